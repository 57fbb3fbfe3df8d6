"""Adapter of SGLang: uses its HTTP server, which the rollout worker starts or which is already running.

Weights are passed as files in shared memory (``sglang_files``), which every build of SGLang can load. Running
completions are retracted while weights are loaded; SGLang then recomputes their keys and values with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.services.rollout.engines.adapter import EngineAdapter
from penstock.services.rollout.engines.completion import Completion, Finish
from penstock.services.rollout.engines.remote import CALL_S
from penstock.services.rollout.engines.sglang_calls import Stream, generate_body, name_of, read_scores, score_body
from penstock.services.rollout.engines.sglang_files import VersionFiles
from penstock.services.rollout.engines.sglang_server import SglangServer
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.errors import ConfigError, DeadlineError, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Likely
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way

__all__ = ["KNOWN_VERSIONS", "SglangEngine"]

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose routes, requests and responses this adapter was written for."""
SETTLE_S = 0.02
"""Seconds without a new token after which a paused server is assumed to have sent all its tokens."""
STALL_S = 300.0
"""Seconds without a new token after which a server that is decoding is assumed to hang."""
_AGAIN_S = 0.5
"""Seconds after which an abort is repeated: SGLang ignores an abort that arrives before its request."""


class SglangEngine(EngineAdapter[Stream, SglangConfig]):
    """Implements ``EngineAdapter`` for SGLang. ``model.tokenizer`` must be set: SGLang needs it for min_new_tokens."""

    title = "SGLang"

    _name = ""
    """Random prefix of the request ids of this engine, so that they are unique if the server has other clients."""
    _server: SglangServer | None = None
    _files: VersionFiles | None = None
    _folder: Path | None = None
    """Directory of the fetched version."""
    _heard = 0.0
    """Monotonic time of the last event from the server, in seconds."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Start a server with this model, or load the model into the server at ``sglang_url``.

        Raises:
            ConfigError: SGLang is not installed, or the context length of the server at the URL is too small.
            Unavailable: the server does not start or respond, works for another job, or reports another weight label.
            WeightsError: the server at the URL cannot load the model.
        """
        url, python = self._settings.sglang_url, self._settings.sglang_interpreter
        self._name = secrets.token_hex(4)
        self._files = await asyncio.to_thread(VersionFiles, self._settings, self.model.path)
        if url:
            self._server = SglangServer(url)
        elif python is not None:
            self._server = await SglangServer.start(python, self._words(), self._variables())
        else:
            raise ConfigError("there is no SGLang here; run: penstock engines install sglang")
        self._look_at(await self._server.ready())
        if not self._server.is_own:
            await self._take_over(self._server)
        await self._check_label(self._label, Unavailable)

    def _words(self) -> list[str]:
        """Return the command-line options of a server that the worker starts."""
        model, config = self.model, self._config
        words = [
            "--model-path", str(model.path), "--tokenizer-path", str(model.tokenizer), "--dtype", model.dtype,
            "--context-length", str(model.max_length), "--max-running-requests", str(self._max_running),
            "--weight-version", self._label,
            "--incremental-streaming-output", "--skip-server-warmup", "--log-level", "warning",
        ]  # fmt: skip
        words += ["--trust-remote-code"] if model.trusted else []
        words += [] if config.memory_fraction is None else ["--mem-fraction-static", str(config.memory_fraction)]
        if model.device == "cpu":
            tokens = str(max(model.max_length, self._max_running * model.max_length // 4))
            return [
                *words, "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                "--disable-cuda-graph", "--disable-overlap-schedule", "--max-total-tokens", tokens,
            ]  # fmt: skip
        # FlashAttention kernels support only 16-bit dtypes.
        words += ["--attention-backend", "triton"] if model.dtype == "float32" else []
        return [*words, "--enable-deterministic-inference"] if config.seeded else words

    def _variables(self) -> dict[str, str]:
        if self.model.device != "cpu":
            return {}
        return {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(self._threads)}

    def _look_at(self, info: Mapping[str, Any]) -> None:
        """Check the server information: warn about version and seeds, raise ConfigError if the context is too short."""
        version = str(info.get("version", "of an unknown version")).split("+")[0]
        if version not in KNOWN_VERSIONS:
            logger.warning(
                "this adapter was written for SGLang %s, not for %s: look at `mismatch/logprob` of the first batch",
                " and ".join(KNOWN_VERSIONS), version,
            )  # fmt: skip
        length = info.get("context_length")
        if length is not None and length < self.max_length:
            raise ConfigError(
                f"the SGLang at {self._settings.sglang_url} takes {length} tokens, and this job needs "
                f"{self.max_length}: start it with --context-length, or lower rollout.max_length"
            )
        if self._settings.sglang_url and self._config.seeded and not info.get("enable_deterministic_inference"):
            logger.warning(
                "the SGLang at %s ignores seeds: start it with --enable-deterministic-inference, or set "
                "rollout.seeded: false", self._settings.sglang_url,
            )  # fmt: skip

    async def _take_over(self, server: SglangServer) -> None:
        """Clear requests and pauses that an earlier worker may have left, and load the model as version 0."""
        await server.post("/abort_request", {"rid": "", "abort_all": True}, "end earlier requests")
        await server.post("/continue_generation", {}, "go on")
        await self._load_from(self.model.path, self._label)

    async def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            if not server.is_own and self._halted:
                with contextlib.suppress(PenstockError):  # the server may have ended
                    await server.post("/continue_generation", {}, "go on")
            await server.close()
        if self._files is not None:
            await asyncio.to_thread(self._files.close)

    async def health(self) -> dict[str, Any]:
        """Return counts and flags; see ``Engine.health``. Also sends a request to a server the worker did not start."""
        counts = await super().health()
        if self._server is not None and not self._server.is_own:
            await self._served_label()
        return counts

    def _gone(self) -> str | None:
        if self._server is None or self._server.is_gone:
            return "its process is gone"
        silent_s = time.monotonic() - self._heard
        if self.running and not self._halted and silent_s > STALL_S:
            return f"it decodes and has told no token for {silent_s:.0f} s"
        return None

    # -- requests ----------------------------------------------------------------------------------------------------

    def _begin(self, completion: Completion) -> Stream:
        self._heard = time.monotonic()
        return Stream(completion, self._detokenize, rid=name_of(self._name, completion))

    async def _decode(self, stream: Stream) -> Finish:
        """Read a completion up to the server's final event, which reports the weight label of each token."""
        assert self._server is not None
        events = self._server.events("/generate", generate_body(stream.rid, stream.completion))
        ended: Finish | None = None
        async with contextlib.aclosing(events):
            async for part in events:
                self._heard = time.monotonic()
                if ended is None:
                    before = len(stream.token_ids)
                    told, ended = stream.take(part, self._label)
                    self._dispatch.generated_tokens += len(stream.token_ids) - before
                    self._dispatch.tell(stream.completion, told)
                meta = part.get("meta_info") or {}
                if meta.get("finish_reason"):
                    stream.settle(meta)
                    return ended or "abort"
                if ended is not None:  # it ended with a stop string, which the server does not know
                    await self._ask_to_end([stream])
        raise Unavailable("SGLang did not say how a completion ended")

    async def _end(self, streams: Sequence[Stream]) -> None:
        """Abort streams repeatedly until they have ended, because a request may reach the server after its abort."""
        end = time.monotonic() + CALL_S
        while left := [stream for stream in streams if self._dispatch.lives(stream)]:
            if self._dispatch.failure is not None:
                return
            if time.monotonic() > end:
                raise DeadlineError(f"SGLang did not end {len(left)} completions within {CALL_S:g} s")
            await self._ask_to_end(left)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._dispatch.until(lambda: not any(map(self._dispatch.lives, streams)))

    async def _ask_to_end(self, streams: Sequence[Stream]) -> None:
        for stream in streams:
            await self._post("/abort_request", {"rid": stream.rid, "abort_all": False}, "end a request")

    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        body = score_body(f"{self._name}-score-{number}.", token_ids, top_logprobs)
        return read_scores(await self._post("/generate", body, "score a text"), token_ids, top_logprobs)

    async def _stand_still(self, *, clear_cache: bool) -> None:
        """Pause SGLang and wait until it has stopped: it responds to the pause too early, but its scheduler answers
        ``/server_info`` only afterwards. Retracting drops all caches, so ``clear_cache`` makes no difference."""
        await self._post("/pause_generation", {"mode": "retract"}, "pause")
        assert self._server is not None
        await self._server.get("/server_info", "pause", older="/get_server_info")
        before = -1
        while self.running and before != self.generated_tokens:  # tokens sampled before the pause may still arrive
            before = self.generated_tokens
            await asyncio.sleep(SETTLE_S)

    async def _move_on(self) -> None:
        await self._post("/continue_generation", {}, "go on")
        self._heard = time.monotonic()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _fetch(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Write a version to files that the server can load."""
        assert self._files is not None
        await self._release()
        self._folder, way = await asyncio.to_thread(self._files.write, manifest, routes)
        return way

    async def _release(self) -> None:
        """Remove the files of the fetched version; SGLang has its own copy of the weights once they are loaded."""
        folder, self._folder = self._folder, None
        if folder is not None and self._files is not None:
            await asyncio.to_thread(self._files.remove, folder)

    async def _load(self, label: str) -> None:
        """Load the fetched version; ``_stand_still`` has already retracted the running completions."""
        assert self._folder is not None
        await self._load_from(self._folder, label)

    async def _load_from(self, folder: Path, label: str) -> None:
        body = {
            "model_path": str(folder), "load_format": "safetensors", "weight_version": label, "flush_cache": True,
            "abort_all_requests": False,
        }  # fmt: skip
        await self._post("/update_weights_from_disk", body, "load weights", WeightsError)

    async def _flush(self) -> None:
        """Flush the cache explicitly: the update also does it, but earlier versions of SGLang ignored its failure."""
        await self._post("/flush_cache", {}, "drop its caches", WeightsError)

    async def _served_label(self) -> str:
        if self._server is None:
            raise self._dispatch.unavailable()
        info = await self._server.get("/model_info", "say what it serves", older="/get_model_info")
        return str(info.get("weight_version"))

    # -- the server --------------------------------------------------------------------------------------------------

    async def _post(
        self, path: str, body: Mapping[str, Any], what: str, kind: type[PenstockError] = Unavailable
    ) -> dict[str, Any]:
        if self._server is None:
            raise self._dispatch.unavailable()
        return await self._server.post(path, body, what, kind)
