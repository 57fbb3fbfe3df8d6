"""The newest version of a job whose engines serve an older one until the newest has passed: a second engine."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from penstock.services.rollout.engines import open_engine
from penstock.services.rollout.group_maker import GroupMaker
from penstock.services.rollout.policy import PolicyFollower
from penstock.shared.config.kinds import AnyJob
from penstock.shared.config.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.models.loading import resolve_device
from penstock.shared.protocol import subjects
from penstock.shared.transport.bus import Bus

__all__ = ["Candidate"]


class Candidate:
    """Answers held-out prompts with versions that no agent has seen yet. Opening it blocks while the model loads."""

    def __init__(
        self, bus: Bus, settings: ServiceSettings, job: str, config: AnyJob, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        self._engine = open_engine(
            config.model, tokenizer, max_running=config.placement.max_running, seed=config.seed,
            device=resolve_device(config.placement.device),
        )  # fmt: skip
        key = subjects.candidate_manifest(job)
        self.policy = PolicyFollower(bus, settings, job, self._engine, key=key)
        self.maker = GroupMaker(job, settings.worker_id, config, self._engine, tokenizer)

    async def run(self) -> None:
        """Follow the newest version until cancelled."""
        await self._engine.start()
        await self.policy.run()

    @staticmethod
    def is_needed(config: AnyJob) -> bool:
        """Whether a job measures versions before it serves them."""
        return isinstance(config, OnlineJob) and config.online.promotion is not None and bool(config.data.eval)
