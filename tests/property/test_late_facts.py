"""Turns and feedback after the end of an episode: a leader reading live decides like one reading all at once."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.services.coordinator.online.matching import Matching
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, FeedbackStatus, Interaction

EPISODE = "0192f0c1-0000-7000-8000-00000000000e"
IDLE, AGE, END = 8, 20, 60

Arrivals = list[tuple[int, Interaction | Feedback]]
"""Interactions and feedback, each with the second of its arrival."""


def job(gamma: float) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "train": {"max_lag": 3},
            "online": {
                "metrics": {"rating": {"type": "float"}}, "gamma": gamma, "idle_ttl_s": IDLE, "max_age_s": AGE,
            },
        }
    )  # fmt: skip


def turn(number: int, ended: int, *, version: int = 0, cut: bool = False) -> Interaction:
    return Interaction(
        id=f"i{number}", request=f"i{number}", index=0, job="j", episode=EPISODE, key_id="asker", user="u",
        split="train", untrainable="side_turn" if cut else "", prompt_ids=[1], token_ids=[2], logprobs=[-0.5],
        spans=[Span(version, 0, 1)], sampling=Sampling(max_new_tokens=9), finish="stop", template="", body_digest="",
        text="", started=ended - 0.5, first_token=ended, ended=ended,
    )  # fmt: skip


def item(number: int, about: str, received: int, weight: float = 1.0) -> Feedback:
    place: dict[str, Any] = {"inference": about} if about else {"episode": EPISODE}
    key = "k" if weight else "light"
    return Feedback(id=f"f{number}", job="j", kind="metric", key_id=key, received=received, metric="rating", value=0.5,
                    weight=weight, **place)  # fmt: skip


class Reader:
    """A leader that collects the newest status of each feedback item, and the refused interactions."""

    def __init__(self, config: OnlineJob) -> None:
        self.matching, self.statuses, self.refused = Matching(config), dict[str, tuple[str, str]](), dict[str, str]()
        self._seq = 0

    def read(self, record: Interaction | Feedback, now: float) -> None:
        self._seq += 1
        is_turn = isinstance(record, Interaction)
        self._note(
            self.matching.on_interaction(self._seq, record)
            if isinstance(record, Interaction)
            else self.matching.on_feedback(self._seq, record, now)
        )
        assert is_turn or record.id in {*self.statuses, *(item.feedback.id for item in self.matching.unmatched)}

    def sweep(self, version: int, now: float) -> None:
        self._note(self.matching.sweep(version=version, now=now))

    def _note(self, statuses: list[FeedbackStatus]) -> None:
        self.statuses |= {one.feedback: (one.status, one.reason) for one in statuses}
        self.refused |= {one.interaction: one.reason for one in self.matching.refused_interactions.drain()}

    @property
    def ready(self) -> list[tuple[list[str], set[str], float]]:
        found = (one for paths in self.matching.ready.values() for one in paths)
        paths = [([turn.interaction.id for turn in one.turns], {*one.feedback}, one.reward) for one in found]
        return sorted(paths, key=lambda one: one[0])


def live(config: OnlineJob, arrivals: Arrivals) -> Reader:
    """Let a leader read each arrival in its second, and sweep every second; return the leader."""
    reader = Reader(config)
    for now in range(END + 1):
        reader.sweep(0, now)
        for _, record in (one for one in arrivals if one[0] == now):
            reader.read(record, now)
    return reader


def read_at_once(config: OnlineJob, arrivals: Arrivals) -> Reader:
    """Let a leader read all interactions, then all feedback, and only then sweep; return the leader."""
    reader = Reader(config)
    for kind in (Interaction, Feedback):
        for _, record in arrivals:
            if isinstance(record, kind):
                reader.read(record, END)
    reader.sweep(0, END)
    return reader


@st.composite
def courses(draw: st.DrawFn, whole: bool) -> Arrivals:
    """Draw turns and feedback of one episode, each in its own second; ``whole``: some judge the whole episode."""
    seconds = sorted(draw(st.sets(st.integers(1, 45), min_size=2, max_size=9)))
    arrivals: Arrivals = [(seconds[0], turn(0, seconds[0], cut=draw(st.booleans())))]
    for number, second in enumerate(seconds[1:], 1):
        known = [record.id for _, record in arrivals if isinstance(record, Interaction)]
        if draw(st.integers(0, 2)) == 0:
            arrivals.append((second, turn(number, second, cut=draw(st.booleans()))))
        else:
            about = draw(st.sampled_from([*known, *([""] if whole else [])]))
            arrivals.append((second, item(number, about, second, weight=draw(st.sampled_from([0.0, 1.0, 1.0])))))
    return arrivals


@settings(max_examples=60, deadline=None)
@given(st.booleans().flatmap(lambda credit: st.tuples(st.just(credit), courses(whole=credit))))
def test_a_new_leader_reverses_no_refusal(course: tuple[bool, Arrivals]) -> None:
    config, arrivals = job(1.0 if course[0] else 0.0), course[1]
    first, second = live(config, arrivals), read_at_once(config, arrivals)
    assert second.refused == first.refused
    assert second.statuses == first.statuses
    assert second.ready == first.ready


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_late_feedback_does_not_revive_an_answer(gamma: float) -> None:
    arrivals: Arrivals = [(1, turn(0, 1)), (1 + IDLE, item(1, "i0", 1 + IDLE))]
    for reader in (live(job(gamma), arrivals), read_at_once(job(gamma), arrivals)):
        assert (reader.statuses, reader.refused) == ({"f1": ("rejected", "no_feedback")}, {"i0": "no_feedback"})


def test_a_turn_of_a_refused_episode_is_too_late() -> None:
    arrivals: Arrivals = [(1, turn(0, 1)), (20, turn(1, 20)), (21, item(2, "i1", 21)), (22, item(3, "", 22))]
    for reader in (live(job(1.0), arrivals), read_at_once(job(1.0), arrivals)):
        assert reader.refused == {"i0": "no_feedback", "i1": "episode_over"}
        assert reader.statuses == {"f2": ("rejected", "episode_over"), "f3": ("rejected", "no_feedback")}


def test_feedback_in_time_can_be_revised_until_admission() -> None:
    """While a ready episode waits for a batch, later feedback still counts, and a new version changes nothing."""
    arrivals: Arrivals = [(1, turn(0, 1)), (2, item(1, "i0", 2)), (30, turn(2, 30, version=9)), (31, item(3, "i2", 31))]
    for reader in (live(job(1.0), arrivals), read_at_once(job(1.0), arrivals)):
        reader.sweep(9, END)
        assert reader.ready == [(["i2"], {"f1", "f3"}, 0.5)]
        assert reader.refused == {}
