"""Tracks the requests of an engine: queued and running completions, and whether all samples of a request are ready."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from msgspec.structs import replace

from penstock.services.rollout.engines.base import Listener
from penstock.services.rollout.engines.completion import Completion, Finished, finished
from penstock.services.rollout.engines.constraint import Matcher
from penstock.shared.errors import ConfigError, Conflict
from penstock.shared.protocol.generation import GenRequest, GenResult, Sample, Token
from penstock.shared.protocol.ids import derive_seed

__all__ = ["Requests", "check_request", "check_text", "rest_of"]


@dataclass(slots=True, eq=False)
class _Request:
    request_id: str
    answer: asyncio.Future[GenResult]
    samples: list[Sample | None]
    on_token: Listener | None
    on_start: Callable[[], None] | None
    started: bool = False


def check_request(request: GenRequest, *, vocab_size: int, max_length: int) -> None:
    """Raise ConfigError if a model with this vocabulary and maximum length cannot serve the request."""
    sampling = request.sampling
    length = len(request.prompt_ids) + sampling.max_new_tokens
    if not request.prompt_ids or sampling.max_new_tokens < 1 or request.n < 1:
        raise ConfigError("a request needs a prompt, max_new_tokens >= 1 and n >= 1")
    if length > max_length:
        raise ConfigError(
            f"{len(request.prompt_ids)} prompt tokens + {sampling.max_new_tokens} new ones exceed the "
            f"{max_length} that the model takes: shorten the prompt or lower max_new_tokens"
        )
    if request.begun is not None:
        _check_begun(request, request.begun)
    biased = (token for token, _ in sampling.logit_bias)
    if not all(0 <= token < vocab_size for token in (*request.input_ids, *sampling.stop_token_ids, *biased)):
        raise ConfigError(f"token ids must lie in 0..{vocab_size - 1}")


def _check_begun(request: GenRequest, begun: Sample) -> None:
    num, covered = len(begun.token_ids), sum(span.end - span.start for span in begun.spans)
    if request.n != 1 or request.constraint is not None:
        raise ConfigError("only a request for one completion without a constraint goes on with a begun one")
    if not 0 < num < request.sampling.max_new_tokens or not num == len(begun.logprobs) == covered:
        raise ConfigError(f"{num} begun tokens of {request.sampling.max_new_tokens}: some must be left, with log-probs")


def rest_of(request: GenRequest) -> GenRequest:
    """Return the request for the remaining tokens of a begun completion; the begun tokens become part of the prompt.

    The token limits count only the rest, and the seed is a new one. A server draws random numbers from the seed and the
    index of an output token: with the old seed, the rest would get the random numbers of the begun tokens again.

    Raises:
        ConfigError: the request has penalties, for which the engine would not count the begun tokens.
    """
    if request.begun is None:
        return request
    done, s = len(request.begun.token_ids), request.sampling
    if s.frequency_penalty or s.presence_penalty:
        raise ConfigError("this engine goes on with no completion that has penalties: it would not count its tokens")
    rest = replace(
        s, max_new_tokens=s.max_new_tokens - done, min_new_tokens=max(0, s.min_new_tokens - done),
        seed=None if s.seed is None else derive_seed(s.seed, "begun", done),
    )  # fmt: skip
    return replace(request, sampling=rest)


def check_text(token_ids: Sequence[int], *, vocab_size: int, max_length: int) -> None:
    """Raise ConfigError if a model with this vocabulary and maximum length cannot score the text."""
    if not token_ids or len(token_ids) > max_length or not all(0 <= token < vocab_size for token in token_ids):
        raise ConfigError(f"a text to score has 1 to {max_length} token ids in 0..{vocab_size - 1}")


class Requests:
    """Open requests of one engine, with a first-in, first-out queue of their completions."""

    def __init__(self) -> None:
        self._serials = count()
        self._open: dict[int, _Request] = {}
        self._serial_of: dict[str, int] = {}
        """Serial number by request id."""
        self._queue: deque[Completion] = deque()

    @property
    def waiting(self) -> int:
        """Number of queued completions, which are not in the batch."""
        return len(self._queue)

    @property
    def following(self) -> Completion | None:
        """First completion in the queue; None if the queue is empty."""
        return self._queue[0] if self._queue else None

    def started(self) -> set[int]:
        """Return the serial numbers of open requests with at least one completion that was taken into the batch."""
        return {serial for serial, request in self._open.items() if request.started}

    def chosen(self, request_ids: Collection[str] | None) -> set[int]:
        """Return the serial numbers of open requests with these ids; None: all."""
        if request_ids is None:
            return set(self._open)
        return {self._serial_of[request_id] for request_id in request_ids if request_id in self._serial_of}

    def name_of(self, serial: int) -> str:
        """Return the id of an open request."""
        return self._open[serial].request_id

    def open(
        self,
        request: GenRequest,
        stop_ids: tuple[int, ...],
        on_token: Listener | None = None,
        on_start: Callable[[], None] | None = None,
        matchers: Sequence[Matcher | None] | None = None,
    ) -> tuple[int, asyncio.Future[GenResult]]:
        """Queue the completions of a request; returns its serial number and the future of its result.

        Raises:
            Conflict: a request with this id is open.
        """
        if request.request_id in self._serial_of:
            raise Conflict(f"request id '{request.request_id}' is in use")
        serial = next(self._serials)
        seed = request.sampling.seed
        base = secrets.randbits(62) if seed is None else seed
        answer: asyncio.Future[GenResult] = asyncio.get_running_loop().create_future()
        self._serial_of[request.request_id] = serial
        self._open[serial] = _Request(request.request_id, answer, [None] * request.n, on_token, on_start)
        prompt_ids, session = tuple(request.input_ids), request.session if request.n == 1 else ""
        self._queue.extend(
            Completion(
                serial, i, prompt_ids, request.sampling, stop_ids, base + i, streamed=on_token is not None,
                session=session, keep=bool(session) and not request.last, top_logprobs=request.top_logprobs,
                matcher=matchers[i] if matchers is not None else None, begun=request.begun,
            )
            for i in range(request.n)
        )  # fmt: skip
        return serial, answer

    def waits_started(self) -> bool:
        """Return True if the queue holds a completion of a request in ``started``."""
        return any(self._open[completion.request].started for completion in self._queue)

    def take(self, room: int, *, only_started: bool) -> list[Completion]:
        """Dequeue up to ``room`` completions for the batch, in order of arrival; calls ``on_start`` of their requests.

        Args:
            only_started: take only completions of requests that already had one in the batch.
        """
        if only_started:
            chosen = [c for c in self._queue if self._open[c.request].started][:room]
            for completion in chosen:
                self._queue.remove(completion)
        else:
            chosen = [self._queue.popleft() for _ in range(min(room, len(self._queue)))]
        for completion in chosen:
            request = self._open[completion.request]
            if not request.started and request.on_start is not None:
                request.on_start()
            request.started = True
        return chosen

    def deliver(self, tokens: Iterable[tuple[int, Token]]) -> None:
        """Pass new tokens to the listeners of their requests; each token comes with the serial number of its
        request."""
        for serial, token in tokens:
            request = self._open.get(serial)
            if request is not None and request.on_token is not None:
                request.on_token(token)

    def finish(self, ended: Iterable[Finished]) -> None:
        """Record finished completions; the last one of a request resolves its future."""
        for item in ended:
            request = self._open.get(item.completion.request)
            if request is None:
                continue
            request.samples[item.completion.index] = item.sample
            samples = [sample for sample in request.samples if sample is not None]
            if len(samples) == len(request.samples):
                self._close(item.completion.request)
                if not request.answer.done():
                    request.answer.set_result(GenResult(request_id=request.request_id, samples=samples))

    def unqueue(self, requests: Collection[int]) -> None:
        """End the queued completions of these requests as 'abort', without new tokens."""
        waiting = [c for c in self._queue if c.request in requests]
        self._queue = deque(c for c in self._queue if c.request not in requests)
        self.finish(finished(completion, [], [], "abort") for completion in waiting)

    def forget(self, request: int) -> None:
        """Drop a cancelled request and its queued completions; the caller must evict its completions in the batch."""
        self._close(request)
        self._queue = deque(c for c in self._queue if c.request != request)

    def refuse(self, request: int, error: Exception) -> None:
        """Fail one request and drop its queued completions; results of its completions in the batch are ignored."""
        found = self._open.get(request)
        self.forget(request)
        if found is not None and not found.answer.done():
            found.answer.set_exception(error)

    def fail(self, error: Callable[[], Exception]) -> None:
        """Fail every open request with its own exception, which ``error`` creates, and clear the queue."""
        for request in self._open.values():
            if not request.answer.done():
                request.answer.set_exception(error())
        self._open.clear()
        self._serial_of.clear()
        self._queue.clear()

    def _close(self, serial: int) -> None:
        request = self._open.pop(serial, None)
        if request is not None:
            del self._serial_of[request.request_id]
