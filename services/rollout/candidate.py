"""A second engine for a job's newest version. The job's main engine serves an older version until the promotion."""

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
    """Serves a candidate (a policy version before its promotion) for held-out prompts and canary requests.

    The constructor blocks while the model loads.
    """

    def __init__(
        self, bus: Bus, settings: ServiceSettings, job: str, config: TextJob, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self.engine = open_engine(
            config.model, tokenizer, max_running=config.placement.max_running, seed=config.seed,
            device=resolve_device(config.placement.device), rollout=config.rollout,
        )  # fmt: skip
        key = subjects.candidate_manifest(job)
        self.policy = PolicyFollower(bus, settings, job, self.engine, key=key, leaving=self._leave)
        self.maker = GroupMaker(job, settings.worker_id, config, self.engine, tokenizer)
        self.on_leave: Callable[[], Awaitable[None]] | None = None
        """Callback that moves live requests to the main engine before this engine loads another version."""
        self._left = (-1, -1)
        """Version and trainer epoch that the engine is about to replace."""

    async def run(self) -> None:
        """Start the engine, and load each newly announced version into it, until cancelled."""
        await self.engine.start()
        await self.policy.run()

    def serves(self, version: int) -> bool:
        """Return True if this engine serves ``version`` and is not about to replace it by another version."""
        return self.policy.version == version and self._left != (version, self.policy.epoch)

    async def _leave(self) -> None:
        self._left = self.policy.version, self.policy.epoch
        if self.on_leave is not None:
            await self.on_leave()

    @staticmethod
    def is_needed(config: TextJob) -> bool:
        """Return True if a job evaluates versions, or tries them on live requests, before it serves them."""
        if not isinstance(config, OnlineJob) or config.online.promotion is None:
            return False
        return bool(config.data.eval) or config.online.canary is not None
