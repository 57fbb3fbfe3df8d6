"""Adapter of SGLang: uses its HTTP server, which the rollout worker starts or which is already running.

Weights are passed as files in shared memory (``files``), which every build of SGLang can load. Running
completions are retracted while weights are loaded; SGLang then recomputes their keys and values with the new weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.services.rollout.engines.servers.adapter import ServerAdapter
from penstock.services.rollout.engines.servers.client import EngineServer
from penstock.services.rollout.engines.servers.pause_lease import PauseLease
from penstock.services.rollout.engines.sglang.calls import Stream, generate_body, read_scores, score_body
from penstock.services.rollout.engines.sglang.files import VersionFiles
from penstock.shared.config.rollout import SglangConfig
from penstock.shared.errors import ConfigError, PenstockError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Likely
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way

__all__ = ["KNOWN_VERSIONS", "SglangEngine"]

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose routes, requests and responses this adapter was written for."""


class SglangEngine(ServerAdapter[Stream, SglangConfig]):
    """Implements ``EngineAdapter`` for SGLang. ``model.tokenizer`` must be set: SGLang needs it for min_new_tokens."""

    title = "SGLang"
    generate_path = "/generate"
    stream_type = Stream
    _files: VersionFiles | None = None
    _folder: Path | None = None
    """Directory of the fetched version."""
    _lease: PauseLease | None = None
    """Continues the server at ``sglang_url`` if this process dies while it is paused."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Start a server with this model, or load the model into the server at ``sglang_url``.

        Raises:
            ConfigError: SGLang is not installed, or the context length of the server at the URL is too small.
            Unavailable: the server does not start or respond, works for another job, or reports another weight label.
            WeightsError: the server at the URL cannot load the model.
        """
        url, python = self._settings.sglang_url, self._settings.sglang_interpreter
        self._files = await asyncio.to_thread(VersionFiles, self._settings, self.model.path)
        if url:
            self._server = EngineServer(self.title, url)
            self._lease = PauseLease(f"{self._server.url}/continue_generation", [self._files.claim])
        elif python is not None:
            self._server = await EngineServer.start(self.title, python, self._words(), self._variables())
        else:
            raise ConfigError("there is no SGLang here; run: penstock engines install sglang")
        self._look_at(await self._server.ready("/server_info", older="/get_server_info"))
        if not self._server.is_own:
            await self._take_over(self._server)
        await self._check_label(self._label, Unavailable)

    def _words(self) -> list[str]:
        """Return the Python interpreter's arguments to start a server; ``EngineServer.start`` adds the address."""
        model, config = self.model, self._config
        words = [
            "-m", "sglang.launch_server", "--model-path", str(model.path), "--tokenizer-path", str(model.tokenizer),
            "--dtype", model.dtype,
            "--context-length", str(model.max_length), "--max-running-requests", str(self._max_running),
            "--weight-version", self._label,
            "--incremental-streaming-output", "--skip-server-warmup", "--log-level", "warning",
        ]  # fmt: skip
        words += ["--trust-remote-code"] if model.trusted else []
        words += [] if config.memory_fraction is None else ["--mem-fraction-static", str(config.memory_fraction)]
        if model.device == "cpu":
            tokens = str(max(model.max_length, self._max_running * model.max_length // 4))  # this much memory is taken
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
        """Check the server information. Warn if this adapter does not know the server's version, or if the server
        ignores the seeds that the job sets. Raise ConfigError if the server's context is too short."""
        version = str(info.get("version", "an unknown version")).split("+")[0]
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

    async def _take_over(self, server: EngineServer) -> None:
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
                    self._free_lease()
            await server.close()
        if self._lease is not None:
            await asyncio.to_thread(self._lease.close)
        if self._files is not None:
            await asyncio.to_thread(self._files.close)

    async def health(self) -> dict[str, Any]:
        """Return counters and flags; see ``Engine.health``. Also checks that a server not started by this worker
        responds."""
        counts = await super().health()
        if self._server is not None and not self._server.is_own:
            await self._served_label()
        return counts

    # -- requests ----------------------------------------------------------------------------------------------------

    def _body(self, stream: Stream) -> Mapping[str, Any]:
        return generate_body(stream.rid, stream.completion)

    async def _ask_to_end(self, streams: Sequence[Stream]) -> None:
        bodies = [{"rid": stream.rid, "abort_all": False} for stream in streams]
        await asyncio.gather(*(self._post("/abort_request", body, "end a request") for body in bodies))

    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        body = score_body(f"{self._name}-score-{number}.", token_ids, top_logprobs)
        return read_scores(await self._post("/generate", body, "score a text"), token_ids, top_logprobs)

    async def _pause(self, *, clear_cache: bool) -> None:
        """Pause SGLang and retract its running requests; this drops all caches, even without ``clear_cache``.

        A pause of SGLang has no time limit, so a server that outlives this process gets a watchdog first.
        """
        if self._lease is not None:
            try:
                await asyncio.to_thread(self._lease.hold)
            except OSError as error:
                raise Unavailable(f"{self.title} is not paused, because its watchdog does not start: {error}") from None
        await self._post("/pause_generation", {"mode": "retract"}, "pause")

    async def _echo(self) -> None:
        """Await an answer of SGLang's scheduler, because the HTTP server confirms a pause before the scheduler
        pauses."""
        await self._running_server().get("/server_info", "pause", older="/get_server_info")

    async def _go(self) -> None:
        await self._post("/continue_generation", {}, "go on")
        self._free_lease()

    def _free_lease(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(OSError):  # the watchdog was killed; the next pause starts another one
                self._lease.free()

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
        """Flush the cache again after the update, because updates of earlier SGLang versions ignore a failed flush."""
        await self._post("/flush_cache", {}, "drop its caches", WeightsError)

    async def _served_label(self) -> str:
        info = await self._running_server().get("/model_info", "say what it serves", older="/get_model_info")
        return str(info.get("weight_version"))
