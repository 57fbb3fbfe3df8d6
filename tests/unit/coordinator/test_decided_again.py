"""The audit of admissions replays decisions. Also: answers that were cut off, and episodes that no client ended."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.queries.admission_audit import StoredFacts, replay_admissions
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.live.interaction import Feedback, Interaction

spec = importlib.util.spec_from_file_location("online_learning", Path(__file__).with_name("test_online_learning.py"))
assert spec is not None
assert spec.loader is not None
learning: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)
NOW, EPISODE = learning.NOW, learning.EPISODE
interaction, job, rating, table, turns = (
    learning.interaction, learning.job, learning.rating, learning.table, learning.turns,
)  # fmt: skip
VERSION = 6


def admitted(
    config: OnlineJob, records: list[Interaction], items: list[Feedback], now: float, leader: Matching | None = None
) -> list[Admission]:
    """Let a leader decide on ``records`` and ``items`` at version 6; return its admissions."""
    matching = leader or Matching(config)
    for seq, record in enumerate(records, 1):
        matching.on_interaction(seq, record)
    for seq, item in enumerate(items, 1):
        matching.on_feedback(seq, item, now)
    matching.sweep(version=VERSION, now=now)
    ready = [trajectory for found in matching.ready.values() for trajectory in found]
    return [
        Admission(
            n, {t.interaction.id: t.seq for t in one.turns}, {name: item.seq for name, item in one.feedback.items()},
            one.reward, VERSION - one.min_version, one.key_id, one.user, one.reason, now, objective=one.objective,
            refused=one.refused,
        )
        for n, one in enumerate(ready)
    ]  # fmt: skip


def replay(
    config: OnlineJob, records: list[Interaction], items: list[Feedback], admissions: list[Admission]
) -> tuple[int, list[str]]:
    """Replay ``admissions`` from stored ``records`` and ``items``; return how many were checked, and the flaws."""
    stored = StoredFacts(
        dict(enumerate(records, 1)), {seq: [item] for seq, item in enumerate(items, 1)},
        {EPISODE: list(range(1, len(records) + 1))},
    )  # fmt: skip
    return replay_admissions(admissions, stored, config)


CASES: dict[str, tuple[dict[str, Any], list[Interaction], list[Feedback], float]] = {
    "an episode that nobody ended": (
        {"unfinished": "mask"}, turns(), [rating("f1", 0.5, inference="i2")], NOW + 5 + 1800.0,
    ),
    "a turn that was cut off": (
        {"truncated": "mask"}, [replace(turns()[0], finish="length"), turns()[1]],
        [rating("f1", 0.5, inference="i2"), rating("end", None, episode=EPISODE, metric="", final=True)], NOW + 6,
    ),
    "an answer that two sources judged": (
        {}, [interaction()], [rating("f1", 0.25), rating("f2", -0.5, key_id="k2", weight=0.5), rating("f3", 1.0)],
        NOW + 2,
    ),
    "feedback through coordinators whose clocks differ": (
        {}, [interaction()], [rating("f1", 0.25, received=NOW + 60), rating("f2", -0.5, received=NOW - 60)], NOW + 61,
    ),
    "a default": (
        {"metrics": {"rating": {"type": "float", "default_after_s": 5.0, "default_value": -0.25}}},
        [interaction()], [], NOW + 30,
    ),
    "an episode as one trajectory": ({}, turns(), [rating("f1", 0.5, inference="i2", final=True)], NOW + 9),
    "turns apart, with credit": (
        {"gamma": 0.5}, turns(), [rating("f0", 0.25), rating("f1", 0.5, inference="i2", final=True)], NOW + 9,
    ),
    "a reward that is not declared, of a turn and of the whole": (
        {"gamma": 0.5}, turns(), [
            rating("f0", 0.75, metric="reward"), rating("f1", 0.25, episode=EPISODE, metric="reward", final=True),
            rating("f2", -0.25, episode=EPISODE, metric="reward", turn=0, key_id="k2"),
        ], NOW + 9,
    ),
    "an episode with a turn that was refused": (
        {"gamma": 0.5}, [turns()[0], replace(turns()[1], untrainable="side_turn")],
        [rating("f0", 0.25), rating("f1", 0.5, inference="i2", final=True)], NOW + 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_was_admitted_is_decided_the_same_again(case: str) -> None:
    online, records, items, now = CASES[case]
    config = job(**online)
    admissions = admitted(config, records, items, now)
    assert admissions
    assert replay(config, records, items, admissions) == (len(admissions), [])
    checked, flaws = replay(config, records, items, [replace(admissions[0], reward=0.9), *admissions[1:]])
    assert checked == len(admissions)
    assert flaws == [f"ordinal 0: decided again its reward would be {admissions[0].reward:g}, not 0.9"]


@pytest.mark.parametrize("objecting", ["i1", "i2"])
def test_feedback_on_a_turn_of_an_objecting_user_moves_to_the_others(objecting: str) -> None:
    records = [replace(one, user="out" if one.id == objecting else "u") for one in turns()]
    items = [rating("f0", 0.25), rating("f1", 0.5, inference="i2", final=True), rating("whole", 0.5, episode=EPISODE)]
    config = job(gamma=0.5, metrics=learning.RATED | {"whole": {"type": "float", "level": "episode"}})
    items[-1] = replace(items[-1], metric="whole")
    matching = Matching(config, opted_out=lambda user: user == "out")
    admissions = admitted(config, records, items, NOW + 9, matching)
    (one,) = admissions
    assert [*one.interactions] == [name for name in ("i1", "i2") if name != objecting]
    assert sorted(one.feedback) == ["f0", "f1", "whole"]
    assert one.refused == {objecting: "opted_out"}
    assert replay(config, records, items, admissions) == (1, [])
    matching.on_admitted(admissions)
    assert matching.low_water() == (3, 3), "nothing is undecided"
    assert matching.on_job_end(NOW + 10) == []


def test_an_admission_that_does_not_follow_from_the_records_is_found() -> None:
    config, records, items = job(), [interaction()], [rating("f1", 0.5), rating("f2", 0.5, key_id="k2")]
    (fair,) = admitted(config, records, items, NOW + 2)
    assert replay(config, records, items, [fair]) == (1, [])
    stale = replace(fair, lag=4)
    assert "its turns would not be trained so" in replay(config, records, items, [stale])[1][0]
    assert "it would still wait" in replay(config, records, items, [replace(fair, feedback={})])[1][0]
    assert "it would be policy by feedback" in replay(config, records, items, [replace(fair, reason="default")])[1][0]


def test_admissions_with_missing_records_are_left_out() -> None:
    config, records, items = job(), [interaction()], [rating()]
    (fair,) = admitted(config, records, items, NOW + 2)
    assert replay(config, [], items, [fair]) == (0, [])
    assert replay(config, records, [], [replace(fair, reward=0.9)]) == (0, [])
    assert replay_admissions([replace(fair, interactions={})], StoredFacts({}, {}), config) == (0, [])


@pytest.mark.parametrize("gone", [0, 1])
def test_admissions_with_feedback_on_a_missing_turn_are_left_out(gone: int) -> None:
    config, records = job(gamma=0.5), turns()
    records[gone] = replace(records[gone], untrainable="side_turn")
    items = [rating("f0", 0.25, inference="i1"), rating("f1", 0.5, inference="i2", final=True)]
    admissions = admitted(config, records, items, NOW + 9)
    assert replay(config, records, items, admissions) == (1, [])
    remaining = {seq: record for seq, record in enumerate(records, 1) if seq != gone + 1}
    stored = StoredFacts(remaining, {1: [items[0]], 2: [items[1]]}, {EPISODE: list(remaining)}, oldest=min(remaining))
    assert replay_admissions(admissions, stored, config) == (0, [])


def test_missing_turns_are_no_violation() -> None:
    config, records = job(gamma=0.5, max_age_s=60.0, idle_ttl_s=600.0), turns()
    records[0] = replace(records[0], untrainable="side_turn", started=NOW - 40)
    items = [rating("f1", 0.5, inference="i2")]
    admissions = admitted(config, records, items, NOW + 25)
    assert replay(config, records, items, admissions) == (1, [])
    stored = StoredFacts({2: records[1]}, {1: items}, {EPISODE: [2]}, oldest=2)
    assert replay_admissions(admissions, stored, config) == (0, [])
    assert "would still wait" in replay_admissions(admissions, replace_oldest(stored), config)[1][0], (
        "nothing is missing"
    )
    by_number = [
        rating("f0", 0.25, key_id="k2", episode=EPISODE, turn=0),
        rating("f1", 0.5, inference="i2", final=True),
    ]
    admissions = admitted(config, records, by_number, NOW + 9)
    both = {seq: [item] for seq, item in enumerate(by_number, 1)}
    stored = StoredFacts({2: records[1]}, both, {EPISODE: [2]}, oldest=2)
    assert replay_admissions(admissions, stored, config) == (0, [])
    assert replay_admissions(admissions, replace_oldest(stored), config)[1]


def replace_oldest(stored: StoredFacts) -> StoredFacts:
    """Return ``stored`` as if nothing had been purged."""
    return StoredFacts(stored.records, stored.items, stored.turns)


# -- answers that were cut off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truncated", "decision"),
    [
        ("judge", ("train", "feedback", 0.5)),
        ("penalise", ("train", "invalid", -1.0)),
        ("leave_out", ("reject", "truncated", 0.5)),
    ],
)
def test_row_10_an_answer_at_the_length_limit(truncated: str, decision: tuple[str, str, float]) -> None:
    config = job(truncated=truncated)
    assert table(job=config, interaction=interaction(finish="length")) == decision
    assert table(job=config) == ("train", "feedback", 0.5), "an answer that ended by itself"


def test_row_10_a_cut_answer_is_penalised_without_feedback() -> None:
    config = job(truncated="penalise", invalid_reward=-0.25)
    assert table(job=config, interaction=interaction(finish="length"), items=[]) == ("train", "invalid", -0.25)


# -- episodes without an end ------------------------------------------------------------------------------------------


def test_row_9_an_active_episode_closes_at_its_maximum_age() -> None:
    config = job(max_age_s=60.0, idle_ttl_s=30.0)
    matching = Matching(config)
    for number in range(8):
        at = NOW + 10.0 * number
        matching.on_interaction(
            number + 1, interaction(f"i{number}", at=at, episode=EPISODE, alone=False, version=VERSION)
        )
        matching.sweep(version=VERSION, now=at)
        if number == 0:
            matching.on_feedback(1, rating("f0", 0.5, inference="i0"), at)
        if at - NOW < 59:
            assert not matching.ready, "the episode is still active"
    assert EPISODE in matching.ready
    late = matching.on_feedback(2, rating("f9", 1.0, inference="i7"), NOW + 80)
    assert [one.status for one in late] == ["matched"], "it counts until admission"
    matching.sweep(version=VERSION, now=NOW + 81)
    learning.take(matching)
    matching.on_interaction(20, interaction("i20", at=NOW + 90, episode=EPISODE, alone=False, version=VERSION))
    after_end = matching.on_feedback(3, rating("f20", 1.0, inference="i20"), NOW + 91)
    assert [(one.status, one.reason) for one in after_end] == [("rejected", "episode_over")]
