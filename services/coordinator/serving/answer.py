"""Partial answer to one request: the gateway appends chunks, and one or more HTTP responses read the chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.services.coordinator.serving.models import Served
from penstock.shared.errors import PenstockError
from penstock.shared.protocol.generation import Span
from penstock.shared.protocol.live.inference import Begun, Chunk, InferenceReply, InferenceRequest
from penstock.shared.protocol.live.interaction import Interaction

__all__ = ["Answer", "Ask"]


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request. ``draft`` is the request to the workers as far as the HTTP layer can fill it; the gateway
    adds ids, its own address, the episode, and the user.

    ``retries`` is the number of earlier attempts, None if the client does not report it; a client that reports it
    retries automatically. ``episode`` is empty if the client names none.
    """

    served: Served
    draft: InferenceRequest
    num_prompts: int
    user: str
    episode: str
    retries: int | None
    any_owner: bool = False
    """True if ``episode`` may belong to another key."""
    only_opened: bool = False
    """True if ``episode`` must have been opened through the API and must still be stored, because the key is valid for
    this episode only."""


@dataclass(slots=True)
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: int = 0
    calls: int = 0
    finish: str = ""


class Answer:
    """Answer of the rollout workers, chunk by chunk."""

    def __init__(self, served: Served, request: InferenceRequest) -> None:
        self.served, self.request = served, request
        self.worker = ""
        self.version = served.version
        self.prompt_ids: list[list[int]] = []
        self.error: PenstockError | None = None
        self.recovering: asyncio.Task[None] | None = None
        self.recoveries = 0
        self.key = ""
        """Key that all attempts of a request share; '' if the client does not retry automatically."""
        self.noted = ""
        """Id of the request for which a note (see ``Notes``) names this gateway as the answer's holder; '': no note."""
        self.conversation: tuple[str, ...] = ()
        """Owner of the chat, for assigning follow-up requests to the same episode; empty if not tracked."""
        self.given_up = False
        """True if the client abandoned the answer."""
        self.end: asyncio.TimerHandle | None = None
        """Timer that ends the wait for the client's retry; None while a client reads."""
        self._choices = [_Choice() for _ in request.ids]
        self._chunks: list[Chunk] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def id(self) -> str:
        """Id of the response, and of its first interaction."""
        return self.request.id

    @property
    def done(self) -> bool:
        """True if no more chunks will follow."""
        return self.error is not None or all(choice.finish for choice in self._choices)

    @property
    def num_generated(self) -> int:
        """Number of output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def unfinished(self) -> list[int]:
        """Indices of unfinished choices."""
        return [index for index, choice in enumerate(self._choices) if not choice.finish]

    def accepted(self, reply: InferenceReply) -> None:
        """Record that a worker accepted the request."""
        self.worker = reply.worker
        if not self.prompt_ids or not all(self.prompt_ids):
            self.prompt_ids, self.version = reply.prompt_ids, reply.version

    def feed(self, chunk: Chunk) -> bool:
        """Append a chunk, ignoring repeats; return False if an earlier chunk is missing."""
        choice = self._choices[chunk.choice]
        if choice.finish:
            return True
        if chunk.start >= 0:
            if chunk.start != len(choice.token_ids):
                return False
            self._extend(choice, chunk)
        elif any(known.choice == chunk.choice and known.start < 0 for known in self._chunks):
            return True
        choice.text += len(chunk.text) if chunk.start >= 0 else 0
        choice.calls += len(chunk.calls)
        choice.finish = chunk.finish
        self._chunks.append(chunk)
        self._wake()
        return True

    def _extend(self, choice: _Choice, chunk: Chunk) -> None:
        start = len(choice.token_ids)
        choice.token_ids += chunk.token_ids
        choice.logprobs += [logprob for logprob in chunk.logprobs if logprob is not None]
        end = len(choice.token_ids)
        before = choice.spans[-1] if choice.spans else None
        if before is not None and (before.version, before.weights) == (chunk.version, chunk.weights):
            start = choice.spans.pop().start
        if end > start:
            choice.spans.append(Span(chunk.version, start, end, chunk.weights))

    def finish_from(self, index: int, record: Interaction) -> None:
        """Complete a choice from its stored record, because the worker's last chunks were lost."""
        choice, n = self._choices[index], self.request.n
        start = len(choice.token_ids)
        if not self.prompt_ids:
            self.prompt_ids = [[] for _ in range(len(self._choices) // n)]
        if not self.prompt_ids[index // n]:
            self.prompt_ids[index // n] = record.prompt_ids
        version = record.spans[-1].version if record.spans else self.version
        self.feed(
            Chunk(
                self.id, index, start, record.token_ids[start:], list(record.logprobs[start:]), version,
                record.text[choice.text :], record.calls[choice.calls :], finish=record.finish, recorded=True,
            )
        )  # fmt: skip

    def progress(self) -> dict[int, Begun]:
        """Return, by index, the tokens received so far of each unfinished choice; leave out choices without tokens."""
        return {
            index: Begun(token_ids=choice.token_ids, logprobs=choice.logprobs, spans=choice.spans)
            for index in self.unfinished
            if (choice := self._choices[index]).token_ids
        }

    def fail(self, error: PenstockError) -> None:
        """End the answer with an error."""
        self.error = self.error or error
        self._wake()

    async def read(self, cursor: int) -> Sequence[Chunk]:
        """Wait for chunks from ``cursor`` on and return them; none at the end of the answer.

        Raises:
            PenstockError: the answer failed.
        """
        while len(self._chunks) <= cursor and not self.done:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if len(self._chunks) <= cursor and self.error is not None:
            raise self.error
        return self._chunks[cursor:]

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
