"""A learner counts cut-off completions as wrong, leaves them out of the loss, or leaves them out of their group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.services.trainer.learners.learner import Learner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.trajectory import Group

Config = Callable[..., JobConfig]

PROMPT, TERSE, SIZE, LIMIT = [5, 6, 7], 24, 8, 16
"""A first token below TERSE is a right answer; any other begins a completion that runs up to the limit."""


def answers(learner: Learner) -> torch.Tensor:
    """Return the log-probs of the first token of an answer."""
    with torch.no_grad():
        return torch.log_softmax(learner.model(input_ids=torch.tensor([PROMPT])).logits[0, -1].float() / 0.7, -1)


def sampled(learner: Learner, ordinal: int, *, cut_off_fails: bool) -> Group:
    """Sample completions; only the first token is the policy's choice, and those that are cut off earn nothing."""
    logprobs = answers(learner)
    tokens = torch.multinomial(logprobs.exp(), SIZE, replacement=True, generator=torch.Generator().manual_seed(ordinal))
    terse = (tokens < TERSE).numpy()
    lengths = np.where(terse, 2, LIMIT)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    token_ids, mask = np.full(starts[-1], 9, np.int32), np.zeros(starts[-1], np.uint8)
    values = np.zeros(starts[-1], np.float32)
    token_ids[starts[:-1]], mask[starts[:-1]], values[starts[:-1]] = tokens.numpy(), 1, logprobs[tokens].numpy()
    return Group(
        job="job_1", draw=Draw(ordinal), attempt="a", epoch=0, prompt_ids=np.array(PROMPT, np.int32),
        token_ids=token_ids, cu_seqlens=starts.astype(np.int32), logprobs=values, mask=mask,
        rewards=terse.astype(np.float32), failed=~terse & cut_off_fails, finish=(~terse).astype(np.uint8),
        spans=np.array([[i, 0, 0, n] for i, n in enumerate(lengths)], np.int32),
    )  # fmt: skip


def learnt(make_config: Config, *, cut_off_fails: bool = False, **algorithm: Any) -> tuple[float, float, float]:
    """Train 8 updates; return P(answer) before and after them, and the groups without signal in the first."""
    config = make_config(
        algorithm={"group_size": SIZE, **algorithm}, optimizer={"learning_rate": 3e-3, "weight_decay": 0.0},
        train={"batch_size": 2 * SIZE},
    )  # fmt: skip
    learner = Learner(config)
    before, silent = float(answers(learner)[:TERSE].exp().sum()), []
    for index in range(8):
        groups = [sampled(learner, 2 * index + i, cut_off_fails=cut_off_fails) for i in range(2)]
        silent.append(learner.update(BatchShard.whole(groups), update_index=index)["groups/no_signal"])
    return before, float(answers(learner)[:TERSE].exp().sum()), silent[0]


def test_answers_are_learnt_where_cut_off_ones_count(make_config: Config) -> None:
    before, counted, silent = learnt(make_config)
    assert 0.2 < before < 0.8
    assert counted > before + 0.1
    assert silent == 0


def test_nothing_is_learnt_where_cut_off_ones_leave_their_group(make_config: Config) -> None:
    before, left_out, silent = learnt(make_config, cut_off_fails=True)
    assert left_out == before, "right answers beside right answers have no advantage"
    assert silent == 2


def test_filter_of_the_loss_keeps_the_statistics_of_the_group(make_config: Config) -> None:
    before, filtered, silent = learnt(make_config, overlong_filter=True)
    assert filtered > before + 0.05
    assert silent == 0
