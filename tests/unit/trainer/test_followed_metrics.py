"""Every metric that the health of a run follows is in the report of a real learner, or in the counts of the leader."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.services.coordinator.training.health import FOLLOWED, GRADIENTS
from penstock.services.coordinator.training.tally import Tally
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.events import BatchSealed, Dropped
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group, GroupHeader
from tests.unit.trainer.episode_batches import group_of, job_of, spec_of

STAMP = {"writer_epoch": 1, "time": 0.0}


def counted_by_the_leader() -> set[str]:
    """Return the names in a row of the leader's own counts, after one group and one draw without signal."""
    header = GroupHeader(
        draw=Draw(0), attempt="a", epoch=1, digest="d", nbytes=1, prompt_tokens=1, lengths=[1], rewards=[0.0],
        failed=[True], truncated=[False], finite=True, min_version=0, max_version=0, worker="w",
        succeeded=[False],
    )  # fmt: skip
    tally = Tally(1, ["addition"])
    tally.begin(0.0, {})
    tally.on_group(header, duplicate=False)
    dropped = Dropped(
        **STAMP, draws=[Draw(0)], reason="no_signal", lengths=[1], redraw=False, min_version=0, deadline=0.0
    )
    tally.on_events([dropped], {})
    batch = BatchSealed(**STAMP, number=1, revision=1, start_version=0, update_index=0, groups=[])
    return set(tally.row(batch, 0, 1.0))


OF_THE_TRAINER = set(FOLLOWED) - counted_by_the_leader()


def test_a_report_of_a_text_learner_has_all_followed_metrics(
    make_config: Callable[..., JobConfig], batch: list[Group]
) -> None:
    report = Learner(make_config()).update(BatchShard.whole(batch), update_index=0)
    lacking = OF_THE_TRAINER - report.keys()
    assert lacking == {*GRADIENTS} - {"optimizer/grad_norm"}
    assert {"reward/min", "reward/max", "optimizer/steps"} <= report.keys()


@pytest.mark.parametrize(
    ("algorithm", "policy", "gradient", "lacking"),
    [
        ("ppo", "gaussian", "policy", {"groups/no_signal"}),
        ("grpo", "gaussian", "policy", set()),
        ("sac", "squashed", "actor", {"groups/no_signal", "policy/approx_kl"}),
    ],
)
def test_a_report_of_an_embodied_learner_has_the_followed_metrics(
    algorithm: str, policy: str, gradient: str, lacking: set[str]
) -> None:
    """Episodes are not truncated completions; PPO and SAC compare no episodes of a group, and SAC has no old policy."""
    learner = EmbodiedLearner(job_of({"type": algorithm}, {"type": policy}), spec_of())
    report = learner.update(BatchShard.whole([group_of(learner.policy, i) for i in range(2)]), update_index=0)
    expected = (OF_THE_TRAINER - set(GRADIENTS) - {"length/truncated"} - lacking) | {f"{gradient}/grad_norm"}
    assert OF_THE_TRAINER & report.keys() == expected
    assert {"reward/min", "reward/max", f"{gradient}/steps"} <= report.keys()
