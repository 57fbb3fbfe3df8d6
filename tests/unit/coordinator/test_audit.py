"""The audit of a ledger: a valid ledger passes, and each violation fails the check that covers it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.services.coordinator.queries.audit import Audit, audit_entries, audit_group, audit_ledger, audit_stored
from penstock.services.coordinator.training.hyperparameters import hyperparameters_of
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.shared.config.jobs.amendable import settings_of
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Checkpointed,
    Drawn,
    Dropped,
    Event,
    JobStarted,
    LineageForked,
    SealedGroup,
    encode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group, encode_group

Entries = list[list[Event]]

CONFIG = JobConfig.parse(
    {
        "name": "audited",
        "model": {"config": {}, "tokenizer": "char"},
        "data": {"train": {"type": "addition"}},
        "reward": {"scorers": [{"type": "exact"}]},
        "algorithm": {"group_size": 2},
        "train": {"batch_size": 4, "max_updates": 9},
    }
)
BASE: dict[str, Any] = {"writer_epoch": 1, "time": 0.0}
SEALED, TRAINED = 5, 6
"""Indices of the entries that seal and train the second batch."""


def group_of(ordinal: int, version: int) -> SealedGroup:
    return SealedGroup(
        Draw(ordinal), f"a{ordinal}", ordinal + 10, f"d{ordinal}", version, version, [1.0, 0.0], 4, "worker"
    )


def batch(number: int, ordinals: range) -> BatchSealed:
    groups = [group_of(ordinal, number - 1) for ordinal in ordinals]
    return BatchSealed(
        **BASE, number=number, revision=1, start_version=number - 1, update_index=number - 1, groups=groups,
        hyperparameters=hyperparameters_of(settings_of(CONFIG)),
    )  # fmt: skip


def trained(number: int) -> BatchTrained:
    return BatchTrained(**BASE, number=number, revision=1, version=number, digest=f"w{number}", trainer_epoch=1)


def ledger() -> Entries:
    """Return the ledger of a strictly on-policy job after two updates, with two draws in flight."""
    start = JobStarted(**BASE, config_digest="c", settings=settings_of(CONFIG))
    first = Checkpointed(**BASE, number=0, version=0, digest="w0", path="/gone", trainer_epoch=1, low_seq=0)
    drawn = Drawn(**BASE, start=0, stop=6, min_version=0, deadline=9.0)
    return [[start], [first], [drawn], [batch(1, range(2))], [trained(1)], [batch(2, range(2, 4))], [trained(2)]]


def with_group(**changes: Any) -> Entries:
    """Return the ledger with ``changes`` to the first group of the second batch."""
    entries = ledger()
    sealed = batch(2, range(2, 4))
    groups = [msgspec.structs.replace(sealed.groups[0], **changes), *sealed.groups[1:]]
    entries[SEALED] = [msgspec.structs.replace(sealed, groups=groups)]
    return entries


def with_last(*events: Event) -> Entries:
    """Return the ledger with one more entry that holds ``events``."""
    return [*ledger(), list(events)]


def dropped(*ordinals: int, reason: str) -> Dropped:
    draws = [Draw(ordinal) for ordinal in ordinals]
    return Dropped(
        **BASE, draws=draws, reason=reason, lengths=[2] * len(draws), redraw=False, min_version=2, deadline=9.0
    )


def forked(version: int) -> LineageForked:
    return LineageForked(
        **BASE, from_batch=2, version=version, digest="f", reason="lost", trainer_epoch=2, min_version=2, deadline=9.0
    )


def renumbered() -> Entries:
    entries = ledger()
    entries[TRAINED] = [msgspec.structs.replace(trained(2), version=3)]
    return entries


VIOLATIONS: dict[str, tuple[Entries, str, str]] = {
    "a token from an older policy": (with_group(min_version=0), "lag bound", "draw 2.0 has lag 1 > 0"),
    "a token from a policy that was not there yet": (with_group(max_version=2), "spans", "draw 2.0 is newer than"),
    "a message again": (with_group(seq=10), "once only", "message 10 was trained 2 times"),
    "an attempt again": (with_group(attempt="a0"), "once only", "attempt a0 was trained 2 times"),
    "a draw again": (with_group(draw=Draw(0)), "ledger equation", "entry 6"),
    "an update again": (with_last(trained(2)), "ledger equation", "batches are trained in order"),
    "a version left out": (renumbered(), "version monotone", "batch 2 made 3 after 1"),
    "a fork below the clock": (with_last(forked(2)), "version monotone", "fork to 2 at or below 2"),
    "a draw that was never drawn": (with_last(dropped(7, reason="lost")), "ledger equation", "entry 8"),
    "a draw ended twice": (with_last(dropped(1, reason="lost")), "ledger equation", "entry 8"),
    "ordinals left out": (
        with_last(Drawn(**BASE, start=7, stop=8, min_version=2, deadline=9.0)), "ledger equation", "without gaps",
    ),
    "an older writer": (
        with_last(msgspec.structs.replace(dropped(4, reason="lost"), writer_epoch=0)), "ledger equation", "went back",
    ),
    "replaced without permission": (
        with_last(dropped(4, reason="no_signal")), "resampling", "1 groups were replaced for batch 3, 0 may be",
    ),
}  # fmt: skip


def test_a_valid_ledger_passes() -> None:
    snapshots = {count: fold(event for entry in ledger()[:count] for event in entry) for count in (3, 7)}
    audit = audit_entries([encode_events(entry) for entry in ledger()], CONFIG, snapshots)
    report = audit.report()
    assert report["ok"], report["violations"]
    assert all(check["ok"] for check in report["checks"])
    assert report["equation"] == {"drawn": 6, "trained": 4, "dropped": {}, "in_flight": 2, "balanced": True}
    assert (report["batches"], report["version"], audit.snapshots_checked) == (2, 2, 2)


@pytest.mark.parametrize("violation", VIOLATIONS)
def test_each_violation_fails_its_check(violation: str) -> None:
    entries, check, text = VIOLATIONS[violation]
    report = audit_ledger(entries, CONFIG).report()
    assert not report["ok"]
    assert {row["name"]: row["ok"] for row in report["checks"]}[check] is False
    assert any(line.startswith(f"{check}: ") and text in line for line in report["violations"]), report["violations"]


def test_a_snapshot_is_the_fold_of_what_it_covers() -> None:
    for snapshots in ({3: LedgerState()}, {0: LedgerState()}):
        assert audit_ledger(ledger(), CONFIG, snapshots).violations.keys() == {"snapshots"}


def test_an_unreadable_entry_is_reported_and_earlier_entries_are_checked() -> None:
    entries = [encode_events(entry) for entry in with_group(min_version=0)]
    violations = audit_entries([*entries, b"\xc1"], CONFIG).violations
    assert violations.keys() == {"lag bound", "ledger equation"}
    assert violations["ledger equation"][0].startswith("entry 8: ")


# -- stored groups -----------------------------------------------------------------------------------------------------


def stored(**changes: Any) -> Group:
    """Return a group of two completions of two tokens each, sampled by version 1, with ``changes``."""
    group = Group(
        job="job_1", draw=Draw(2), attempt="a2", epoch=1, prompt_ids=np.arange(2, dtype=np.int32),
        token_ids=np.arange(4, dtype=np.int32), cu_seqlens=np.array([0, 2, 4], np.int32),
        logprobs=np.full(4, -0.5, np.float32), mask=np.ones(4, np.uint8), rewards=np.array([1, 0], np.float32),
        failed=np.zeros(2, np.bool_), finish=np.zeros(2, np.uint8),
        spans=np.array([[0, 1, 0, 2], [1, 1, 0, 2]], np.int32),
    )  # fmt: skip
    return replace(group, **changes)


def audit_of(group: Group, **changes: Any) -> Audit:
    """Audit ``group`` against its ledger entry, which is valid but for ``changes``; return the audit."""
    audit = Audit()
    audit_group(audit, 2, msgspec.structs.replace(group_of(2, 1), **changes), group, "d2")
    return audit


def test_a_valid_group_passes() -> None:
    audit = audit_of(stored())
    assert not audit.violations
    assert (audit.groups_checked, audit.tokens_checked) == (1, 4)


@pytest.mark.parametrize(
    ("group", "check"),
    [
        (stored(draw=Draw(3)), "digests"),
        (stored(attempt="another"), "digests"),
        (stored(spans=np.array([[0, 0, 0, 2], [1, 1, 0, 2]], np.int32)), "spans"),
        (stored(spans=np.array([[0, 1, 0, 2], [1, 2, 0, 2]], np.int32)), "spans"),
        (stored(logprobs=np.array([-0.5, np.nan, -0.5, -0.5], np.float32)), "finite"),
        (stored(logprobs=np.array([-0.5, 0.1, -0.5, -0.5], np.float32)), "finite"),
        (stored(rewards=np.array([np.inf, 0], np.float32)), "finite"),
    ],
    ids=["draw", "attempt", "older", "newer", "nan", "above 0", "reward"],
)
def test_a_group_that_differs_from_the_sealed_one_fails_its_check(group: Group, check: str) -> None:
    assert audit_of(group).violations.keys() == {check}


def test_the_digest_is_that_of_the_stored_bytes() -> None:
    data, header = encode_group(stored())
    sealed = msgspec.structs.replace(group_of(2, 1), digest=header.digest)
    valid, changed, cut = Audit(), Audit(), Audit()
    audit_stored(valid, 2, sealed, data)
    assert not valid.violations
    other, _ = encode_group(stored(logprobs=np.full(4, -0.6, np.float32)))
    audit_stored(changed, 2, sealed, other)
    assert changed.violations == {"digests": ["batch 2, draw 2.0: the stored group is not the one that was sealed"]}
    audit_stored(cut, 2, sealed, data[:-200])
    assert cut.violations["digests"][0].startswith("batch 2, draw 2.0: the stored group does not decode: ")
    assert cut.groups_checked == 1
