"""Weights of new sources of feedback: small until they agree with the reference keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.online.fairness import comparisons, flaws_of_weights, weight_of
from penstock.services.coordinator.online.matching import Matching
from penstock.services.coordinator.online.source import LiveSource
from penstock.services.coordinator.training.decision import Draft, copy_state
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.algorithms.agreement import add_pairs, concordance
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.events import (
    Admission,
    Admitted,
    BatchSealed,
    Checkpointed,
    Drawn,
    JobStarted,
    SealedGroup,
)
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Feedback, Interaction

NOW = 1000.0
EPOCH: dict[str, Any] = {"writer_epoch": 1, "time": NOW}


def job(**sources: Any) -> OnlineJob:
    new_sources = {"reference_keys": ["judge"], "items": 10, "agreement": 0.5, **sources}
    return OnlineJob.parse(
        {
            "kind": "online_rl", "name": "live", "model": {"config": {}, "tokenizer": "char"},
            "sampling": {"max_new_tokens": 4}, "train": {"batch_size": 4},
            "online": {"metrics": {"accepted": {"type": "boolean"}}, "new_sources": new_sources},
        }
    )  # fmt: skip


def rating(about: str, value: bool, *, key: str = "k", **changes: Any) -> Feedback:
    fields: dict[str, Any] = {"id": f"{key}-{about}", "received": NOW} | changes
    return Feedback(job="j", kind="metric", key_id=key, inference=about, metric="accepted", value=value, **fields)


def paired(*values: tuple[float, float], key: str = "k") -> Any:
    return add_pairs({}, [(key, x, y) for x, y in values])[key]


# -- agreement ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("both", "only_x", "only_y", "neither", "kappa"),
    [(20, 5, 10, 15, 0.4), (45, 15, 25, 15, 0.1304), (25, 35, 5, 35, 0.2593), (10, 0, 0, 10, 1.0), (0, 9, 9, 0, -1.0)],
)
def test_agreement_of_booleans_is_cohens_kappa(both: int, only_x: int, only_y: int, neither: int, kappa: float) -> None:
    """The first three cases are worked examples of Cohen's kappa for two raters."""
    values = [(1.0, 1.0)] * both + [(1.0, -1.0)] * only_x + [(-1.0, 1.0)] * only_y + [(-1.0, -1.0)] * neither
    assert concordance(paired(*values)) == pytest.approx(kappa, abs=1e-4)


def test_chance_agreement_and_a_constant_rater_show_nothing() -> None:
    rng = random.Random(5)
    assert concordance(paired(*[(1.0, 1.0)] * 50)) == 0.0
    assert concordance(paired(*[(1.0, rng.choice([-1.0, 1.0, 1.0, 1.0])) for _ in range(200)])) == 0.0
    assert abs(concordance(paired(*[(rng.choice([-1.0, 1.0]), rng.choice([-1.0, 1.0])) for _ in range(2000)]))) < 0.1
    assert concordance(paired(*[(0.1, 0.1)] * 7)) == 0.0
    assert concordance((0.0,) * 6) == 0.0


def test_a_shift_costs_agreement_though_the_order_is_the_same() -> None:
    values = [(n / 10, n / 10) for n in range(10)]
    assert concordance(paired(*values)) == pytest.approx(1.0)
    assert concordance(paired(*[(x + 0.5, y) for x, y in values])) < 0.5


# -- what is compared --------------------------------------------------------------------------------------------------


def test_newest_values_are_compared_with_the_reference_mean() -> None:
    config = job(reference_keys=["judge", "people"])
    items = [
        rating("a", True, received=NOW), rating("a", False, received=NOW + 1, id="later"),
        rating("a", True, key="judge"), rating("a", False, key="people"), rating("b", True),
        rating("c", True, key="judge"), rating("d", True, key="other"), rating("d", False, key="judge"),
    ]  # fmt: skip
    assert comparisons(config, items) == [("k", -1.0, 0.0), ("other", 1.0, -1.0)]
    others = [replace(item, metric="reward", value=float(item.value is True)) for item in items]
    assert comparisons(config, others) == [("k", 0.0, 0.5), ("other", 1.0, 0.0)], (
        "the same holds for an undeclared reward"
    )
    assert comparisons(config, [replace(item, metric="liked") for item in items]) == [], "no metric counts it"
    plain = OnlineJob.parse({**config.model_dump(mode="json", exclude_unset=True), "online": {}})
    assert (comparisons(plain, items), weight_of(plain, {}, ["k"], "feedback")) == ([], 1.0)


AGREES = [(1.0, 1.0), (-1.0, -1.0)] * 5
DIFFERS = [(1.0, -1.0), (-1.0, 1.0)] * 5


@pytest.mark.parametrize(
    ("values", "weight"),
    [
        ([], 0.2),
        (AGREES[:9], 0.2),
        (AGREES, 1.0),
        (DIFFERS, 0.2),
        ([*AGREES, *DIFFERS], 0.2),
        ([*AGREES * 5, *DIFFERS], 1.0),
    ],
)
def test_a_source_is_new_until_it_agrees_often_enough(values: list[tuple[float, float]], weight: float) -> None:
    known = add_pairs({}, [("k", x, y) for x, y in values])
    assert weight_of(job(), known, ["k"], "feedback") == weight
    assert weight_of(job(), known, ["judge"], "feedback") == 1.0
    assert weight_of(job(), known, ["judge", "k"], "feedback") == weight, "a part of the reward comes from it"
    assert weight_of(job(), known, ["k"], "default") == 1.0, "there is no feedback"
    assert weight_of(job(weight=0.5), {}, ["k"], "credit") == 0.5


def test_a_job_needs_a_reference_key() -> None:
    with pytest.raises(ConfigError, match="reference_keys"):
        job(reference_keys=[])


# -- in the ledger -----------------------------------------------------------------------------------------------------


def answered(name: str, **changes: Any) -> Interaction:
    fields: dict[str, Any] = {
        "id": name, "request": name, "index": 0, "job": "j", "episode": f"e-{name}", "alone": True, "key_id": "asker",
        "user": "u", "split": "train", "untrainable": "", "prompt_ids": [7], "token_ids": [1], "logprobs": [-0.5],
        "spans": [Span(0, 0, 1)], "sampling": Sampling(max_new_tokens=4), "finish": "stop", "template": "t",
        "body_digest": "b", "text": "x", "started": NOW, "first_token": NOW, "ended": NOW,
    }  # fmt: skip
    return Interaction(**fields | changes)


@pytest.mark.parametrize(
    ("gamma", "broken", "judged", "reasons"),
    [
        (0.5, "a", "b", ["credit", "feedback"]),  # half of its return is feedback on b
        (0.5, "b", "a", ["feedback", "invalid"]),
        (0.5, "b", "", ["invalid"]),
        (1.0, "a", "a", ["invalid", "credit"]),  # whatever feedback it has
    ],
)
def test_a_broken_turn_does_not_hide_the_judges_of_its_return(
    gamma: float, broken: str, judged: str, reasons: list[str]
) -> None:
    config = OnlineJob.parse(
        {**(plain := job().model_dump(mode="json", exclude_unset=True)), "online": {**plain["online"], "gamma": gamma}}
    )
    matching = Matching(config)
    for seq, name in enumerate("ab", 1):
        valid = False if name == broken else None
        matching.on_interaction(
            seq, answered(name, episode="talk", alone=False, started=NOW + seq, tool_calls_valid=valid)
        )
    if judged:
        matching.on_feedback(1, rating(judged, False, final=True), NOW)
    matching.sweep(version=0, now=NOW + 100_000)
    ready = [one for found in matching.ready.values() for one in found]
    assert [one.reason for one in ready] == reasons
    weights = [weight_of(config, {}, one.owners.judges, one.reason) for one in ready]
    assert weights == [1.0 if reason == "invalid" else 0.2 for reason in reasons]


class Live:
    """A run that admits answers; the test chooses which keys judge each answer."""

    def __init__(self) -> None:
        self.job, self.seq = job(), 0
        self.matching = Matching(self.job)
        self.source = LiveSource(self.job, self.matching)
        self.entries: list[list[Any]] = []
        self.run = JobRun(self.job, LedgerState(), num_ordinals=None, writer_epoch=1, source=self.source)
        self.commit([JobStarted(**EPOCH, config_digest="c")])
        self.commit([Checkpointed(**EPOCH, number=0, version=0, digest="w", path="p", trainer_epoch=1, low_seq=1)])

    def commit(self, events: list[Any]) -> None:
        self.entries.append(events)
        self.run.commit(events)

    def judged(self, **verdicts: bool) -> Admission:
        """Serve an answer that each key of ``verdicts`` judges; return its admission."""
        self.seq += 1
        name = f"i{self.seq}"
        self.matching.on_interaction(self.seq, answered(name))
        for key, value in verdicts.items():
            self.matching.on_feedback(self.seq, rating(name, value, key=key), NOW)
        self.matching.sweep(version=0, now=NOW)
        draft = Draft(self.run, copy_state(self.run.state), Inputs(NOW))
        self.run.state.open.clear()  # as if all earlier draws were trained: there is always room
        self.run.state.drawn = self.run.state.trained + self.run.state.dropped.total()
        draft = Draft(self.run, copy_state(self.run.state), Inputs(NOW))
        self.source.draw(draft)
        self.commit(draft.events)
        (admission,) = [one for event in draft.events if isinstance(event, Admitted) for one in event.admissions]
        self.matching.on_admitted([admission])
        return admission


def test_a_source_becomes_known_by_the_ledger() -> None:
    live = Live()
    first = live.judged(k=True, judge=True)
    assert (first.weight, first.compared) == (0.2, [("k", 1.0, 1.0)])
    for n in range(9):
        assert live.judged(k=bool(n % 2), judge=bool(n % 2)).weight == 0.2
    assert live.judged(k=True).weight == 1.0
    assert live.judged(stranger=True).weight == 0.2
    assert live.judged(judge=True).weight == 1.0
    assert live.run.state.agreements.keys() == {"k"}
    assert not flaws_of_weights(live.entries, {}, live.job)
    for n in range(9):
        live.judged(k=not n % 2, judge=bool(n % 2))
    assert live.judged(k=True).weight == 0.2, "a source may lose its trust"


def test_an_audit_finds_weights_that_do_not_follow() -> None:
    def history(weight: float, sealed: float) -> tuple[list[list[Any]], dict[int, BatchSealed]]:
        admission = Admission(0, {"i": 1}, {"f": 1}, 1.0, 0, "k", "u", "feedback", NOW, judges=["k"], weight=weight)
        group = SealedGroup(Draw(0), "a", 1, "d", 0, 0, [1.0], 1, "online", weight=sealed)
        batch = BatchSealed(**EPOCH, number=1, revision=1, start_version=0, update_index=0, groups=[group])
        events = [
            Drawn(**EPOCH, start=0, stop=1, min_version=0, deadline=NOW),
            Admitted(**EPOCH, admissions=[admission], low_interactions=1, low_feedback=1),
        ]
        assert fold(events).agreements == {}
        return [events], {1: batch}

    entries, trained = history(0.2, 0.2)
    assert not flaws_of_weights(entries, trained, job())
    assert flaws_of_weights(*history(1.0, 1.0), job()) == ["ordinal 0: admitted with weight 1, not 0.2"]
    assert flaws_of_weights(*history(0.2, 1.0), job()) == ["batch 1: draw 0.0 has weight 1, not 0.2"]
