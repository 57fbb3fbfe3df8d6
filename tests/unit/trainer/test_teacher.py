"""On-policy distillation: a frozen model of another shape judges each token, and the policy comes to agree with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.errors import CheckpointError, ConfigError
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]
Make = Callable[..., str]

PROMPT = [5, 6, 7]
LENGTH = 3


def logprobs_by_hand(model: Any, prompt: list[int], completion: list[int], *, temperature: float) -> Tensor:
    """Return the log-prob of each token of a completion, by a plain forward pass of the library's model."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0].double() / temperature
    own = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return own[torch.arange(len(completion)), torch.tensor(completion)]


def sampled(learner: Learner, ordinal: int, size: int, *, temperature: float = 1.0) -> Group:
    """Return a group of ``size`` completions of LENGTH tokens that the policy samples after PROMPT."""
    generator = torch.Generator().manual_seed(ordinal)
    rows = torch.tensor([PROMPT] * size)
    logprobs = torch.zeros(size, LENGTH)
    with torch.no_grad():
        for at in range(LENGTH):
            own = torch.log_softmax(learner.model(input_ids=rows).logits[:, -1].float() / temperature, -1)
            chosen = torch.multinomial(own.exp(), 1, generator=generator)
            logprobs[:, at] = own.gather(1, chosen)[:, 0]
            rows = torch.cat([rows, chosen], 1)
    return Group(
        job="job_1", draw=Draw(ordinal), attempt="a", epoch=0, prompt_ids=np.array(PROMPT, np.int32),
        token_ids=rows[:, len(PROMPT) :].numpy().astype(np.int32).ravel(),
        cu_seqlens=np.arange(0, LENGTH * size + 1, LENGTH, dtype=np.int32), logprobs=logprobs.numpy().ravel(),
        mask=np.ones(LENGTH * size, np.uint8), rewards=np.zeros(size, np.float32), failed=np.zeros(size, bool),
        finish=np.zeros(size, np.uint8), spans=np.array([[i, 0, 0, LENGTH] for i in range(size)], np.int32),
        temperature=temperature,
    )  # fmt: skip


def divergence(learner: Learner, teacher: Any) -> float:
    """Return the exact KL(policy || teacher) of the first token after PROMPT."""
    with torch.no_grad():
        own, theirs = (
            torch.log_softmax(model(input_ids=torch.tensor([PROMPT])).logits[0, -1].double(), -1)
            for model in (learner.model, teacher)
        )
    return float((own.exp() * (own - theirs)).sum())


@pytest.mark.long
def test_the_policy_comes_to_agree_with_its_teacher(make_config: Config, make_teacher: Make) -> None:
    path = make_teacher()
    teacher = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(6)  # a teacher with preferences: to a fresh model all tokens are alike
        teacher.save_pretrained(path)
    learner = Learner(
        make_config(
            algorithm={"type": "distillation", "teacher": path, "group_size": 32},
            sampling={"temperature": 1.0},
            optimizer={"learning_rate": 8e-3, "weight_decay": 0.0},
            train={"batch_size": 64},
        )
    )
    before = divergence(learner, teacher)
    for step in range(30):
        groups = [sampled(learner, 2 * step + i, 32) for i in range(2)]
        metrics = learner.update(BatchShard.whole(groups), update_index=step)
        assert metrics["update_s/forward"] > 0
    assert divergence(learner, teacher) < before / 3, (before, divergence(learner, teacher))
    assert metrics["policy/kl_teacher"] < before / 2


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_advantages_are_discounted_log_ratios(
    make_config: Config, make_teacher: Make, batch: list[Group], gamma: float
) -> None:
    """Advantages are ``A_t = Σ_k γ^k (log π_teacher - log π)_{t+k}`` by the library's forward pass; the ratio is 1."""
    path = make_teacher()
    config = make_config(algorithm={"type": "distillation", "teacher": path, "gamma": gamma})
    learner, teacher = Learner(config), AutoModelForCausalLM.from_pretrained(path).eval()
    temperature = config.sampling.temperature
    expected, kl = [], []
    groups = []
    for group in batch:
        own = []
        for i in range(group.num_trajectories):
            cut = slice(int(group.cu_seqlens[i]), int(group.cu_seqlens[i + 1]))
            row = (group.prompt_ids.tolist(), group.token_ids[cut].tolist())
            behaviour = logprobs_by_hand(learner.model, *row, temperature=temperature)
            ratios = (logprobs_by_hand(teacher, *row, temperature=temperature) - behaviour)[group.mask[cut] == 1]
            own.append(behaviour)
            if not group.failed[i]:
                kl += (-ratios).tolist()
                value = torch.zeros(())
                for ratio in reversed(ratios.tolist()):
                    value = ratio + gamma * value
                    expected.append(float(value))
        groups.append(replace(group, logprobs=torch.cat(own).float().numpy()))
    metrics = learner.update(BatchShard.whole(groups), update_index=0)
    assert metrics["policy/kl_teacher"] == pytest.approx(np.mean(kl), abs=1e-5)
    assert metrics["loss/policy"] == pytest.approx(-np.mean(expected), abs=1e-4)


def test_a_teacher_that_agrees_teaches_nothing(make_config: Config, make_teacher: Make) -> None:
    path = make_teacher()
    model = {"path": path, "config": None, "tokenizer": None}
    config = make_config(model=model, algorithm={"type": "distillation", "teacher": path}, sampling={"temperature": 1})
    learner = Learner(config)
    metrics = learner.update(BatchShard.whole([sampled(learner, 0, 4)]), update_index=0)
    assert abs(metrics["policy/kl_teacher"]) < 1e-6
    assert metrics["optimizer/grad_norm"] < 1e-6


def test_a_teacher_with_other_tokens_is_refused(make_config: Config, make_teacher: Make) -> None:
    path = make_teacher(characters="9876543210+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$")
    with pytest.raises(ConfigError, match=r"the teacher .* has another vocabulary: 10 tokens"):
        Learner(make_config(algorithm={"type": "distillation", "teacher": path}))


def test_a_teacher_that_is_not_there_is_refused(make_config: Config) -> None:
    with pytest.raises(ConfigError, match="does not exist on this host"):
        Learner(make_config(algorithm={"type": "distillation", "teacher": "/nowhere/at/all"}))


def test_a_checkpoint_goes_on_with_its_own_teacher_only(make_config: Config, make_teacher: Make) -> None:
    path = make_teacher()
    config = make_config(algorithm={"type": "distillation", "teacher": path})
    learner = Learner(config)
    state = learner.state()
    assert state.models.keys() == {"policy"}
    Learner(config).load_state(state)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
        model.save_pretrained(path)
    with pytest.raises(CheckpointError, match="give the teacher that the job was started with"):
        Learner(config).load_state(state)


def test_megatron_holds_no_teacher(make_config: Config) -> None:
    with pytest.raises(ConfigError, match="backend 'megatron' holds no teacher"):
        make_config(algorithm={"type": "distillation", "teacher": "some/model"}, backend={"type": "megatron"})
