"""Once an answer is wrong, its length must not matter: which aggregations and overlong rules keep that, exactly.

After a mistake every continuation has the same reward, hence the same advantage ``A < 0``. The expected gradient is
``-A E[w(length) ∇ log π]`` with the weight ``w`` that the loss gives the tokens of the answer: zero for a constant
``w``, since ``E[∇ log π] = 0``; it favours length where ``w`` falls with it (Dr. GRPO, arXiv 2503.20783, §3.1).

Shape legend: K = completions, M = their tokens one after another.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.shared.algorithms.aggregation import Aggregation, aggregate
from penstock.shared.algorithms.overlong import overlong_filter, soft_overlong_punishment
from penstock.shared.algorithms.policy_loss import policy_gradient_loss

LIMIT = 12
LENGTHS_K = torch.tensor([*range(1, LIMIT + 1), LIMIT])
"""Each length of a completion that ended once, and the length of the one that was cut off."""
NUM = len(LENGTHS_K)
ROWS_M = torch.repeat_interleave(torch.arange(NUM), LENGTHS_K)


def token_logprobs(stop_logit: Tensor) -> Tensor:
    """Return log-probs [M] under a policy that ends a completion with probability σ(stop_logit) at each token."""
    stop, go = torch.nn.functional.logsigmoid(stop_logit), torch.nn.functional.logsigmoid(-stop_logit)
    is_last_M = torch.cat([torch.arange(1, k + 1) == k for k in LENGTHS_K.tolist()])
    is_last_M[-1] = False
    return torch.where(is_last_M, stop, go)


def push_to_stop(mode: Aggregation, *, kept_K: Tensor | None = None, advantages_K: Tensor | None = None) -> float:
    """Return the change of the stop logit by a step of gradient descent, over all continuations of a wrong answer."""
    stop_logit = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    logprobs_M = token_logprobs(stop_logit)
    probability_K = torch.zeros(NUM, dtype=torch.float64).index_add(0, ROWS_M, logprobs_M.detach()).exp()
    assert float(probability_K.sum()) == pytest.approx(1.0)
    advantages_K = torch.full((NUM,), -0.5, dtype=torch.float64) if advantages_K is None else advantages_K
    loss_M = policy_gradient_loss(logprobs_M, logprobs_M.detach(), advantages_K[ROWS_M]).loss_M
    kept_K = torch.ones(NUM, dtype=torch.bool) if kept_K is None else kept_K
    weighted_M = loss_M * (probability_K * kept_K)[ROWS_M]
    lengths_M = LENGTHS_K[ROWS_M].double()
    loss = aggregate(mode, weighted_M, lengths_M, num_tokens=100, num_sequences=10, horizon=LIMIT)
    return -float(torch.autograd.grad(loss, stop_logit)[0])


@pytest.mark.parametrize("mode", ["token_mean", "constant"])
def test_one_weight_for_all_tokens_leaves_the_length_of_wrong_answers_alone(mode: Aggregation) -> None:
    assert push_to_stop(mode) == pytest.approx(0.0, abs=1e-12)


def test_mean_over_the_sequence_makes_wrong_answers_longer() -> None:
    assert push_to_stop("sequence_mean") < -1e-3


@pytest.mark.parametrize("mode", ["token_mean", "constant"])
def test_filter_makes_wrong_answers_longer(mode: Aggregation) -> None:
    assert push_to_stop(mode, kept_K=overlong_filter(torch.arange(NUM) == NUM - 1)) < -1e-4


@pytest.mark.parametrize("mode", ["token_mean", "constant"])
def test_soft_punishment_makes_wrong_answers_shorter(mode: Aggregation) -> None:
    punished_K = soft_overlong_punishment(LENGTHS_K, max_length=LIMIT, buffer=LIMIT / 2).double() - 0.5
    assert push_to_stop(mode, advantages_K=punished_K) > 1e-3
