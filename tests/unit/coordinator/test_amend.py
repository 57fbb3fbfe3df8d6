"""Changes of a job file during a run: one event at a batch boundary, and hyper-parameters sealed with each batch."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.services.coordinator.queries.audit import audit_ledger
from penstock.services.coordinator.training.inputs import Inputs
from penstock.services.coordinator.training.ledger import LedgerState, fold
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.jobs.amendable import settings_of, with_patch
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import (
    BatchSealed,
    Event,
    Hyperparameters,
    JobStarted,
    SettingsChanged,
    decode_events,
    encode_events,
)
from penstock.shared.protocol.messages import Report
from penstock.shared.protocol.trajectory import GroupHeader

SPEC = {
    "name": "amended",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "algorithm": {"group_size": 2, "kl": {"coef": 0.1}},
    "sampling": {"max_new_tokens": 4},
    "optimizer": {"learning_rate": 1e-3},
    "train": {"batch_size": 4, "max_updates": 3, "max_lag": 1},
}
CONFIG = JobConfig.parse(SPEC)
PATCH = {"optimizer": {"learning_rate": 5e-4}, "algorithm": {"kl": {"coef": 0.2}}, "train": {"max_updates": 9}}
CHANGED = JobConfig.parse(with_patch(SPEC, PATCH))


class Scene:
    """A job with ``max_lag`` 1 whose open draws are answered on request; stores the entries of its ledger."""

    def __init__(self) -> None:
        self.run = JobRun(CONFIG, LedgerState(), num_ordinals=None, writer_epoch=1)
        self.entries: list[list[Event]] = []
        self.seq = 0
        self.commit(self.run.decide(Inputs(1.0)))
        self.report("checkpointed", digest="w0", path="c0")

    def commit(self, events: list[Event]) -> None:
        if events:
            self.entries.append(decode_events(encode_events(events)))
            self.run.commit(events)

    def report(self, kind: str, **fields: object) -> None:
        events = self.run.on_report(Report(kind=kind, epoch=1, **fields), Inputs(1.0))  # type: ignore[arg-type]
        self.commit(events + self.run.decide(Inputs(1.0), after=events))

    def answer(self) -> None:
        for draw in [d for d in self.run.state.in_flight if d not in self.run.candidates]:
            self.seq += 1
            version, temperature = self.run.state.version, self.run.state.open[draw].temperature
            assert temperature is not None
            header = GroupHeader(
                draw=draw, attempt=f"a{self.seq}", epoch=1, digest="d", nbytes=100, prompt_tokens=2, lengths=[2, 2],
                rewards=[1.0, 0.0], failed=[False] * 2, truncated=[False] * 2, finite=True, min_version=version,
                max_version=version, worker="w", temperature=temperature,
            )  # fmt: skip
            self.run.on_group(self.seq, header)
        self.commit(self.run.decide(Inputs(1.0)))

    def train(self) -> None:
        number = self.run.state.last_trained + 1
        batch = self.run.state.sealed[number]
        self.report(
            "trained", batch=number, revision=batch.revision, version=batch.start_version + 1, digest=f"w{number}"
        )

    def sealed(self) -> dict[int, Hyperparameters | None]:
        return {e.number: e.hyperparameters for entry in self.entries for e in entry if isinstance(e, BatchSealed)}


def test_sealed_batches_keep_their_hyperparameters() -> None:
    scene = Scene()
    scene.answer()
    old, new = Hyperparameters(1e-3, 0.1, 3), Hyperparameters(5e-4, 0.2, 9)
    before = set(scene.sealed())
    assert before
    scene.commit(scene.run.amend(CHANGED, 2, 1.0))
    assert scene.run.amend(CHANGED, 3, 1.0) == [], "the settings are in force already"
    for _ in range(5):
        scene.answer()
        scene.train()
    sealed = scene.sealed()
    assert {number for number, found in sealed.items() if found == old} == before
    assert {number for number, found in sealed.items() if found == new} == set(sealed) - before
    assert len(sealed) > CONFIG.train.max_updates, "the run is longer now"
    event = next(e for entry in scene.entries for e in entry if isinstance(e, SettingsChanged))
    assert (event.number, event.update_index, event.generation) == (max(before) + 1, max(before), 2)
    assert scene.run.state.applies_at == max(before)
    assert audit_ledger(scene.entries, CHANGED).report()["ok"]


def temperatures(scene: Scene) -> dict[int, set[float | None]]:
    """Return the temperatures of the groups of each sealed batch."""
    events = [event for entry in scene.entries for event in entry if isinstance(event, BatchSealed)]
    return {event.number: {group.temperature for group in event.groups} for event in events}


def test_a_new_temperature_applies_to_later_draws_only() -> None:
    scene = Scene()
    drawn = scene.run.state.in_flight
    warmer = JobConfig.parse(with_patch(SPEC, {"sampling": {"temperature": 0.5}, "train": {"max_updates": 9}}))
    scene.commit(scene.run.amend(warmer, 2, 1.0))
    assert scene.run.state.applies_at == 0, "no batch was sealed yet"
    assert drawn == scene.run.state.in_flight
    assert all(scene.run.state.open[draw].temperature == 1.0 for draw in drawn)
    for _ in range(6):
        scene.answer()
        scene.train()
    found = temperatures(scene)
    assert [found[number] for number in sorted(found)][:4] == [{1.0}, {1.0}, {0.5}, {0.5}]
    assert set.union(*(values for number, values in found.items() if number > 2)) == {0.5}
    state = fold(event for entry in scene.entries for event in entry)
    assert state.open == scene.run.state.open, "another leader asks for the same temperatures"
    assert audit_ledger(scene.entries, warmer).report()["ok"]


def test_the_audit_finds_a_group_of_another_temperature() -> None:
    scene = Scene()
    scene.answer()
    entries = [
        [
            replace(event, groups=[replace(group, temperature=0.5) for group in event.groups])
            if isinstance(event, BatchSealed)
            else event
            for event in entry
        ]
        for entry in scene.entries
    ]
    (check,) = audit_ledger(entries, CONFIG).violations.items()
    assert check[0] == "hyper-parameters"
    assert "sampled at temperature 0.5, drawn at 1" in check[1][0]


def test_a_new_leader_folds_the_same_settings_and_changes_nothing() -> None:
    scene = Scene()
    scene.commit(scene.run.amend(CHANGED, 2, 1.0))
    state = fold(event for entry in scene.entries for event in entry)
    assert state.settings == settings_of(CHANGED)
    assert JobRun(CHANGED, state, num_ordinals=None, writer_epoch=2).amend(CHANGED, 2, 1.0) == []
    late = JobRun(CONFIG, fold(scene.entries[0]), num_ordinals=None, writer_epoch=2)  # it missed the event
    assert [type(event) for event in late.amend(CHANGED, 2, 1.0)] == [SettingsChanged]


def test_the_audit_finds_a_batch_with_other_settings() -> None:
    scene = Scene()
    scene.answer()
    wrong = next(i for i, entry in enumerate(scene.entries) if any(isinstance(e, BatchSealed) for e in entry))
    started = [
        JobStarted(writer_epoch=1, time=0.0, config_digest="c", settings=settings_of(CHANGED))
        if isinstance(event, JobStarted)
        else event
        for event in scene.entries[0]
    ]
    report = audit_ledger([started, *scene.entries[1 : wrong + 1]], CONFIG).report()
    assert [text.partition(":")[0] for text in report["violations"]] == ["hyper-parameters"] * len(scene.sealed())


def test_a_ledger_of_an_earlier_version_gets_its_settings_at_the_next_boundary() -> None:
    state = fold([JobStarted(writer_epoch=1, time=0.0, config_digest="c")])
    run = JobRun(CONFIG, state, num_ordinals=None, writer_epoch=2)
    (event,) = run.amend(CONFIG, 1, 1.0)
    assert isinstance(event, SettingsChanged)
    assert event.settings == settings_of(CONFIG)


@pytest.mark.parametrize(("requested", "reason"), [(True, "request"), (False, "")])
def test_a_checkpoint_on_request(requested: bool, reason: str) -> None:
    scene = Scene()
    inputs = Inputs(1.0, checkpoint_requested=requested)
    assert scene.run.wants_checkpoint(inputs) == "", "what is trained is in a checkpoint already"
    scene.answer()
    scene.train()
    assert scene.run.wants_checkpoint(inputs) == reason
