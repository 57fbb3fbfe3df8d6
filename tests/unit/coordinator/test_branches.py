"""Episodes with branches: parents of turns, credit along branches, and weights of branches."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online import matching as matching_module
from penstock.services.coordinator.online.credit import TurnTokens, TurnTree, branch_shares, returns, turn_tree
from penstock.services.coordinator.online.fairness import flaws_of_weights
from penstock.services.coordinator.online.groups import group_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.turns import Trajectory
from penstock.services.coordinator.queries import admission_audit
from penstock.services.coordinator.queries.admission_audit import StoredFacts, replay_admissions
from penstock.services.coordinator.training.decision import Draft, copy_state
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, Checkpointed, JobStarted
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, Interaction

spec = importlib.util.spec_from_file_location("online_learning", Path(__file__).with_name("test_online_learning.py"))
assert spec is not None
assert spec.loader is not None
learning: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)
NOW, EPISODE, SOLVED = learning.NOW, learning.EPISODE, learning.SOLVED
job, rating = learning.job, learning.rating
EPOCH: dict[str, Any] = {"writer_epoch": 1, "time": NOW}
HEADER = [90, 91]
"""Tokens that a template puts before each answer."""


def turn(name: str, prompt: list[int], answer: list[int], at: float, **changes: Any) -> Interaction:
    found: Interaction = learning.interaction(
        name, prompt_ids=prompt, token_ids=answer, at=NOW + at, episode=EPISODE, alone=False, **changes
    )
    return found


def agents() -> list[Interaction]:
    """Build two interleaved conversations of two turns each: an agent's (a1, a2) and its sub-agent's (s1, s2)."""
    return [
        turn("a1", [1, 2], [3], 1),
        turn("s1", [7], [8], 2),
        turn("a2", [1, 2, 3, 4], [5], 3),
        turn("s2", [7, 8, 9], [10], 4),
    ]


def settled(
    turns: list[Interaction], *items: Feedback, now: float = NOW + 99_999, **online: Any
) -> dict[str, Trajectory]:
    """Close the episode of ``turns``; return its trajectories, each under the joined ids of its turns."""
    matching = Matching(job(**online))
    for seq, one in enumerate(turns, 1):
        matching.on_interaction(seq, one)
    for seq, item in enumerate(items, 1):
        matching.on_feedback(seq, item, NOW)
    matching.sweep(version=5, now=now)
    return {"".join(t.interaction.id for t in one.turns): one for found in matching.ready.values() for one in found}


def rewards(turns: list[Interaction], *items: Feedback, **online: Any) -> dict[str, float]:
    return {name: one.reward for name, one in settled(turns, *items, **online).items()}


# -- the tree ---------------------------------------------------------------------------------------------------------


def parents(*turns: tuple[list[int], list[int]]) -> tuple[int, ...]:
    return turn_tree([TurnTokens.of(prompt, answer) for prompt, answer in turns]).parents


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        pytest.param([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6])], (-1, 0, 1), id="the longest beginning"),
        pytest.param([([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6])], (-1, 0, 0), id="two turns continue one"),
        pytest.param([([1], [2]), ([7], [8]), ([1, 2, 3], [4]), ([7, 8], [9])], (-1, -1, 0, 1), id="interleaved"),
        pytest.param([([1], [2]), ([1], [2]), ([1, 2, 3], [4])], (-1, 0, 1), id="the newest of the same"),
        pytest.param([([1], [2]), ([1], [3]), ([1, 2, 4], [4])], (-1, -1, 0), id="the same prompt asked again"),
        pytest.param([([1], [2]), ([9], [3]), ([8], [4])], (-1, 0, 1), id="no prompt extends a turn"),
        pytest.param([([1, 2], [3]), ([1], [2])], (-1, 0), id="a prefix of an earlier prompt"),
        pytest.param([([], [3]), ([], []), ([5], [2])], (-1, 0, 1), id="without tokens"),
        pytest.param([([257], [2]), ([257, 2, 1], [2]), ([1], [9])], (-1, 0, 1), id="tokens, not bytes"),
    ],
)
def test_the_parent_is_the_longest_prefix_of_the_prompt(
    turns: list[tuple[list[int], list[int]]], expected: tuple[int, ...]
) -> None:
    assert parents(*turns) == expected


def test_a_rendered_prompt_extends_the_newest_turn_of_its_conversation() -> None:
    """A chat template may drop earlier thoughts: 50 is a thought, 51 the answer after it, 60 a message of the user."""
    first = ([1, 60, *HEADER], [50, 51])
    tool = ([1, 60, *HEADER, 50, 51, 61, *HEADER], [50, 52])
    other = ([7, 60, *HEADER], [50])
    anew = ([1, 60, *HEADER, 51, 61, *HEADER, 52, 62, *HEADER], [53])
    assert parents(first, tool, other, anew) == (-1, 0, -1, 1)
    thinking = [*HEADER, 92]  # a thought begins, which the template drops once the answer is part of the conversation
    assert parents(
        ([1, 60, *thinking], [50]), ([7, 60, *thinking], [50]), ([1, 60, *HEADER, 51, 62, *thinking], [50])
    ) == (-1, -1, 0)  # fmt: skip
    asked = [([1, task, *HEADER, *HEADER, *HEADER], [50]) for task in (60, 61, 62)]
    assert parents(*asked) == (-1, 0, 1), "others share tokens, none shares the end of its prompt"
    assert parents(asked[0], asked[1], ([1, 60, *HEADER * 3, 50, 3], [4])) == (-1, -1, 0)


@pytest.mark.parametrize("late", [0, 750])
def test_building_a_tree_is_fast_in_any_order(late: int) -> None:
    """``late`` equal long prompts come before prompts that shrink turn by turn; no turn extends an earlier one."""
    tokens, size = list(range(3000)), 1500
    shrinking = [TurnTokens.of(tokens[: 2 * (size - place)], [-1] * (place < late)) for place in range(late, size)]
    turns = [TurnTokens.of(tokens, [-2 - place]) for place in range(late)] + shrinking
    before = time.process_time()
    tree = turn_tree(turns)
    assert time.process_time() - before < 1.5, "a quadratic algorithm takes several seconds"
    assert not any(tree.extends)


# -- credit -----------------------------------------------------------------------------------------------------------


def test_interleaved_agents_share_no_credit() -> None:
    found = settled(
        agents(), rating("f1", 0.5, inference="a2"), rating("f2", -0.25, inference="s2", key_id="k2"), gamma=1
    )
    assert {name: one.reward for name, one in found.items()} == {"a1a2": 0.5, "s1s2": -0.25}
    assert {name: one.judges for name, one in found.items()} == {"a1a2": ("k1",), "s1s2": ("k2",)}


def test_turns_that_are_not_adjacent_form_one_trajectory() -> None:
    found = settled(agents(), rating("f1", 0.5, inference="a2"), rating("f2", -0.25, inference="s2"))
    a, s = (group_of("j", Draw(n), [t.interaction for t in one.turns], reward=one.reward, epoch=1)
            for n, one in enumerate(found.values()))  # fmt: skip
    assert (a.prompt_ids.tolist(), a.token_ids.tolist(), a.mask.tolist()) == ([1, 2], [3, 4, 5], [1, 0, 1])
    assert (s.prompt_ids.tolist(), s.token_ids.tolist(), s.mask.tolist()) == ([7], [8, 9, 10], [1, 0, 1])


def test_a_conversation_without_feedback_gets_no_credit_from_another() -> None:
    only = rating("f1", 0.5, inference="a2")
    assert rewards(agents(), only) == {"a1a2": 0.5}
    timed = {"rating": {"type": "float", "default_after_s": 5.0, "default_value": -0.5}}
    found = settled(agents(), only, metrics=timed)
    assert {name: (one.reward, one.reason) for name, one in found.items()} == {
        "a1": (0.0, "credit"), "a2": (0.5, "feedback"), "s1": (-1.0, "default"), "s2": (-0.5, "default"),
    }  # fmt: skip


def test_the_reward_of_the_episode_reaches_the_end_of_each_branch() -> None:
    solved = rating("f1", True, episode=EPISODE, metric="solved")
    found = settled(agents(), solved, metrics=SOLVED, gamma=0.5)
    assert {name: one.reward for name, one in found.items()} == {"a1": 0.5, "s1": 0.5, "a2": 1.0, "s2": 1.0}
    assert {one.judges for one in found.values()} == {("k1",)}
    broken = [*agents()[:2], replace(agents()[2], tool_calls_valid=False), agents()[3]]
    assert rewards(broken, solved, metrics=SOLVED, gamma=0.5) == {"a1": -0.5, "s1": 0.5, "a2": -1.0, "s2": 1.0}


def test_a_parent_gets_the_mean_return_of_its_children() -> None:
    fork = [turn("r", [1], [2], 1), turn("x", [1, 2, 3], [4], 2), turn("y", [1, 2, 5], [6], 3)]
    items = [rating("f0", 0.25, inference="r"), rating("f1", 1.0, inference="x"), rating("f2", 0.5, inference="y")]
    assert rewards(fork, *items, gamma=0.5) == {"r": 0.25 + 0.5 * (1.0 + 0.5) / 2, "x": 1.0, "y": 0.5}
    title = [fork[0], fork[1], replace(fork[2], untrainable="side_turn")]
    assert rewards(title, *items[:2], gamma=0.5) == {"r": 0.25 + 0.5 * 1.0, "x": 1.0}, "a side turn dilutes nothing"
    assert rewards(title, *items, gamma=0.5)["r"] == 0.25 + 0.5 * (1.0 + 0.5) / 2, "unless it has feedback"


def test_returns_of_a_chain_are_those_of_turns_in_time() -> None:
    chain = TurnTree((-1, 0, 1), (False, True, False))
    assert returns([1.0, 0.0, 4.0], 0.5, chain) == returns([1.0, 0.0, 4.0], 0.5) == [2.0, 2.0, 4.0]
    forest = TurnTree((-1, 0, 0, -1, 2), (False, True, True, False, True))
    assert returns([1.0, 2.0, 4.0, 8.0, 16.0], 0.5, forest) == [1 + 0.5 * (2 + 12) / 2, 2.0, 4 + 8.0, 8.0, 16.0]


# -- weights ----------------------------------------------------------------------------------------------------------


def test_the_branches_of_an_episode_weigh_as_one_conversation() -> None:
    items = [rating("f1", 0.5, inference="a2"), rating("f2", 0.5, inference="s2")]
    assert {name: one.share for name, one in settled(agents(), *items).items()} == {"a1a2": 0.5, "s1s2": 0.5}
    assert {one.share for one in settled(agents(), *items, balance="trajectories").values()} == {1.0}
    chain = learning.turns()
    for one in settled(chain, rating("f0", 0.25), rating("f1", 0.5, inference="i2")).values():
        assert one.share == 1.0, "parts of one branch have its tokens between them"
    side = [*agents()[:1], replace(agents()[1], untrainable="side_turn"), agents()[2]]
    assert {name: one.share for name, one in settled(side, items[0]).items()} == {"a1a2": 1.0}


def test_a_shared_part_weighs_as_much_as_its_branches() -> None:
    assert branch_shares([-1, 0, 0, -1]) == [pytest.approx(2 / 3), *[pytest.approx(1 / 3)] * 3]
    assert branch_shares([-1, 0, 1]) == [1.0, 1.0, 1.0]
    assert branch_shares([-1, 0, 0], [2, 2, 6]) == [(2 / 4 + 2 / 8) / 2, 2 / 4 / 2, 6 / 8 / 2]
    assert branch_shares([-1, 0], [0, 0]) == [1.0, 1.0]


def test_a_branch_is_one_sequence_for_a_sequence_mean_loss() -> None:
    config = OnlineJob.parse(
        job().model_dump(mode="json", exclude_unset=True) | {"algorithm": {"aggregation": "sequence_mean"}}
    )
    matching = Matching(config)
    for seq, one in enumerate(learning.turns(), 1):
        matching.on_interaction(seq, one)
    for seq, item in enumerate([rating("f0", 0.25), rating("f1", 0.5, inference="i2", final=True)], 1):
        matching.on_feedback(seq, item, NOW)
    matching.sweep(version=6, now=NOW + 9)
    assert [one.share for one in matching.ready[EPISODE]] == [2 / 3, 1 / 3], "by sampled tokens"


def decided(config: OnlineJob, turns: list[Interaction], items: list[Feedback]) -> tuple[Admitted, StoredFacts]:
    """Let a leader decide on ``turns`` and feedback ``items``; return its `Admitted` event and the stored streams."""
    matching = Matching(config)
    source = LiveSource(config, matching)
    run = JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1, source=source)
    run.commit([JobStarted(**EPOCH, config_digest="c")])
    run.commit([Checkpointed(**EPOCH, number=0, version=5, digest="w", path="p", trainer_epoch=1, low_seq=1)])
    for seq, one in enumerate(turns, 1):
        matching.on_interaction(seq, one)
    for seq, item in enumerate(items, 1):
        matching.on_feedback(seq, item, NOW)
    matching.sweep(version=5, now=NOW + 99_999)
    draft = Draft(run, copy_state(run.state), Inputs(NOW + 99_999))
    source.draw(draft)
    (event,) = [one for one in draft.events if isinstance(one, Admitted)]
    stored = StoredFacts(
        dict(enumerate(turns, 1)), {seq: [item] for seq, item in enumerate(items, 1)},
        {EPISODE: list(range(1, len(turns) + 1))},
    )  # fmt: skip
    return event, stored


def test_an_audit_finds_weights_and_shares_that_do_not_follow() -> None:
    new = {"reference_keys": ["key_judge"], "weight": 0.25}
    config = job(new_sources=new)
    items = [rating("f1", 0.5, inference="a2"), rating("f2", 0.25, inference="s2", key_id="key_judge")]
    event, stored = decided(config, agents(), items)
    assert [(one.reward, one.share, one.weight) for one in event.admissions] == [(0.5, 0.5, 0.125), (0.25, 0.5, 0.5)]
    assert flaws_of_weights([[event]], {}, config) == []
    assert replay_admissions(event.admissions, stored, config) == (2, [])
    greedy = [replace(event.admissions[0], share=1.0, weight=0.25), event.admissions[1]]
    assert replay_admissions(greedy, stored, config)[1] == [
        "ordinal 0: decided again its share of the episode would be 0.5"
    ]
    heavier = replace(event, admissions=[replace(event.admissions[0], weight=0.25), event.admissions[1]])
    assert flaws_of_weights([[heavier]], {}, config) == ["ordinal 0: admitted with weight 0.25, not 0.125"]


def test_an_episode_larger_than_the_pipeline_is_admitted_alone() -> None:
    """A leader never decides one half of an episode without the other."""
    config = OnlineJob.parse(
        job(gamma=0.5).model_dump(mode="json", exclude_unset=True) | {"train": {"batch_size": 2, "max_lag": 0}}
    )
    assert config.max_draws == 2
    event, _ = decided(config, agents(), [rating("f1", 0.5, inference="a2"), rating("f2", -0.25, inference="s2")])
    assert [one.reward for one in event.admissions] == [0.25, -0.125, 0.5, -0.25]


def test_the_first_agents_within_the_share_of_their_user_are_trained() -> None:
    spec = job().model_dump(mode="json", exclude_unset=True) | {"train": {"batch_size": 64}}
    config = OnlineJob.parse(spec | {"online": spec["online"] | {"defences": "standard"}})
    assert config.max_draws * config.online.max_share_per_user < 3
    third = [turn("x1", [11], [12], 2.5), turn("x2", [11, 12, 13], [14], 5)]
    turns = sorted([*agents(), *third], key=lambda one: one.started)
    items = [rating(f"f{n}", 0.5, inference=about, key_id="asker") for n, about in enumerate(("a2", "s2", "x2"))]
    event, stored = decided(config, turns, items)
    assert [[*one.interactions] for one in event.admissions] == [["a1", "a2"], ["s1", "s2"]]
    assert [one.share for one in event.admissions] == [0.5, 0.5], "the episode weighs as much as others"
    assert event.admissions[0].refused == dict.fromkeys(("x1", "x2"), "over_share")
    assert sorted(name for one in event.admissions for name in one.feedback) == ["f0", "f1", "f2"]
    assert (event.low_interactions, event.low_feedback) == (7, 3), "nothing is undecided"
    assert replay_admissions(event.admissions, stored, config) == (2, [])


def test_an_episode_with_too_much_to_imitate_is_admitted_alone() -> None:
    """The answers of the agents are stale, so the policy loss may not use them."""
    off_policy = {"supervised": {}, "max_share": 0.01}
    config = job(gamma=0.5, off_policy=off_policy)
    old = [replace(one, spans=[replace(one.spans[0], version=0)]) for one in agents()]
    event, _ = decided(config, old, [rating("f1", 0.5, inference="a2"), rating("f2", 0.5, inference="s2")])
    assert [one.objective for one in event.admissions] == ["supervised"] * 4


def test_an_audit_leaves_out_branches_decided_by_earlier_versions() -> None:
    items = [rating("f1", 0.5, inference="a2"), rating("f2", 0.25, inference="s2")]
    event, stored = decided(job(), agents(), items)
    earlier: list[Admission] = [replace(one, share=0.0, reward=0.75) for one in event.admissions]
    assert replay_admissions(earlier, stored, job()) == (0, [])
    assert flaws_of_weights([[replace(event, admissions=[replace(earlier[0], weight=1.0)])]], {}, job()) == []


def test_the_order_of_records_does_not_matter() -> None:
    items = [rating("f1", 0.5, inference="a2"), rating("f2", -0.25, inference="s2")]
    expected = rewards(agents(), *items)
    assert rewards(agents()[::-1], *items[::-1]) == expected
    late = agents()
    matching = Matching(job())
    for seq, one in enumerate([late[1], late[3], late[2]], 1):
        matching.on_interaction(seq, one)
    for seq, item in enumerate(items, 1):
        matching.on_feedback(seq, item, NOW)
    matching.sweep(version=5, now=NOW + 99_999)
    assert len(matching.ready[EPISODE]) == 2
    matching.on_interaction(4, late[0])
    matching.sweep(version=5, now=NOW + 99_999)
    names = ["".join(turn.interaction.id for turn in one.turns) for one in matching.ready[EPISODE]]
    assert dict(zip(names, [one.reward for one in matching.ready[EPISODE]], strict=True)) == expected


def test_an_episode_has_at_most_max_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every leader and the audit count the same turns."""
    for module in (matching_module, admission_audit):
        monkeypatch.setattr(module, "MAX_TURNS", 3)
    items = [rating("f1", 0.5, inference="a2"), rating("f2", 0.25, inference="s2")]
    matching = Matching(job())
    for seq, one in enumerate(agents(), 1):
        matching.on_interaction(seq, one)
    statuses = [one for seq, item in enumerate(items, 1) for one in matching.on_feedback(seq, item, NOW)]
    assert [(one.status, one.reason) for one in statuses] == [("matched", ""), ("rejected", "too_many_turns")]
    assert [(one.interaction, one.reason) for one in matching.refused_interactions.drain()] == [
        ("s2", "too_many_turns")
    ]
    early = Matching(job())
    assert early.on_feedback(1, items[1], NOW) == []
    early_statuses = [one for seq, item in enumerate(agents(), 1) for one in early.on_interaction(seq, item)]
    assert [(one.feedback, one.reason) for one in early_statuses] == [("f2", "too_many_turns")]
    turns = [*agents()[:3], turn("fork", [1, 2, 3, 7], [8], 4)]
    turns[1] = replace(turns[1], untrainable="side_turn")
    event, stored = decided(job(), turns, [items[0], rating("f3", 0.25, inference="s1")])
    assert [(list(one.interactions), list(one.feedback)) for one in event.admissions] == [(["a1", "a2"], ["f1", "f3"])]
    assert replay_admissions(event.admissions, stored, job()) == (1, [])
