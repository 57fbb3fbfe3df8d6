"""Counts a run's tokens and draws between two updates, from headers and events, for its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from penstock.services.coordinator.training.gate import Candidate
from penstock.services.coordinator.training.ledger import NO_SIGNAL
from penstock.shared.protocol.events import BatchSealed, Dropped, Event
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import GroupHeader
from penstock.shared.runtime import metrics

__all__ = ["Tally", "length_bucket"]

TOKENS = metrics.counter("tokens", "Tokens generated, prefilled, trained and dropped.", ["kind"])
DROPPED = metrics.counter("draws_dropped", "Draws that ended without training.", ["reason"])
LAG = metrics.histogram("lag_versions", "Policy lag of trained groups.", buckets=(0, 1, 2, 4, 8, 16, 32, 64))

KINDS = ("generated", "prefilled", "trained", "dropped")
ENDS = frozenset({"run_ended", "cancelled", "failed"})
"""Reasons for which the end of a run drops draws."""


def length_bucket(tokens: int) -> str:
    """Return the bucket of a mean completion length: the power of two at or above it, or `0` for an unknown length."""
    return str(1 << (tokens - 1).bit_length()) if tokens > 0 else "0"


class Tally:
    """Counts tokens and draws since the last metrics row, and tokens of the whole run.

    Dropped tokens are counted only of groups that had arrived. ``sources``: names of the prompt sources; with several,
    rows count each of them.
    """

    def __init__(self, groups_per_batch: int, sources: Sequence[str]) -> None:
        self._groups_per_batch = groups_per_batch
        self._sources = sources
        self._trained: list[GroupHeader] = []
        self._since: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._began = 0.0

    def begin(self, now: float, last_row: Mapping[str, float]) -> None:
        """Start to count; the totals of the run continue from ``last_row``, its newest metrics row."""
        self._began = now
        self.go_on(last_row)

    def go_on(self, row: Mapping[str, float]) -> None:
        """Continue the totals of the run from the totals in ``row``, its newest metrics row."""
        self._totals = Counter({kind: int(row.get(f"tokens_total/{kind}", 0)) for kind in KINDS})

    def on_group(self, header: GroupHeader, *, duplicate: bool, lost: int = 0) -> None:
        """Count a group that arrived. Its prompt is prefilled once for all of its completions.

        ``lost``: number of completions that a group without any stands for.
        """
        self._tokens("generated", sum(header.lengths))
        self._tokens("prefilled", header.prompt_tokens)
        self._tokens("dropped", sum(header.lengths) if duplicate else 0)
        if not duplicate:
            self._since["sequences/arrived"] += len(header.failed) + lost
            self._since["sequences/unscored"] += sum(header.failed) + lost
            if header.succeeded:
                self._since["sequences/succeeded"] += sum(header.succeeded[i] for i in header.counted)

    def on_events(self, events: Iterable[Event], candidates: Mapping[Draw, Candidate]) -> None:
        """Count the draws that ``events`` drop; call before the commit, while ``candidates`` still has their groups."""
        for event in events:
            if isinstance(event, Dropped) and event.reason not in ENDS:
                self._since[f"dropped/{event.reason}"] += len(event.draws)
                DROPPED.labels(event.reason).inc(len(event.draws))
                self._since.update(f"dropped_length/{length_bucket(tokens)}" for tokens in event.lengths)
                gone = [candidates[draw].header for draw in event.draws if draw in candidates]
                self._tokens("dropped", sum(sum(header.lengths) for header in gone))

    @property
    def since(self) -> Mapping[str, float]:
        """Counts since the last metrics row."""
        return self._since

    def on_trained(self, batch: BatchSealed, candidates: Mapping[Draw, Candidate]) -> None:
        """Keep the headers of the groups in ``batch``, which has been trained, for the metrics row of its update."""
        self._trained = [candidates[group.draw].header for group in batch.groups if group.draw in candidates]

    def row(self, batch: BatchSealed, trained_tokens: int, now: float) -> dict[str, float]:
        """Return the metrics row of the update that trained ``batch``, and start counting again."""
        self._tokens("trained", trained_tokens)
        seconds = max(now - self._began, 1e-6)
        values = {f"tokens/{kind}": float(self._since[f"tokens/{kind}"]) for kind in KINDS}
        values |= {f"tokens_per_s/{kind}": self._since[f"tokens/{kind}"] / seconds for kind in KINDS}
        values |= {f"tokens_total/{kind}": float(self._totals[kind]) for kind in KINDS}
        if self._totals["generated"]:
            values["goodput"] = self._totals["trained"] / self._totals["generated"]
        counted = ("dropped", "sequences/")
        values |= {name: float(count) for name, count in self._since.items() if name.startswith(counted)}
        values["resample_ratio"] = self._since[f"dropped/{NO_SIGNAL}"] / self._groups_per_batch
        lags = [batch.start_version - group.min_version for group in batch.groups if group.objective == "policy"]
        for lag, count in sorted(Counter(lags).items()):
            values[f"lag_groups/{lag}"] = float(count)
        for lag in lags:
            LAG.observe(lag)
        values |= self._by_source()
        self._since.clear()
        self._began = now
        return values

    def _by_source(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for name in self._sources if len(self._sources) > 1 else ():
            headers = [header for header in self._trained if header.source == name]
            rewards = [header.rewards[i] for header in headers for i in header.counted]
            values[f"groups/count/{name}"] = float(len(headers))
            if rewards:
                values[f"reward/mean/{name}"] = sum(rewards) / len(rewards)
        return values

    def _tokens(self, kind: str, count: int) -> None:
        self._since[f"tokens/{kind}"] += count
        self._totals[kind] += count
        TOKENS.labels(kind).inc(count)
