"""An audit of a serving job on a real bus: the check for each kind of tampering fails on it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.services import build_services
from penstock.services.coordinator.training.journal import Journal
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.service import ServiceSettings
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    CanaryBegun,
    CanaryJudged,
    Checkpointed,
    Drawn,
    Event,
    JobStarted,
    Judged,
    Promoted,
    encode_events,
)
from penstock.shared.transport.bus import Bus

spec = importlib.util.spec_from_file_location("online_supply", Path(__file__).with_name("test_online_supply.py"))
assert spec is not None
assert spec.loader is not None
live: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(live)

NOW = 1000.0
BASE: dict[str, Any] = {"writer_epoch": 1, "time": NOW}
PLACE: dict[str, Any] = {"version": 0, "number": 0, "digest": "w0"}
BEGUN = CanaryBegun(**BASE, **PLACE, served=0, share=0.2)


def job(**promotion: Any) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "train": {"batch_size": 2, "max_lag": 1}, "algorithm": {"type": "reinforce_pp", "kl": {"coef": 0.1}},
            "data": {"eval": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
            "evaluation": {"every": 1, "num_prompts": 4}, "online": {"promotion": {"min_entropy": 0.5, **promotion}},
        }
    )  # fmt: skip


def promoted(reason: str, **figures: float) -> Promoted:
    return Promoted(**BASE, **PLACE, reason=reason, figures={name.replace("__", "/"): v for name, v in figures.items()})


def judged(canary: float) -> CanaryJudged:
    """Return ten judged conversations of the candidate, with reward ``canary``, and ten of the other arm, with 1."""
    rows = [
        Judged(f"conversation {arm}{n}", arm == "c", canary if arm == "c" else 1.0, [f"{arm}{n}"], ["k"], ["k"], ["u"])
        for arm in "cs"
        for n in range(10)
    ]
    return CanaryJudged(**BASE, version=0, judged=rows)


def admitted(name: str) -> list[Event]:
    admission = Admission(0, {name: 1}, {"f": 1}, 1.0, 0, "k", "u", "feedback", NOW)
    return [
        Drawn(**BASE, start=0, stop=1, min_version=0, deadline=NOW),
        Admitted(**BASE, admissions=[admission], low_interactions=1, low_feedback=1),
    ]


async def report_of(bus: Bus, config: OnlineJob, entries: list[list[Event]], directory: Path) -> dict[str, Any]:
    """Return the audit report of a job whose ledger has these entries after its first ones."""
    record = await JobStore(bus).create(config)
    journal = Journal(bus, record.id)
    await journal.load()
    first = Checkpointed(**BASE, number=0, version=0, digest="w0", path="/gone", trainer_epoch=1, low_seq=0)
    for entry in [[JobStarted(**BASE, config_digest="c")], [first, promoted("initial")], *entries]:
        await journal.append(entry)
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=directory))
    return await services.diagnosis.audit(record.id)


def passed(entropy: float) -> Promoted:
    return promoted("passed", policy__entropy=entropy)


CANARY = {"canary": {"conversations": 10}}
CASES: dict[str, tuple[dict[str, Any], list[list[Event]], list[list[Event]], str, str]] = {
    "a bound that was broken": (
        {}, [[passed(0.6)]], [[passed(0.1)]], "promotions", "version 0 was served: policy/entropy 0.1 < 0.5",
    ),
    "a trial that was lost": (
        CANARY, [[BEGUN, judged(1.0), passed(0.6)]], [[BEGUN, judged(0.0), passed(0.6)]],
        "canaries", "version 0 was served to all: its canary is 'refused'",
    ),
    "no trial": (
        CANARY, [[BEGUN, judged(1.0), passed(0.6)]], [[passed(0.6)]],
        "canaries", "version 0 was served to all without a canary",
    ),
    "an answer on trial that is trained": (
        CANARY, [[BEGUN, judged(1.0)], admitted("s3")], [[BEGUN, judged(1.0)], admitted("c3")],
        "canaries", "interaction c3 of a canary was admitted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_an_audit_finds_answers_served_against_the_rules(case: str, bus: Bus, tmp_path: Path) -> None:
    promotion, honest, tampered, check, text = CASES[case]
    fair = await report_of(bus, job(**promotion), honest, tmp_path)
    assert fair["ok"], fair["violations"]
    found = await report_of(bus, job(**promotion), tampered, tmp_path)
    assert not found["ok"]
    assert [row["name"] for row in found["checks"] if not row["ok"]] == [check]
    (flaw,) = found["violations"]
    assert flaw.startswith(f"{check}: {text}")


async def test_an_audit_finds_an_admission_that_breaks_the_rules(bus: Bus, tmp_path: Path) -> None:
    record = await JobStore(bus).create(live.CONFIG)
    job, subject = record.id, subjects.ledger(record.id)
    async with live.leader(bus, record, 1, tmp_path):
        await live.report(bus, job, kind="checkpointed", batch=0, version=0, digest="w0", path="ckpt-0")
        first, second = await live.serve(bus, job), await live.serve(bus, job)
        await live.post_feedback(bus, job, ("a", first, 1.0), ("b", second, -1.0))
        await live.until_sealed(bus, job, 1)
    services = build_services(bus, JobStore(bus), Members(), {}, ServiceSettings(data_dir=tmp_path))
    honest = await services.diagnosis.audit(job)
    assert honest["ok"], honest["violations"]
    assert {row["name"]: row["detail"] for row in honest["checks"]}["decisions"].startswith("2 of")

    entries = await live.ledger(bus, job)
    await bus.purge(subjects.LEDGER, subject)
    for entry in entries:
        tampered = [
            replace(event, admissions=[replace(event.admissions[0], reason="default"), *event.admissions[1:]])
            if isinstance(event, Admitted)
            else event
            for event in entry
        ]
        await bus.publish(subject, encode_events(tampered))
    found = await services.diagnosis.audit(job)
    assert [row["name"] for row in found["checks"] if not row["ok"]] == ["decisions"]
    assert found["violations"][0].startswith("decisions: ordinal 0: decided again it would be policy by feedback")
