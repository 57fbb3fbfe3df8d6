"""Hosts whose clocks are wrong: a coordinator an hour ahead, a worker two minutes ahead, a trainer an hour behind."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from penstock.local.launch import Process, interpreter
from penstock.shared.protocol.events import Dropped

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
AHEAD = {"coordinator": "+3600s", "rollout": "+130s", "reward": "+130s", "trainer": "-3600s"}
KEY = {"authorization": "Bearer e2e-key"}
LIVE = {
    "kind": "online_rl",
    "name": "live",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {
        "metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 1, "match_ttl_s": 1800, "idle_ttl_s": 1800,
        "max_age_s": 1800,
    },
}  # fmt: skip


def skewed(module: str, environment: Mapping[str, str], log: IO[bytes]) -> Process:
    """Start a service as on a host whose clock is wrong."""
    ahead = AHEAD.get(module.rpartition(".")[2])
    if ahead is not None:
        fake = {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME": ahead,
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        environment = {**environment, **fake}
    return interpreter(module, environment, log)


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed: no process has a wrong clock")
def test_jobs_end_well_on_hosts_with_wrong_clocks(deploy: Callable[..., Any], tmp_path: Path, make_job: Any) -> None:
    deployment = deploy(tmp_path, skewed)
    deployment.ready_s = 300.0  # interpreters of their own, which import all that they need
    deployment.environment["PENSTOCK_LEASE_S"] = "10"
    with deployment as stack:
        job = stack.submit("train.max_updates=2", "train.draw_timeout_s=60")
        spec = {name: section for name, section in {**make_job(), **LIVE}.items() if name not in ("data", "reward")}
        live = stack.client.submit(spec).id
        stack.until(lambda: stack.status(live).phase == "running", "the online job runs", 200)

        def updated() -> bool:
            """Ask, post feedback on the answer, and return True once the job has made an update."""
            question = [{"role": "user", "content": "1+2"}]
            url, body = stack.stack.url, {"model": "live", "messages": question, "user": "u"}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=KEY, timeout=30)
            if not answer.is_success:
                return False
            item = {"feedback_id": str(uuid.uuid4()), "inference_id": answer.json()["id"], "metric_name": "liked"}
            assert httpx.post(f"{url}/v1/feedback", json={**item, "value": True}, headers=KEY, timeout=30).is_success
            return bool(stack.status(live).step >= 1)

        stack.until(updated, "an update from live feedback", 400, lambda: stack.client.why(live))
        record = stack.finish(job, 300)
        assert (record.status.phase, record.status.step) == ("succeeded", 2), record.status
        dropped = [event for one in (job, live) for event in stack.ledger(one) if isinstance(event, Dropped)]
        assert not [event for event in dropped if event.reason == "deadline"]
        skews = {row["worker"]: row["clock_skew_s"] for row in stack.client.workers(live)}
        wanted = {"coordinator-0": 3600, "rollout-0": 130, "trainer-0": -3600, "env-0": 0}
        assert {name: skews[name] for name in wanted} == pytest.approx(wanted, abs=5)
        clocks = next(one for one in stack.status(live).conditions if one.type == "ClocksAgree")
        assert clocks.status == "False"
        assert "rollout-0 +130" in clocks.message
        stack.client.cancel(live)
        stack.finish(live)
        stack.check_audit(job)
        stack.check_audit(live)
        assert "ahead of the clock of NATS" in stack.log("coordinator-0")
