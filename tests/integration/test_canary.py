"""A candidate version is tried on live answers before it is promoted; a new leader keeps the feedback on it.

Leader, trainer and rollout worker are real, on one bus. The test posts answers of both arms, and feedback on them.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.leader.runner import JobRunner
from penstock.services.coordinator.online.supply import LiveSupply
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.rollout.session import RolloutSession
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import pack
from penstock.shared.protocol.events import CanaryBegun, CanaryJudged, Promoted, PromotionRefused, decode_events
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.protocol.live.interaction import CANARY, Feedback, FeedbackBatch, Interaction, new_marked_id
from penstock.shared.transport.bus import Bus


def promotions() -> Any:
    """Module ``test_promotion.py``, whose ``Job`` runs the job here, too."""
    path = Path(__file__).with_name("test_promotion.py")
    spec = importlib.util.spec_from_file_location("promotion_of_canaries", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATE = promotions()
CONFIG = OnlineJob.parse(
    {
        **GATE.CONFIG.model_dump(mode="json", exclude_unset=True),
        "data": {}, "reward": {}, "evaluation": {"every": 0, "at_start": False, "at_end": False},
        "online": {
            "max_wait_s": 3600,
            "promotion": {"min_entropy": 0.0, "patience": 2, "canary": {"conversations": 10, "share": 0.5}},
        },
    }
)  # fmt: skip
GATE.CONFIG = CONFIG


async def judge(job: Any, version: int, value: float, number: int, *, untrainable: str = "") -> None:
    """Publish ``number`` answers by a version, and a reward of ``value`` for each."""
    now = time.time()
    names = [new_marked_id(job.id) for _ in range(number)]
    for name in names:
        record = Interaction(
            id=name, request=name, index=0, job=job.id, episode=new_marked_id(job.id), alone=True, key_id="k",
            user="u", split="train", untrainable=untrainable, prompt_ids=[4, 5], token_ids=[6, 7, 2],
            logprobs=[-1.0, -1.0, -1.0], spans=[Span(version, 0, 3)], sampling=Sampling(max_new_tokens=4),
            finish="stop", template="t", body_digest="b", text="ab", started=now, first_token=now, ended=now,
        )  # fmt: skip
        await job.bus.publish(subjects.interaction(job.id, name), pack(record, job=job.id), msg_id=name)
    items = [
        Feedback(
            id=new_marked_id(job.id), job=job.id, kind="metric", key_id="k", received=now, inference=name,
            metric="reward", value=value,
        )
        for name in names
    ]  # fmt: skip
    await job.bus.publish(subjects.feedback(job.id), pack(FeedbackBatch(items=items), job=job.id))


def leader(bus: Bus, store: JobStore, record: JobRecord, directory: Path, *, epoch: int) -> JobRunner:
    supply = LiveSupply(bus, record.id, CONFIG, epoch=epoch)
    return JobRunner(bus, store, Members(), record, epoch=epoch, data_dir=directory, supply=supply)


async def test_a_candidate_with_good_feedback_is_promoted(bus: Bus, tmp_path: Path) -> None:
    store = JobStore(bus)
    record = await store.create(CONFIG)
    settings = ServiceSettings(data_dir=tmp_path, shm_dir=tmp_path, worker_id="w", lease_s=0.5)
    first, second = (leader(bus, store, record, tmp_path, epoch=epoch) for epoch in (1, 2))
    rollout = RolloutSession(bus, settings, record.id, CONFIG)
    job = GATE.Job(bus, record.id, first, rollout, settings)
    async with GATE.running(rollout.run), job.trainer():
        async with GATE.running(first.lead):
            await job.until(lambda: first.ready)
            await job.until(lambda: first.inputs.announced == 0)
            await job.answer(version=0)
            await job.until(lambda: first.run.state.canary is not None)
            assert any("promotion (Canary): version 1 answers 50%" in row["waiting_for"] for row in first.why())
            await job.until(lambda: rollout._candidate is not None and rollout._candidate.serves(1))
            await judge(job, 1, 0.5, 6, untrainable=CANARY)
            await judge(job, 0, 0.5, 10)
            await job.until(lambda: len(first.run.state.judged) == 16)
        async with GATE.running(second.lead):
            await job.until(lambda: second.ready)
            assert len(second.run.state.judged) == 16
            await judge(job, 1, 0.5, 4, untrainable=CANARY)
            await job.until(lambda: rollout.status()["version"] == 1)
            await judge(job, 1, -0.5, 2)
            await judge(job, 1, 0.5, 2)  # the next update
            await job.until(lambda: second.run.state.canary is not None)
            await judge(job, 2, -1.0, 10, untrainable=CANARY)
            await judge(job, 1, 0.5, 10)
            await job.until(lambda: second.run.state.num_refused == 1)
            assert rollout.status()["version"] == 1
    entries = [decode_events(message.data) for message in await bus.read(subjects.LEDGER, subjects.ledger(job.id))]
    events = [event for entry in entries for event in entry]
    decisions = [
        (type(event).__name__, event.version)
        for event in events
        if isinstance(event, Promoted | PromotionRefused | CanaryBegun)
    ]
    assert decisions[:5] == [
        ("Promoted", 0), ("CanaryBegun", 1), ("Promoted", 1), ("CanaryBegun", 2), ("PromotionRefused", 2)
    ]  # fmt: skip
    judged = [one for event in events if isinstance(event, CanaryJudged) for one in event.judged if event.version < 3]
    assert sum(one.is_canary for one in judged) == 20
    assert not audit_ledger(entries, CONFIG).violations
