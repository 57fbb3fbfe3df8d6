"""Posted episodes: turns in any order, ended by `done` or by time, with credit along their branches."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online import episode as episode_module
from penstock.services.coordinator.online.admission import PolicyState, facts_of
from penstock.services.coordinator.online.episode import PostedEpisode
from penstock.services.coordinator.online.fairness import flaws_of_weights
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.online.statuses import UnrecordedDecisions
from penstock.services.coordinator.online.turns import FeedbackItem, PostedTurn, tokens_of
from penstock.services.coordinator.queries.admission_audit import StoredFacts, replay_admissions
from penstock.services.coordinator.training.decision import Draft, copy_state
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, Checkpointed, Dropped, JobStarted
from penstock.shared.protocol.live.interaction import Erasure, Feedback

spec = importlib.util.spec_from_file_location("off_policy", Path(__file__).with_name("test_off_policy.py"))
assert spec is not None
assert spec.loader is not None
off_policy: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(off_policy)
NOW, TRUSTED = off_policy.NOW, {"posted": off_policy.TRUSTED}
EPISODE = "0192f0c1-0000-7000-8000-00000000000e"
EPOCH: dict[str, Any] = {"writer_epoch": 1, "time": NOW}
BOTH_LEVELS = {"reward": {"type": "float"}, "solved": {"type": "float", "level": "episode"}}


def job(**online: Any) -> OnlineJob:
    found: OnlineJob = off_policy.job(**TRUSTED | online)
    return found


def turn(number: int, prompt: list[int], answer: list[int], *, done: bool = False, **body: Any) -> Feedback:
    changes = {name: body.pop(name) for name in ("received", "user", "revision", "key_id") if name in body}
    changes["episode"] = body.pop("episode", EPISODE)
    body = {
        "prompt_token_ids": prompt,
        "token_ids": answer,
        "policy_version": 5,
        "logprobs": [-0.5] * len(answer),
    } | body
    found: Feedback = off_policy.item(
        "interaction", body.pop("name", f"t{number}"), turn=number, final=done, body=body, **changes
    )
    return found


def conversation() -> list[Feedback]:
    """Build three turns of one conversation; the last has a reward."""
    return [
        turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), turn(2, [1, 2, 3, 4, 5], [6], done=True, reward=0.5),
    ]  # fmt: skip


def larger(config: OnlineJob, **online: Any) -> OnlineJob:
    """Return ``config`` with batches of 64 and with ``online`` merged into its section."""
    spec = config.model_dump(mode="json", exclude_unset=True)
    return OnlineJob.parse(spec | {"train": {"batch_size": 64}, "online": spec["online"] | online})


def two_turns() -> list[Feedback]:
    """Build two turns of one conversation, each its own trajectory under a discount."""
    return [turn(0, [1], [2]), turn(1, [1, 2, 3], [4], done=True, reward=0.5)]


class Leader:
    """A leader that reads feedback, decides and admits; with ``before`` it continues from the ledger of that leader."""

    def __init__(self, config: OnlineJob, items: list[Feedback], before: Leader | None = None) -> None:
        self.config, self.items = config, items
        self.entries: list[list[Any]] = [] if before is None else list(before.entries)
        self.unrecorded = UnrecordedDecisions()
        self.matching = Matching(config)
        self.source = LiveSource(config, self.matching)
        self.run = JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1, source=self.source)
        for entry in self.entries:
            self.run.commit(entry)
        if before is None:
            self.commit([JobStarted(**EPOCH, config_digest="c")])
            self.commit([Checkpointed(**EPOCH, number=0, version=5, digest="w", path="p", trainer_epoch=1, low_seq=1)])
        self.matching.restore(self.run.state)
        self.statuses: dict[str, tuple[str, str]] = {}
        self.read(self.run.state.read_from[1])

    def commit(self, events: list[Any]) -> None:
        self.unrecorded.close_episodes(self.matching.examples.closed.drain())
        events = [*self.unrecorded.drain(epoch=1, now=NOW, read_to=(1, len(self.items) + 1)), *events]
        self.entries.append(events)
        self.run.commit(events)

    def read(self, start: int) -> None:
        for seq, item in enumerate(self.items, 1):
            if seq >= start:
                self.record(self.matching.on_feedback(seq, item, NOW))

    def record(self, statuses: list[Any]) -> None:
        self.statuses |= {one.feedback: (one.status, one.reason) for one in statuses}
        self.unrecorded.add(statuses)

    def add(self, *items: Feedback) -> None:
        self.items = [*self.items, *items]
        self.read(len(self.items) - len(items) + 1)

    def decide(self, at: float = 1.0) -> list[Admission]:
        self.record(self.matching.sweep(version=5, now=NOW + at))
        draft = Draft(self.run, copy_state(self.run.state), Inputs(NOW + at))
        self.source.draw(draft)
        self.commit(draft.events)
        found = [one for event in draft.events if isinstance(event, Admitted) for one in event.admissions]
        self.matching.on_admitted(found)
        return found


def rewards(admissions: list[Admission]) -> dict[str, float]:
    return {" ".join(one.origin[1:]): one.reward for one in admissions}


def replay(leader: Leader, admissions: list[Admission]) -> tuple[int, list[str]]:
    items = {seq: [item] for seq, item in enumerate(leader.items, 1)}
    return replay_admissions(admissions, StoredFacts({}, items), leader.config)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_turns_in_any_order_are_credited_like_served_ones(order: tuple[int, ...], gamma: float) -> None:
    leader = Leader(job(gamma=gamma), [])
    for place in order:
        assert leader.decide() == [], "turns are missing"
        assert leader.matching.low_water()[1] == 1, "a new leader must read all of them"
        leader.add(conversation()[place])
    admissions = leader.decide()
    expected = {"t0 t1 t2": 0.5} if gamma == 1 else {"t0": 0.125, "t1": 0.25, "t2": 0.5}
    assert rewards(admissions) == expected
    assert {one.weight for one in admissions} == {1.0}
    assert replay(leader, admissions) == (len(admissions), [])
    assert leader.matching.low_water()[1] == 3, "nothing is undecided"


@pytest.mark.parametrize(("solved", "reward"), [(True, 1.0), (False, -1.0)])
def test_an_episode_may_have_a_boolean_reward(solved: bool, reward: float) -> None:
    metrics = {"solved": {"type": "boolean", "level": "episode", "default_value": not solved}}
    items = [turn(0, [1], [2]), turn(1, [1, 2, 3], [4], done=True, rewards={"solved": solved})]
    leader = Leader(job(gamma=0.5, metrics=metrics), items)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0": reward / 2, "t1": reward}
    assert replay(leader, admissions) == (2, [])


def test_an_undeclared_reward_counts_on_its_turn() -> None:
    metrics = {"solved": {"type": "boolean", "level": "episode"}}
    items = [
        turn(0, [1], [2], reward=0.5), turn(1, [1, 2, 3], [4], done=True, reward=-0.5, rewards={"solved": True})
    ]  # fmt: skip
    leader = Leader(job(gamma=0.5, metrics=metrics), items)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0": 0.75, "t1": 0.5}
    assert replay(leader, admissions) == (2, [])
    alone = Leader(job(gamma=0.5, metrics=metrics), two_turns())
    assert rewards(alone.decide()) == {"t0": 0.25, "t1": 0.5}


def test_an_episode_without_an_end_closes_when_idle() -> None:
    leader = Leader(job(idle_ttl_s=60.0), [replace(one, final=False) for one in conversation()])
    assert leader.decide(59.0) == []
    assert rewards(leader.decide(61.0)) == {"t0 t1 t2": 0.5}
    gap = Leader(job(idle_ttl_s=60.0), [conversation()[0], conversation()[2]])
    assert gap.decide(59.0) == [], "turn 1 may still arrive"
    found = gap.decide(61.0)
    assert rewards(found) == {"t0 t2": 0.5}, "its tokens are in the next prompt"
    far = Leader(job(idle_ttl_s=60.0), [turn((1 << 31) - 1, [1], [2], done=True, reward=0.5)])
    assert far.decide(59.0) == []
    assert rewards(far.decide(61.0)) == {f"t{(1 << 31) - 1}": 0.5}
    busy = [replace(one, final=False, received=NOW + 40.0 * one.turn) for one in conversation()]
    aged = Leader(job(idle_ttl_s=60.0, max_age_s=90.0), busy)
    assert aged.decide(89.0) == []
    assert rewards(aged.decide(91.0)) == {"t0 t1 t2": 0.5}


def test_turns_without_a_number_are_ordered_by_arrival() -> None:
    items = [replace(one, turn=-1, received=NOW + place) for place, one in enumerate(conversation())]
    leader = Leader(job(gamma=0.5), items[:2])
    assert leader.decide() == []
    leader.add(items[2])
    assert rewards(leader.decide()) == {"t0": 0.125, "t1": 0.25, "t2": 0.5}


@pytest.mark.parametrize("another", [False, True])
def test_every_leader_refuses_a_turn_after_the_end(another: bool) -> None:
    leader = Leader(job(), conversation())
    assert leader.decide()
    late = turn(3, [1, 2, 3, 4, 5, 6, 7], [8], done=True, reward=1.0)
    if another:
        leader = Leader(job(), [*leader.items, late], leader)
    else:
        leader.add(late)
    assert leader.decide() == []
    assert leader.statuses["t3"] == ("rejected", "episode_over")
    other = turn(0, [1], [2], done=True, reward=1.0, name="other", key_id="k2")
    leader.add(other)
    assert rewards(leader.decide()) == {"other": 1.0}, "episode names are scoped to the key"


@pytest.mark.parametrize(("ended", "gap", "at"), [("done", 0, 0), ("idle", 0, 60), ("aged", 40, 90)])
def test_every_leader_refuses_a_refused_episode(ended: str, gap: float, at: float) -> None:
    """A late turn adds nothing to an episode, even for a leader that reads all turns of the episode at once."""
    config = job(idle_ttl_s=60.0, max_age_s=90.0)
    rated = [
        replace(one, received=NOW + gap * one.turn, final=one.final and ended == "done") for one in conversation()
    ]  # fmt: skip
    unrated = [replace(one, body=one.body | {"reward": None}) for one in rated]
    late = turn(3, [1, 2, 3, 4, 5, 6, 7], [8], done=True, reward=1.0, received=NOW + at)
    first = Leader(config, unrated)
    assert first.decide(95.0) == []
    first.add(late)
    assert first.decide(95.0) == []
    second = Leader(config, first.items, first)
    assert second.decide(95.0) == []
    assert second.statuses == {}, "the ledger has it"
    second = Leader(config, first.items)
    assert second.decide(95.0) == []
    assert second.statuses == first.statuses, "nor does the time of reading change it"
    assert first.statuses == dict.fromkeys(["t0", "t1", "t2"], ("rejected", "no_reward")) | {
        "t3": ("rejected", "episode_over")
    }
    ready = Leader(config, [*rated, late])
    assert rewards(ready.decide(95.0)) == {"t0 t1 t2": 0.5}, "those that had arrived are decided at once"


def test_every_leader_refuses_late_turns_below_the_mark() -> None:
    """Another episode moved the mark past this one, which neither the ledger nor the messages read again name."""
    unrated = [replace(one, body=one.body | {"reward": None}) for one in conversation()]
    first = Leader(job(), unrated)
    assert first.decide() == []
    first.add(turn(0, [1], [2], done=True, reward=1.0, name="other", key_id="k2"))
    assert rewards(first.decide()) == {"other": 1.0}
    assert first.run.state.read_from[1] > len(unrated)
    late = turn(3, [1, 2, 3, 4, 5, 6, 7], [8], reward=1.0)
    second = Leader(first.config, [*first.items, late], first)
    assert second.decide(10_000.0) == []
    assert second.statuses == {"t3": ("rejected", "episode_over")}
    third = Leader(first.config, [*unrated, *second.items[3:], replace(late, id="t4", turn=4)], second)
    assert third.decide(10_000.0) == []
    assert third.statuses["t4"] == ("rejected", "episode_over")


def test_turns_of_one_message_and_revisions_are_not_late() -> None:
    together = Leader(job(), [])
    for one in conversation():
        together.record(together.matching.on_feedback(1, replace(one, final=True), NOW))
    assert rewards(together.decide()) == {"t0 t1 t2": 0.5}
    revised = replace(conversation()[0], revision=1, received=NOW + 70)
    leader = Leader(job(idle_ttl_s=60.0), [*(replace(one, final=False) for one in conversation()), revised])
    assert rewards(leader.decide(130.0)) == {"t0 t1 t2": 0.5}


def test_an_episode_has_at_most_max_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_module, "MAX_TURNS", 2)
    items = [replace(one, final=False, body=one.body | {"reward": 0.5}) for one in conversation()]
    first = Leader(job(idle_ttl_s=60.0), items)
    assert first.decide(59.0) == []
    assert first.statuses["t2"] == ("rejected", "too_many_turns")
    assert list(first.matching.examples.items) == ["t0", "t1"]
    first.add(replace(items[0], revision=1))
    known = Leader(first.config, first.items, first)
    second = Leader(first.config, first.items)
    assert rewards(second.decide(61.0)) == rewards(known.decide(61.0)) == {"t0": 1.0, "t1": 0.5}
    assert rewards(first.decide(61.0)) == {"t0": 1.0, "t1": 0.5}
    assert second.statuses["t2"] == ("rejected", "too_many_turns"), "a revised turn arrived with its first revision"


def test_another_leader_decides_the_same() -> None:
    items = [conversation()[2], conversation()[0]]
    first = Leader(job(gamma=0.5), items)
    assert first.decide() == []
    second = Leader(job(gamma=0.5), [*items, conversation()[1]], first)
    unbroken = Leader(job(gamma=0.5), [*items, conversation()[1]])
    assert second.decide() == unbroken.decide()


def test_untrained_turns_count_by_credit_and_are_decided_with_the_rest() -> None:
    items = conversation()
    items[1] = replace(items[1], body=items[1].body | {"policy_version": 1, "reward": 0.25})  # stale
    leader = Leader(job(gamma=0.5, off_policy=None), items)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0": 0.25, "t2": 0.5}
    assert [list(one.feedback) for one in admissions] == [["t0"], ["t2", "t1"]]
    assert replay(leader, admissions) == (2, [])
    refused = Leader(job(posted={}, off_policy=None), conversation())
    assert refused.decide() == []
    assert set(refused.statuses.values()) == {("rejected", "source_not_trusted")}
    refused.add(turn(3, [9], [9], reward=1.0))
    refused.decide()
    assert refused.statuses["t3"] == ("rejected", "episode_over")


def test_assumed_turns_form_no_trajectory_together() -> None:
    """Assumed turns have no log-probs of their own; each draw gets those of the newest policy, for one answer."""
    items = [replace(one, body=one.body | {"policy_version": None, "logprobs": None}) for one in conversation()]
    leader = Leader(job(posted=off_policy.TRUSTED | {"assume_on_policy": True}), items)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0": 0.5, "t1": 0.5, "t2": 0.5}
    assert {one.reason for one in admissions} == {"assumed"}
    assert replay(leader, admissions) == (3, [])


def test_an_episode_of_an_untrusted_key_is_refused_without_its_tree() -> None:
    config = job(posted={}, off_policy=None)
    turns = {
        one.id: PostedTurn(FeedbackItem(seq, one), facts_of(one), tokens_of(one, config))
        for seq, one in enumerate(conversation(), 1)
    }
    episode = PostedEpisode(f"k1 {EPISODE}", turns)
    present = PolicyState(version=5, newest=5, temperature=1.0)
    outcome = episode.settle(config, present)
    assert outcome is not None
    assert (outcome.trajectories, outcome.refused) == ([], dict.fromkeys(turns, "source_not_trusted"))
    assert episode._credit is None


def test_interleaved_agents_share_no_credit_and_weigh_as_one() -> None:
    agents = [
        turn(0, [1], [2]), turn(1, [7], [8]), turn(2, [1, 2, 3], [4], reward=1.0),
        turn(3, [7, 8, 9], [10], reward=-1.0, done=True),
    ]  # fmt: skip
    leader = Leader(job(), agents)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0 t2": 1.0, "t1 t3": -1.0}
    assert [(one.share, one.weight) for one in admissions] == [(0.5, 0.5)] * 2
    assert replay(leader, admissions) == (2, [])
    assert flaws_of_weights(leader.entries, {}, leader.config) == []
    greedy = [replace(admissions[0], share=1.0, weight=1.0), admissions[1]]
    assert replay(leader, greedy) == (2, ["ordinal 0: decided again its share of the episode would be 0.5"])
    shared = [replace(admissions[0], reward=0.0), admissions[1]]
    assert replay(leader, shared) == (2, ["ordinal 0: decided again its reward would be 1, not 0"])
    apart = [replace(admissions[0], origin=[*admissions[0].origin[:2], "t9"]), admissions[1]]
    assert replay(leader, apart)[1] == ["ordinal 0: decided again its turns would not be trained so"]
    assert replay(Leader(job(), agents[:3]), admissions) == (0, []), "a part of it is gone"


def test_the_reward_of_the_episode_reaches_the_end_of_each_branch() -> None:
    agents = [
        turn(0, [1], [2]),
        turn(1, [7], [8], reward=0.25),
        turn(2, [1, 2], [4], done=True, rewards={"solved": 1.0}),
    ]
    leader = Leader(job(metrics=BOTH_LEVELS, gamma=0.5), agents)
    assert rewards(leader.decide()) == {"t0": 0.5, "t1": 1.25, "t2": 1.0}


def test_turns_of_text_are_credited_and_imitated() -> None:
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "completion": {"content": "y"}}
    items = [
        replace(turn(0, [], []), body=text), replace(turn(1, [], [], done=True), body=text | {"reward": 0.5}),
    ]  # fmt: skip
    leader = Leader(job(gamma=0.5, off_policy={"supervised": {"min_reward": 0.2}}), items)
    (one,) = (leader.decide(),)
    assert [(admission.objective, admission.reason, admission.reward) for admission in one] == [
        ("supervised", "text_only", 0.25), ("supervised", "text_only", 0.5),
    ]  # fmt: skip
    assert replay(leader, one) == (2, [])


def test_a_single_turn_is_decided_as_if_it_had_no_episode() -> None:
    one = turn(0, [7, 8], [1, 2], done=True, reward=0.5)
    found = Leader(job(), [one]).decide()
    plain = Leader(job(), [replace(one, episode="", turn=-1)]).decide()
    assert [replace(admission, origin=[]) for admission in found] == plain
    apart = Leader(job(gamma=0.0), conversation())
    assert [admission.reward for admission in apart.decide()] == [0.5], "if each turn counts alone"
    assert apart.statuses["t0"] == ("rejected", "no_reward")


def test_a_revision_retraction_or_deletion_settles_the_episode_again() -> None:
    leader = Leader(job(), conversation())
    leader.record(leader.matching.sweep(version=5, now=NOW + 1))
    assert leader.matching.examples.ready
    leader.add(replace(conversation()[2], revision=1, body=conversation()[2].body | {"reward": -0.5}))
    assert not leader.matching.examples.ready
    assert rewards(leader.decide()) == {"t0 t1 t2": -0.5}
    taken_back = Leader(job(idle_ttl_s=60.0), conversation())
    taken_back.add(off_policy.item("retraction", "r", inference="", body={"feedback": "t1"}))
    assert taken_back.decide() == [], "as if it had never arrived"
    assert rewards(taken_back.decide(61.0)) == {"t0 t2": 0.5}
    erased = Leader(job(), conversation()[:2])
    erased.matching.on_erasure(Erasure(user="u", interactions=[], feedback=["t0", "t1"], time=NOW), NOW)
    assert erased.decide(99_999.0) == []
    assert erased.matching.low_water()[1] == 2


def test_a_turn_revised_to_a_metric_leaves_its_episode() -> None:
    served = off_policy.served("i1", key_id="k1")
    config = job(metrics={"reward": {"type": "float"}}, idle_ttl_s=60.0)
    leader = Leader(config, conversation()[:2])
    leader.matching.on_interaction(1, served)
    leader.add(off_policy.item("metric", "t1", value=1.0, revision=1), conversation()[2])
    assert [(list(one.interactions), one.feedback) for one in leader.decide()] == [(["i1"], {"t1": 3})]
    assert leader.decide() == [], "turn 1 is gone, and may still arrive"
    another = Leader(config, leader.items, leader)
    assert rewards(another.decide(61.0)) == rewards(leader.decide(61.0)) == {"t0 t2": 0.5}
    single = Leader(config, [turn(0, [1], [2], done=True, reward=0.5, name="one", episode="")])
    single.matching.on_interaction(1, served)
    single.record(single.matching.sweep(version=5, now=NOW + 1))
    assert list(single.matching.examples.ready) == ["one"]
    single.add(off_policy.item("metric", "one", value=1.0, revision=1))
    assert [(list(one.interactions), list(one.feedback)) for one in single.decide()] == [(["i1"], ["one"])]
    assert not (single.matching.examples.items or single.matching.examples.ready)


def test_an_episode_with_an_objecting_user_is_refused() -> None:
    items = [replace(conversation()[0], user="private"), *conversation()[1:]]
    leader = Leader(job(), items)
    leader.matching._opted_out = lambda user: user == "private"
    assert leader.decide() == []
    assert {leader.statuses[name] for name in ("t0", "t1", "t2")} == {("rejected", "opted_out")}


def test_turns_of_one_posted_episode_are_not_compared_with_each_other() -> None:
    algorithm = {"type": "reinforce_pp", "baseline": {"siblings": True}}
    config = OnlineJob.parse(job(gamma=0.5).model_dump(mode="json", exclude_unset=True) | {"algorithm": algorithm})
    leader = Leader(config, [replace(one, body=one.body | {"group_id": "g"}) for one in conversation()])
    admissions = leader.decide()
    draws = list(leader.run.state.open)
    baselines, _ = leader.source.values(Draft(leader.run, leader.run.state, Inputs(NOW)), draws)
    assert len(admissions) == 3
    assert set(baselines.values()) == {0.0}, "the tracked value: there is no sibling"


def test_an_episode_larger_than_the_pipeline_is_admitted_alone() -> None:
    small = job(gamma=0.5).model_dump(mode="json", exclude_unset=True) | {"train": {"batch_size": 2, "max_lag": 0}}
    leader = Leader(OnlineJob.parse(small), [turn(0, [9], [9], done=True, reward=0.5, name="other", episode="e2")])
    assert leader.config.max_draws == 2
    leader.add(*conversation())
    assert rewards(leader.decide()) == {"other": 0.5}, "there is no slot beside another one"
    alone = Leader(leader.config, conversation())
    assert rewards(alone.decide()) == {"t0": 0.125, "t1": 0.25, "t2": 0.5}


def test_an_episode_is_admitted_whole_or_waits() -> None:
    config = job(gamma=0.5, max_share_per_key=0.25)
    assert config.max_draws * 0.25 == 2
    first, later = (
        turn(0, [9], [9], done=True, reward=0.5, name=name, episode=f"of {name}") for name in ("first", "later")
    )
    leader = Leader(config, [first, *two_turns(), later])
    assert rewards(leader.decide()) == {"first": 0.5}
    assert leader.decide() == [], "later examples do not overtake it"
    assert {"t0", "t1", "later"} <= leader.matching.examples.ready.keys()
    (draw,) = leader.run.state.open
    leader.commit(
        [Dropped(**EPOCH, draws=[draw], reason="lost", lengths=[0], redraw=False, min_version=0, deadline=NOW)]
    )
    assert rewards(leader.decide()) == {"t0": 0.25, "t1": 0.5}
    assert leader.decide() == [], "both slots of the owner are in use"
    assert list(leader.matching.examples.ready) == ["later"]


@pytest.mark.parametrize("share", ["max_share_per_key", "max_share_per_asker", "max_share_per_user"])
def test_an_episode_beyond_its_owners_share_trains_its_first_turns(share: str) -> None:
    leader = Leader(job(gamma=0.5, **{share: 0.25}), conversation())
    admissions = leader.decide()
    assert rewards(admissions) == {"t0": 0.125, "t1": 0.25}
    assert [list(one.feedback) for one in admissions] == [["t0"], ["t1", "t2"]], "the last one counts by credit"
    assert replay(leader, admissions) == (2, [])
    assert leader.matching.low_water()[1] == 3, "nothing is undecided"


def test_a_text_conversation_beyond_its_users_share_is_decided() -> None:
    config = larger(job(gamma=0.5, off_policy={"supervised": {"min_reward": 0.2}}), max_share_per_user=0.02)
    text: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "completion": {"content": "y"}}
    items = [
        replace(turn(0, [], [], user="u"), body=text),
        replace(turn(1, [], [], user="u", done=True), body=text | {"reward": 0.5}),
    ]
    leader = Leader(config, items)
    admissions = leader.decide()
    assert [(one.objective, list(one.feedback), one.reward) for one in admissions] == [
        ("supervised", ["t0", "t1"], 0.25)
    ]
    assert leader.matching.low_water()[1] == 2, "nothing is undecided"
    assert replay(leader, admissions) == (1, [])


def test_an_excluded_turn_changes_no_other() -> None:
    fork = [turn(0, [1], [2]), turn(1, [1, 2, 3], [4], reward=0.5), turn(2, [1, 2, 5], [6], reward=0.5, done=True)]
    assert [one.share for one in Leader(job(), fork).decide()] == [1.0, 0.5, 0.5]
    leader = Leader(job(max_share_per_user=0.25), fork)
    admissions = leader.decide()
    assert rewards(admissions) == {"t0 t1": 0.5}
    assert [one.share for one in admissions] == [1.0]
    assert replay(leader, admissions) == (1, [])
