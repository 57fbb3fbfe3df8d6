"""Weights of a whole job under faults: a member of a broadcast dies in it, and a stopped worker holds a weight slot."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from penstock.shared.config.service import ServiceSettings
from penstock.shared.errors import WeightsError
from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.weights import WeightManifest
from penstock.shared.weights.shm import ShmReceiver, ShmStaged

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

WORKERS = ("rollout-0", "rollout-1")
SECOND = "rollout-attached"
FURTHER = 10
"""Updates after the last fault."""
ENDLESS = ("train.max_updates=100000", "train.draw_timeout_s=60")


@pytest.fixture
def hosts(deploy: Callable[..., Any], nursery: Any, stack_folder: Path) -> Iterator[Any]:
    """Stack with two rollout workers, each process of which is a host of its own and takes part in broadcasts."""

    def launch(module: str, environment: Mapping[str, str], log: IO[bytes]) -> Any:
        return nursery.launch(module, {**environment, "PENSTOCK_HOST_ID": environment["PENSTOCK_WORKER_ID"]}, log)

    made = deploy(stack_folder / "hosts", launch, workers={"rollout": 2})
    made.environment |= {"PENSTOCK_WEIGHT_COLLECTIVE": "gloo", "PENSTOCK_BULK_HOST": "127.0.0.1"}
    with made:
        yield made


def row_of(stack: Any, job: str, worker: str) -> dict[str, Any]:
    """Return what a worker reports on a job, {} if it is not alive."""
    return next((row for row in stack.client.workers(job) if row["worker"] == worker), {})


def end(stack: Any, job: str) -> None:
    """Let an endless job end after a few more updates; check that it does, that its books hold, and what it trained."""
    total = int(stack.status(job).step) + FURTHER
    stack.client.amend(job, {"train": {"max_updates": total}})
    status = stack.finish(job, 120).status
    assert (status.phase, status.step) == ("succeeded", total), status.message
    assert "wrong_weights" not in status.draws["dropped"]
    stack.check_audit(job)


def test_a_worker_that_dies_in_a_broadcast_stops_no_job(hosts: Any) -> None:
    """The worker is stopped first, so that the next broadcast waits for it, and is killed in that broadcast, unless the
    broadcast of the version after the stop had ended before."""
    job = hosts.submit(*ENDLESS)

    def by_gloo() -> bool:
        return all(row_of(hosts, job, worker).get("transport") == "gloo" for worker in WORKERS)

    def details() -> object:
        return hosts.client.workers(job), hosts.log("trainer-0")[-2000:]

    broke = "the broadcast of weights to rollout-0, rollout-1 broke"

    def dies() -> bool:
        """Kill the stopped worker; return True if a broadcast to it broke, False if none had begun."""
        hosts.until(by_gloo, "both workers got weights by gloo", 90, details)
        before, version = hosts.log("trainer-0").count(broke), hosts.status(job).policy_version
        os.kill(hosts.pid("rollout-1"), signal.SIGSTOP)
        hosts.until(lambda: hosts.status(job).policy_version > version, "a version after the stop", 90)
        hosts.kill("rollout-1")
        hosts.reach(job, hosts.status(job).step + 3)
        hosts.until(by_gloo, "a new broadcast, with the restarted worker", 90, details)
        return bool(hosts.log("trainer-0").count(broke) > before)

    assert any(dies() for _ in range(5)), "no kill met a broadcast"

    version = hosts.status(job).policy_version
    hosts.until(lambda: hosts.status(job).policy_version > version, "an update that has just begun")
    hosts.kill("rollout-1")
    hosts.reach(job, hosts.status(job).step + 3)
    end(hosts, job)


def newest(stack: Any, job: str) -> WeightManifest:
    """Return the manifest of the announced version."""
    entry = stack.on_bus(lambda bus: bus.kv(subjects.MANIFESTS).get(job))
    return unpack(entry.value, WeightManifest)[0]


def test_a_job_names_the_stopped_worker_that_holds_the_last_slot(stack: Any, tmp_path: Path) -> None:
    """Of four slots the worker holds one, readers in this process hold two, and the newest version has the last.

    Once the worker goes on, two slots are enough.
    """
    receiver = ShmReceiver(ServiceSettings(data_dir=tmp_path, shm_dir=stack.shm))
    held: dict[int, ShmStaged] = {}
    with stack.attached("penstock.services.rollout", SECOND) as second:
        job = stack.submit(*ENDLESS)
        stack.until(lambda: row_of(stack, job, SECOND).get("transport") == "shm", "the second worker has weights", 90)
        os.kill(second.pid, signal.SIGSTOP)
        stopped_at = newest(stack, job).version

        def slot_wait() -> str:
            """Hold the newest version, unless it may be the one that the worker holds; return what is waited for."""
            waits = [row["waiting_for"] for row in stack.client.why(job) if "a weight slot" in row["waiting_for"]]
            manifest = newest(stack, job)
            if not waits and manifest.version not in held and manifest.version > stopped_at + 1 and len(held) < 2:
                with contextlib.suppress(WeightsError):  # replaced meanwhile
                    held[manifest.version] = receiver.stage(manifest)
            return str(waits[0]) if waits else ""

        try:
            said = stack.until(slot_wait, "a wait for a slot", 120, lambda: (list(held), stack.client.why(job)))
            assert "a weight slot: all 4 are in use, by " in said
            assert f"process {second.pid} (stopped)" in said
            version = newest(stack, job).version
            os.kill(second.pid, signal.SIGCONT)
            stack.until(lambda: newest(stack, job).version > version + 2, "updates once the worker goes on", 90)
            assert len(held) == 2, "the readers here hold their slots to the end"
        finally:
            os.kill(second.pid, signal.SIGCONT)
            for staged in held.values():
                staged.release()
        end(stack, job)
