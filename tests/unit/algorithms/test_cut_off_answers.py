"""Rules for cut-off answers: the exact effect of each on whether a policy learns to answer at all.

A policy answers with probability a; an answer is right with probability r; other completions are cut off. With
advantages A the expected change of logit(a) is ``a (1 - a) (E[A | answers] - E[A | cut off])``, for groups of n:

    counted as wrong        (1 - 1/n) a (1 - a) r
    punished as well        (1 - 1/n) a (1 - a) (r + 1)
    out of the loss         (1 - 1/n) a (1 - a) r (1 - a)
    out of the group        0

If all problems share one mean m, the difference of expectations is r where cut-off answers count, and r - m where they
are only left out of the loss.

Shape legend: n = completions of a group, B = completions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from penstock.shared.algorithms.advantages import grpo_advantages
from penstock.shared.algorithms.aggregation import constant
from penstock.shared.algorithms.overlong import overlong_filter, soft_overlong_punishment
from penstock.shared.algorithms.policy_loss import policy_gradient_loss
from penstock.shared.algorithms.statistics import moments, whiten

RIGHT, WRONG, CUT_OFF = range(3)
LENGTHS = torch.tensor([3, 2, 8])
"""Numbers of tokens of the outcomes RIGHT, WRONG and CUT_OFF; the last one is the limit."""
LIMIT, N = 8, 4

Rule = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Function that maps outcomes [n] to advantages [n] and a mask [n] of the completions that the loss counts."""


def rewards_of(outcomes: Tensor) -> Tensor:
    return (outcomes == RIGHT).float()


def grpo(rewards: Tensor, valid: Tensor, *, by_std: bool = False) -> Tensor:
    return grpo_advantages(rewards, torch.zeros(len(rewards), dtype=torch.int64), valid, scale_by_std=by_std)


def counted(outcomes: Tensor) -> tuple[Tensor, Tensor]:
    everybody = torch.ones(len(outcomes), dtype=torch.bool)
    return grpo(rewards_of(outcomes), everybody), everybody


def punished(outcomes: Tensor) -> tuple[Tensor, Tensor]:
    everybody = torch.ones(len(outcomes), dtype=torch.bool)
    punishment = soft_overlong_punishment(LENGTHS[outcomes], max_length=LIMIT, buffer=4)
    return grpo(rewards_of(outcomes) + punishment, everybody), everybody


def filtered(outcomes: Tensor) -> tuple[Tensor, Tensor]:
    return counted(outcomes)[0], overlong_filter(outcomes == CUT_OFF)


def left_out(outcomes: Tensor) -> tuple[Tensor, Tensor]:
    kept = overlong_filter(outcomes == CUT_OFF)
    return grpo(rewards_of(outcomes), kept), kept


def by_std(outcomes: Tensor) -> tuple[Tensor, Tensor]:
    kept = overlong_filter(outcomes == CUT_OFF)
    return grpo(rewards_of(outcomes), kept, by_std=True), kept


def push_to_answer(advantages_B: Tensor, kept_B: Tensor, outcomes_B: Tensor, logit: Tensor) -> Tensor:
    """Return the step of gradient descent on the logit that decides the first token of each completion."""
    logprobs_B = torch.nn.functional.logsigmoid(torch.where(outcomes_B == CUT_OFF, -logit, logit))
    loss_B = policy_gradient_loss(logprobs_B, logprobs_B.detach(), advantages_B).loss_M * kept_B
    loss = constant(loss_B, num_sequences=len(loss_B), horizon=1)
    return -torch.autograd.grad(loss, logit)[0]


def expected_push(rule: Rule, a: float, r: float) -> float:
    """Return the mean of `push_to_answer` over all groups of N completions, weighted by their probability."""
    chance = [a * r, a * (1 - r), 1 - a]
    total = 0.0
    for group in product(range(3), repeat=N):
        outcomes = torch.tensor(group)
        logit = torch.tensor(math.log(a / (1 - a)), dtype=torch.float64, requires_grad=True)
        total += math.prod(chance[o] for o in group) * float(push_to_answer(*rule(outcomes), outcomes, logit))
    return total


@pytest.mark.parametrize(("a", "r"), [(0.5, 1.0), (0.9, 0.7)])
@pytest.mark.parametrize(
    ("rule", "difference"),
    [
        (counted, lambda a, r: r),
        (punished, lambda a, r: r + 1),
        (filtered, lambda a, r: r * (1 - a)),
        (left_out, lambda a, r: 0.0),
        (by_std, lambda a, r: 0.0),
    ],
)
def test_the_rule_for_cut_off_answers_decides_whether_a_policy_learns_to_answer(
    rule: Rule, difference: Callable[[float, float], float], a: float, r: float
) -> None:
    expected = (1 - 1 / N) * a * (1 - a) * difference(a, r)
    assert expected_push(rule, a, r) == pytest.approx(expected, abs=1e-7)


def test_with_one_mean_for_all_problems_a_filter_makes_the_policy_give_hard_ones_up() -> None:
    """Each outcome is as frequent in the batch as it is likely; of its two problems 9 and 2 of 10 answers are right."""
    easy = [RIGHT] * 81 + [WRONG] * 9 + [CUT_OFF] * 10
    hard = [RIGHT] * 18 + [WRONG] * 72 + [CUT_OFF] * 10
    outcomes_B = torch.tensor(easy + hard)
    lengths_B = LENGTHS[outcomes_B]
    returns_T = torch.repeat_interleave(rewards_of(outcomes_B), lengths_B)
    pooled = moments(returns_T, torch.ones_like(returns_T))
    advantages_B = whiten(rewards_of(outcomes_B), torch.ones(len(outcomes_B)), pooled)
    kept_B = overlong_filter(outcomes_B == CUT_OFF)

    def push(part: slice, kept_B: Tensor) -> float:
        logit = torch.tensor(math.log(9.0), dtype=torch.float64, requires_grad=True)
        step = push_to_answer(advantages_B[part], kept_B[part], outcomes_B[part], logit)
        return float(step) * math.sqrt(pooled.variance) / 0.09

    mean = 3 * 99 / (3 * 99 + 2 * 81 + 8 * 20)
    assert push(slice(100, None), torch.ones(200)) == pytest.approx(0.2, abs=1e-6)
    assert push(slice(100, None), kept_B) == pytest.approx(0.2 - mean, abs=1e-6)
    assert push(slice(100), kept_B) == pytest.approx(0.9 - mean, abs=1e-6)
