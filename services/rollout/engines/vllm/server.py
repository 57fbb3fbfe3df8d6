"""Adapter of vLLM's HTTP server, which the rollout worker starts as a child process.

Weights are passed by reference, as with ``vllm``: ``plugin`` opens them in vLLM's worker processes. The server
listens on a Unix socket in a directory that only this user can read: its control routes have no key.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.services.rollout.engines.adapter import ModelFiles
from penstock.services.rollout.engines.servers.adapter import ServerAdapter
from penstock.services.rollout.engines.servers.client import EngineServer
from penstock.services.rollout.engines.vllm.server_calls import (
    Stream,
    abort_body,
    command_line,
    generate_body,
    read_scores,
    score_body,
)
from penstock.services.rollout.engines.vllm.workers import (
    SlotWorkers,
    StagedByWorkers,
    check_heads,
    check_shared_memory,
    check_version,
    engine_options,
    variables,
)
from penstock.shared.config.rollout import VllmServerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable, WeightsError
from penstock.shared.protocol.generation import Likely

__all__ = ["VllmServerEngine"]


_LONGEST = 64
"""Length that the path of a temporary directory must not reach: the kernel limits the length of socket paths."""


class VllmServerEngine(StagedByWorkers, ServerAdapter[Stream, VllmServerConfig]):
    """Implements ``EngineAdapter`` for vLLM's server."""

    title = "vLLM"
    generate_path = "/inference/v1/generate"
    stream_type = Stream
    _folder: Path | None = None
    """Directory with the server's socket, and with the link through which the server imports Penstock's plug-in."""

    def __init__(self, model: ModelFiles, config: VllmServerConfig, settings: ServiceSettings, **options: Any) -> None:
        super().__init__(model, config, settings, **options)
        self._slots = SlotWorkers(self._workers, settings)

    # -- life --------------------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Start a server with this model.

        Raises:
            ConfigError: vLLM is not installed, or does not support this model here.
            Unavailable: shared memory has no room for it, or the server does not start or respond, or reports another
                weight label.
        """
        python = self._settings.vllm_interpreter
        if python is None:
            raise ConfigError("there is no vLLM here; run: penstock engines install vllm")
        check_shared_memory()
        self._folder = await asyncio.to_thread(_folder_with_code)
        options = engine_options(self.model, self._config, max_running=self._max_running)
        words = ["-m", "vllm.entrypoints.openai.api_server", *command_line(options), "--enable-scale-out"]
        words += ["--disable-uvicorn-access-log", "--uvicorn-log-level=warning"]
        self._server = await EngineServer.start(
            self.title, python, words, self._variables(self._folder), socket_path=self._folder / "socket"
        )
        check_version(str((await self._server.ready("/version")).get("version")))
        check_heads(self.model.head_dim, await self._slots.head_sizes())
        await self._post("/update_weight_version", {"new_version": self._label}, "label its weights")
        await self._check_label(self._label, Unavailable)
        await asyncio.to_thread(self.model.remove_temporary)

    def _variables(self, code: Path) -> dict[str, str]:
        """Return environment variables of the server, by which it finds ``plugin`` and enables its control routes."""
        path = os.pathsep.join(filter(None, (str(code), os.environ.get("PYTHONPATH"))))
        level = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")
        own = {"PYTHONPATH": path, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": level}
        return variables(self._threads) | own

    async def _shut(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _body(self, stream: Stream) -> Mapping[str, Any]:
        return generate_body(stream.rid, stream.completion, vocab_size=self.model.vocab_size)

    async def _ask_to_end(self, streams: Sequence[Stream]) -> None:
        await self._post("/abort_requests", abort_body([stream.rid for stream in streams]), "end requests")

    async def _score(self, number: int, token_ids: list[int], top_logprobs: int) -> tuple[list[float], list[Likely]]:
        body = score_body(f"{self._name}-score-{number}.", token_ids, top_logprobs)
        return read_scores(await self._post(self.generate_path, body, "score a text"), token_ids, top_logprobs)

    async def _pause(self, *, clear_cache: bool) -> None:
        await self._post(f"/pause?mode=keep&clear_cache={str(clear_cache).lower()}", {}, "pause")

    async def _echo(self) -> None:
        await self._running_server().get("/is_paused", "pause")

    async def _go(self) -> None:
        await self._post("/resume", {}, "go on")

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _load(self, label: str) -> None:
        await self._update("/start_weight_update", {}, "begin an update")
        await self._update("/update_weights", {"update_info": {}}, "load weights")
        await self._update("/finish_weight_update", {"weight_version": label}, "finish an update")

    async def _flush(self) -> None:
        await self._update("/reset_prefix_cache?reset_running_requests=true", {}, "drop its caches")

    async def _served_label(self) -> str:
        return str((await self._running_server().get("/weight_info", "say its version")).get("weight_version"))

    async def _update(self, path: str, body: Mapping[str, Any], what: str) -> dict[str, Any]:
        return await self._post(path, body, what, WeightsError)

    async def _workers(self, method: str, *args: str) -> list[Any]:
        """Call a method of ``SlotWorker`` in each worker process; see ``SlotWorkers``."""
        answer = await self._update("/collective_rpc", {"method": method, "args": list(args)}, method)
        found: list[Any] = answer.get("results") or []
        return found


def _folder_with_code() -> Path:
    """Return a new temporary directory from which the server's interpreter imports the Penstock of this process."""
    usual = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix="penstock-vllm-", dir=usual if len(usual) < _LONGEST else "/tmp"))
    (folder / "penstock").symlink_to(Path(penstock.__file__).parent, target_is_directory=True)
    return folder
