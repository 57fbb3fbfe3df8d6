"""Where the trained models live: one config class per backend, told apart by ``type``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.model import ModelConfig

__all__ = ["BackendConfig", "FSDPConfig", "LocalConfig", "MegatronConfig"]


class LocalConfig(StrictModel):
    """One process, one device, any causal language model of the transformers library."""

    type: Literal["local"] = "local"

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together and train the same groups."""
        return 1


class FSDPConfig(StrictModel):
    """PyTorch FSDP2: weights, gradients and moments are cut into one part per rank. Llama, Qwen and Mixtral.

    With `model.dtype: bfloat16` the parts of what is trained are kept in float32, and a block computes in bfloat16
    (mixed precision).
    """

    type: Literal["fsdp"] = "fsdp"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks; bfloat16 halves the traffic and loses digits."""
    reshard_after_forward: bool = True
    """Give the gathered weights of a block back after its forward pass and gather them again for the backward pass."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block for the backward pass and compute the rest again."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in host memory; a block's weights are on the GPU while it computes."""
    offload_reference: bool = False
    """The same for frozen models alone: a teacher, and the reference, but not with `model.lora`, where that shares the
    weights of the policy."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError where ``model`` cannot be trained like this."""
        if self.offload_reference and model.lora is not None:
            raise ValueError(
                "backend.offload_reference: with model.lora the reference shares the weights of the policy and has no "
                "copy to offload: use backend.cpu_offload"
            )

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together and train the same groups: each rank trains its own."""
        return 1


class MegatronConfig(StrictModel):
    """megatron-core: layers are cut over tensor-parallel ranks and dealt to pipeline stages, tokens are cut over
    context-parallel ranks, experts dealt to expert-parallel ranks. Llama, Qwen and Mixtral.

    All ranks / (tensor_parallel x context_parallel x pipeline_parallel) are data parallel; neighbours share a copy of
    the model.
    """

    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(1, ge=1)
    """Ranks over which heads, MLP columns and vocabulary are cut; divides the model's key/value heads."""
    sequence_parallel: bool = False
    """Between attention and MLP each tensor-parallel rank keeps a part of the tokens; saves activation memory."""
    context_parallel: int = Field(1, ge=1)
    """Ranks over which the tokens of a microbatch are cut; for long sequences. Attention exchanges them for heads, so
    tensor_parallel x context_parallel divides the model's key/value heads."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages, each with as many layers; divides the number of layers. The microbatches of an optimizer step pass
    through them in a pipeline, which needs several for each stage to be busy: see `train.max_tokens_per_microbatch`."""
    expert_parallel: int = Field(1, ge=1)
    """Context- and data-parallel ranks over which the experts of a layer are dealt; divides the number of experts and
    of those ranks. They exchange tokens, all other weights are whole on each of them."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again."""

    @model_validator(mode="after")
    def _sequences_are_cut_over_tensor_ranks(self) -> MegatronConfig:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel > 1: it cuts tokens over those ranks")
        return self

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError where ``model`` cannot be trained like this, as far as the job file says what it is."""
        if model.lora is not None:
            raise ValueError("backend 'megatron' has no adapters: use backend.type local for model.lora")
        if model.config is None:
            return
        config = model.config
        if config.num_kv_heads % self.sharing_heads:
            raise ValueError(
                f"backend.tensor_parallel x context_parallel = {self.sharing_heads} does not divide the "
                f"{config.num_kv_heads} key/value heads of model.config: every rank needs whole query groups"
            )
        if config.intermediate_size % self.tensor_parallel:
            raise ValueError(
                f"backend.tensor_parallel {self.tensor_parallel} does not divide model.config.intermediate_size "
                f"{config.intermediate_size}"
            )
        if config.num_layers % self.pipeline_parallel:
            raise ValueError(
                f"backend.pipeline_parallel {self.pipeline_parallel} does not divide the {config.num_layers} layers of "
                "model.config: every stage has as many"
            )
        experts = config.experts
        if self.expert_parallel > 1 and experts is None:
            raise ValueError(f"backend.expert_parallel {self.expert_parallel}: model.config has no experts")
        if experts is not None and experts.number % self.expert_parallel:
            raise ValueError(
                f"backend.expert_parallel {self.expert_parallel} does not divide the {experts.number} experts of "
                "model.config"
            )

    def on_one_rank(self) -> MegatronConfig:
        """The same where one rank holds the whole model."""
        return MegatronConfig(activation_checkpointing=self.activation_checkpointing)

    @property
    def sharing_heads(self) -> int:
        """Ranks that attend over the same sequences, each with some of the heads."""
        return self.tensor_parallel * self.context_parallel

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together and train the same groups."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel


BackendConfig = Annotated[LocalConfig | FSDPConfig | MegatronConfig, Field(discriminator="type")]
