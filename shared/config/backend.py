"""Training backends, which hold and shard the trained models: one config class per backend, selected by ``type``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.model import ModelConfig

__all__ = ["BackendConfig", "FSDPConfig", "LocalConfig", "MegatronConfig"]


class LocalConfig(StrictModel):
    """One process on one device; supports any causal language model of the transformers library."""

    type: Literal["local"] = "local"

    @property
    def model_parallel(self) -> int:
        """Number of ranks that share one copy of the model: always 1."""
        return 1


class FSDPConfig(StrictModel):
    """PyTorch FSDP2: weights, gradients and optimizer moments are sharded over the ranks. Decoder blocks of Llama, Qwen
    and Mixtral are gathered one by one; any other causal language model is gathered as a whole.

    With `model.dtype: bfloat16` the shards of trained weights are kept in float32 and blocks compute in bfloat16
    (mixed precision).
    """

    type: Literal["fsdp"] = "fsdp"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient reduction over ranks; bfloat16 halves the traffic but loses precision."""
    reshard_after_forward: bool = True
    """Free the gathered weights of a block after its forward pass and gather them again for the backward pass."""
    activation_checkpointing: bool = False
    """Activation checkpointing: keep only the inputs of each block for the backward pass and recompute the rest. For
    Llama, Qwen and Mixtral only."""
    cpu_offload: bool = False
    """Keep weights, gradients and moments in host memory; a block's weights are on the GPU only while it computes."""
    offload_reference: bool = False
    """Offload only frozen models to host memory: the teacher and the reference (not with `model.lora`, where the
    reference shares the weights of the policy)."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if ``model`` cannot be trained with this backend."""
        if self.offload_reference and model.lora is not None:
            raise ValueError(
                "backend.offload_reference: with model.lora the reference shares the weights of the policy and has no "
                "copy to offload: use backend.cpu_offload"
            )

    @property
    def model_parallel(self) -> int:
        """Number of ranks that train on the same groups: always 1, because with FSDP each rank has its own groups."""
        return 1


class MegatronConfig(StrictModel):
    """Megatron-core: layers sharded over tensor-parallel ranks and distributed over pipeline stages, tokens split over
    context-parallel ranks, experts distributed over expert-parallel ranks. For Llama, Qwen and Mixtral.

    All ranks / (tensor_parallel x context_parallel x pipeline_parallel) are data parallel; consecutive ranks share a
    copy of the model.
    """

    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(1, ge=1)
    """Ranks over which attention heads, MLP columns and the vocabulary are sharded; must divide the number of
    key/value heads of the model."""
    sequence_parallel: bool = False
    """Outside of attention and MLP, split the tokens over the tensor-parallel ranks, which saves activation memory."""
    context_parallel: int = Field(1, ge=1)
    """Ranks over which the tokens of a microbatch are split, for long sequences. During attention each of these ranks
    has all tokens but only some of the heads, so tensor_parallel x context_parallel must divide the number of key/value
    heads of the model."""
    pipeline_parallel: int = Field(1, ge=1)
    """Pipeline stages, each with the same number of layers; must divide the number of layers. The microbatches of an
    optimizer step pass through the stages in a pipeline; all stages are busy only if a step has several microbatches
    per stage: see `train.max_tokens_per_microbatch`."""
    expert_parallel: int = Field(1, ge=1)
    """Number of ranks over which the experts of a layer are distributed. Must divide the number of experts, and
    context_parallel x the number of data-parallel ranks. The ranks exchange tokens. Weights other than experts
    are not distributed over them."""
    activation_checkpointing: bool = False
    """Activation checkpointing: keep only the inputs of each layer for the backward pass and recompute the rest."""

    @model_validator(mode="after")
    def _sequences_are_cut_over_tensor_ranks(self) -> MegatronConfig:
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel > 1: it cuts tokens over those ranks")
        return self

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if the job file alone shows that this backend cannot train ``model``."""
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
        """Return this configuration with all parallel sizes 1, so that one rank holds the whole model."""
        return MegatronConfig(activation_checkpointing=self.activation_checkpointing)

    @property
    def sharing_heads(self) -> int:
        """Number of ranks that compute attention over the same sequences, each for some of the heads."""
        return self.tensor_parallel * self.context_parallel

    @property
    def model_parallel(self) -> int:
        """Number of ranks that share one copy of the model and train on the same groups."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel


BackendConfig = Annotated[LocalConfig | FSDPConfig | MegatronConfig, Field(discriminator="type")]
