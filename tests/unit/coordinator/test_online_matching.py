"""Matching of feedback that names an episode, comes from several keys, or waits for its answer."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online import episode as episode_module
from penstock.services.coordinator.online import statuses as statuses_module
from penstock.services.coordinator.online import undecided
from penstock.services.coordinator.online.admission import refusal_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.off_policy import OffPolicyExamples
from penstock.services.coordinator.online.turns import DISCONNECTED
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.live.interaction import Erasure, Feedback, Interaction

NOW = 1000.0
EPISODE = "0192f0c1-0000-7000-8000-00000000000e"


def matching(**online: Any) -> Matching:
    spec = {
        "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
        "data": {"prompt": {"max_tokens": 16}}, "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 4},
        "online": {"metrics": {"rating": {"type": "float"}}, "gamma": 0.0, **online},
    }  # fmt: skip
    return Matching(OnlineJob.parse(spec))


def served(name: str, *, episode: str = EPISODE, key: str = "asker", alone: bool = True) -> Interaction:
    return Interaction(
        id=name, request=name, index=0, job="j", episode=episode, alone=alone, key_id=key, user="u", split="train",
        untrainable="", prompt_ids=[7], token_ids=[1], logprobs=[-0.5], spans=[Span(0, 0, 1)],
        sampling=Sampling(max_new_tokens=4), finish="stop", template="t", body_digest="b", text="x", started=NOW,
        first_token=NOW, ended=NOW,
    )  # fmt: skip


def rating(name: str, about: str, *, key: str = "asker", **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"inference": about, "value": 0.5, "received": NOW} | changes
    return Feedback(id=name, job="j", kind="metric", key_id=key, metric="rating", **fields)


def correction(name: str, about: str, *, key: str = "asker") -> Feedback:
    body = {"corrected": {"role": "assistant", "content": "better"}}
    return Feedback(id=name, job="j", kind="correction", key_id=key, inference=about, received=NOW, body=body)


def test_a_revision_takes_its_item_away_from_the_turn_that_has_it() -> None:
    """The item names the episode of both turns; its revision counts for the newer turn only."""
    found = matching()
    found.on_interaction(1, served("i1"))
    found.on_feedback(1, rating("f1", "", episode=EPISODE, value=1.0), NOW)
    found.on_interaction(2, served("i2"))
    found.on_feedback(2, rating("f1", "", episode=EPISODE, value=-1.0, revision=1), NOW)
    found.sweep(version=0, now=NOW)
    admitted = {name: one.reward for paths in found.ready.values() for one in paths for name in one.feedback}
    holders = [one.turns[0].interaction.id for paths in found.ready.values() for one in paths if "f1" in one.feedback]
    assert (holders, admitted) == (["i2"], {"f1": -1.0})


def test_an_item_without_weight_does_not_count() -> None:
    """An item of weight 0 trains no answer by default, ends no episode, and does not reduce the credit of others."""
    metrics = {"rating": {"type": "float"}, "solved": {"type": "float", "level": "episode"}}
    found = matching(metrics=metrics)
    found.on_interaction(1, served("i1", alone=False))
    nothing: dict[str, Any] = {"key": "light", "weight": 0.0}
    found.on_feedback(1, rating("f1", "i1", **nothing), NOW)
    found.on_feedback(2, replace(rating("f2", "", episode=EPISODE, **nothing), metric="solved"), NOW)
    assert found.sweep(version=0, now=NOW + 1) == []
    assert (found.num_waiting, found.ready) == (1, {})
    statuses = found.sweep(version=0, now=NOW + 1 + found.job.online.idle_ttl_s)
    assert {(one.status, one.reason) for one in statuses} == {("rejected", "no_feedback")}
    other = matching()
    other.on_interaction(1, served("i1"))
    for seq, item in enumerate((rating("f1", "i1", value=-1.0, **nothing), rating("f2", "i1", weight=0.1)), 1):
        other.on_feedback(seq, item, NOW)
    other.sweep(version=0, now=NOW)
    assert [(one.reward, one.judges) for one in other.ready["i1"]] == [(0.5, ("asker",))], "relative to the others"


def test_no_key_revises_the_feedback_of_another() -> None:
    found = matching()
    found.on_interaction(1, served("i1"))
    found.on_feedback(1, rating("f1", "i1", value=1.0), NOW)
    assert found.on_feedback(2, rating("f1", "i1", key="hostile", value=-1.0, revision=9), NOW) == []
    found.sweep(version=0, now=NOW)
    assert [one.reward for one in found.ready["i1"]] == [1.0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("target", [{"about": "i1"}, {"about": "", "episode": EPISODE, "final": True}])
def test_a_job_may_accept_feedback_of_the_asking_key_only(early: bool, target: dict[str, Any]) -> None:
    found = matching(raters="same_key")
    item = rating("f1", key="other", **target)
    statuses = found.on_feedback(1, item, NOW) if early else []
    statuses += found.on_interaction(1, served("i1"))
    statuses += [] if early else found.on_feedback(1, item, NOW)
    assert [(one.status, one.reason) for one in statuses] == [("rejected", "other_key")]
    statuses = found.on_feedback(2, rating("f2", "i1"), NOW)
    assert [one.status for one in statuses] == ["matched"]
    assert matching().job.online.raters == "any"


def test_unmatched_feedback_is_bounded_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "MAX_PER_KEY", 2)
    found = matching()
    items = [rating(f"f{n}", f"i{n}", key="flood") for n in range(1, 4)]
    statuses = [one for seq, item in enumerate(items) for one in found.on_feedback(seq, item, NOW)]
    assert [(one.feedback, one.status, one.reason) for one in statuses] == [("f1", "expired", "too_many_unmatched")]
    assert found.on_feedback(4, rating("f4", "i4", key="quiet"), NOW) == []
    assert len(found.unmatched) == 3
    assert found.on_interaction(1, served("i1")) == []
    assert [one.feedback for one in found.on_interaction(2, served("i2", episode="other"))] == ["f2"]
    assert len(found.unmatched) == 2


def test_a_message_is_passed_once_all_of_its_items_are_decided() -> None:
    found = matching()
    for seq, names in ((1, ("f1", "f2")), (2, ("f3",))):
        for name in names:
            found.on_feedback(seq, rating(name, f"i-{name}"), NOW)
    assert found.low_water(without=["f1"])[1] == 1, "the other item of the message is undecided"
    assert found.low_water(without=["f1", "f2"])[1] == 2
    assert found.low_water()[1] == 1, "asking decides nothing"
    found.reject(["f2"], "feedback_full", NOW)
    assert found.low_water()[1] == 1
    assert found.low_water(without=["f1"])[1] == 2
    found.reject(["f1", "f3"], "feedback_full", NOW)
    assert found.low_water()[1] == 2, "a message of feedback may hold more items"


def test_pinned_names_keep_their_first_reason_and_others_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statuses_module, "MAX_DECIDED", 2)
    names = statuses_module.DecidedNames()
    names["new"] = "stale"
    names.pin(["old", "new"], "trained")
    for name in ("old", "a", "b", "c"):
        names[name] = "late"
    names.discard("old")
    names.discard("c")
    assert names == {"old": "trained", "new": "trained", "b": "late"}


def test_only_the_reward_fields_of_an_item_are_held() -> None:
    found = matching()
    found.on_feedback(1, rating("f1", "i1", body={"comment": "x" * 9999}, tags={"a": "b"}), NOW)
    (item,) = found.unmatched
    assert (item.feedback.body, item.feedback.tags) == ({}, {})


def test_the_garbage_collector_passes_over_feedback_that_waits() -> None:
    """A full garbage collection that visited a million waiting items would stop the leader for seconds."""
    found = matching()
    gc.collect()
    before = len(gc.get_objects())
    for number in range(2_000):
        found.on_feedback(number + 1, rating(f"f{number}", f"i{number}", key=f"k{number % 5}"), NOW)
    found.sweep(version=0, now=NOW)
    gc.collect()
    assert len(found.unmatched) == 2_000
    assert len(gc.get_objects()) - before < 200
    assert not any(gc.is_tracked(one) for one in (*found._undecided.items.values(), *found.unmatched._keys.values()))


def test_a_turn_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def counted(interaction: Interaction, job: OnlineJob) -> str:
        checked.append(interaction.id)
        return refusal_of(interaction, job)

    monkeypatch.setattr(episode_module, "refusal_of", counted)
    found = matching()
    found.on_interaction(1, served("i1"))
    for _ in range(3):
        found.sweep(version=0, now=NOW)
    assert checked == ["i1"]


def test_a_waiting_episode_costs_nothing_until_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    settled_at: list[float] = []
    settle = episode_module.ServedEpisode._settle

    def spy(episode: Any, job: Any, *, version: int, now: float) -> Any:
        settled_at.append(now)
        return settle(episode, job, version=version, now=now)

    monkeypatch.setattr(episode_module.ServedEpisode, "_settle", spy)
    timed = {"type": "float", "default_after_s": 60}
    found = matching(metrics={"rating": timed}, idle_ttl_s=600, max_age_s=3600)
    for number in range(5):
        found.on_interaction(number, served(f"i{number}", episode=""))
    found.sweep(version=0, now=NOW)
    for second in range(1, 59):
        found.sweep(version=0, now=NOW + second)
    assert settled_at == [NOW] * 5
    found.sweep(version=1, now=NOW + 59)
    assert len(settled_at) == 5, "one version more makes none too old"
    found.on_feedback(1, rating("f1", "i1"), NOW + 59)
    found.sweep(version=1, now=NOW + 59)
    assert len(settled_at) == 6 and len(found.ready) == 1
    found.sweep(version=1, now=NOW + 60)
    assert len(found.ready) == 5, "the default counts from now on"


def test_an_episode_name_is_scoped_to_its_key() -> None:
    found = matching(gamma=1.0)
    for seq, key in enumerate(("a", "b", "a")):
        found.on_interaction(seq, served(f"i{seq}", episode="session-1", key=key, alone=False))
    assert sorted(len(one.turns) for one in found.episodes.values()) == [1, 2]
    for seq, key in enumerate(("a", "b"), 3):  # an id that the gateway gave out is one episode for every key
        found.on_interaction(seq, served(f"i{seq}", key=key, alone=False))
    assert len(found.episodes[EPISODE].turns) == 2


@pytest.mark.parametrize("swept", [False, True])
def test_an_answer_that_was_cut_off_and_completed_counts_as_completed(swept: bool) -> None:
    found = matching()
    whole = served("i1")
    cut = replace(whole, token_ids=[], logprobs=[], spans=[], finish="client_disconnected", untrainable=DISCONNECTED)
    found.on_interaction(1, cut)
    if swept:
        found.sweep(version=0, now=NOW)
        assert not found.episodes
    found.on_interaction(2, whole)
    found.on_interaction(3, cut)
    assert [one.status for one in found.on_feedback(1, rating("f1", "i1"), NOW)] == ["matched"]
    found.sweep(version=0, now=NOW)
    (path,) = found.ready["i1"]
    assert [(turn.seq, turn.interaction.finish) for turn in path.turns] == [(2, whole.finish)]


@pytest.mark.parametrize("stage", ["parked", "matched"])
def test_an_item_is_admitted_from_its_copy(stage: str) -> None:
    """A deletion copied the item to a new message, since its first message also held an item of a deleted user."""
    found = matching()
    if stage == "matched":
        found.on_interaction(1, served("i1"))
    item = rating("f1", "i1")
    found.on_feedback(100, item, NOW)
    found.sweep(version=0, now=NOW)
    assert found.on_feedback(150, item, NOW + 9) == []
    assert found.on_feedback(160, replace(item, received=NOW + 9), NOW + 9) == [], "posted twice: the first one counts"
    if stage == "parked":
        found.on_interaction(1, served("i1"))
    assert found.low_water()[1] == 150
    found.sweep(version=0, now=NOW + 9)
    (path,) = found.ready["i1"]
    assert [(one.seq, one.feedback.received) for one in path.feedback.values()] == [(150, NOW)]


@pytest.mark.parametrize("episode", ["", EPISODE])
def test_an_example_is_built_from_its_copy(episode: str) -> None:
    found = matching(off_policy={"supervised": {}}, gamma=1.0)
    posted: dict[str, Any] = {"completion": {"role": "assistant", "content": "x"}, "rewards": {"rating": 1.0}}
    fields: dict[str, Any] = {"id": "b", "job": "j", "key_id": "k", "received": NOW}
    if episode:
        item = Feedback(kind="interaction", episode=episode, final=True, body=posted, **fields)
    else:
        item = Feedback(kind="correction", inference="i1", **fields)
    found.on_feedback(100, item, NOW)
    found.on_interaction(1, served("i1"))
    found.sweep(version=0, now=NOW + 9)
    assert list(found.examples.ready) == ["b"]
    found.on_feedback(150, item, NOW + 9)
    assert not found.examples.ready, "settled again before it is admitted"
    found.sweep(version=0, now=NOW + 9, everything=False)
    assert found.examples.ready["b"].admission(0, 0, NOW).feedback == {"b": 150}


def test_all_names_in_the_ledger_stay_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statuses_module, "MAX_DECIDED", 3)
    found, numbers = matching(), range(1, 6)
    found.restore(LedgerState(consumed={f"i{n}": n for n in numbers}, used={f"f{n}": n for n in numbers}))
    for n in numbers:
        assert found.on_interaction(n, served(f"i{n}", episode=f"e{n}")) == []
        assert found.on_feedback(n, rating(f"f{n}", f"i{n}"), NOW) == []
    found.sweep(version=0, now=NOW)
    assert (found.num_waiting, found.ready) == (0, {})
    (late,) = found.on_feedback(9, rating("f9", "i1"), NOW)
    assert (late.status, late.reason) == ("rejected", "late_after_training")


def test_examples_about_deleted_interactions_are_refused() -> None:
    found = matching(off_policy={"supervised": {}})
    found.on_erasure(Erasure(user="u", interactions=["i1"], feedback=[], time=NOW), NOW)
    item = Feedback(id="b", job="j", kind="correction", key_id="k", received=NOW, inference="i1")
    assert [(one.status, one.reason) for one in found.on_feedback(2, item, NOW)] == [("rejected", "erased")]


def _seconds_of_pairs(waiting: int, pairs: int = 100) -> float:
    """Match ``pairs`` corrections with answers while ``waiting`` others wait; return the CPU seconds, best of three."""
    found, seconds = matching(off_policy={"supervised": {}}, idle_ttl_s=600), list[float]()
    for number in range(waiting):
        found.on_feedback(number, correction(f"w{number}", f"nothing{number}", key=f"k{number % 7}"), NOW)
    found.sweep(version=0, now=NOW)
    for start in range(waiting, waiting + 3 * pairs, pairs):
        began = time.process_time()
        for number in range(start, start + pairs):
            found.on_feedback(number, correction(f"c{number}", f"i{number}"), NOW)
            found.sweep(version=0, now=NOW, everything=False)
            found.on_interaction(number, served(f"i{number}", episode=""))
            found.sweep(version=0, now=NOW, everything=False)
            found.low_water()
        seconds.append(time.process_time() - began)
    return min(seconds)


def test_matching_takes_as_long_however_much_waits() -> None:
    assert _seconds_of_pairs(8_000) < 4 * _seconds_of_pairs(50)


def test_a_sweep_visits_nothing_that_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = matching(off_policy={"supervised": {}})
    for number in range(50):
        found.on_feedback(number, correction(f"c{number}", f"i{number}"), NOW)
        found.on_feedback(number, rating(f"f{number}", f"j{number}"), NOW)
    found.sweep(version=0, now=NOW)
    visited: list[str] = []
    settle = OffPolicyExamples._settle

    def spy(offers: OffPolicyExamples, name: str, *args: Any) -> str:
        visited.append(name)
        return settle(offers, name, *args)

    monkeypatch.setattr(OffPolicyExamples, "_settle", spy)
    for version in range(3):
        found.sweep(version=version, now=NOW + version)
    assert not visited
    found.on_interaction(1, served("i7", episode=""))
    found.sweep(version=2, now=NOW + 2)
    assert visited == ["c7"]


def test_all_keys_together_have_no_more_waiting_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undecided, "MAX_UNMATCHED", 10)
    monkeypatch.setattr(undecided, "EVICTED_AT_ONCE", 3)
    found = matching()
    for number in range(11):
        statuses = found.on_feedback(number, rating(f"f{number}", f"i{number}", key=f"k{number % 2}"), NOW)
    gone = [(f"f{number}", "expired", "too_many_unmatched") for number in (0, 2, 4)]
    assert [(one.feedback, one.status, one.reason) for one in statuses] == gone
    assert len(found.unmatched) == 8
    assert found.low_water()[1] == 1, "evicted items hold back no mark"
