"""The undeclared metric `reward`: it counts without being awaited, and values of unknown metrics do not count."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.decision_feed import Funnel
from penstock.services.coordinator.online.matching import Matching
from penstock.shared.config.online.section import OnlineConfig
from penstock.shared.protocol.live.interaction import Feedback

spec = importlib.util.spec_from_file_location("online_learning", Path(__file__).with_name("test_online_learning.py"))
assert spec is not None
assert spec.loader is not None
learning: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)
NOW, EPISODE = learning.NOW, learning.EPISODE
interaction, job, rating, settled, table, turns = (
    learning.interaction, learning.job, learning.rating, learning.settled, learning.table, learning.turns,
)  # fmt: skip
END = rating("end", None, episode=EPISODE, metric="", final=True)


def rewarded(value: float = 1.0, name: str = "r1", **changes: Any) -> Feedback:
    found: Feedback = rating(name, value, metric="reward", **changes)
    return found


def trained(items: list[Feedback], **online: Any) -> list[tuple[list[str], float, str]]:
    """Close an episode of two turns with ``items``; return (ids of turns, return, reason) of each trajectory."""
    matching, _ = settled(turns(), [*items, END], **online)
    matching.sweep(version=6, now=NOW + 6)
    return [
        ([turn.interaction.id for turn in one.turns], one.reward, one.reason) for one in matching.ready.get(EPISODE, ())
    ]


# -- what counts ------------------------------------------------------------------------------------------------------


def test_which_metrics_count() -> None:
    declared = OnlineConfig.parse({"metrics": {"accepted": {"type": "boolean"}}})
    assert [declared.metric(name) is not None for name in ("accepted", "reward", "liked", "comment")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert [sorted(declared.of_level(level)) for level in ("interaction", "episode")] == [
        ["accepted", "reward"], ["reward"],
    ]  # fmt: skip
    own = OnlineConfig.parse({"metrics": {"reward": {"type": "boolean", "level": "episode", "weight": 0.5}}})
    found = own.metric("reward")
    assert found is not None
    assert (found.type, found.weight) == ("boolean", 0.5)
    assert [sorted(own.of_level(level)) for level in ("interaction", "episode")] == [[], ["reward"]]
    assert OnlineConfig.parse({"metrics": {}}) == OnlineConfig()


def test_a_reward_counts_beside_declared_metrics_and_is_not_awaited() -> None:
    assert table() == ("train", "feedback", 0.5), "it is not awaited"
    assert table(items=[rating(), rewarded(0.25)]) == ("train", "feedback", 0.75)
    assert table(items=[rewarded()])[:2] == ("wait", "feedback"), "for declared metrics"
    defaults = job(metrics={"rating": {"type": "float", "default_after_s": 1.0, "default_value": -1.0}})
    assert table(job=defaults, items=[rewarded()]) == ("train", "feedback", 0.0), "not only the default"
    assert table(items=[rewarded()], closed=True) == ("train", "feedback", 1.0)
    assert table(items=[rewarded(5.0)], closed=True)[2] == 1.0, "clipped"
    assert table(items=[rewarded(weight=0.0)], closed=True) == ("reject", "no_feedback", 0.0)
    both = [rewarded(-1.0), rewarded(0.5, "r2", key_id="k2"), rewarded(0.25, "r3", received=NOW + 2)]
    assert table(items=both, closed=True)[2] == 0.375, "the newest item of each source"


def test_without_declared_metrics_the_reward_is_awaited() -> None:
    assert table(job=job(metrics={}), items=[]) == ("wait", "feedback", 0.0)
    assert table(job=job(metrics={}), items=[rewarded()]) == ("train", "feedback", 1.0)


def test_a_value_out_of_range_is_refused() -> None:
    (one,) = Matching(job()).on_feedback(1, rewarded(11.0), NOW)
    assert (one.status, one.reason) == ("rejected", "out_of_range")


def test_unknown_metrics_do_not_count() -> None:
    liked = rating("l1", 1.0, metric="liked", key_id="stranger")
    assert table(items=[liked], closed=True) == ("reject", "no_feedback", 0.0)
    defaults = job(metrics={"rating": {"type": "float", "default_after_s": 1.0}})
    assert table(job=defaults, items=[liked])[:2] == ("train", "default")
    matching, _ = settled([interaction()], [rating(), liked, rewarded(key_id="judge")])
    assert matching.ready["i1"][0].judges == ("judge", "k1")


def test_the_funnel_has_the_mean_reward() -> None:
    funnel = Funnel(job())
    funnel.on_feedback([rewarded(0.5), rewarded(-1.0, "r2"), rewarded(99.0, "r3"), rating("l1", 1.0, metric="liked")])
    row = funnel.row()
    assert row["online/metric/reward"] == -0.25
    assert "online/metric/liked" not in row


# -- what it is about -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([rewarded(1.0)], [(["i1"], 1.0, "feedback"), (["i2"], 0.0, "credit")]),
        ([rewarded(1.0, inference="i2")], [(["i1"], 0.5, "credit"), (["i2"], 1.0, "feedback")]),
        ([rewarded(1.0, episode=EPISODE)], [(["i1"], 0.5, "credit"), (["i2"], 1.0, "feedback")]),
        ([rewarded(1.0, episode=EPISODE, turn=0)], [(["i1"], 1.0, "feedback"), (["i2"], 0.0, "credit")]),
        (
            [rewarded(1.0, inference="i2"), rewarded(0.5, "r2", episode=EPISODE)],
            [(["i1"], 0.75, "credit"), (["i2"], 1.5, "feedback")],
        ),
        ([], []),
    ],
)
def test_the_reward_judges_its_target(items: list[Feedback], expected: list[Any]) -> None:
    assert trained(items, gamma=0.5) == expected


def test_the_reward_of_an_episode_reaches_the_end_of_every_branch() -> None:
    """The episode has two conversations, one beginning after the first turn of the other."""
    first, other = turns(rendered_anew=True)
    second = interaction("i3", at=NOW + 6, episode=EPISODE, alone=False, prompt_ids=[7, 8, 1, 2, 30], version=6)
    matching, _ = settled([first, other, second], [rewarded(0.5, episode=EPISODE), END])
    matching.sweep(version=6, now=NOW + 7)
    found = {turn.interaction.id: one.reward for one in matching.ready[EPISODE] for turn in one.turns}
    assert found == {"i1": 0.5, "i2": 0.5, "i3": 0.5}


def test_a_metric_of_level_episode_ignores_turn_numbers() -> None:
    item = rating("f1", True, episode=EPISODE, metric="solved", turn=0)
    found = [(["i1"], 0.5, "credit"), (["i2"], 1.0, "feedback")]
    assert trained([item], metrics=learning.SOLVED, gamma=0.5) == found
    assert trained([replace(item, turn=-1)], metrics=learning.SOLVED, gamma=0.5) == found


def test_without_credit_the_reward_is_on_the_newest_turn() -> None:
    matching, _ = settled(turns(), [], gamma=0.0, idle_ttl_s=60.0)
    matching.on_feedback(1, rewarded(episode=EPISODE), NOW)
    matching.sweep(version=6, now=NOW + 66)
    assert {key: [one.reward for one in found] for key, found in matching.ready.items()} == {"i2": [1.0]}
