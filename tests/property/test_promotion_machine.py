"""State machine of an online job with a promotion gate, and with rollbacks to any checkpoint."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.services.coordinator.training.inputs import Inputs, Rollback
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.promotion import PromotionGate, flaw_of_rollback
from penstock.services.coordinator.training.run import JobRun
from penstock.shared.config.online.promotion import PromotionConfig
from penstock.shared.protocol.events import Promoted, PromotionRefused
from penstock.shared.protocol.messages import Report


def online_machine() -> Any:
    """Load the neighbouring test module, and return it."""
    spec = importlib.util.spec_from_file_location("online_machine", Path(__file__).with_name("test_online_machine.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # for the dataclasses there
    spec.loader.exec_module(module)
    return module


BASE = online_machine()


class PromotionMachine(BASE.OnlineMachine):  # type: ignore[misc]
    @initialize(max_lag=st.integers(0, 2), batch=st.integers(2, 3), patience=st.integers(1, 3))
    def begin(self, max_lag: int, batch: int, patience: int) -> None:
        self.promotion = PromotionConfig(min_entropy=0.5, patience=min(patience, max_lag + 1))
        self.entropy, self.announced = 1.0, -1
        plain = BASE.job(max_lag=max_lag, batch=batch, gamma=0.0, share=1.0, default_after_s=None)
        online = plain.online.model_copy(update={"promotion": self.promotion})
        self.config, self.world = plain.model_copy(update={"online": online}), BASE.World()
        self.now, self.epoch, self.served = 1000.0, 1, 0
        self.lead()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="ckpt-0"))

    def core(self, state: LedgerState) -> JobRun:
        self.asked: Rollback | None = None
        gate = PromotionGate(self.promotion)
        return JobRun(
            self.config, state, num_ordinals=None, writer_epoch=self.epoch, source=self.source, promotion=gate
        )

    @property
    def inputs(self) -> Inputs:
        return Inputs(self.now, rollback=self.asked, announced=self.announced)

    def measured(self) -> dict[str, float]:
        return {"policy/entropy": self.entropy}

    @rule(entropy=st.sampled_from([1.0, 1.0, 0.1]))
    def changes(self, entropy: float) -> None:
        self.entropy = entropy

    @rule()
    def engines_load_the_version(self) -> None:
        state = self.run.state
        if state.promoted is not None:
            self.announced = state.promoted.version
        self.decide()

    @rule(entropy=st.sampled_from([1.0, 1.0, 0.1]), saved=st.booleans())
    def one_update(self, entropy: float, saved: bool) -> None:
        """Take the usual course of an update, so that rare events find a job in training."""
        self.engines_load_the_version()
        self.talk(count=4, early=False, key=BASE.KEYS[0])
        if self.run.state.sealed:
            self.entropy = entropy
            self.train(crash="")
        if saved:
            self.checkpoint()

    @rule(place=st.integers(0, 3))
    def ask_to_go_back(self, place: int) -> None:
        checkpoints = sorted(self.run.state.checkpoints)
        number = checkpoints[place % len(checkpoints)]
        if not flaw_of_rollback(self.run.state, number):
            self.asked = Rollback(number, "by request", f"op-{self.run.state.forked}")

    @precondition(lambda self: self.run.rollback(self.inputs) is not None)
    @rule()
    def the_trainer_goes_back(self) -> None:
        state, rollback = self.run.state, self.run.rollback(self.inputs)
        assert rollback is not None
        later = state.after(rollback.number)
        if not later:  # a fork has already removed the batches
            self.asked = None
            return
        assert all(number in state.batches for number in later)
        version = max(state.version, self.world.engine_version) + 1
        self.world.engine_version = version
        batch, updates, before = later[0], state.updates - len(later), set(state.open)
        self.report(
            Report(
                kind="forked", epoch=1, batch=batch, version=version, digest=f"w{version}", reason="rolled back",
                rollback=rollback.number,
            )
        )  # fmt: skip
        again = [draw for draw in self.run.state.open if draw not in before and draw.n]
        assert not again, "draws that are rolled back must not be opened again"
        assert (self.run.state.updates, self.run.state.fork_request) == (updates, rollback.operation)
        assert self.run.state.checkpoint is not None
        assert self.run.state.checkpoint.number < batch
        self.asked = None

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def only_passed_versions_are_served(self) -> None:
        state = self.run.state
        assert len(state.sealed) <= 1
        if state.promoted is None:
            return
        assert state.promoted.version <= state.version
        assert state.refused is None or state.refused.version != state.promoted.version
        for event in (event for entry in self.world.entries for event in entry):
            if isinstance(event, Promoted) and event.reason == "passed":
                assert event.figures["policy/entropy"] >= 0.5
            if isinstance(event, PromotionRefused):
                known = event.figures  # empty for a version that is left after an unrequested fork
                assert not known or known["policy/entropy"] < 0.5

    @invariant()
    def the_served_version_can_be_trained_again(self) -> None:
        state = self.run.state
        if state.promoted is not None:
            base = state.base_of(state.promoted.number)
            assert base is not None
            assert base.number in state.pinned
            assert all(number in state.batches for number in state.after(base.number))

    @invariant()
    def nothing_is_sealed_while_training_is_to_go_back(self) -> None:
        if self.run.rollback(self.inputs) is not None:
            before = len(self.run.state.sealed)
            events = self.run.decide(self.inputs)
            assert not [event for event in events if type(event).__name__ in ("BatchSealed", "Drawn")], before


TestPromotion = PromotionMachine.TestCase
TestPromotion.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
