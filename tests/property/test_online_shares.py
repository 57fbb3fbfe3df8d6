"""No owner has more of a batch than its share, however much traffic it sends."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.services.coordinator.online.fairness import (
    InFlightBounds,
    Owners,
    OwnerShares,
    flaws_of_shares,
    within_bounds,
)
from penstock.services.coordinator.online.groups import group_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource, within_shares
from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.events import Admission, Admitted, BatchSealed, Event
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, Interaction
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import encode_group

HOSTILE = "hostile"
SHARE = 0.2
HONEST = [f"customer-{number}" for number in range(8)]
ROLES = ("max_share_per_key", "max_share_per_asker", "max_share_per_user")


def job(batch: int = 20, **online: Any) -> OnlineJob:
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "shares", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 2}, "train": {"batch_size": batch, "max_lag": 1},
            "online": {"metrics": {"rating": {"type": "float"}}, "max_wait_s": 10.0, **online},
        }
    )  # fmt: skip


# -- one batch --------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from([HOSTILE] * 9 + ["a", "b", "c"])
SOME = st.lists(NAMES, min_size=1, max_size=2, unique=True).map(tuple)
OWNERS = st.lists(st.builds(Owners, SOME, SOME, st.tuples(NAMES)), min_size=1, max_size=60)


def admission(ordinal: int, owners: Owners) -> Admission:
    judges, askers, (user,) = owners
    return Admission(
        ordinal, {f"i{ordinal}": ordinal}, {}, 0.0, 0, judges[0], user, "feedback", 0.0, judges=list(judges),
        askers=list(askers),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    OWNERS, st.integers(2, 40), st.tuples(*[st.sampled_from([0.05, 0.2, 0.29, 1 / 3, 0.5, 0.7, 1.0])] * 3), st.data()
)
def test_no_batch_exceeds_an_owners_share(
    owners: list[Owners], size: int, shares: tuple[float, ...], data: st.DataObject
) -> None:
    config = job(**dict(zip(ROLES, shares, strict=True)))
    least = data.draw(st.integers(1, size))
    draws = [Draw(ordinal) for ordinal in range(len(owners))]
    known = {ordinal: admission(ordinal, each) for ordinal, each in enumerate(owners)}
    chosen = within_shares(config, draws, known, size, least=least)
    assert not chosen or least <= len(chosen) <= size
    assert len(set(chosen)) == len(chosen)
    batch = [owners[draw.ordinal] for draw in chosen]
    assert flaws_of_shares(config.online, batch) == []
    for role, share in enumerate(shares):
        counts = Counter(name for each in batch for name in each[role])
        assert all(count <= share * len(batch) for count in counts.values()), "never rounded up"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.builds(Owners, SOME, SOME, st.tuples(NAMES)), min_size=1, max_size=4), max_size=20))
def test_trajectories_accepted_together_fit_together(episodes: list[list[Owners]]) -> None:
    config = job(max_share_per_key=0.3, max_share_per_asker=0.4, max_share_per_user=0.5)
    shares, taken = OwnerShares(config.online, 10), list[Owners]()
    for episode in episodes:
        taken += episode if shares.try_add(episode) else []
    for role, most in enumerate((3, 4, 5)):
        counts = Counter(name for each in taken for name in each[role])
        assert max(counts.values(), default=0) <= most


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.builds(Owners, SOME, SOME, st.tuples(NAMES)), st.sampled_from(["policy", "supervised"]))),
    st.tuples(*[st.sampled_from([0.05, 0.2, 1 / 3, 1.0])] * 3),
)
def test_every_episode_fits_within_the_shares_of_its_owners(
    found: list[tuple[Owners, Objective]], shares: tuple[float, ...]
) -> None:
    config = job(off_policy={"supervised": {}}, **dict(zip(ROLES, shares, strict=True)))
    parts = within_bounds(config, range(len(found)), lambda left: [[n] for n in left], lambda part: found[part[0]])
    assert bool(parts) is bool(found)
    assert parts == sorted(parts)
    assert InFlightBounds.of(config).try_add([found[part[0]] for part in parts]), "parts wait for ever"
    for place, share in enumerate(shares):
        counts = Counter(name for (part,) in parts for name in found[part][0][place])
        assert share == 1 or max(counts.values(), default=0) <= share * config.max_draws


def test_a_batch_that_is_not_due_is_full_or_empty() -> None:
    config = job(max_share_per_key=0.5)
    known = {n: admission(n, Owners((HOSTILE if n < 6 else "a",), ("x",), ("u",))) for n in range(9)}
    draws = [Draw(n) for n in known]
    assert within_shares(config, draws, known, 8, least=8) == []
    assert [draw.ordinal for draw in within_shares(config, draws, known, 8)] == [0, 1, 2, 6, 7, 8]


# -- a flood ----------------------------------------------------------------------------------------------------------


class Flood:
    """A job under traffic: each answer gets feedback at once, and each batch is trained at once."""

    def __init__(self, config: OnlineJob) -> None:
        self.config, self.now, self.served = config, 1000.0, 0
        self.matching = Matching(config)
        source = LiveSource(config, self.matching)
        self.run = JobRun(config, LedgerState(), num_ordinals=None, writer_epoch=1, source=source)
        self.entries: list[list[Event]] = []
        self.interactions: dict[int, Interaction] = {}
        self.batches: list[list[Admission]] = []
        self.stored = 0
        self.decide()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="c"))

    def traffic(self, asker: str, judge: str) -> None:
        self.answer(asker, judge, token=2, value=-1.0 if judge == HOSTILE else 1.0)
        self.step(everything=False)

    def answer(self, asker: str, judge: str, *, token: int, value: float) -> None:
        self.served += 1
        seq, name = self.served, f"i{self.served}"
        self.interactions[seq] = record = Interaction(
            id=name, request=name, index=0, job="j", episode=f"e-{name}", alone=True, key_id=asker, user=asker,
            split="train", untrainable="", prompt_ids=[1], token_ids=[token], logprobs=[-0.1],
            spans=[Span(self.run.state.version, 0, 1)], sampling=Sampling(max_new_tokens=2), finish="stop", template="",
            body_digest="", text="", started=self.now, first_token=self.now, ended=self.now,
        )  # fmt: skip
        self.matching.on_interaction(seq, record)
        feedback = Feedback(
            id=f"f{seq}", job="j", kind="metric", key_id=judge, received=self.now, inference=name, metric="rating",
            value=value,
        )  # fmt: skip
        self.matching.on_feedback(seq, feedback, self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.step(everything=True)

    def step(self, *, everything: bool) -> None:
        version = self.run.state.start_version(self.run.state.next_number)
        self.matching.sweep(version=version, now=self.now, everything=everything)
        self.decide()
        self.train()

    def decide(self) -> None:
        self.commit(self.run.decide(Inputs(self.now)))

    def commit(self, events: list[Event]) -> None:
        if not events:
            return
        self.entries.append(events)
        effects = self.run.commit(events)
        for event in events:
            if isinstance(event, Admitted):
                self.matching.on_admitted(event.admissions)
            if isinstance(event, BatchSealed):
                self.batches.append([self.run.state.admissions[group.draw.ordinal] for group in event.groups])
        for draw in effects.tickets:
            one = self.run.state.admissions[draw.ordinal]
            turns = [self.interactions[seq] for seq in one.interactions.values()]
            self.stored += 1
            _, header = encode_group(group_of("j", draw, turns, reward=one.reward, epoch=1))
            self.run.on_group(self.stored, header)
        if effects.tickets:
            self.decide()

    def report(self, report: Report) -> None:
        events = self.run.on_report(report, Inputs(self.now))
        self.commit(events + self.run.decide(Inputs(self.now), after=events))

    def train(self) -> None:
        while self.run.state.sealed:
            batch = self.run.state.sealed[min(self.run.state.sealed)]
            version = batch.start_version + 1
            self.report(
                Report(
                    kind="trained", epoch=1, batch=batch.number, revision=batch.revision, version=version, digest="w"
                )
            )


@pytest.mark.long
@pytest.mark.parametrize("role", ["asks and judges", "asks", "judges"])
def test_a_flood_of_one_key_is_at_most_its_share_of_every_batch(role: str) -> None:
    """One key requests nine of ten answers, judges nine of ten, or does both."""
    flood = Flood(job(10, max_share_per_key=SHARE, max_share_per_asker=SHARE))
    for number in range(300):
        hostile = number % 10 != 0
        honest = HONEST[number % 8 if hostile else number // 10 % 8]
        other = HONEST[number // 10 % 8]
        asker = HOSTILE if hostile and role != "judges" else honest
        judge = HOSTILE if hostile and role != "asks" else other
        flood.traffic(asker, judge)
        if number % 10 == 9:
            flood.passes(1.0)
    assert len(flood.batches) >= 3, "30 honest answers, 8 for each batch"
    for batch in flood.batches:
        assert len(batch) == 10, "draws that wait for their share make no small batch"
        assert sum(HOSTILE in one.judges for one in batch) <= 2
        assert sum(HOSTILE in one.askers for one in batch) <= 2
    assert not audit_ledger(flood.entries, flood.config).violations


def bandit(config: OnlineJob, *, rounds: int) -> float:
    """Train a policy over four answers under inverted feedback on nine of ten; return the final share of right answers.

    Its gradient is that of REINFORCE with advantages normalised over the batch.
    """
    flood, rng, logits, trained = Flood(config), random.Random(0), [0.0] * 4, 0
    chances = [0.25] * 4
    for number in range(rounds):
        for key in [HOSTILE] * 9 + [HONEST[number % 8]]:
            (token,) = rng.choices(range(4), chances)
            right = token == 0
            flood.answer(key, key, token=token, value=1.0 if right == (key != HOSTILE) else -1.0)
        flood.step(everything=True)
        for batch in flood.batches[trained:]:
            rewards = [one.reward for one in batch]
            mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
            for one in batch:
                (seq,) = one.interactions.values()
                token, advantage = flood.interactions[seq].token_ids[0], (one.reward - mean) / (spread + 1e-6)
                for place, chance in enumerate(chances):
                    logits[place] += 2.0 * advantage * ((place == token) - chance) / len(batch)
        trained = len(flood.batches)
        total = sum(map(math.exp, logits))
        chances = [math.exp(logit) / total for logit in logits]
    return chances[0]


def test_inverted_feedback_on_nine_of_ten_answers_does_not_flip_a_policy() -> None:
    shares = {"max_share_per_key": SHARE, "max_share_per_asker": SHARE}
    assert bandit(job(10, **shares), rounds=90) >= 0.8
    assert bandit(job(10), rounds=20) <= 0.1, "without shares the policy flips"


def test_with_few_honest_answers_a_batch_waits_and_is_then_small() -> None:
    flood = Flood(job(max_share_per_key=SHARE, max_share_per_asker=SHARE))
    for number in range(90):
        flood.traffic(HOSTILE, HOSTILE)
        if number % 10 == 0:
            flood.traffic(HONEST[number // 10 % 8], HONEST[number // 10 % 8])
    assert flood.batches == [], "9 honest answers make no batch of 20"
    flood.passes(9.0)
    flood.traffic(HOSTILE, HOSTILE)
    assert flood.batches == []
    flood.passes(2.0)
    (batch,) = flood.batches
    assert len(batch) == 11
    assert sum(HOSTILE in one.judges for one in batch) == 2


def test_a_flood_alone_fills_no_batch() -> None:
    flood = Flood(job(max_share_per_key=SHARE, max_share_per_asker=SHARE))
    for _ in range(60):
        flood.traffic(HOSTILE, HOSTILE)
        flood.passes(1.0)
    assert flood.batches == []
    assert len(flood.run.state.open) == 8, "a fifth of the 40 places"


def test_the_backlog_of_a_flood_is_bounded() -> None:
    flood = Flood(job(max_share_per_key=SHARE))
    flood.traffic("a", "a")
    for _ in range(300):
        flood.traffic(HOSTILE, HOSTILE)
    flood.passes(1.0)
    assert flood.matching.num_waiting <= 257
    assert len(flood.matching.ready) <= 256
    owners = Counter(admission.judges[0] for admission in flood.run.state.admissions.values())
    assert owners == {HOSTILE: 8, "a": 1}


def test_an_audit_finds_a_batch_that_is_mostly_of_one_key() -> None:
    flood = Flood(job())
    for _ in range(20):
        flood.traffic(HOSTILE, HOSTILE)
    assert len(flood.batches) == 1
    found = audit_ledger(flood.entries, job(max_share_per_key=SHARE)).violations
    assert found == {"admissions": ["batch 1: key 'hostile' has 20 of 20, more than its share of 0.2"]}
