"""Counts of tokens and draws by outcome, and the completions that a page shows."""

from __future__ import annotations

import csv
import io

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.api.jobs.observe import as_csv, as_parquet
from penstock.services.coordinator.queries.samples import choose_samples
from penstock.services.coordinator.training.gate import Candidate, Verdict
from penstock.services.coordinator.training.tally import Tally, length_bucket
from penstock.shared.protocol.events import BatchSealed, Dropped, SealedGroup
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import GroupHeader

SOURCES = enumerate(["easy", "hard", "easy", "hard"])
"""Ordinals of draws with the names of their sources."""


def header(ordinal: int, lengths: list[int], rewards: list[float] | None = None, source: str = "") -> GroupHeader:
    n = len(lengths)
    return GroupHeader(
        draw=Draw(ordinal), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=7, lengths=lengths,
        rewards=rewards or [0.0] * n, failed=[False] * n, truncated=[False] * n, finite=True, min_version=3,
        max_version=3, worker="w", source=source,
    )  # fmt: skip


def dropped(reason: str, *ordinals: int, lengths: list[int]) -> Dropped:
    return Dropped(
        writer_epoch=1, time=0.0, draws=[Draw(o) for o in ordinals], reason=reason, lengths=lengths, redraw=False,
        min_version=0, deadline=0.0,
    )  # fmt: skip


def batch(*min_versions: int) -> BatchSealed:
    groups = [
        SealedGroup(
            draw=Draw(i), attempt="a", seq=i, digest="d", min_version=v, max_version=v, rewards=[], tokens=10,
            worker="w",
        )
        for i, v in enumerate(min_versions)
    ]  # fmt: skip
    return BatchSealed(writer_epoch=1, time=0.0, number=1, revision=1, start_version=5, update_index=0, groups=groups)


def test_every_token_is_generated_once_and_trained_or_dropped() -> None:
    tally = Tally(groups_per_batch=4, sources=["addition"])
    tally.begin(100.0, {"tokens_total/generated": 1000.0, "tokens_total/trained": 500.0})
    held = {Draw(i): Candidate(i, header(i, [10, 30]), Verdict.ACCEPT) for i in range(4)}
    for candidate in held.values():
        tally.on_group(candidate.header, duplicate=False)
    tally.on_group(header(0, [5]), duplicate=True)
    events = [
        dropped("stale", 0, lengths=[20]),
        dropped("no_signal", 1, lengths=[20]),
        dropped("deadline", 9, lengths=[0]),
        dropped("run_ended", 3, lengths=[20]),
    ]
    tally.on_events(events, held)
    row = tally.row(batch(5, 4, 4, 5), trained_tokens=80, now=110.0)
    assert [row[f"tokens/{kind}"] for kind in ("generated", "prefilled", "trained", "dropped")] == [165, 35, 80, 85]
    assert row["tokens_per_s/generated"] == 16.5
    assert row["tokens_total/generated"] == 1165
    assert row["goodput"] == pytest.approx(580 / 1165)
    assert {k: v for k, v in row.items() if k.startswith("dropped")} == {
        "dropped/stale": 1,
        "dropped/no_signal": 1,
        "dropped/deadline": 1,
        "dropped_length/32": 2,
        "dropped_length/0": 1,
    }
    assert row["resample_ratio"] == 0.25
    assert (row["lag_groups/0"], row["lag_groups/1"]) == (2, 2)
    again = tally.row(batch(5), trained_tokens=0, now=111.0)
    assert again["tokens/generated"] == 0
    assert again["tokens_total/generated"] == 1165
    assert not any(name.startswith("dropped") for name in again)


def test_solved_episodes_are_counted_whether_trained_or_dropped() -> None:
    tally = Tally(groups_per_batch=1, sources=[""])
    mixed = replace(header(0, [5, 5, 5]), succeeded=[True, False, True], failed=[False, False, True])
    tally.on_group(mixed, duplicate=False)
    solved = replace(header(1, [5, 5, 5]), succeeded=[True, True, True])
    tally.on_group(solved, duplicate=False)
    tally.on_group(solved, duplicate=True)
    tally.on_events([dropped("no_signal", 1, lengths=[5])], {Draw(1): Candidate(1, solved, Verdict.ACCEPT)})
    row = tally.row(batch(5), trained_tokens=15, now=1.0)
    assert (row["sequences/succeeded"], row["sequences/arrived"], row["sequences/unscored"]) == (4, 6, 1)


def test_trained_groups_are_counted_by_source() -> None:
    held = {Draw(i): Candidate(i, header(i, [4, 4], [0.0, i / 4], source), Verdict.ACCEPT) for i, source in SOURCES}
    tally = Tally(groups_per_batch=3, sources=["easy", "hard", "rare"])
    tally.on_trained(batch(5, 5, 5), held)
    row = tally.row(batch(5, 5, 5), trained_tokens=0, now=1.0)
    assert {name: value for name, value in row.items() if name.startswith(("reward", "groups"))} == {
        "groups/count/easy": 2,
        "reward/mean/easy": (0 + 0 / 4 + 0 + 2 / 4) / 4,
        "groups/count/hard": 1,
        "reward/mean/hard": (0 + 1 / 4) / 2,
        "groups/count/rare": 0,
    }, "draw 3 was not in the batch"
    alone = Tally(groups_per_batch=3, sources=["easy"])
    alone.on_trained(batch(5), held)
    assert not any(name.startswith(("reward", "groups")) for name in alone.row(batch(5), trained_tokens=0, now=1.0))


@pytest.mark.parametrize(("tokens", "bucket"), [(0, "0"), (1, "1"), (2, "2"), (3, "4"), (64, "64"), (65, "128")])
def test_length_buckets_are_powers_of_two(tokens: int, bucket: str) -> None:
    assert length_bucket(tokens) == bucket


def test_a_page_of_evaluated_completions_is_chosen_from_headers() -> None:
    headers = [(12, header(1, [3, 9], [0.0, 1.0])), (11, header(0, [5], [0.5]))]

    def ids(sort: str | None, after: str | None = None, limit: int = 9) -> list[tuple[int, str]]:
        return choose_samples(headers, sort=sort, after=after, limit=limit)

    assert ids(None) == [(11, "0-0.0-0"), (12, "0-1.0-0"), (12, "0-1.0-1")]
    assert ids("-reward") == [(12, "0-1.0-1"), (11, "0-0.0-0"), (12, "0-1.0-0")]
    assert ids("length", limit=2) == [(12, "0-1.0-0"), (11, "0-0.0-0")]
    assert ids("length", after="0-0.0-0") == [(12, "0-1.0-1")]
    assert ids(None, after="gone") == []
    headers.append((13, header(2, [4], [0.25], "hard")))
    assert choose_samples(headers, sort=None, after=None, limit=9, env="hard") == [(13, "0-2.0-0")]


def test_metrics_as_csv_and_parquet_leave_missing_values_empty() -> None:
    found = {"steps": [1, 2], "wall": [10.0, 11.5], "series": {"a/b": [0.5, None], "c": [None, 2.0]}}
    rows = list(csv.reader(io.StringIO(as_csv(found).decode())))
    assert rows == [["step", "wall", "a/b", "c"], ["1", "10.0", "0.5", ""], ["2", "11.5", "", "2.0"]]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(as_parquet(found)))
    assert table.to_pydict() == {"step": [1, 2], "wall": [10.0, 11.5], "a/b": [0.5, None], "c": [None, 2.0]}
