"""How tokens are sampled."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["SamplingConfig"]


class SamplingConfig(StrictModel):
    """How tokens are sampled. Training samples the untruncated distribution, so that log-probs mean what they say."""

    max_new_tokens: int = Field(64, ge=1)
    """Longest completion in tokens."""
    min_new_tokens: int = Field(0, ge=0)
    """No stop before this many tokens: stop tokens are masked out until then (evaluation only; training needs 0)."""
    ignore_eos: bool = False
    """The end of sequence is a token like others: completions go on to `max_new_tokens`, or to `stop`."""
    temperature: float = Field(1.0, ge=0)
    """Logits are divided by this; 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (evaluation only; training needs 1)."""
    top_k: int = Field(0, ge=0)
    """Keep the k likeliest tokens, 0 keeps all (evaluation only)."""
    stop: list[str] = Field(default_factory=list)
    """A completion ends after any of these strings; the tokens that wrote it stay part of the completion."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Further stop tokens beside the tokenizer's end-of-sequence."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is larger than max_new_tokens")
        return self
