"""Compatibility of two models, checked before training: equal meaning of token ids, equal shapes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from penstock.shared.config.model import ModelConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_tokenizer

__all__ = ["check_same_shapes", "check_same_tokens", "check_tokenizer"]

Shapes = Iterable[tuple[str, tuple[int, ...]]]


def check_same_tokens(tokenizer: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast, *, what: str) -> None:
    """Raise ConfigError if a token has different ids in the two vocabularies, or if they have no token in common."""
    ids, theirs = tokenizer.get_vocab(), other.get_vocab()
    moved = sorted(token for token in ids.keys() & theirs.keys() if ids[token] != theirs[token])
    if moved or ids.keys().isdisjoint(theirs.keys()):
        example = f"'{moved[0]}' is {ids[moved[0]]} here and {theirs[moved[0]]} there" if moved else "they share none"
        raise ConfigError(f"{what} has another vocabulary: {len(moved)} tokens have another id ({example})")


def check_tokenizer(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise ConfigError if ``model.tokenizer`` and the tokenizer stored beside the weights assign different ids to a
    token."""
    if config.path is None or config.tokenizer is None or not Path(config.path, "tokenizer_config.json").is_file():
        return
    beside = build_tokenizer(config.model_copy(update={"tokenizer": None}))
    check_same_tokens(tokenizer, beside, what=f"the model in '{config.path}' (model.tokenizer is '{config.tokenizer}')")


def check_same_shapes(policy: Shapes, other: Shapes, *, what: str) -> None:
    """Raise ConfigError unless ``policy`` and ``other`` have parameters of the same names and shapes."""
    own, theirs = dict(policy), dict(other)
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            vocabulary = ": another vocabulary" if "embed_tokens" in name or "lm_head" in name else ""
            raise ConfigError(
                f"{what} does not have the shape of the policy{vocabulary}: '{name}' is "
                f"{list(theirs[name]) if name in theirs else 'missing'} there, "
                f"{list(own[name]) if name in own else 'missing'} here"
            )
