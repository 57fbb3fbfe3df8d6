"""A server with the HTTP contract of SGLang 0.5.23 that really samples, from a small model of transformers on the CPU.

It copies what an adapter would notice of the real server: a pause is answered before the scheduler has paused;
tokens of a retracted completion are computed again; the last event alone reports the version of each token; events
repeat earlier tokens or do not (``--incremental-streaming-output``); the end of a waiting completion repeats its
last token; an abort ends all requests whose rid begins with its rid, and none for an unknown rid; a request that
arrives in a pause reaches the scheduler afterwards, an abort of it in the pause has no effect, nor has a later one, and
its connection's end ends it; cached prefixes
outlive an update without a flush; ``ignore_eos`` also ignores stop tokens, and without it a token ``<|eom_id|>`` of the
tokenizer also ends a completion whose request does not name it; an update ignores unknown names, and one
that cannot be loaded ends the server; log-probs are of the logits after penalties, divided by the temperature; unknown
keys are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import uvicorn
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang import __version__
from sglang.scheduler import Completion, Scheduler

SLICED = ("output_token_logprobs", "output_top_logprobs")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingParams(_Strict):
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None
    n: int = 1


class Generate(_Strict):
    rid: str
    input_ids: list[int]
    sampling_params: dict[str, Any]
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class Abort(_Strict):
    rid: str = ""
    abort_all: bool = False


class Pause(_Strict):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Continue(_Strict):
    torch_empty_cache: bool = True


class Update(_Strict):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class EventBuffer:
    """Buffer of the scheduler's events for one request, until its handler takes them."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.came = asyncio.Event()

    def add(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        self.came.set()

    async def take(self, *, incremental: bool) -> dict[str, Any]:
        await self.came.wait()
        self.came.clear()
        events, self.events = self.events, []
        last = events[-1]
        if incremental and len(events) > 1:
            last = {**last, "output_ids": [token for event in events for token in event["output_ids"]]}
            joined = {key: [row for event in events for row in event["meta_info"].get(key, [])] for key in SLICED}
            last["meta_info"] = {**last["meta_info"], **joined}
        return last


class Front:
    """HTTP side of the server: finds requests by rid, holds them during a pause, and knows the served version."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.version = options.weight_version
        self.buffers: dict[str, EventBuffer] = {}
        self.reported: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.may_start = asyncio.Condition()
        self.paused = False
        self.scheduler: Scheduler

    @asynccontextmanager
    async def alive(self, app: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self.scheduler = Scheduler(
            self.options, lambda event: loop.call_soon_threadsafe(self.receive, event), loop.call_soon_threadsafe
        )
        yield

    def receive(self, event: dict[str, Any]) -> None:
        rid = event["meta_info"]["id"]
        buffer = self.buffers.get(rid)
        if buffer is None:
            return
        event["meta_info"].setdefault("weight_version", self.version)
        if self.options.incremental_streaming_output and not event.pop("whole", False):
            start = self.reported[rid]
            event["output_ids"] = event["output_ids"][start:]
            for key in SLICED:
                event["meta_info"][key] = event["meta_info"][key][start:]
            self.reported[rid] = event["meta_info"]["completion_tokens"]
        buffer.add(event)

    def close(self, rid: str) -> None:
        if self.buffers.pop(rid, None) is not None:
            self.reported.pop(rid)
            self.aborted.discard(rid)
            self.scheduler.post("abort", rid)

    # -- routes ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        asked = Generate.model_validate(await request.json())
        try:
            params = SamplingParams.model_validate(asked.sampling_params)
        except ValidationError as error:
            return _refused(str(error).splitlines()[1] + str(error).splitlines()[2])
        if len(asked.input_ids) + params.max_new_tokens > self.options.context_length:
            return _refused(f"the input ({len(asked.input_ids)} tokens) is longer than the model's context length")
        if asked.rid in self.buffers:
            return _refused(f"Duplicate request ID detected: {asked.rid}")
        buffer, self.reported[asked.rid] = self.buffers.setdefault(asked.rid, EventBuffer()), 0
        completion = Completion(asked.rid, asked.input_ids, params.model_dump(), asked.top_logprobs_num,
                                asked.logprob_start_len)  # fmt: skip
        if asked.stream:
            return StreamingResponse(self._events(completion, buffer), media_type="text/event-stream")
        await self._dispatch(completion)
        while True:
            event = await buffer.take(incremental=False)
            if event["meta_info"]["finish_reason"] is not None:
                self.close(asked.rid)
                return JSONResponse(event)

    async def _dispatch(self, completion: Completion) -> None:
        async with self.may_start:
            await self.may_start.wait_for(lambda: not self.paused)
        self.scheduler.post("add", completion)

    async def _events(self, completion: Completion, buffer: EventBuffer) -> AsyncIterator[str]:
        try:
            await self._dispatch(completion)
            while True:
                event = await buffer.take(incremental=self.options.incremental_streaming_output)
                if event["meta_info"]["finish_reason"] is not None:
                    self.buffers.pop(completion.rid, None)
                    self.aborted.discard(completion.rid)
                    yield f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
                    return
                yield f"data: {json.dumps(event)}\n\n"
        finally:
            self.close(completion.rid)

    async def abort(self, request: Request) -> Response:
        asked = Abort.model_validate(await request.json())
        if asked.abort_all:
            self.scheduler.post("abort", "")
        elif asked.rid in self.buffers and asked.rid not in self.aborted:
            self.aborted.add(asked.rid)
            self.scheduler.post("abort", asked.rid)
        return Response()

    async def pause(self, request: Request) -> Response:
        mode = Pause.model_validate(await request.json()).mode
        self.paused = True
        self.scheduler.post("abort" if mode == "abort" else "pause", "" if mode == "abort" else mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, request: Request) -> Response:
        Continue.model_validate(await request.json())
        async with self.may_start:
            self.paused = False
            self.scheduler.post("continue")
            self.may_start.notify_all()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        done = await self.scheduler.ask("flush")
        return Response("Cache flushed.\n" if done else "Flush cache failed.\n", status_code=200 if done else 400)

    async def update(self, request: Request) -> Response:
        asked = Update.model_validate(await request.json())
        message = await self.scheduler.ask("update", asked.model_dump())
        if not message and asked.weight_version is not None:
            self.version = asked.weight_version
        body = {"success": not message, "message": message or "Succeeded to update model weights."}
        return JSONResponse(body | {"num_paused_requests": 0}, status_code=400 if message else 200)

    async def model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": self.options.model_path, "weight_version": self.version})

    async def server_info(self, request: Request) -> Response:
        state = await self.scheduler.ask("state")
        return JSONResponse({**vars(self.options), "internal_states": [state], "version": __version__})


def _refused(message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error"}}, status_code=400)


async def _misshapen(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": {"message": str(error)}}, status_code=422)


def read_options() -> argparse.Namespace:
    """Parse the options that the adapter passes; an unknown option is an error."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "tokenizer-path", "dtype", "weight-version", "host", "log-level"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--attention-backend")
    for name in ("context-length", "max-running-requests", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("incremental-streaming-output", "enable-deterministic-inference", "skip-server-warmup"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Serve until killed."""
    options = read_options()
    front = Front(options)
    routes = [
        Route("/generate", front.generate, methods=["POST"]), Route("/abort_request", front.abort, methods=["POST"]),
        Route("/pause_generation", front.pause, methods=["POST"]),
        Route("/continue_generation", front.go_on, methods=["POST"]),
        Route("/flush_cache", front.flush, methods=["GET", "POST"]),
        Route("/update_weights_from_disk", front.update, methods=["POST"]),
        Route("/model_info", front.model_info), Route("/server_info", front.server_info),
    ]  # fmt: skip
    app = Starlette(routes=routes, lifespan=front.alive, exception_handlers={ValidationError: _misshapen})
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
