"""HTTP response of a completion: one JSON object, or a stream of events. If the client disconnects, the answer is
cancelled, unless a retry of the same request could still fetch the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.services.coordinator.api.http.replies import problem_response
from penstock.services.coordinator.api.http.sse import HEADERS
from penstock.services.coordinator.api.live.completion_format import Format
from penstock.services.coordinator.problems import Flaw, HttpProblem, from_error
from penstock.services.coordinator.serving.answer import Answer
from penstock.services.coordinator.serving.gateway import Gateway
from penstock.shared.errors import ConfigError, ConstraintError, PenstockError, ProtocolError
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.generation import Constraint
from penstock.shared.protocol.live.inference import Chunk
from penstock.shared.runtime import metrics

__all__ = ["CompletionReply", "as_problem"]

log = logging.getLogger(__name__)

TOKENS = metrics.counter("inference_tokens", "Tokens of live requests.", ("kind",))
FIRST = metrics.histogram("time_to_first_token_seconds", "From a live request to the first token of its answer.")
DISCONNECTED = metrics.counter("inference_disconnects", "Live requests whose client left before the end.")


class CompletionReply(Response):
    """HTTP response for an answer whose generation has started."""

    def __init__(
        self, serving: Gateway, answer: Answer, format: Format, charge: Callable[[int], Awaitable[object]]
    ) -> None:
        """``charge`` counts the tokens of the answer, even if the client disconnects early."""
        self.background = None
        self.status_code = 200
        self._serving, self._answer, self._format, self._charge = serving, answer, format, charge
        self._names = {
            "x-interaction-id": answer.id,
            "x-policy-version": str(answer.version),
            "x-episode-id": answer.request.episode,
            "x-request-id": answer.id,
        }
        self._begun = False
        self._chunks: list[Chunk] = []
        self._new: Sequence[Chunk] = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. If the client disconnects, cancel the answer, unless a retry of the same request could still
        fetch it."""
        work = asyncio.create_task(self._stream(send) if self._answer.request.stream else self._whole(scope, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                DISCONNECTED.inc()
                log.info("the client of request %s left", self._answer.id)
        finally:
            for task in (work, gone):
                task.cancel()
            results = await asyncio.gather(work, gone, return_exceptions=True)
            self._serving.leave(self._answer, begun=self._begun)
            await self._charge(sum(map(len, self._answer.prompt_ids)) + self._answer.num_generated - 1)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _stream(self, send: Send) -> None:
        await self._start(send, 200, {"content-type": "text/event-stream; charset=utf-8", **HEADERS})
        self._begun = True
        try:
            while await self._read():
                data = self._format.events(self._new)
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            self._check_recorded()
        except PenstockError as error:
            problem = as_problem(error, self._answer.request.constraint)
            broken = {"error": {"message": problem.detail, "type": "server_error", "code": problem.code, "param": None}}
            await send({"type": "http.response.body", "body": b"data: " + orjson.dumps(broken) + b"\n\n"})
            return
        await self._finished()
        await send({"type": "http.response.body", "body": self._format.end()})

    async def _whole(self, scope: Scope, send: Send) -> None:
        try:
            while await self._read():
                pass
            self._check_recorded()
        except PenstockError as error:
            await problem_response(as_problem(error, self._answer.request.constraint), scope["path"])(
                scope, _nothing, send
            )
            return
        await self._finished()
        body = orjson.dumps(self._format.whole(self._chunks))
        more = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(send, 200, more if self._is_recorded else {**more, "x-recorded": "false"})
        self._begun = True
        await send({"type": "http.response.body", "body": body})

    async def _read(self) -> bool:
        """Wait for new chunks; return False after the last one."""
        self._new = await self._answer.read(len(self._chunks))
        if self._new and not self._chunks:
            FIRST.observe(max(0.0, bus_time() - self._answer.request.started))
        self._chunks += self._new
        return bool(self._new)

    @property
    def _is_recorded(self) -> bool:
        return all(chunk.recorded for chunk in self._chunks if chunk.finish)

    def _check_recorded(self) -> None:
        """Raise HttpProblem (503) if the job requires recorded answers and this answer was not recorded."""
        if self._answer.served.strict_recording and self._answer.request.store and not self._is_recorded:
            detail = "the answer could not be recorded, and this job wants none that is not: ask again"
            raise HttpProblem(503, "not_recorded", detail, headers={"Retry-After": "1", "retry-after-ms": "1000"})

    async def _finished(self) -> None:
        TOKENS.labels("prompt").inc(sum(map(len, self._answer.prompt_ids)))
        TOKENS.labels("generated").inc(self._answer.num_generated)
        message = self._format.message(self._chunks)
        if message is not None:
            await self._serving.remember(self._answer, message)

    async def _start(self, send: Send, status: int, more: dict[str, str]) -> None:
        headers = [(k.encode(), v.encode("latin-1", "replace")) for k, v in {**self._names, **more}.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})


def as_problem(error: PenstockError, constraint: Constraint | None = None) -> HttpProblem:
    """Convert an error to the form of OpenAI's API: 400 for a prompt or a constraint that no worker can serve."""
    if isinstance(error, ConstraintError) and constraint is not None:
        flaw = Flaw(pointer=f"/{constraint.asked_by}", detail=str(error))
        return HttpProblem(400, "invalid_schema", f"{constraint.asked_by}: {error}", errors=[flaw])
    if isinstance(error, ProtocolError):
        return HttpProblem(413, "too_large", str(error))
    if isinstance(error, ConfigError):
        code = "context_length_exceeded" if "exceed" in str(error) else "invalid_prompt"
        return HttpProblem(400, code, str(error))
    return from_error(error)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> dict[str, str]:
    return {"type": "http.disconnect"}
