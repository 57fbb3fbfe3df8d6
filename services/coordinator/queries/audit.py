"""Audit of a job: pure functions that check its guarantees on ledger entries and stored groups, and return findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from penstock.services.coordinator.online.fairness import flaws_of_weights
from penstock.services.coordinator.online.source import flaws_of_baselines
from penstock.services.coordinator.queries.admission_audit import flaws_of_admission
from penstock.services.coordinator.training.canary import flaws_of_canaries
from penstock.services.coordinator.training.hyperparameters import hyperparameters_of
from penstock.services.coordinator.training.ledger import NO_SIGNAL, LedgerState
from penstock.services.coordinator.training.promotion import flaws_of_promotions
from penstock.shared.config.jobs.kinds import AnyTraining
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ProtocolError
from penstock.shared.protocol.embodied.episode_group import AnyGroup, decode_any_group
from penstock.shared.protocol.events import (
    BatchSealed,
    BatchTrained,
    Dropped,
    Event,
    LineageForked,
    SealedGroup,
    decode_events,
)
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

__all__ = ["Audit", "audit_entries", "audit_group", "audit_ledger", "audit_stored"]

CHECKS = {
    "ledger equation": "drawn = trained + dropped + in flight after every event; each draw ends exactly once",
    "lag bound": "no group was trained with a lag above max_lag",
    "once only": "no draw, attempt or message was trained twice in the lineage",
    "version monotone": "policy versions rise by one per update, and above the clock at a fork",
    "digests": "stored groups hash to what the ledger sealed",
    "spans": "version spans cover every token, agree with what the gate saw and name the weights of the ledger",
    "finite": "every log-prob and reward that was trained is finite",
    "resampling": "no more groups without signal were replaced than algorithm.dynamic_sampling allows",
    "hyper-parameters": "each batch was sealed with the settings that held then, and sampled with those of its draws",
    "admissions": "what an online job trained was admitted: an interaction once, its feedback once, within the bound",
    "decisions": "decided again from what is stored, live interactions earn what the ledger says",
    "canaries": "a version on trial was served to all as its feedback said, and nothing it answered was trained",
    "promotions": "a version that was served kept the bounds of online.promotion, or somebody wanted it",
    "archive": "segments of the ledger that were archived are whole, in order, and hash to what the ledger names",
    "snapshots": "each snapshot equals the fold of the entries that it covers",
}


@dataclass(slots=True)
class Audit:
    """Findings of an audit. ``violations`` maps the name of a check to the descriptions of its violations."""

    state: LedgerState = field(default_factory=LedgerState)
    trained: dict[int, BatchSealed] = field(default_factory=dict)
    violations: dict[str, list[str]] = field(default_factory=dict)
    groups_checked: int = 0
    groups_gone: int = 0
    tokens_checked: int = 0
    max_lag_seen: int = 0
    snapshots_checked: int = 0
    admissions_checked: int = 0
    decisions_checked: int = 0

    def find(self, check: str, text: str) -> None:
        """Record that ``check`` found a violation."""
        self.violations.setdefault(check, []).append(text)

    def report(self) -> dict[str, Any]:
        """Return the report for the API and the CLI."""
        state = self.state
        detail = {
            "lag bound": f"largest lag {self.max_lag_seen}",
            "digests": f"{self.groups_checked} groups read, {self.groups_gone} purged after a checkpoint",
            "finite": f"{self.tokens_checked} tokens",
            "admissions": f"{self.admissions_checked} trajectories of live interactions",
            "decisions": f"{self.decisions_checked} of the newest decided again",
            "snapshots": f"{self.snapshots_checked} equal the fold",
        }
        checks = [
            {"name": name, "ok": name not in self.violations, "detail": detail.get(name, text)}
            for name, text in CHECKS.items()
        ]
        return {
            "ok": not self.violations,
            "equation": {
                "drawn": state.drawn,
                "trained": state.trained,
                "dropped": dict(state.dropped),
                "in_flight": len(state.open),
                "balanced": state.balanced(),
            },
            "batches": len(self.trained),
            "version": state.version,
            "checks": checks,
            "violations": [f"{name}: {text}" for name, texts in self.violations.items() for text in texts],
        }


def audit_entries(
    entries: Sequence[bytes], config: AnyTraining, snapshots: Mapping[int, LedgerState] | None = None
) -> Audit:
    """Audit encoded entries as ``audit_ledger`` does, up to the first one that does not decode."""
    decoded, flaw = [], ""
    for count, data in enumerate(entries, 1):
        try:
            decoded.append(decode_events(data))
        except ProtocolError as error:
            flaw = f"entry {count}: {error}"
            break
    audit = audit_ledger(decoded, config, snapshots)
    if flaw:
        audit.find("ledger equation", flaw)
    return audit


def audit_ledger(
    entries: Sequence[list[Event]], config: AnyTraining, snapshots: Mapping[int, LedgerState] | None = None
) -> Audit:
    """Replay the ledger, check every decision in it and each of ``snapshots``, and return the findings.

    ``snapshots`` maps the number of entries that a snapshot covers to its state. Key 0 means that the ledger lacks the
    newest entry that the snapshot covers.
    """
    audit = Audit()
    sealed: dict[int, BatchSealed] = {}
    if snapshots and 0 in snapshots:
        audit.find("snapshots", "one covers an entry that the ledger does not have")
    for count, entry in enumerate(entries, 1):
        try:
            _audit_entry(audit, entry, config, sealed)
        except (AssertionError, KeyError) as error:
            audit.find("ledger equation", f"entry {count}: {error!r}")
            return audit
        snapshot = (snapshots or {}).get(count)
        if snapshot is not None:
            audit.snapshots_checked += 1
            if snapshot != audit.state:
                audit.find("snapshots", f"the one after entry {count} is not the fold of the entries up to there")
    _check_once(audit)
    if isinstance(config, OnlineJob):
        audit.admissions_checked, flaws = flaws_of_admission(entries, audit.trained, config)
        found = {
            "admissions": flaws + flaws_of_weights(entries, audit.trained, config),
            "promotions": flaws_of_promotions(entries, config.online.promotion),
            "canaries": flaws_of_canaries(entries, config.online.promotion),
        }
        for check, flaws in found.items():
            for flaw in flaws:
                audit.find(check, flaw)
    return audit


def _audit_entry(audit: Audit, entry: list[Event], config: AnyTraining, sealed: dict[int, BatchSealed]) -> None:
    for event in entry:
        _check_version(audit, event)
        _check_values(audit, event, config)
        audit.state.apply(event)
        match event:
            case BatchSealed():
                sealed[event.number] = event
                _check_lag(audit, event, config.train.max_lag)
                if event.hyperparameters != hyperparameters_of(audit.state.settings):
                    audit.find("hyper-parameters", f"batch {event.number} was sealed with {event.hyperparameters}")
                if not isinstance(config, OnlineJob):  # live requests choose their own temperature
                    _check_temperatures(audit, event)
            case Dropped() if event.reason == NO_SIGNAL:
                _check_resampling(audit, config)
            case BatchTrained():
                audit.trained[event.number] = sealed[event.number]
            case LineageForked():
                audit.trained = {n: b for n, b in audit.trained.items() if n < event.from_batch}
            case _:
                pass


def _check_version(audit: Audit, event: Event) -> None:
    """Check the versions in an event. This check precedes the state's own check, which would only raise a generic
    error."""
    before = audit.state.version
    if isinstance(event, BatchTrained) and event.version != before + 1:
        audit.find("version monotone", f"batch {event.number} made {event.version} after {before}")
    if isinstance(event, LineageForked) and event.version <= before:
        audit.find("version monotone", f"fork to {event.version} at or below {before}")


def _check_values(audit: Audit, event: Event, config: AnyTraining) -> None:
    if isinstance(event, BatchSealed) and isinstance(config, OnlineJob):
        for flaw in flaws_of_baselines(config, audit.state, event):
            audit.find("admissions", flaw)


def _check_lag(audit: Audit, batch: BatchSealed, max_lag: int) -> None:
    for group in batch.groups:
        if group.max_version > batch.start_version:
            audit.find("spans", f"batch {batch.number}: draw {group.draw} is newer than the policy that trained it")
        if group.objective != "policy":
            continue
        lag = batch.start_version - group.min_version
        audit.max_lag_seen = max(audit.max_lag_seen, lag)
        if lag > max_lag:
            audit.find("lag bound", f"batch {batch.number}: draw {group.draw} has lag {lag} > {max_lag}")


def _check_temperatures(audit: Audit, batch: BatchSealed) -> None:
    for group in batch.groups:
        drawn, sampled = audit.state.open[group.draw].temperature, group.temperature
        if sampled is not None and drawn is not None and sampled != drawn:
            text = f"batch {batch.number}: draw {group.draw} was sampled at temperature {sampled:g}, drawn at {drawn:g}"
            audit.find("hyper-parameters", text)


def _check_resampling(audit: Audit, config: AnyTraining) -> None:
    dynamic, found = config.algorithm.dynamic_sampling, audit.state.resampled
    bound = 0 if dynamic is None else int(dynamic.max_resampled * config.groups_per_batch)
    if found > bound:
        audit.find("resampling", f"{found} groups were replaced for batch {audit.state.next_number}, {bound} may be")


def _check_once(audit: Audit) -> None:
    draws: Counter[Draw] = Counter()
    seqs: Counter[int] = Counter()
    attempts: Counter[str] = Counter()
    for batch in audit.trained.values():
        draws.update(group.draw for group in batch.groups)
        seqs.update(group.seq for group in batch.groups)
        attempts.update(group.attempt for group in batch.groups)
    for name, counter in (("draw", draws), ("message", seqs), ("attempt", attempts)):
        for key, count in counter.items():
            if count > 1:
                audit.find("once only", f"{name} {key} was trained {count} times")


def audit_stored(audit: Audit, number: int, sealed: SealedGroup, data: bytes) -> None:
    """Check an encoded stored group as ``audit_group`` does."""
    try:
        group = decode_any_group(data, temperature=1.0 if sealed.temperature is None else sealed.temperature)
    except ProtocolError as error:
        audit.groups_checked += 1
        audit.find("digests", f"batch {number}, draw {sealed.draw}: the stored group does not decode: {error}")
    else:
        audit_group(audit, number, sealed, group, xxhash.xxh3_128_hexdigest(data))


def audit_group(audit: Audit, number: int, sealed: SealedGroup, group: AnyGroup, digest: str) -> None:
    """Check the stored payload of a trained group against its ledger entry."""
    audit.groups_checked += 1
    audit.tokens_checked += int(group.lengths.sum())
    where = f"batch {number}, draw {sealed.draw}"
    if digest != sealed.digest or group.draw != sealed.draw or group.attempt != sealed.attempt:
        audit.find("digests", f"{where}: the stored group is not the one that was sealed")
    if group.objective != sealed.objective:
        audit.find("digests", f"{where}: sealed as {sealed.objective}, the stored group is of {group.objective}")
    if isinstance(group, Group) and sealed.temperature is not None and group.temperature != sealed.temperature:
        audit.find("digests", f"{where}: sealed at temperature {sealed.temperature:g}, stored at {group.temperature:g}")
    versions = group.spans[:, 1]
    if len(versions) and (int(versions.min()), int(versions.max())) != (sealed.min_version, sealed.max_version):
        audit.find("spans", f"{where}: spans say {versions.min()}..{versions.max()}, the gate saw otherwise")
    if audit.state.made_by_others((v, w) for v, w in zip(versions.tolist(), group.weights, strict=False) if w):
        audit.find("spans", f"{where}: a span names weights that its version does not have in the ledger")
    if not np.isfinite(group.logprobs).all() or not np.isfinite(group.rewards).all():
        audit.find("finite", f"{where}: a log-prob or reward is not finite")
    is_density = not isinstance(group, Group)  # log-probs are densities of a continuous action
    if not is_density and (group.logprobs > 1e-6).any():
        audit.find("finite", f"{where}: a log-prob is above 0")


def sealed_by_seq(audit: Audit) -> Mapping[int, tuple[int, SealedGroup]]:
    """Return the batch number and the ledger entry of every trained group, by the group's stream sequence number
    in EXPERIENCE."""
    return {group.seq: (number, group) for number, batch in audit.trained.items() for group in batch.groups}
