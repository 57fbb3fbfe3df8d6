"""Packages that a job needs beside the usual ones, and the response to a submission if workers lack them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.submission import check_packages, plan_job
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.jobs.needs import Need, needs
from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.messages import Heartbeat

JOB: dict[str, Any] = {
    "name": "lora",
    "model": {"config": {}, "tokenizer": "char", "lora": {}},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
}


def test_the_packages_that_a_job_file_needs() -> None:
    assert needs(parse_job({**JOB, "model": {"config": {}, "tokenizer": "char"}})) == []
    scorers = [{"type": "exact"}, {"type": "math"}, {"type": "reward_model", "path": "/models/judge"}]
    job = {**JOB, "reward": {"scorers": scorers}, "optimizer": {"type": "adamw_8bit"}}
    assert needs(parse_job(job)) == [
        Need("model.lora", "peft", "rollout"),
        Need("reward.scorers[1]", "math_verify", "reward"),
        Need("reward.scorers[2]", "torch", "reward"),
        Need("model.lora", "peft", "trainer"),
        Need("optimizer.type", "bitsandbytes", "trainer"),
    ]
    (megatron,) = needs(
        parse_job({**JOB, "model": {"config": {}, "tokenizer": "char"}, "backend": {"type": "megatron"}})
    )
    assert (megatron.package, megatron.service, megatron.extra) == ("megatron", "trainer", "megatron")


def test_a_library_of_environments_may_have_its_own_interpreter() -> None:
    job: dict[str, Any] = {
        **JOB, "model": {"config": {}, "tokenizer": "char"}, "data": {"train": {"type": "tasks", "num_rows": 4}},
        "sampling": {"max_new_tokens": 8},
        "reward": {"scorers": [{"type": "environment"}]},
        "environment": {"type": "verifiers", "max_observation_tokens": 16, "env": {"taskset": {"id": "x"}}},
    }  # fmt: skip
    assert needs(parse_job(job)) == [Need("environment", "verifiers", "env")]
    job["environment"]["python"] = "/opt/verifiers/bin/python"
    assert needs(parse_job(job)) == []


def members(**packages: list[str] | None) -> Members:
    """Return live workers with the given names (``rollout_0``) and installed packages (None: not reported)."""
    found = Members()
    for name, own in packages.items():
        beat = Heartbeat(
            service=name.partition("_")[0], worker=name, host="h", pid=1, started=0.0, interval_s=1.0, health_port=1,
            ready=True, jobs={}, packages=own,
        )  # fmt: skip
        found.on_heartbeat(beat, 100.0)
    return found


def test_no_warning_where_nothing_is_known_or_missing() -> None:
    job = parse_job(JOB)
    for known in (Members(), members(rollout_0=None, trainer_0=None), members(rollout_0=["peft"], reward_0=[])):
        assert check_packages(job, known, 100.0) == []
    assert check_packages(job, members(rollout_0=[]), 500.0) == [], "the worker is lost"


def test_a_job_that_no_worker_can_run_is_refused() -> None:
    known = members(rollout_0=["peft", "torch"], trainer_0=["torch"])
    with pytest.raises(ConfigError) as error:
        check_packages(parse_job(JOB), known, 100.0)
    assert str(error.value) == (
        "model.lora: every trainer worker needs the package 'peft', and it is missing beside trainer_0: install "
        "penstock[lora] there"
    )


async def test_a_worker_that_lacks_a_package_beside_one_that_has_it_is_named() -> None:
    settings, known = ServiceSettings(), members()
    plan = await plan_job(parse_job(JOB), [], settings, known, stores_parts=True)
    assert plan["warnings"] == []
    for worker, packages in (("rollout-0", ["peft"]), ("rollout-1", [])):
        beat = Heartbeat(
            service="rollout", worker=worker, host="h", pid=1, started=0.0, interval_s=1.0, health_port=1, ready=True,
            jobs={}, packages=packages,
        )  # fmt: skip
        known.on_heartbeat(beat, time.monotonic())
    plan = await plan_job(parse_job(JOB), [], settings, known, stores_parts=True)
    assert plan["warnings"] == [
        "model.lora: every rollout worker needs the package 'peft', and it is missing beside rollout-1: install "
        "penstock[lora] there"
    ]
