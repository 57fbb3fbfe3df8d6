"""The learner of an embodied job: exact continuation through a checkpoint, statistics, refusals, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.services.trainer.checkpoint.export import export
from penstock.services.trainer.checkpoint.state import load_checkpoint, save_checkpoint
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.learners.job_learner import open_learner
from penstock.services.trainer.learners.replay_tolerance import copy_weights
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.errors import CheckpointError, ConfigError, ProtocolError
from penstock.shared.models.episode_policy import build_policy
from penstock.shared.protocol.embodied.environment import ArraySpec
from penstock.shared.protocol.embodied.episode_group import EpisodeGroup
from penstock.shared.weights.flat import digest_of_tensors, fill, view
from tests.unit.trainer.episode_batches import CHUNK, DISCRETE, group_of, job_of, spec_of

KINDS = [("ppo", "gaussian"), ("ppo", "tokens"), ("grpo", "categorical"), ("sac", "squashed")]
UPDATES = 4


def learner_of(algorithm: str = "ppo", policy: str = "gaussian", **train: Any) -> EmbodiedLearner:
    job = job_of({"type": algorithm}, {"type": policy}, **train)
    return EmbodiedLearner(job, DISCRETE if policy == "categorical" else spec_of())


def shard(learner: EmbodiedLearner, index: int, **keys: Any) -> BatchShard[EpisodeGroup]:
    return BatchShard.whole([group_of(learner.policy, 2 * index + i, **keys) for i in range(2)])


def everything(learner: EmbodiedLearner) -> dict[str, Tensor]:
    state = learner.state()
    weights = {f"weights.{name}": tensor for name, tensor in state.models["policy"].weights.items()}
    return weights | {f"rule.{name}": tensor for name, tensor in state.rule.items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(("algorithm", "policy"), KINDS)
def test_save_load_continue_equals_uninterrupted(tmp_path: Path, algorithm: str, policy: str, before: int) -> None:
    going, resumed = learner_of(algorithm, policy), learner_of(algorithm, policy)
    for index in range(before):
        going.update(shard(going, index), update_index=index)
    path = save_checkpoint(tmp_path, "job_1", before, going.state(), {})
    resumed.load_state(load_checkpoint(path).state)
    assert_same(everything(resumed), everything(going))
    torch.manual_seed(99)
    for index in range(before, UPDATES):
        batch = shard(going, index)
        expected = going.update(batch, update_index=index)
        assert resumed.update(batch, update_index=index) == expected
    assert_same(everything(resumed), everything(going))
    assert digest_of_tensors(resumed.weights()) == digest_of_tensors(going.weights())


@pytest.mark.parametrize(("algorithm", "policy"), KINDS)
def test_published_weights_act_as_the_trained_policy(algorithm: str, policy: str) -> None:
    """A rollout worker that loads the weights decides the same, with the observation statistics of their version."""
    learner = learner_of(algorithm, policy)
    batch = shard(learner, 0)
    learner.update(batch, update_index=0)
    layout = learner.layout()
    buffer = np.zeros(layout.nbytes, np.uint8)
    fill(buffer, layout, learner.weights())
    job = job_of({"type": algorithm}, {"type": policy})
    spec = DISCRETE if policy == "categorical" else spec_of(num_envs=8)
    worker = build_policy(job.policy, spec, action_chunk=CHUNK, seed=0)
    worker.load_state_dict(dict(view(buffer, layout)))
    observations = {name: torch.from_numpy(column) for name, column in batch.groups[0].observations.items()}
    ours, theirs = learner.policy.act(observations, None), worker.act(observations, None)
    assert torch.equal(ours.actions_NCA, theirs.actions_NCA)
    assert torch.equal(ours.logprobs_NCA, theirs.logprobs_NCA)
    assert not list(learner.take_base())
    assert learner.base_digest == ""


def test_statistics_take_in_a_batch_after_it_was_trained() -> None:
    """An update uses the observation statistics with which its version acted, so ratios are 1 before the first step."""
    learner = learner_of()
    seen: list[np.ndarray[Any, Any]] = []
    for index in range(3):
        batch = shard(learner, index, failed=(0,))
        report = learner.update(batch, update_index=index)
        assert report["mismatch/logprob"] == pytest.approx(0, abs=1e-6)
        for group in batch.groups:
            seen.append(group.observations["state"][group.cu_seqlens[1] :])  # the first episode failed
    weights = dict(learner.weights())
    every = np.concatenate(seen)
    assert weights["normaliser.count"].tolist() == [len(every)]
    np.testing.assert_allclose(weights["normaliser.mean_O"][:3], every.mean(0), rtol=1e-12)
    np.testing.assert_allclose(weights["normaliser.squares_O"][:3] / len(every), every.var(0), rtol=1e-12)


def test_statistics_of_a_batch_are_reported() -> None:
    learner = learner_of("grpo", "gaussian")
    batch = shard(learner, 0, lengths=(5, 3, 2), failed=(2,))
    report = learner.update(batch, update_index=0)
    returns = np.concatenate([group.returns[:2] for group in batch.groups])
    steps = [sum(group.valid[group.cu_seqlens[i] : group.cu_seqlens[i + 1]]) for group in batch.groups for i in (0, 1)]
    assert report["reward/mean"] == pytest.approx(returns.mean(), rel=1e-5)
    assert report["success/rate"] == 0.5
    assert report["episode/length"] == np.mean(steps)
    assert (report["sequences/failed"], report["tokens/scored"], report["groups/count"]) == (2, 16, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"observations": {"state": ArraySpec((4,), "float64"), "goal": ArraySpec((1, 2), "float32")}},
         r"observation 'state' is .*3.*, this job's is .*4"),
        ({"action_low": [-3.0, -2.0]}, r"environment 'action_low' is \[-1.*, this job's is \[-3"),
        ({"action_low": [-1.0], "action_high": [1.0], "action_shape": (1,)}, "environment 'action_shape'"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_space_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    saved, other = learner_of(), EmbodiedLearner(job_of(), spec_of(**changes))
    before = everything(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_state(saved.state())
    assert_same(everything(other), before)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (job_of(policy={"hidden_sizes": [8]}), r"policy 'hidden_sizes' is \[16\], this job's is \[8\]"),
        (job_of(policy={"type": "tokens"}), "policy 'type' is gaussian, this job's is tokens"),
        (job_of({"type": "grpo"}), "GRPO does not fit the model"),
        (job_of({"value_hidden_sizes": [8]}), "PPO does not fit the model"),
    ],
)
def test_a_checkpoint_of_another_policy_or_algorithm_is_refused(job: EmbodiedJob, message: str) -> None:
    saved = learner_of()
    saved.update(shard(saved, 0), update_index=0)
    other = EmbodiedLearner(job, spec_of())
    before = everything(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_state(saved.state())
    assert_same(everything(other), before)


def test_another_version_of_the_simulator_and_other_cameras_do_not_matter() -> None:
    job = job_of(policy={"observations": ["state"]})
    saved = EmbodiedLearner(job, spec_of())
    more = {"state": ArraySpec((3,), "float64"), "camera": ArraySpec((8, 8, 3), "uint8")}
    other = EmbodiedLearner(job, spec_of(observations=more, versions={"gymnasium": "9"}, num_envs=64, env_id="Other"))
    saved.update(shard(saved, 0), update_index=0)
    other.load_state(saved.state())
    assert_same(everything(other), everything(saved))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"failed": (0, 1)}, "all 4 episodes of the batch failed"),
        ({"chunk": 3}, r"a decision has the shape \[3, 2\], the policy's have \[2, 2\]"),
        ({"observations": "state"}, "observation 'goal' is missing"),
        ({"observations": "wide"}, r"observation 'state' is of shape \[5\], the policy reads \[3\]"),
    ],
)
def test_a_batch_that_does_not_fit_changes_nothing(group: dict[str, Any], message: str) -> None:
    learner = learner_of()
    before = everything(learner)
    source = build_policy(learner._config.policy, spec_of(), action_chunk=group.get("chunk", CHUNK), seed=0)
    groups = [group_of(source, i, failed=group.get("failed", ())) for i in range(2)]
    for each in groups:
        for named in (each.observations, each.final_observations):
            if group.get("observations") == "state":
                del named["goal"]
            elif group.get("observations") == "wide":
                named["state"] = np.zeros((len(named["state"]), 5))
    with pytest.raises(ProtocolError, match=message):
        learner.update(BatchShard.whole(groups), update_index=0)
    assert_same(everything(learner), before)


def test_a_checkpoint_describes_its_policy_and_is_no_hugging_face_model(tmp_path: Path) -> None:
    job = job_of()
    learner = EmbodiedLearner(job, spec_of(action_low=[-np.inf, -2.0]))
    path = save_checkpoint(tmp_path, "job_1", 0, learner.state(), {"config": job.model_dump_json()})
    found = json.loads((path / "config.json").read_text())
    assert found["policy"]["hidden_sizes"] == [16]
    assert found["action_chunk"] == CHUNK
    assert found["environment"]["observations"] == {"state": [[3], "float64"], "goal": [[1, 2], "float32"]}
    assert found["environment"]["action_low"] == [None, -2.0]
    EmbodiedLearner(job, spec_of(action_low=[-np.inf, -2.0])).load_state(load_checkpoint(path).state)
    with pytest.raises(CheckpointError, match="no Hugging Face model"):
        export(path, tmp_path / "target")


def test_a_replay_compares_trained_parameters_and_records_the_number_of_ranks() -> None:
    learner = learner_of()
    assert learner.environment()["ranks"] == "1"
    assert set(copy_weights(learner)) == {name for name, _ in learner.policy.named_parameters()}
    assert {"normaliser.count", "normaliser.mean_O", "normaliser.squares_O"} < dict(learner.weights()).keys()


def test_a_learner_needs_the_description_of_the_simulator() -> None:
    with pytest.raises(ConfigError, match="simulator 'Reach' was not described"):
        open_learner(job_of())
    assert isinstance(open_learner(job_of(), simulator=spec_of()), EmbodiedLearner)
    with pytest.raises(ConfigError, match="'state' is no observation"):
        open_learner(job_of(), simulator=spec_of(observations={"rgb": ArraySpec((3,), "uint8")}))
