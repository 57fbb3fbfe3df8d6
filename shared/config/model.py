"""The policy model: a Hugging Face path, or a small architecture built from its config."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["ArchitectureConfig", "ModelConfig"]


class ArchitectureConfig(StrictModel):
    """A decoder built from scratch with random weights; the defaults make about one million parameters."""

    arch: Literal["qwen2", "qwen3", "llama"] = "qwen3"
    """Architecture family of the transformers library."""
    hidden_size: int = Field(128, ge=8, multiple_of=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the MLP."""
    num_layers: int = Field(4, ge=1, le=128)
    """Number of decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Attention heads."""
    num_kv_heads: int = Field(2, ge=1)
    """Key/value heads (grouped-query attention)."""
    max_position_embeddings: int = Field(512, ge=16)
    """Longest sequence the model accepts, in tokens."""
    vocab_size: int | None = Field(None, ge=8)
    """Embedding rows; default: the size of the tokenizer."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Share the embedding with the output head."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ArchitectureConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self


class ModelConfig(StrictModel):
    """Which policy is trained. Exactly one of ``path`` and ``config``."""

    path: str | None = None
    """Directory of a Hugging Face causal LM (config.json, safetensors, tokenizer), or a hub id."""
    config: ArchitectureConfig | None = None
    """Build a model with random weights from this architecture."""
    tokenizer: str | None = None
    """`char` (one token per character, for small tasks) or a path; default: the tokenizer in ``path``."""
    characters: str = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
    """Alphabet of the `char` tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter and compute type of trainer and sampler."""
    trust_remote_code: bool = False
    """Passed to transformers; executes code from the model directory."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path and model.config")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.tokenizer is needed with model.config: 'char' or a path")
        return self
