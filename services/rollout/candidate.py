"""The newest version of a job whose engines serve an older one until the newest has passed: a second engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.group_maker import GroupMaker
from penstock.services.rollout.policy import PolicyFollower
from penstock.shared.config.jobs.kinds import TextJob
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.loading import resolve_device
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

__all__ = ["Candidate"]


class Candidate:
    """Answers held-out prompts with versions that no agent has seen yet, and those agents that try one.

    Opening it blocks while the model loads.
    """

    def __init__(
        self, bus: Bus, settings: ServiceSettings, job: str, config: TextJob, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.engine = open_engine(
            config.model, tokenizer, max_running=config.placement.max_running, seed=config.seed,
            device=resolve_device(config.placement.device),
        )  # fmt: skip
        key = subjects.candidate_manifest(job)
        self.policy = PolicyFollower(bus, settings, job, self.engine, key=key, leaving=self._leave)
        self.maker = GroupMaker(job, settings.worker_id, config, self.engine, tokenizer)
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        """Sends the agents that try a version elsewhere before the engine takes in another one."""
        self._left = (-1, -1)
        """Version and trainer epoch that the engine is about to lose."""

    async def run(self) -> None:
        """Follow the newest version until cancelled."""
        await self.engine.start()
        await self.policy.run()

    def serves(self, version: int) -> bool:
        """True if agents may be answered with this version here."""
        return self.policy.version == version and self._left != (version, self.policy.epoch)

    async def _leave(self) -> None:
        self._left = self.policy.version, self.policy.epoch
        if self.on_leave is not None:
            await self.on_leave()

    @staticmethod
    def is_needed(config: TextJob) -> bool:
        """True if a job measures versions, or has them tried, before it serves them."""
        if not isinstance(config, OnlineJob) or config.online.promotion is None:
            return False
        return bool(config.data.eval) or config.online.canary is not None
