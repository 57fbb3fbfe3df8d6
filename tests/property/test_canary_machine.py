"""State machine of a job that runs canary trials on live traffic, with a promotion gate."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec.structs import replace

from penstock.services.coordinator.training.canary import is_in_canary
from penstock.shared.config.online.canary import CanaryConfig
from penstock.shared.config.online.promotion import PromotionConfig
from penstock.shared.protocol.events import CanaryBegun, CanaryJudged, Promoted, PromotionRefused
from penstock.shared.protocol.generation import Span
from penstock.shared.protocol.live.interaction import CANARY, Feedback
from penstock.shared.protocol.messages import Report


def promotion_machine() -> Any:
    """Load the neighbouring test module, and return it."""
    path = Path(__file__).with_name("test_promotion_machine.py")
    spec = importlib.util.spec_from_file_location("promotion_machine", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GATED = promotion_machine()
BASE = GATED.BASE


class CanaryMachine(GATED.PromotionMachine):  # type: ignore[misc]
    @initialize(
        max_lag=st.integers(1, 2),
        gamma=st.sampled_from([0.0, 1.0]),
        share=st.sampled_from([0.5, 1.0]),
        on_timeout=st.sampled_from(["refuse", "promote"]),
        default_after_s=st.sampled_from([None, 15.0]),
    )
    def begin(self, max_lag: int, gamma: float, share: float, on_timeout: Any, default_after_s: float | None) -> None:
        canary = CanaryConfig(share=0.5, max_drop=0.5, confidence=0.5, max_wait_s=60.0, on_timeout=on_timeout)
        canary = canary.model_copy(update={"conversations": 2})  # fewer than a job may ask for
        self.promotion = PromotionConfig(min_entropy=0.5, patience=max_lag, canary=canary)
        self.entropy, self.announced = 1.0, -1
        plain = BASE.job(max_lag=max_lag, batch=2, gamma=gamma, share=share, default_after_s=default_after_s)
        online = plain.online.model_copy(update={"promotion": self.promotion})
        self.config, self.world = plain.model_copy(update={"online": online}), BASE.World()
        self.now, self.epoch, self.served = 1000.0, 1, 0
        self.tried: set[str] = set()
        self.lead()
        self.report(Report(kind="checkpointed", epoch=1, batch=0, version=0, digest="w0", path="ckpt-0"))

    @rule(episode=st.sampled_from(["", "", *BASE.EPISODES[1:]]), old=st.integers(0, 2), broken=st.integers(0, 7))
    def serve(self, episode: str, old: int, broken: int) -> None:
        """Route like the gateway: the version on trial answers its share, the served version the rest."""
        before, state = self.served, self.run.state
        super().serve(episode=episode, old=old, broken=broken)
        canary = state.canary
        if self.served == before or canary is None:
            return
        seq = len(self.world.interactions)
        record = self.world.interactions[seq]
        version, untrainable = canary.served, record.untrainable
        if is_in_canary("j", canary.version, canary.share, record.episode):
            version, untrainable = canary.version, untrainable or CANARY
            self.tried.add(record.id)
        spans = [Span(version, 0, 1)]
        self.world.interactions[seq] = replace(record, spans=spans, untrainable=untrainable)

    @precondition(lambda self: self.run.state.canary is not None)
    @rule(liked=st.booleans(), key=st.sampled_from(BASE.KEYS[:2]))
    def agents_judge_both_arms(self, liked: bool, key: str) -> None:
        for _ in range(6):
            if self.served == len(BASE.NAMES):
                break
            self.serve(episode="", old=0, broken=0)
            name = BASE.NAMES[self.served - 1]
            value = 1.0 if (name in self.tried) is liked else -1.0
            item = Feedback(
                id=f"f{name}", job="j", kind="metric", key_id=key, received=self.now, inference=name, metric="rating",
                value=value,
            )  # fmt: skip
            self.world.feedback[len(self.world.feedback) + 1] = [item]
        self.read_interactions(20)
        self.read_feedback(20)
        self.decide()

    def sweep(self, *, everything: bool) -> None:
        self.matching.trials.discard_recorded(self.run.state)
        super().sweep(everything=everything)

    # -- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def only_passed_versions_are_served(self) -> None:
        """Check the rule of jobs without trials, except that feedback may refuse a version which keeps the bounds."""
        state = self.run.state
        assert len(state.sealed) <= 1
        for event in (event for entry in self.world.entries for event in entry):
            if isinstance(event, Promoted) and event.reason == "passed":
                assert event.figures["policy/entropy"] >= 0.5
            if isinstance(event, PromotionRefused) and event.figures.get("policy/entropy", 0.0) >= 0.5:
                assert "canary" in event.reason

    @invariant()
    def trial_answers_are_not_trained(self) -> None:
        assert not [one for one in self.admissions() if self.tried & one.interactions.keys()]

    @invariant()
    def nothing_is_in_training_during_a_trial(self) -> None:
        state = self.run.state
        if state.canary is not None:
            assert not state.sealed
            assert state.canary.version == state.version
            assert state.promoted is not None
            assert state.promoted.version == state.canary.served

    @invariant()
    def samples_are_recorded_once(self) -> None:
        judged: list[str] = []
        for event in (event for entry in self.world.entries for event in entry):
            if isinstance(event, CanaryBegun):
                judged = []
            if isinstance(event, CanaryJudged):
                judged += [name for one in event.judged for name in one.interactions]
                canary = {name for one in event.judged if one.is_canary for name in one.interactions}
                assert canary <= self.tried
        assert len(judged) == len(set(judged))

    @invariant()
    def a_served_version_passed_its_trial(self) -> None:
        tried = -1
        for event in (event for entry in self.world.entries for event in entry):
            if isinstance(event, CanaryBegun):
                tried = event.version
            if isinstance(event, Promoted) and event.reason in ("passed", "canary timed out"):
                assert event.version == tried


TestCanary = CanaryMachine.TestCase
TestCanary.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
