"""A job whose engine is on another host and gets only the changes of its weights is the same job as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest

from penstock.shared.protocol import subjects
from penstock.shared.protocol.codec import unpack
from penstock.shared.protocol.events import BatchTrained
from penstock.shared.protocol.weights import WeightManifest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]

UPDATES = 5
SMALL_STEPS = (
    "model.dtype=bfloat16", "optimizer.learning_rate=3e-6", "train.max_lag=0", "train.staleness=in_order",
    "train.max_updates=100000", "train.draw_timeout_s=60",
)  # fmt: skip
"""Changes of the job file with which few weights change in each update, and runs of the job do not differ."""


@pytest.fixture
def hosts(deploy: Callable[..., Any], nursery: Any, stack_folder: Path) -> Iterator[Any]:
    """Stack each process of which is a host of its own, and whose trainer sends changes."""

    def launch(module: str, environment: Mapping[str, str], log: IO[bytes]) -> Any:
        return nursery.launch(module, {**environment, "PENSTOCK_HOST_ID": environment["PENSTOCK_WORKER_ID"]}, log)

    made = deploy(stack_folder / "hosts", launch)
    made.environment |= {"PENSTOCK_BULK_HOST": "127.0.0.1", "PENSTOCK_WEIGHT_DELTAS": "true"}
    with made:
        yield made


def digests(stack: Any, job: str) -> list[str]:
    """Return the digests of the first versions."""
    trained = [event.digest for event in stack.ledger(job) if isinstance(event, BatchTrained)]
    return trained[:UPDATES]


def test_a_job_by_changes_has_the_digests_of_the_job_without(stack: Any, hosts: Any) -> None:
    plain, job = stack.submit(*SMALL_STEPS), hosts.submit(*SMALL_STEPS)

    def bytes_of_a_version() -> int:
        """Return how many bytes the worker fetched for its last version, once that is one after the first."""
        rows = [row for row in hosts.client.workers(job) if row["worker"] == "rollout-0"]
        return int(rows[0].get("fetched_bytes", 0)) if rows and hosts.status(job).step > 1 else 0

    fetched = hosts.until(bytes_of_a_version, "a version by TCP", 60, lambda: hosts.client.workers(job))
    entry = hosts.on_bus(lambda bus: bus.kv(subjects.MANIFESTS).get(job))
    assert fetched < unpack(entry.value, WeightManifest)[0].layout.nbytes / 4
    for each, of in ((hosts, job), (stack, plain)):
        each.reach(of, UPDATES)
        each.client.cancel(of)
        each.finish(of)
        each.check_audit(of)
        assert "wrong_weights" not in each.status(of).draws["dropped"]
    assert digests(hosts, job) == digests(stack, plain)
    assert len(set(digests(hosts, job))) == UPDATES, "the policy did not move: the test proves nothing"
    assert "is fetched whole" not in hosts.log("rollout-0")
