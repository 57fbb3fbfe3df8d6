"""Policies that never change: the model of an evaluation job, and a deployment, as the engine loaded them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from penstock.services.rollout.asking import Asking
from penstock.services.rollout.engines import Engine, open_engine
from penstock.services.rollout.serving import InferenceServer
from penstock.shared.config.service import ServiceSettings
from penstock.shared.config.serving_job import ServingJob
from penstock.shared.errors import ConfigError
from penstock.shared.models.loading import build_tokenizer, resolve_device
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.messages import Report
from penstock.shared.transport.bus import Bus

__all__ = ["FixedPolicy", "ServingSession"]


class FixedPolicy:
    """Stands where a ``PolicyFollower`` stands; serves version 0."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.version = 0

    def status(self) -> dict[str, Any]:
        """Nothing comes to it, and nothing pauses it."""
        return {"pause_s": 0.0}

    async def run(self) -> None:
        """Keep the engine until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            await self._engine.close()

    async def first(self) -> None:
        """Version 0 is there from the start."""

    async def reach(self, wanted: Callable[[int], bool], *, deadline_s: float, what: str) -> None:
        """Version 0 is there from the start, and no other one comes."""
        assert wanted(0), f"an evaluation job has no {what}"


class ServingSession:
    """One deployment on one rollout worker: an engine that answers live requests, and nothing else."""

    def __init__(self, bus: Bus, settings: ServiceSettings, job: str, config: ServingJob) -> None:
        self._bus, self._settings, self.job, self.config = bus, settings, job, config
        self._asking = Asking(bus)
        self._engine: Engine | None = None
        self._serving: InferenceServer | None = None
        self._drained = False

    async def run(self) -> None:
        """Answer until cancelled, or until ``drain`` and the last request in hand is answered."""
        self._asking.wait("model", "the model to be loaded", str(self.config.model.path or "model.config"))
        try:
            self._serving = await asyncio.to_thread(self._load)
        except ConfigError as error:
            self._asking.done("model")
            report = pack(Report(kind="failed", epoch=0, reason=str(error)), job=self.job)
            await self._asking.ask(subjects.report(self.job), report, "failure", "the coordinator to take a failure")
            raise
        assert self._engine is not None
        try:
            await self._engine.start()
            self._asking.done("model")
            if self._drained:
                self._serving.drain()
            await self._serving.run()
        finally:
            await self._engine.close()

    def _load(self) -> InferenceServer:
        config = self.config
        tokenizer = build_tokenizer(config.model)
        self._engine = open_engine(
            config.model, tokenizer, max_running=config.placement.max_running, seed=config.seed,
            device=resolve_device(config.placement.device),
        )  # fmt: skip
        return InferenceServer(
            self._bus, self._settings.worker_id, self.job, self._engine, tokenizer, config.sampling,
            max_running=config.placement.max_running, version=lambda: 0, hold_s=config.serving.hold_s,
            template_args=config.serving.chat_template_args,
        )  # fmt: skip

    def drain(self) -> None:
        """Take no more requests."""
        self._drained = True
        if self._serving is not None:
            self._serving.drain()

    @property
    def busy(self) -> bool:
        """True if requests are in hand."""
        return self._serving is not None and bool(self._serving.num_requests)

    def status(self) -> dict[str, Any]:
        """This worker's entry for the job, for its heartbeat."""
        oldest, loaded = self._asking.oldest, self._serving is not None
        row: dict[str, Any] = {
            "version": 0 if oldest is None and loaded else -1,
            "running": self._engine.running if self._engine else 0,
            "requests": self._serving.num_requests if self._serving else 0,
            "generated_tokens": self._engine.generated_tokens if self._engine else 0,
        }
        if oldest is not None:
            row |= {"since": oldest[0], "waiting_for": oldest[1], "subject": oldest[2]}
        return row
