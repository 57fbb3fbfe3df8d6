"""Episodes with branches: decisions do not depend on the order of records and feedback, and an audit repeats them."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from msgspec.structs import replace

from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.turns import Trajectory
from penstock.services.coordinator.queries.admission_audit import StoredFacts, replay_admissions
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Feedback, Interaction

EPISODE = "0192f0c1-0000-7000-8000-00000000000e"
NOW, LATER = 1000.0, 99_999.0
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
REFUSALS = ["", "", "", "side_turn", "client_disconnected"]
METRICS = {"rating": {"type": "float"}, "solved": {"type": "float", "level": "episode", "default_value": 0.25}}


REWARDS = {"of_turn": {"type": "float"}, "of_whole": {"type": "float", "level": "episode"}}
"""Two declared metrics that stand for the undeclared `reward`; a missing value adds nothing."""


def job(gamma: float, aggregation: str, metrics: dict[str, Any] = METRICS) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "algorithm": {"type": "reinforce_pp", "aggregation": aggregation},
            "online": {"metrics": metrics, "gamma": gamma, "max_age_s": 1e6},
        }
    )  # fmt: skip


@st.composite
def episodes(draw: st.DrawFn) -> tuple[list[Interaction], list[Feedback]]:
    """Draw turns whose prompts are new or extend an earlier turn, with feedback on some of them."""
    turns: list[Interaction] = []
    for place in range(draw(st.integers(1, 7))):
        before = draw(st.sampled_from([None, *turns]))
        new_ids = draw(TOKENS)
        prompt = new_ids if before is None else [*before.prompt_ids, *before.token_ids, *new_ids]
        answer = draw(TOKENS)
        turns.append(
            Interaction(
                id=f"i{place}", request=f"i{place}", index=0, job="j", episode=EPISODE, key_id="asker", user="u",
                split="train", untrainable=draw(st.sampled_from(REFUSALS)), prompt_ids=prompt, token_ids=answer,
                logprobs=[-0.5] * len(answer), spans=[Span(3, 0, len(answer))], sampling=Sampling(max_new_tokens=9),
                finish="stop", template="", body_digest="", text="", started=NOW + place, first_token=NOW + place,
                ended=NOW + place,
            )
        )  # fmt: skip
    items: list[Feedback] = []
    for count in range(draw(st.integers(1, 4))):
        value, key = draw(st.sampled_from([-1.0, 0.5, 1.0])), draw(st.sampled_from(["k1", "k2"]))
        about = draw(st.sampled_from(["", "solved", *[one.id for one in turns]]))
        place: dict[str, Any] = {"inference": about}
        if about in ("", "solved"):
            place = {"episode": EPISODE, "turn": draw(st.integers(-1, 2))}
        metric = "solved" if about == "solved" else draw(st.sampled_from(["rating", "reward"]))
        items.append(
            Feedback(id=f"f{count}", job="j", kind="metric", key_id=key, received=NOW + count, value=value,
                     metric=metric, **place)
        )  # fmt: skip
    return turns, items


def decided(config: OnlineJob, inputs: list[tuple[int, Interaction | Feedback]]) -> list[Trajectory]:
    matching = Matching(config)
    for seq, one in inputs:
        if isinstance(one, Interaction):
            matching.on_interaction(seq, one)
        else:
            matching.on_feedback(seq, one, NOW)
    matching.sweep(version=3, now=LATER)
    return [trajectory for found in matching.ready.values() for trajectory in found]


def rows(trajectories: list[Trajectory]) -> list[tuple[Any, ...]]:
    return [
        ([turn.interaction.id for turn in one.turns], one.reward, one.reason, one.share, one.judges, {*one.feedback})
        for one in trajectories
    ]


@settings(max_examples=25, deadline=None)
@given(episodes(), st.sampled_from([0.5, 1.0]), st.sampled_from(["token_mean", "sequence_mean"]), st.data())
def test_every_leader_and_the_audit_decide_an_episode_the_same(
    episode: tuple[list[Interaction], list[Feedback]], gamma: float, aggregation: str, data: st.DataObject
) -> None:
    config, (turns, items) = job(gamma, aggregation), episode
    inputs: list[tuple[int, Interaction | Feedback]] = [*enumerate(turns, 1), *enumerate(items, 1)]
    found = decided(config, inputs)
    assert rows(decided(config, data.draw(st.permutations(inputs)))) == rows(found)
    assert len({turn.interaction.id for one in found for turn in one.turns}) == sum(len(one.turns) for one in found)
    assert len({name for one in found for name in one.feedback}) == sum(len(one.feedback) for one in found)
    assert all(0 < one.share <= 1 for one in found)
    admissions = [
        Admission(
            n, {turn.interaction.id: turn.seq for turn in one.turns},
            {name: item.seq for name, item in one.feedback.items()}, one.reward, 0, one.key_id, one.user, one.reason,
            LATER, share=one.share,
        )
        for n, one in enumerate(found)
    ]  # fmt: skip
    stored = StoredFacts(
        dict(enumerate(turns, 1)), {seq: [item] for seq, item in enumerate(items, 1)},
        {EPISODE: list(range(1, len(turns) + 1))},
    )  # fmt: skip
    assert replay_admissions(admissions, stored, config) == (len(found), [])


@settings(max_examples=25, deadline=None)
@given(episodes(), st.sampled_from([0.5, 1.0]))
def test_an_undeclared_reward_counts_like_declared_ones(
    episode: tuple[list[Interaction], list[Feedback]], gamma: float
) -> None:
    turns, items = episode
    declared = [
        replace(one, metric="of_turn" if one.inference or one.turn >= 0 else "of_whole")
        if one.metric == "reward"
        else one
        for one in items
    ]
    found = decided(job(gamma, "token_mean"), [*enumerate(turns, 1), *enumerate(items, 1)])
    twin = decided(job(gamma, "token_mean", METRICS | REWARDS), [*enumerate(turns, 1), *enumerate(declared, 1)])
    assert rows(found) == rows(twin)
