"""Penstock's part inside vLLM's worker processes: opens weight slots there, holds them, and loads the model from them.

vLLM imports this module in each worker process, for ``worker_extension_cls`` names ``SlotWorker``; that is before it
makes the engine of weight transfers, which is registered here under ``BACKEND``.
"""

from __future__ import annotations

import os
import select
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from penstock.services.rollout.engines.remote import checkpoint_tensors
from penstock.shared.config.service import load_settings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol.weights import WeightManifest, WeightRoutes
from penstock.shared.weights import Staged, Way, open_receiver
from penstock.shared.weights.open import Receiver

__all__ = ["BACKEND", "OWNER", "SlotWeights", "SlotWorker", "StageReply", "StageRequest"]

BACKEND = "penstock"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
OWNER = "PENSTOCK_ENGINE_OWNER"
"""Variable with the process that the engine belongs to: workers end with it."""


class StageRequest(msgspec.Struct, frozen=True):
    """Open a version. ``settings`` are those of the rollout worker, where they differ from the environment."""

    manifest: WeightManifest
    routes: WeightRoutes | None
    settings: dict[str, str]


class StageReply(msgspec.Struct, frozen=True):
    """How it went: ``way``, or why it did not."""

    way: Way | None = None
    error: str = ""


class _Slots:
    """The version that this process has open; a thread opens it while the model computes on."""

    def __init__(self) -> None:
        self.staged: Staged | None = None
        self._receiver: Receiver | None = None
        self._thread = ThreadPoolExecutor(1, "stage")
        self._opening: Future[Staged] | None = None

    def open(self, request: StageRequest) -> None:
        """Let go of what is open, and begin to open another version."""
        if self._opening is not None:
            wait([self._opening])
        self.reply()
        self.release()
        self._opening = self._thread.submit(self._open, request)

    def reply(self) -> StageReply | None:
        """How it went; None while it goes on."""
        opening = self._opening
        if opening is None or not opening.done():
            return None
        error = opening.exception()
        if error is not None:
            return StageReply(error=str(error) or repr(error))
        self.staged = opening.result()
        return StageReply(self.staged.way)

    def _open(self, request: StageRequest) -> Staged:
        settings = load_settings(request.settings)
        if self._receiver is None:
            self._receiver = open_receiver(settings)
        if request.routes is not None:
            self._receiver.follow(settings.worker_id, request.routes)
        return self._receiver.stage(request.manifest)

    def release(self) -> None:
        """Drop the lock."""
        self._opening = None
        if self.staged is not None:
            self.staged.release()
            self.staged = None


_slots = _Slots()


class SlotWorker:
    """Methods that vLLM's workers get beside their own, for ``collective_rpc``."""

    def penstock_stage(self, request: bytes) -> None:
        """Begin to open a version (msgpack of a ``StageRequest``)."""
        _slots.open(msgspec.msgpack.decode(request, type=StageRequest))

    def penstock_staged(self) -> bytes:
        """msgpack of a ``StageReply``, or b'' while it is being opened."""
        reply = _slots.reply()
        return b"" if reply is None else msgspec.msgpack.encode(reply)

    def penstock_intact(self) -> bool:
        """True if a version is open here and was not overwritten."""
        return _slots.staged is not None and _slots.staged.intact()

    def penstock_release(self) -> None:
        """Let go of the version."""
        _slots.release()


@dataclass
class _Nothing(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """There is nothing to say: the slot is open."""


class SlotWeights(WeightTransferEngine[_Nothing, _Nothing]):  # type: ignore[misc]
    """Loads the version that ``SlotWorker`` opened. vLLM copies it into the form that its kernels want."""

    init_info_cls = _Nothing
    update_info_cls = _Nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = False
        _end_with_owner()

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make every layer wait for its weights. What an update that failed left behind is put in order first."""
        if self._began:
            self.finish_weight_update()
        self._began = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load; the base class synchronizes a device, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _Nothing) -> None:
        """Load every tensor of the open version.

        Raises:
            WeightsError: there is none, or parameters of the model are not in it.
        """
        staged = _slots.staged
        if staged is None:
            raise WeightsError("no version is open in this worker")
        tensors = staged.tensors()
        wanted = {name for name, _ in self.model.named_parameters()}
        loaded = set(self.model.load_weights(checkpoint_tensors(tensors.items())))
        if HEAD in wanted.difference(loaded) and self.model_config.hf_config.tie_word_embeddings:
            # Models leave a tied head out, but a CPU keeps its weights packed apart from the embedding's: without this
            # the logits would silently be those of the version before.
            head = self.model.get_parameter(HEAD)
            head.weight_loader(head, tensors[EMBEDDING])
            loaded.add(HEAD)
        if missing := wanted.difference(loaded):
            raise WeightsError(f"{len(missing)} parameters got no weights, among them '{min(missing)}'")

    def finish_weight_update(self) -> None:
        """Bring what was loaded into the form of the kernels."""
        self._began = False
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Let go of the slot."""
        _slots.release()


def _end_with_owner() -> None:
    """End this process once the one that it works for is gone: nobody else would."""
    owner = int(os.environ.get(OWNER, "0"))
    if not owner:
        return
    try:
        handle = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=watch, name="owner", daemon=True).start()


if BACKEND not in WeightTransferEngineFactory._registry:  # the workers of an engine may share a process
    WeightTransferEngineFactory.register_engine(BACKEND, SlotWeights)
