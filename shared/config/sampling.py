"""Sampling settings."""

from __future__ import annotations

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel

__all__ = ["SamplingConfig"]


class SamplingConfig(StrictModel):
    """Sampling settings. In training, tokens are sampled from the untruncated distribution, so that the recorded
    log-probs are exact."""

    max_new_tokens: int = Field(64, ge=1)
    """Longest completion in tokens."""
    min_new_tokens: int = Field(0, ge=0)
    """Minimum length: stop tokens are masked out before this many tokens (evaluation only; training needs 0)."""
    ignore_eos: bool = False
    """Treat the end-of-sequence token as an ordinary token: completions continue to `max_new_tokens`, or to `stop`."""
    temperature: float = Field(1.0, ge=0)
    """Divisor of the logits; 0 is greedy (evaluation only)."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling (evaluation only; training needs 1)."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: from all (evaluation only)."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion; the tokens that contain them remain part of it."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Stop tokens in addition to the tokenizer's end-of-sequence token."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is larger than max_new_tokens")
        return self
