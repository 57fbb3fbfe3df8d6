"""Five services, a log and a bus learn what a page of plain PyTorch learns, token for token.

The loop below shares no decoder, cache, packing, batching, loss or optimizer code with the services. It shares only the
prompts, the initial weights and the random numbers by which tokens are drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from penstock.services.rollout.engines.sampling import stream_of, uniforms
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.data.prompts import PromptSource
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.protocol.events import BatchSealed, BatchTrained
from penstock.shared.protocol.ids import derive_seed
from penstock.shared.protocol.trajectory import Group

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

UPDATES = 20
SMALL = ("train.max_lag=0", f"train.max_updates={UPDATES}", "optimizer.learning_rate=1e-3")


class PlainGRPO:
    """Plain GRPO (DeepSeekMath, arXiv 2402.03300) with one step per batch, written without regard to speed."""

    def __init__(self, config: JobConfig) -> None:
        self.config, tokenizer = config, build_tokenizer(config.model)
        self.tokenizer, self.eos = tokenizer, int(tokenizer.eos_token_id)
        self.prompts = PromptSource(config.data, tokenizer, config.seed)
        self.model = build_model(config.model, len(tokenizer), seed=config.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.optimizer.learning_rate, weight_decay=0.0)

    def update(self, ordinals: range) -> dict[int, tuple[list[list[int]], list[list[float]]]]:
        """Sample a group for each prompt, then make one step; return tokens and log-probs of each group."""
        groups = {ordinal: self.sample(ordinal) for ordinal in ordinals}
        loss, tokens = torch.zeros(()), 0
        for ordinal, (completions, behaviour) in groups.items():
            rewards = torch.tensor([self.reward(ids) for ids in completions], dtype=torch.float64)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            for ids, old, advantage in zip(completions, behaviour, advantages.float(), strict=True):
                ratio = (self.logprobs(self.prompts.train(ordinal).token_ids, ids) - torch.tensor(old)).exp()
                loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
                tokens += len(ids)
        self.optimizer.zero_grad()
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.max_grad_norm)
        self.optimizer.step()
        return groups

    @torch.no_grad()
    def sample(self, ordinal: int) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one group, each token by a forward pass of the whole text; return tokens and log-probs."""
        seed = derive_seed(self.config.seed, "draw", ordinal, 0)
        completions, logprobs = [], []
        for member in range(self.config.algorithm.group_size):
            stream, prompt = torch.tensor([stream_of(seed + member)]), list(self.prompts.train(ordinal).token_ids)
            ids: list[int] = []
            while len(ids) < self.config.sampling.max_new_tokens and ids[-1:] != [self.eos]:
                logits = self.model(torch.tensor([prompt + ids])).logits[0, -1]
                cumulative = logits.softmax(-1).cumsum(-1, dtype=torch.float64)
                point = uniforms(stream, torch.tensor([len(ids)])) * cumulative[-1]
                ids.append(int(torch.searchsorted(cumulative, point, right=True)))
            completions.append(ids)
            logprobs.append(self.logprobs(prompt, ids).tolist())
        return completions, logprobs

    def logprobs(self, prompt: Any, ids: list[int]) -> Tensor:
        """Return the log-probs of the tokens of one completion."""
        logits = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]

    def reward(self, ids: list[int]) -> float:
        """Return the reward of the format scorer."""
        text = self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.eos] else ids)
        return float(re.fullmatch(self.config.reward.scorers[0].pattern, text, re.DOTALL) is not None)


def trained(stack: Any, job: str) -> Iterator[list[Group]]:
    """Yield the groups of every update, in the order of their prompts."""
    events, groups = stack.ledger(job), stack.groups(job)
    sealed = {event.number: event for event in events if isinstance(event, BatchSealed)}
    for event in events:
        if isinstance(event, BatchTrained):
            yield sorted((groups[one.seq] for one in sealed[event.number].groups), key=lambda group: group.draw)


@pytest.mark.long
def test_services_learn_what_a_plain_loop_learns(stack: Any, make_job: Any) -> None:
    job = stack.submit(*SMALL)
    assert stack.finish(job).status.step == UPDATES
    loop, apart, rewards = PlainGRPO(JobConfig.parse(make_job(*SMALL))), [], []
    for update, batch in enumerate(trained(stack, job)):
        plain = loop.update(range(batch[0].draw.ordinal, batch[-1].draw.ordinal + 1))
        assert len(plain) == len(batch)
        for group in batch:
            completions, logprobs = plain[group.draw.ordinal]
            written = [ids.tolist() for ids in np.split(group.token_ids, group.cu_seqlens[1:-1])]
            assert written == completions, f"update {update}, draw {group.draw}"
            apart.append(np.abs(group.logprobs - np.concatenate(logprobs)).max())
            rewards.append(np.mean(group.rewards))
    assert update == UPDATES - 1
    assert max(apart) < 1e-4, "after every update both policies are the same"
    assert np.mean(rewards[-20:]) > np.mean(rewards[:20]) + 0.1, "the rewards have risen since the start"
