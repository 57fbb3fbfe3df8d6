"""Conversion of tool results to the tokens that a policy reads. Each text is tokenized once, when it is appended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.shared.config.environment import ObservationFormat
from penstock.shared.errors import ConfigError

__all__ = ["ObservationWriter", "TextTokenizer", "without"]


class TextTokenizer(Protocol):
    """Interface of the tokenizer methods (of transformers) that this module calls."""

    @property
    def all_special_tokens(self) -> list[str]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class ObservationWriter:
    """Converts the tool results of one turn to at most ``max_tokens`` tokens, in the format ``form``."""

    def __init__(self, tokenizer: TextTokenizer, form: ObservationFormat, *, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        head, tail = form.result.split("{result}")
        self._before, self._head, self._tail, self._after = map(self._encode, (form.before, head, tail, form.after))

    def write(self, results: Sequence[str]) -> list[int]:
        """Return the tokens of the results of one turn, in order; long results are cut, each to the same length.

        Special tokens are removed from results, because one would look like the end of a turn or the start of the
        user's turn. If the results do not fit, the policy reads an error instead.

        Raises:
            ConfigError: not even one result fits.
        """
        if self._room(len(results)) < 1:
            results = [f"error: the results of {len(results)} calls do not fit"]
            self.check(1)
        room = self._room(len(results))
        tokens = list(self._before)
        for result in results:
            tokens += [*self._head, *self._encode(self._plain(result))[:room], *self._tail]
        return tokens + self._after

    def check(self, num_results: int) -> None:
        """Raise ConfigError if the text around ``num_results`` results leaves no room for the results."""
        if self._room(num_results) < 1:
            raise ConfigError(
                f"environment.max_observation_tokens {self._max_tokens} leaves no room for {num_results} results: the "
                f"text around them has {self._around(num_results)} tokens; raise it, or lower "
                "environment.calls.max_calls"
            )

    def _room(self, num_results: int) -> int:
        """Return the maximum number of tokens of each result."""
        return (self._max_tokens - self._around(num_results)) // num_results

    def _around(self, num_results: int) -> int:
        return len(self._before) + len(self._after) + num_results * (len(self._head) + len(self._tail))

    def _plain(self, result: str) -> str:
        return without(result, self._tokenizer.all_special_tokens)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def without(text: str, special_tokens: Sequence[str]) -> str:
    """Remove special tokens from an environment's text, because they could end the turn or imitate another role."""
    before = ""
    while before != text:  # removing a token may form another one
        before = text
        for token in special_tokens:
            text = text.replace(token, "")
    return text
