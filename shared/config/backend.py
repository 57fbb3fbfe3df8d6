"""Where the trained models live: one config class per backend, told apart by ``type``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    """PyTorch FSDP2: weights, gradients and moments are cut into one part per rank. Llama and Qwen families.

    With `model.dtype: bfloat16` the parts are kept in float32 and a block computes in bfloat16 (mixed precision).
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
    """The same for the frozen reference alone."""

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together and train the same groups: each rank trains its own."""
        return 1


class MegatronConfig(StrictModel):
    """megatron-core: layers are cut over tensor-parallel, tokens over context-parallel ranks. Llama, Qwen and Mixtral.

    All ranks / (tensor_parallel x context_parallel) are data parallel; neighbours share a copy of the model.
    """

    type: Literal["megatron"] = "megatron"
    tensor_parallel: int = Field(1, ge=1)
    """Ranks over which heads, MLP columns and vocabulary are cut; divides the model's key/value heads."""
    sequence_parallel: bool = False
    """Between attention and MLP each tensor-parallel rank keeps a part of the tokens; saves activation memory."""
    context_parallel: int = Field(1, ge=1)
    """Ranks over which the tokens of a microbatch are cut; for long sequences. Attention exchanges them for heads, so
    tensor_parallel x context_parallel divides the model's key/value heads."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each layer for the backward pass and compute the rest again."""

    @model_validator(mode="before")
    @classmethod
    def _not_supported(cls, data: Any) -> Any:
        for key in ("pipeline_parallel", "expert_parallel"):
            if isinstance(data, dict) and key in data:
                raise ValueError(
                    f"{key} is not supported: cut the model with tensor_parallel and context_parallel, or use "
                    "backend.type fsdp, which spreads weights over all ranks"
                )
        return data

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
        if model.config.num_kv_heads % self.model_parallel:
            raise ValueError(
                f"backend.tensor_parallel x context_parallel = {self.model_parallel} does not divide the "
                f"{model.config.num_kv_heads} key/value heads of model.config: every rank needs whole query groups"
            )
        if model.config.intermediate_size % self.tensor_parallel:
            raise ValueError(
                f"backend.tensor_parallel {self.tensor_parallel} does not divide model.config.intermediate_size "
                f"{model.config.intermediate_size}"
            )

    def on_one_rank(self) -> MegatronConfig:
        """The same where one rank holds the whole model."""
        return MegatronConfig(activation_checkpointing=self.activation_checkpointing)

    @property
    def model_parallel(self) -> int:
        """Ranks that hold one copy of the model together and train the same groups."""
        return self.tensor_parallel * self.context_parallel


BackendConfig = Annotated[LocalConfig | FSDPConfig | MegatronConfig, Field(discriminator="type")]
