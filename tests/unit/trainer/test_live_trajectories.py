"""Training on live data: groups of one, short batches, turns with masked context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from penstock.services.coordinator.online.groups import group_of
from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.kinds import parse_training
from penstock.shared.protocol.generation import Sampling, Span
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.interaction import Interaction

CONFIG = parse_training(
    {
        "kind": "online_rl", "name": "live", "seed": 1, "sampling": {"max_new_tokens": 8},
        "model": {
            "config": {"arch": "qwen3", "hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2,
                       "num_kv_heads": 2}, "tokenizer": "char",
        },
        "optimizer": {"learning_rate": 0.01}, "train": {"batch_size": 8},
    }
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def turn(prompt_ids: list[int], token_ids: list[int]) -> Interaction:
    return Interaction(
        id="i", request="i", index=0, job="j", episode="e", key_id="k", user="u", split="train", untrainable="",
        prompt_ids=prompt_ids, token_ids=token_ids, logprobs=[-3.0] * len(token_ids),
        spans=[Span(0, 0, len(token_ids))],
        sampling=Sampling(max_new_tokens=8), finish="stop", template="", body_digest="", text="", started=0.0,
        first_token=0.0, ended=0.0,
    )  # fmt: skip


def shard(rewards: Sequence[float], turns: Sequence[Sequence[Interaction]]) -> BatchShard:
    groups = [
        group_of("j", Draw(n), list(one), reward=reward, epoch=1)
        for n, (reward, one) in enumerate(zip(rewards, turns, strict=True))
    ]
    return BatchShard(groups, list(range(len(groups))), len(groups))


def probability(learner: Learner, prompt_ids: list[int], token: int) -> float:
    with torch.no_grad():
        return float(learner.model(torch.tensor([prompt_ids])).logits[0, -1].softmax(-1)[token])


def test_groups_of_one_learn_from_a_batch_that_is_not_full() -> None:
    learner = Learner(CONFIG)
    before = probability(learner, [10, 11], 20), probability(learner, [10, 11], 21)
    liked, disliked = turn([10, 11], [20]), turn([10, 11], [21])
    for update in range(5):
        learner.update(shard([1.0, -1.0, 1.0], [[liked], [disliked], [liked]]), update_index=update)
    assert probability(learner, [10, 11], 20) > 2 * before[0]
    assert probability(learner, [10, 11], 21) < before[1]


def test_equal_rewards_teach_nothing() -> None:
    learner = Learner(CONFIG)
    before = [tensor.clone() for _, tensor in learner.weights()]
    metrics = learner.update(shard([0.3] * 3, [[turn([10, 11], [20, 21])]] * 3), update_index=0)
    assert metrics["optimizer/grad_norm"] == 0
    after = [tensor for _, tensor in learner.weights()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_context_between_turns_is_read_but_not_trained() -> None:
    joined, plain = Learner(CONFIG), Learner(CONFIG)
    first, second = turn([10, 11], [20]), turn([10, 11, 20, 30, 31], [21])
    other = [turn([10, 11], [22])]
    joint = joined.update(shard([1.0, -1.0], [[first, second], other]), update_index=0)
    apart = plain.update(shard([1.0, 1.0, -1.0], [[first], [second], other]), update_index=0)
    assert joint["tokens/scored"] == apart["tokens/scored"] == 3
    for (_, a), (_, b) in zip(joined.weights(), plain.weights(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
