"""Plugin for vLLM's worker processes: opens a published version of the weights, keeps it open, and loads the model
from it.

vLLM imports this module in each worker process because ``worker_extension_cls`` names ``SlotWorker``. The import
registers the weight transfer engine under ``BACKEND`` before vLLM creates it.
"""

from __future__ import annotations

import base64
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
from penstock.services.rollout.engines.vllm.workers import BACKEND, OWNER, StageReply, StageRequest
from penstock.shared.config.service import load_settings
from penstock.shared.errors import UnreadableWeights, WeightsError
from penstock.shared.weights import Staged, open_receiver
from penstock.shared.weights.open import Receiver

__all__ = ["SlotWeights", "SlotWorker", "head_sizes"]

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def head_sizes() -> list[int]:
    """Return the widths of attention heads that vLLM supports on this machine; an empty list means all widths."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    return list(CPUAttentionBackend.get_supported_head_sizes()) if current_platform.is_cpu() else []


class _Slots:
    """Holds the version that this process has open; a thread opens it while the model keeps computing."""

    def __init__(self) -> None:
        self.staged: Staged | None = None
        self._receiver: Receiver | None = None
        self._thread = ThreadPoolExecutor(1, "stage")
        self._opening: Future[Staged] | None = None

    def open(self, request: StageRequest) -> None:
        """Release the open version and start opening another one; waits for an opening that is still in progress."""
        if self._opening is not None:
            wait([self._opening])
        self.reply()
        self.release()
        self._opening = self._thread.submit(self._open, request)

    def reply(self) -> StageReply | None:
        """Return the result of the last opening; None if none was started or the last one is still in progress."""
        opening = self._opening
        if opening is None or not opening.done():
            return None
        error = opening.exception()
        if error is not None:
            return StageReply(error=str(error) or repr(error), unreadable=isinstance(error, UnreadableWeights))
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
        """Release the open version and its lock, if any."""
        self._opening = None
        if self.staged is not None:
            self.staged.release()
            self.staged = None


_slots = _Slots()


class SlotWorker:
    """Methods added to vLLM's workers, called through ``collective_rpc``; see ``SlotWorkers``."""

    def penstock_stage(self, request: str) -> None:
        """Start opening a version; ``request`` is a ``StageRequest`` in msgpack and base64."""
        _slots.open(msgspec.msgpack.decode(base64.b64decode(request), type=StageRequest))

    def penstock_staged(self) -> dict[str, Any]:
        """Return a ``StageReply``, or {} while the version is being opened."""
        reply = _slots.reply()
        found: dict[str, Any] = {} if reply is None else msgspec.to_builtins(reply)
        return found

    def penstock_intact(self) -> dict[str, bool]:
        """Return ``{"intact": True}`` if this process has a version open whose memory was not overwritten."""
        return {"intact": _slots.staged is not None and _slots.staged.intact()}

    def penstock_heads(self) -> dict[str, list[int]]:
        """Return the result of ``head_sizes`` under the key ``sizes``."""
        return {"sizes": head_sizes()}

    def penstock_release(self) -> None:
        """Release the open version."""
        _slots.release()


@dataclass
class _Nothing(WeightTransferInitInfo, WeightTransferUpdateInfo):  # type: ignore[misc]
    """Empty argument for vLLM's interface of weight transfer, at its start and at each update. Nothing needs to be
    passed, because ``SlotWorker`` has already opened the version."""


class SlotWeights(WeightTransferEngine[_Nothing, _Nothing]):  # type: ignore[misc]
    """Loads the version that ``SlotWorker`` opened. vLLM copies the weights into the layout of its kernels."""

    init_info_cls = _Nothing
    update_info_cls = _Nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began = False
        _end_with_owner()

    def init_transfer_engine(self, init_info: _Nothing) -> None:
        """Do nothing; the interface requires this method."""

    def start_weight_update(self) -> None:
        """Prepare every layer to receive weights; first finishes an earlier update that failed."""
        if self._began:
            self.finish_weight_update()
        self._began = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights. Unlike the base class, synchronize the accelerator only if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: _Nothing) -> None:
        """Load every tensor of the version that ``SlotWorker`` opened.

        Raises:
            WeightsError: no version is open, or it lacks parameters of the model.
        """
        staged = _slots.staged
        if staged is None:
            raise WeightsError("no version is open in this worker")
        tensors = staged.tensors()
        wanted = {name for name, _ in self.model.named_parameters()}
        loaded = set(self.model.load_weights(checkpoint_tensors(tensors.items())))
        if HEAD in wanted.difference(loaded) and self.model_config.hf_config.tie_word_embeddings:
            # ``load_weights`` skips a tied head, but on a CPU vLLM keeps a packed copy of it: without this, the logits
            # would silently come from the previous version.
            head = self.model.get_parameter(HEAD)
            head.weight_loader(head, tensors[EMBEDDING])
            loaded.add(HEAD)
        if missing := wanted.difference(loaded):
            raise WeightsError(f"{len(missing)} parameters got no weights, among them '{min(missing)}'")

    def finish_weight_update(self) -> None:
        """Convert the loaded weights to the layout of the kernels."""
        self._began = False
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Release the open version."""
        _slots.release()


def _end_with_owner() -> None:
    """Start a thread that ends this process when the rollout worker (``OWNER``) ends; nothing else would do so."""
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
