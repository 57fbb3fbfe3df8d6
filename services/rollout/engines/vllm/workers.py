"""Starts vLLM and has its worker processes open versions of the weights; runs in the rollout worker.

``plugin`` is the other side, inside vLLM's worker processes.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.rollout.engines.adapter import ModelFiles
from penstock.shared.config.rollout import VllmConfig, VllmServerConfig
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError, Unavailable, UnreadableWeights, WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Way

__all__ = [
    "BACKEND", "KNOWN_VERSIONS", "OWNER", "SlotWorkers", "StageReply", "StageRequest", "StagedByWorkers",
    "check_heads", "check_shared_memory", "check_version", "engine_options", "variables",
]  # fmt: skip

logger = logging.getLogger(__name__)

KNOWN_VERSIONS = ("0.32.0",)
"""Versions of vLLM with which the contract tests of its adapters passed."""
BACKEND = "penstock"
"""Name of the plug-in's weight transfer engine."""
OWNER = "PENSTOCK_ENGINE_OWNER"
"""Environment variable with the process id of the rollout worker; vLLM's worker processes exit when it ends."""
SHARED_MEMORY = Path("/dev/shm")
SHARED_MIB = 256
"""Free shared memory that vLLM's processes need for their two message queues, in MiB. vLLM itself checks the room
for the larger queue (240 MiB)."""
STAGE_S = 300.0
"""Timeout in seconds for opening a version in vLLM's worker processes."""
_POLL_S = 0.01
_SLOT_WORKER = "penstock.services.rollout.engines.vllm.plugin.SlotWorker"
_RECEIVING = (
    "host_id", "worker_id", "data_dir", "shm_dir", "bulk_host", "bulk_tls_ca", "bulk_tls_cert", "bulk_tls_key",
    "weight_disk",
)  # fmt: skip

Call = Callable[..., Awaitable[list[Any]]]
"""``await call(method, *args)`` calls a method of ``SlotWorker`` in every worker process; returns all results."""


class StageRequest(msgspec.Struct, frozen=True):
    """Request to open a version. ``settings``: environment variables of the rollout worker for receiving weights."""

    manifest: WeightManifest
    routes: WeightRoutes | None
    settings: dict[str, str]


class StageReply(msgspec.Struct, frozen=True):
    """Result of a ``StageRequest``: the ``way`` by which the version was received, or a non-empty ``error``.

    ``unreadable``: the error is ``UnreadableWeights``.
    """

    way: Way | None = None
    error: str = ""
    unreadable: bool = False


class SlotWorkers:
    """Opens versions in vLLM's worker processes.

    Arguments are strings and results dictionaries: vLLM's HTTP server passes nothing else unchanged.
    """

    def __init__(self, call: Call, settings: ServiceSettings) -> None:
        self._call = call
        given = ((name, getattr(settings, name)) for name in _RECEIVING)
        self._settings = {f"PENSTOCK_{name.upper()}": str(value) for name, value in given if value}

    async def open(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        """Open a version in every worker process; returns the transport and the sum of fetched bytes.

        Raises:
            WeightsError: a process cannot open it, or not within ``STAGE_S`` (UnreadableWeights: nor if it is
                published again).
        """
        request = msgspec.msgpack.encode(StageRequest(manifest, routes, self._settings))
        await self._call("penstock_stage", base64.b64encode(request).decode())
        end = time.monotonic() + STAGE_S
        while not all(answers := await self._call("penstock_staged")):
            if time.monotonic() > end:
                raise WeightsError(f"version {manifest.version} was not opened by vLLM's processes in {STAGE_S:g} s")
            await asyncio.sleep(_POLL_S)
        replies = [msgspec.convert(answer, StageReply) for answer in answers]
        if failed := [reply for reply in replies if reply.error]:
            await self.release()
            kind = UnreadableWeights if all(reply.unreadable for reply in failed) else WeightsError
            raise kind(failed[0].error)
        ways = [reply.way for reply in replies if reply.way is not None]
        return Way(ways[0].transport, sum(way.fetched_bytes for way in ways))

    async def release(self) -> None:
        """Release the open version. Safe to repeat."""
        await self._call("penstock_release")

    async def check_intact(self, version: int) -> None:
        """Raise WeightsError if the memory of the open version was overwritten."""
        if not all(answer["intact"] for answer in await self._call("penstock_intact")):
            raise WeightsError(f"the memory of version {version} was overwritten before it was loaded")

    async def head_sizes(self) -> list[int]:
        """Return the widths of attention heads that vLLM supports on this machine; an empty list means all widths."""
        sizes: list[int] = (await self._call("penstock_heads"))[0]["sizes"]
        return sizes


class StagedByWorkers:
    """Methods of ``EngineAdapter`` that both adapters of vLLM share: vLLM's worker processes open the versions."""

    _slots: SlotWorkers

    async def _fetch(self, manifest: WeightManifest, routes: WeightRoutes | None) -> Way:
        return await self._slots.open(manifest, routes)

    async def _release(self) -> None:
        await self._slots.release()

    async def _check_fetched(self, version: int) -> None:
        await self._slots.check_intact(version)


def engine_options(model: ModelFiles, config: VllmConfig | VllmServerConfig, *, max_running: int) -> dict[str, Any]:
    """Return vLLM's engine arguments for a model, by the names of ``AsyncEngineArgs``."""
    return {
        "model": str(model.path), "skip_tokenizer_init": True, "dtype": model.dtype, "max_model_len": model.max_length,
        "max_num_seqs": max_running, "enforce_eager": True, "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs", "max_logprobs": -1, "disable_log_stats": True,
        "generation_config": "vllm", "trust_remote_code": model.trusted,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * (1 << 30)), "worker_extension_cls": _SLOT_WORKER,
        "weight_transfer_config": {"backend": BACKEND},
    }  # fmt: skip


def variables(threads: int) -> dict[str, str]:
    """Return environment variables for vLLM: no usage statistics, no compiler, no pinning to CPU cores."""
    return {
        "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", OWNER: str(os.getpid()),
    }  # fmt: skip


def check_version(version: str) -> None:
    """Log a warning if the contract tests have not passed with this version of vLLM."""
    if version.split("+", maxsplit=1)[0] not in KNOWN_VERSIONS:
        logger.warning(
            "this adapter was tested with vLLM %s, not with this %s: look at `mismatch/logprob` of the first batch",
            " and ".join(KNOWN_VERSIONS), version,
        )  # fmt: skip


def check_shared_memory(folder: Path = SHARED_MEMORY) -> None:
    """Raise Unavailable if ``folder`` has less than ``SHARED_MIB`` free: vLLM itself fails only after minutes."""
    try:
        free = shutil.disk_usage(folder).free >> 20
    except FileNotFoundError:  # vLLM does not check either
        return
    if free < SHARED_MIB:
        raise Unavailable(
            f"vLLM does not start: its processes need {SHARED_MIB} MiB of shared memory, and {folder} has {free} MiB "
            "free; enlarge it (Docker: --shm-size=1g, or shm_size: 1g in the compose file)"
        )


def check_heads(head_dim: int, sizes: Sequence[int]) -> None:
    """Raise ConfigError if vLLM does not support this head size here; vLLM itself fails only at the first token.

    Args:
        sizes: supported head sizes; empty: any.
    """
    if head_dim and sizes and head_dim not in sizes:
        raise ConfigError(
            f"on a CPU vLLM computes attention heads of {', '.join(map(str, sizes))}, and those of this model have "
            f"{head_dim}: take another model, or rollout.engine embedded"
        )
