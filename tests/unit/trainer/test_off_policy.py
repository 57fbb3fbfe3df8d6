"""Imitation and preferences beside the policy loss: gradients, denominators, ranks, replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.coordinator.online.groups import example_group
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.collective import Alone, Collective
from penstock.services.trainer.ranks.process_group import World
from penstock.services.trainer.ranks.sharding import BatchShard, owners
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.objective import Objective
from penstock.shared.protocol.trajectory import Group

Weights = dict[str, np.ndarray[Any, Any]]


def config(**sections: Any) -> OnlineJob:
    spec: dict[str, Any] = {
        "kind": "online_rl", "name": "live", "seed": 1,
        "model": {
            "config": {"arch": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2,
                       "num_kv_heads": 2, "max_position_embeddings": 64},
            "tokenizer": "char",
        },
        "sampling": {"max_new_tokens": 16}, "optimizer": {"learning_rate": 0.01, "eps": 1e-3, "max_grad_norm": 1e9},
        "train": {"batch_size": 8},
        "online": {"off_policy": {"supervised": {"coef": 0.5}, "preference": {"coef": 2.0, "beta": 0.5}}},
    }  # fmt: skip
    return OnlineJob.parse({name: {**spec.get(name, {}), **section} if isinstance(section, dict) else section
                            for name, section in {**spec, **sections}.items()})  # fmt: skip


def examples(n: int, objective: Objective, answers: Sequence[Sequence[int]], *, reward: float = 1.0) -> Group:
    return example_group("j", Draw(n), [10, 11, 12 + n % 3], answers, objective=objective, reward=reward, epoch=1)


def sampled(n: int, answer: Sequence[int], reward: float, *, assumed: bool = False) -> Group:
    return example_group(
        "j", Draw(n), [10, 11], [answer], objective="policy", reward=reward, epoch=1, version=0, assumed=assumed,
        logprobs=[-3.8] * len(answer),
    )  # fmt: skip


POLICY = [sampled(0, [20, 21, 22], 1.0), sampled(1, [23], -1.0), sampled(2, [24, 25], 0.5)]
ANSWERS = [examples(3, "supervised", [[30, 31]]), examples(4, "supervised", [[32, 33, 34, 35, 2]])]
PAIRS = [
    examples(5, "preference", [[36, 37, 2], [38]], reward=0.5),
    examples(6, "preference", [[39], [40, 41, 42]]),
    examples(7, "preference", [[43, 44], [36, 2]]),
]


def weights_of(learner: Learner) -> Weights:
    return {name: tensor.detach().clone().numpy() for name, tensor in learner.weights()}


def logprobs(learner: Learner, group: Group, index: int = 0) -> torch.Tensor:
    """Return the log-probs of one answer's tokens."""
    answer = group.token_ids[group.cu_seqlens[index] : group.cu_seqlens[index + 1]]
    tokens = torch.tensor([[*group.prompt_ids.tolist(), *answer.tolist()]])
    with torch.no_grad():
        scores = torch.log_softmax(learner.model(tokens).logits[0].float(), -1)
    start = len(group.prompt_ids) - 1
    return scores[start : start + len(answer)].gather(-1, tokens[0, start + 1 :, None])[:, 0]


def trained(groups: Sequence[Group], *, updates: int = 1, **sections: Any) -> tuple[Learner, dict[str, float]]:
    learner = Learner(config(**sections))
    metrics: dict[str, float] = {}
    for update in range(updates):
        metrics = learner.update(BatchShard.whole(groups), update_index=update)
    return learner, metrics


def momentum(learner: Learner) -> dict[str, torch.Tensor]:
    found = learner.state().models["policy"].optimizer
    return {name: tensor for name, tensor in found.items() if name.startswith("exp_avg.")}


def test_corrections_alone_make_the_corrected_answer_likelier() -> None:
    before = logprobs(Learner(config()), ANSWERS[0]).sum()
    learner, metrics = trained(ANSWERS[:1], updates=8)
    assert logprobs(learner, ANSWERS[0]).sum() > before + log(4)
    assert metrics["groups/supervised"] == 1
    assert "reward/mean" not in metrics, "there was no reward"
    assert metrics["optimizer/steps"] == 1


def test_preferences_alone_make_the_preferred_answer_likelier_than_the_other() -> None:
    fresh = Learner(config())
    before = logprobs(fresh, PAIRS[0]).sum() - logprobs(fresh, PAIRS[0], 1).sum()
    learner, metrics = trained(PAIRS[:1], updates=8)
    assert logprobs(learner, PAIRS[0]).sum() - logprobs(learner, PAIRS[0], 1).sum() > before + log(4)
    assert metrics["preference/accuracy"] == 1
    assert metrics["preference/margin"] > 0


def test_losses_are_those_of_the_papers_over_denominators_of_their_own() -> None:
    fresh = Learner(config())
    tokens = torch.cat([logprobs(fresh, group) for group in ANSWERS])
    _, metrics = trained([*POLICY, *ANSWERS, *PAIRS])
    assert metrics["loss/supervised"] == pytest.approx(-tokens.mean().item(), rel=1e-5)
    assert metrics["loss/preference"] == pytest.approx(log(2) * (0.5 + 1 + 1) / 3, rel=1e-6), "policy = reference"
    weighted = 0.5 * metrics["loss/supervised"] + 2.0 * metrics["loss/preference"]
    assert metrics["loss/off_policy"] == pytest.approx(weighted)
    assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + weighted)
    assert metrics["groups/count"] == 3, "of the policy loss"


def test_gradients_add_up() -> None:
    policy, answers, pairs, joint = (
        momentum(trained(groups)[0]) for groups in (POLICY, ANSWERS, PAIRS, [*ANSWERS, *POLICY, *PAIRS])
    )
    for name, found in joint.items():
        assert torch.allclose(found, policy[name] + answers[name] + pairs[name], atol=1e-7), name
    assert any(value.abs().max() > 1e-4 for value in pairs.values())


def test_the_policy_loss_alone_is_bit_identical() -> None:
    asked, plain = trained(POLICY, updates=2)[0], trained(POLICY, updates=2, online={"off_policy": None})[0]
    for (name, one), (_, other) in zip(asked.weights(), plain.weights(), strict=True):
        assert torch.equal(one, other), name


def test_neither_packing_nor_positions_in_the_batch_matter() -> None:
    groups = [*POLICY, *ANSWERS, *PAIRS]
    one = trained(groups)[0]
    cut = trained(groups, train={"max_tokens_per_microbatch": 16})[0]
    mixed = trained([PAIRS[0], POLICY[0], ANSWERS[0], *POLICY[1:], PAIRS[1], ANSWERS[1], PAIRS[2]])[0]
    for other in (cut, mixed):
        for (name, a), (_, b) in zip(one.weights(), other.weights(), strict=True):
            assert torch.allclose(a, b, atol=1e-6), name


def test_updates_repeat_bit_for_bit_from_a_loaded_state() -> None:
    batches = [[*POLICY, *ANSWERS, *PAIRS], ANSWERS, [*POLICY, PAIRS[0]]]
    minibatches = {"train": {"minibatches": 2, "epochs": 2}}
    one, other = Learner(config(**minibatches)), Learner(config(**minibatches))
    for index, groups in enumerate(batches):
        one.update(BatchShard.whole(groups), update_index=index)
    other.update(BatchShard.whole(batches[0]), update_index=0)
    resumed = Learner(config(**minibatches))
    resumed.load_state(other.state())
    for index in (1, 2):
        resumed.update(BatchShard.whole(batches[index]), update_index=index)
    for (name, a), (_, b) in zip(one.weights(), resumed.weights(), strict=True):
        assert torch.equal(a, b), name


def test_a_critic_that_warms_up_leaves_nothing_of_the_batch_unused() -> None:
    warming = {"algorithm": {"type": "ppo", "critic": {"warmup_updates": 1}}, "train": {"minibatches": 2}}
    fresh, plain = weights_of(Learner(config(**warming))), weights_of(trained(POLICY, **warming)[0])
    assert all(np.array_equal(value, plain[name]) for name, value in fresh.items()), "the critic warms up alone"
    before = logprobs(Learner(config(**warming)), ANSWERS[0]).sum()
    learner, metrics = trained([*POLICY, ANSWERS[0]], **warming)
    assert logprobs(learner, ANSWERS[0]).sum() > before
    assert metrics["groups/supervised"] == 1
    assert metrics["loss/total"] == metrics["loss/off_policy"] > 0


def test_the_reference_of_preferences_is_the_policy_at_version_0() -> None:
    learner = Learner(config())
    learner.update(BatchShard.whole(ANSWERS), update_index=0)
    metrics = learner.update(BatchShard.whole(PAIRS[:1]), update_index=1)
    assert metrics["loss/preference"] != pytest.approx(0.5 * log(2)), "the policy has moved, the reference has not"
    assert not Learner(config(online={"off_policy": None})).state().models["policy"].reference


# -- assumed samplers --------------------------------------------------------------------------------------------------


def test_assumed_samples_begin_with_a_ratio_of_1_and_weigh_less() -> None:
    steps = {"train": {"epochs": 2}, "online": {"posted": {"assumed_weight": 1.0}}}
    fresh = Learner(config(**steps))
    exact = [replace(group, logprobs=logprobs(fresh, group).numpy()) for group in POLICY]
    assumed = [replace(group, assumed=True) for group in POLICY]
    one, metrics = trained(assumed, **steps)
    two, same = trained(exact, **steps)
    assert metrics["mismatch/logprob"] == pytest.approx(0, abs=1e-6)
    assert metrics["policy/ratio_max"] == pytest.approx(same["policy/ratio_max"], rel=1e-4)
    for (name, a), (_, b) in zip(one.weights(), two.weights(), strict=True):
        assert torch.allclose(a, b, atol=1e-5), name
    half, full = (momentum(trained(assumed, online={"posted": {"assumed_weight": weight}})[0]) for weight in (0.5, 1.0))
    for name, found in half.items():
        assert torch.allclose(found, 0.5 * full[name], atol=1e-7), name


def test_trajectories_judged_by_a_new_source_weigh_less() -> None:
    shard = BatchShard.whole(POLICY)
    full, half, none = Learner(config()), Learner(config()), Learner(config())
    full.update(shard, update_index=0)
    half.update(replace(shard, weights=(0.5,) * len(POLICY)), update_index=0)
    none.update(replace(shard, weights=(1.0,) * len(POLICY)), update_index=0)
    for name, found in momentum(half).items():
        assert torch.allclose(found, 0.5 * momentum(full)[name], atol=1e-7), name
        assert torch.equal(momentum(none)[name], momentum(full)[name]), name
    mixed = replace(BatchShard.whole([ANSWERS[0], *POLICY]), weights=(0.1, 1.0, 0.5, 1.0))
    assert mixed.of("policy").weights == (1.0, 0.5, 1.0)


# -- tracked values ----------------------------------------------------------------------------------------------------


def test_a_sealed_baseline_is_subtracted_from_the_reward() -> None:
    tracked = {"algorithm": {"type": "reinforce_pp", "baseline": {}}}
    groups = [sampled(n, [20 + n, 30], reward) for n, reward in enumerate((1.0, 0.0, 0.5))]
    less = [sampled(n, [20 + n, 30], reward) for n, reward in enumerate((0.25, -0.5, 0.5))]
    learner, plain = Learner(config(**tracked)), Learner(config())
    shard = replace(BatchShard.whole(groups), baselines=(0.75, 0.5, 0.0))
    learner.update(shard, update_index=0)
    plain.update(BatchShard.whole(less), update_index=0)
    for (name, a), (_, b) in zip(learner.weights(), plain.weights(), strict=True):
        assert torch.equal(a, b), name


# -- ranks -------------------------------------------------------------------------------------------------------------

CASES: dict[str, list[Group]] = {
    "mixed": [*POLICY, *ANSWERS, *PAIRS, sampled(8, [26, 27], 0.0, assumed=True), sampled(9, [28], 1.0)],
    "one of each": [*POLICY, ANSWERS[0], PAIRS[0]],
    "answers": ANSWERS,
    "a pair": PAIRS[:1],
}


def run(collective: Collective, backend: str) -> dict[str, tuple[dict[str, float], Weights]]:
    """Train every case on the groups of this rank; return the metrics and weights of each."""
    found = {}
    for name, groups in CASES.items():
        job = config(backend={"type": backend}, train={"minibatches": 2, "max_tokens_per_microbatch": 16})
        learner = Learner(job, collective=collective)
        objectives = tuple(group.objective for group in groups)
        owner = owners([len(g.token_ids) for g in groups], objectives, minibatches=2, ranks=collective.size)
        own = np.flatnonzero(owner == collective.rank).tolist()
        shard = BatchShard([groups[i] for i in own], own, len(groups), objectives=objectives)
        metrics = [learner.update(shard, update_index=index) for index in range(2)][-1]
        found[name] = metrics, weights_of(learner)
    return found


def run_rank(world: World) -> dict[str, tuple[dict[str, float], Weights]]:
    return run(world.everybody, "fsdp")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_number_of_ranks_changes_nothing_but_rounding(ranks: Any) -> None:
    alone = run(Alone(), "local")
    for found in ranks.run(3, run_rank):  # more ranks than some batches have groups, so some are idle
        for name, (metrics, weights) in found.items():
            expected, own = alone[name]
            assert metrics.keys() == expected.keys(), name
            for key in (key for key in metrics if not key.startswith(("update_s/", "speed/"))):
                assert metrics[key] == pytest.approx(expected[key], abs=2e-5, rel=1e-4), (name, key)
            worst = max(np.abs(weights[key] - value).max() for key, value in own.items())
            assert worst <= 1e-5, (name, worst)


def test_owners_balance_each_objective_by_itself_and_a_plain_batch_as_before() -> None:
    objectives: list[Objective] = ["policy", "preference", "policy", "supervised", "policy", "policy"]
    owner = owners([5, 100, 5, 100, 5, 5], objectives, minibatches=1, ranks=2)
    assert np.bincount(owner[[0, 2, 4, 5]]).tolist() == [2, 2], "lengths for other losses do not count here"
