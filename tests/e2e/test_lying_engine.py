"""An engine that claims to serve a new version but keeps the old weights: the trainer finds out and the job pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_HONEST = 2
"""Number of versions that the engine loads: those that sample the batches of as many updates."""
LIE = f'''

class LyingEngine(TransformersEngine):
    """Loads {NUM_HONEST} versions; confirms later ones, with their labels, and keeps the weights that it has."""

    num_loaded = 0

    async def _load(self, label: str) -> None:
        if self.num_loaded < {NUM_HONEST}:
            self.num_loaded += 1
            await super()._load(label)
'''
CHANGES = (
    "name=lying-engine", "rollout.path=./own_engine.py:LyingEngine",
    "train.max_lag=0", "train.max_updates=60", "train.max_mismatch=0.3", "optimizer.learning_rate=1e-2",
    "warm_start.steps=0", "model.characters='0123456789+='",
    "reward.scorers=[{type: format, pattern: '[0-4+].*'}]",
)  # fmt: skip
"""Strictly on-policy, and large updates: the weights that the engine keeps are soon far from the trained ones. About
half of what random weights write has the rewarded form, so every batch has something to learn."""


def test_a_job_pauses_when_its_engine_serves_old_weights(stack: Any, tmp_path: Path) -> None:
    """No group is refused, because each carries the version and digest that the gate expects: only log-probs tell."""
    (tmp_path / "own_engine.py").write_text((EXAMPLES / "own_engine.py").read_text() + LIE)
    (tmp_path / "job.yaml").write_text((EXAMPLES / "own-engine.yaml").read_text())
    words = [word for change in CHANGES for word in ("--set", change)]
    result = stack.cli("submit", str(tmp_path / "job.yaml"), *words)
    assert result.exit_code == 0, result.output
    job = stack.client.find("lying-engine").id

    def paused() -> bool:
        status = stack.status(job)
        assert status.phase not in ("succeeded", "failed", "cancelled"), (status.phase, status.message)
        return bool(status.phase == "paused")

    stack.until(paused, "the pause", 90, lambda: (stack.client.metrics(job)["series"], stack.client.why(job)))
    status = stack.status(job)
    assert f"update {status.step}: sampler and trainer differ by" in status.message
    assert "train.max_mismatch 0.3: what the engines serve is not what they say" in status.message
    assert any(status.message in str(row) for row in stack.client.why(job))
    told = [row["message"] for row in stack.client.events(job, follow=False) if row["type"] == "halted"]
    assert told == [status.message]

    mismatch: list[float] = stack.client.metrics(job, names="mismatch/logprob")["series"]["mismatch/logprob"]
    honest, stale = mismatch[:NUM_HONEST], mismatch[NUM_HONEST:]
    assert max(honest) < 1e-4, "while the engine loads what it is given, both log-probs agree"
    assert min(stale) > 100 * max(honest)
    assert (len(mismatch), stale[-1] > 0.3, max(stale[:-1], default=0) <= 0.3) == (status.step, True, True)
    assert set(status.draws["dropped"]) == set(), "the labels pass for true"
    stack.client.cancel(job, checkpoint=False)
    stack.finish(job)
    stack.check_audit(job)
