"""Completions that an engine's HTTP server decodes: their request ids, weight labels and errors."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.services.rollout.engines.completion import Completion, Finish, finished
from penstock.services.rollout.engines.remote import Written, label_of
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Sample, Token

__all__ = ["ServerStream", "name_of", "raise_error"]

_REFUSED, _FAILED = 400, 500
"""HTTP status codes in [``_REFUSED``, ``_FAILED``) mean an invalid request."""


def name_of(owner: str, completion: Completion) -> str:
    """Return the request id of a completion.

    No id is a prefix of another one, because SGLang aborts all requests whose ids begin with the given id.

    Args:
        owner: unique name of the engine, for servers with several clients.
    """
    return f"{owner}-{completion.request}-{completion.index}."


@dataclass(slots=True, eq=False)
class ServerStream(Written, ABC):
    """A completion that a server decodes, with its tokens so far."""

    rid: str = ""
    """Request id; see ``name_of``."""
    label: str = ""
    """Label of the weights that were served when the request was sent."""
    reading: asyncio.Task[Finish] | None = None
    """Reads the events of the completion; cancelling it closes the connection."""

    @abstractmethod
    def take(self, part: Mapping[str, Any], label: str) -> tuple[list[Token], Finish | None]:
        """Record the new tokens of an event.

        Args:
            label: label of the weights that are served now.

        Returns:
            New tokens except the one that ends the completion, and how it ended; None while it continues.

        Raises:
            ConfigError: the server rejects the request.
            Unavailable: the server failed to serve the request, or left out tokens.
        """

    @abstractmethod
    def final(self, part: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
        """Return None if ``part`` is not the completion's final event. Otherwise return the event's weight spans (each
        with ``version``, ``start``, ``end``), or () if the server reports no spans."""

    def so_far(self) -> Sample | None:
        """Return the tokens so far whose weight label is certain, as a sample with finish 'abort'; None if there are
        none.

        These tokens arrived before the weights changed for the first time since the request. A later token may have
        been in transit when they changed: until the final event, its label may then name weights that are too new.
        """
        starts = self.completion.starts
        if self.ended or not starts or label_of(*starts[0][:2]) != self.label:
            return None
        num = starts[1][2] if len(starts) > 1 else len(self.token_ids)
        certain = replace(self.completion, starts=starts[:1], top=self.completion.top[:num])
        return finished(certain, self.token_ids[:num], self.logprobs[:num], "abort").sample

    def settle(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """Replace the weight labels of the tokens by ``spans`` of the final event: only the server knows them for sure.

        Raises:
            WeightsError: a token was streamed with another label, or there are several labels and the server does not
                report which token has which.
        """
        completion, num = self.completion, len(self.token_ids)
        before = list(completion.starts)
        if not spans:
            if len(before) > 1:
                raise WeightsError("the server does not say which weights made which token: take a later version of it")
            return
        completion.starts.clear()
        for span in spans:
            if span["start"] < num:
                version, weights = _parse(span["version"])
                completion.adopt(version, weights, span["start"])
        if completion.streamed and completion.starts != before and num:
            raise WeightsError(f"tokens were told with the labels {before}, and the server says {completion.starts}")


def _parse(label: str) -> tuple[int, str]:
    version, colon, weights = label.partition(":")
    if not colon or not version.isdecimal():
        raise WeightsError(f"somebody else gave the server weights with the label '{label}'")
    return int(version), weights


def raise_error(engine: str, part: Mapping[str, Any]) -> None:
    """Raise the error that an event reports, if any.

    Raises:
        ConfigError: the engine rejects the request.
        Unavailable: the engine failed to serve it.
    """
    error = part.get("error")
    if error is None:
        return
    message = error.get("message", error) if isinstance(error, dict) else error
    code = error.get("code", _REFUSED) if isinstance(error, dict) else _REFUSED
    if _REFUSED <= code < _FAILED:
        raise ConfigError(f"{engine} refuses a request: {message}")
    raise Unavailable(f"{engine} failed at a request: {message}")
