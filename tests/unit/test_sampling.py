"""Drawing tokens: the right distribution, the right log-prob, noise that is a function of seed and position."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.services.rollout.engines.completion import Completion
from penstock.services.rollout.engines.embedded.rows import Rows
from penstock.services.rollout.engines.sampling import Draws, draw, stream_of, uniforms
from penstock.services.rollout.episode import requests_for
from penstock.services.rollout.serving.server import replayable, sampling_for
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import parse_job
from penstock.shared.config.sampling import SamplingConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.generation import Sampling
from penstock.shared.protocol.ids import Draw
from penstock.shared.protocol.live.inference import ClientSampling
from penstock.shared.protocol.messages import Ticket

LOGITS_V = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread: several threads compute such small tensors more slowly."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draws(num_rows: int, **how: object) -> Draws:
    fields = {
        "stream_R": torch.tensor([stream_of(seed) for seed in range(num_rows)]),
        "index_R": torch.zeros(num_rows, dtype=torch.long),
        "temperature_R1": None,
        "greedy_R": None,
        "all_greedy": False,
        "top_p_R": None,
        "top_k_R": None,
        "forbidden_RK": None,
    }
    return Draws(**{**fields, **how})


def frequencies(tokens: Tensor) -> Tensor:
    return torch.bincount(tokens, minlength=len(LOGITS_V)) / len(tokens)


def test_splitmix64_gives_its_published_numbers() -> None:
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    found = uniforms(torch.zeros(3, dtype=torch.long), torch.arange(3))
    assert found.tolist() == [(value >> 11) * 2.0**-53 for value in first]
    assert stream_of(0) & ((1 << 64) - 1) == first[0]


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_numbers_are_uniform_and_independent_along_each_axis(axis: str) -> None:
    count = 1 << 16
    if axis == "seed":
        values = uniforms(torch.tensor([stream_of(s) for s in range(count)]), torch.full((count,), 5))
    else:
        values = uniforms(torch.full((count,), stream_of(9)), torch.arange(count))
    histogram = torch.histc(values, 64, 0, 1)
    assert float(((histogram - count / 64) ** 2 / (count / 64)).sum()) < 120  # chi-square, 63 degrees: p < 2e-5
    assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.02


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_softmax_and_carry_its_logprobs(temperature: float) -> None:
    count = 20_000
    how = draws(count, temperature_R1=None if temperature == 1 else torch.full((count, 1), temperature))
    tokens, logprobs = draw(LOGITS_V.expand(count, -1), how)
    expected = torch.log_softmax(LOGITS_V / temperature, -1)
    torch.testing.assert_close(logprobs, expected[tokens])
    torch.testing.assert_close(frequencies(tokens), expected.exp(), atol=0.012, rtol=0)


def test_greedy_rows_stand_beside_sampled_ones() -> None:
    count = 200
    greedy = torch.arange(count) % 2 == 0
    tokens, logprobs = draw(LOGITS_V.expand(count, -1), draws(count, greedy_R=greedy))
    assert set(tokens[greedy].tolist()) == {0}
    assert len(set(tokens[~greedy].tolist())) > 2
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS_V, -1)[tokens])
    alone, _ = draw(LOGITS_V.expand(count, -1), draws(count))
    assert torch.equal(alone[~greedy], tokens[~greedy])


def test_truncation_is_per_row_and_leaves_logprobs_alone() -> None:
    count = 3_000
    kind = torch.arange(count) % 3
    top_k = torch.where(kind == 0, 2, 0)
    top_p = torch.where(kind == 1, 0.8, 1.0)
    tokens, logprobs = draw(LOGITS_V.expand(count, -1), draws(count, top_k_R=top_k, top_p_R=top_p))
    probs = torch.softmax(LOGITS_V, -1)
    assert probs[:3].sum() > 0.8 > probs[:2].sum()
    assert set(tokens[kind == 0].tolist()) == {0, 1}
    assert set(tokens[kind == 1].tolist()) == {0, 1, 2}
    assert set(tokens[kind == 2].tolist()) >= {0, 1, 2, 3, 4}
    torch.testing.assert_close(logprobs, probs.log()[tokens])
    kept = frequencies(tokens[kind == 0])[:2]
    torch.testing.assert_close(kept, probs[:2] / probs[:2].sum(), atol=0.05, rtol=0)


def test_forbidden_tokens_are_not_drawn() -> None:
    count = 600
    forbidden = torch.tensor([[0, -1], [-1, -1], [2, 0]]).repeat(count // 3, 1)
    tokens, logprobs = draw(LOGITS_V.expand(count, -1), draws(count, forbidden_RK=forbidden))
    assert 0 not in tokens[0::3]
    assert 0 in tokens[1::3]
    assert not {0, 2} & set(tokens[2::3].tolist())
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS_V, -1)[tokens])


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]).expand(5_000, -1)
    assert set(draw(logits, draws(5_000))[0].tolist()) == {1, 3}


# -- what is recorded is what was sampled --------------------------------------------------------------------------

EOS = 0
"""The likeliest token of LOGITS_V."""
JOB = {
    "name": "honest",
    "model": {"config": {}, "tokenizer": "char"},
    "data": {"train": {"type": "addition"}},
    "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 16, "max_updates": 1},
}

KINDS: dict[str, dict[str, object]] = {"rl": {}, "online_rl": {"kind": "online_rl", "data": {}, "reward": {}}}


def gap(sampling: Sampling, *, num_rows: int = 4000, steps: int = 2) -> float:
    """Return the largest difference, at any step, between a token's share of the rows and what its log-prob claims."""
    stop_ids = () if sampling.ignore_eos else (EOS,)
    stop_ids = (*stop_ids, *sampling.stop_token_ids)
    rows, worst = Rows(num_rows, torch.device("cpu")), 0.0
    rows.reserve(1 + steps)
    rows.add([Completion(0, i, (5,), sampling, stop_ids, seed=i) for i in range(num_rows)], version=0)
    logits_RV = LOGITS_V.expand(num_rows, -1)
    for _ in range(steps):
        token_R, logprob_R = draw(logits_RV, rows.draws(0, num_rows, len(LOGITS_V)))
        claimed_V = torch.zeros(len(LOGITS_V)).scatter(0, token_R, logprob_R.exp())
        worst = max(worst, float((frequencies(token_R) - claimed_V).abs().max()))
        rows.append(0, token_R, logprob_R)
    return worst


ASKED = [
    ({}, True),
    ({"ignore_eos": True}, True),
    ({"stop": ["x"], "stop_token_ids": [3]}, True),
    ({"temperature": 0.7}, True),
    ({"min_new_tokens": 2}, False),
    ({"min_new_tokens": 4}, False),
    ({"top_p": 0.7}, False),
    ({"top_k": 2}, False),
    ({"logit_bias": [(1, 2.0)]}, False),
    ({"logit_bias": [(0, -100.0)]}, False),
    ({"frequency_penalty": 1.5}, False),
    ({"presence_penalty": 1.5}, False),
]


@pytest.mark.parametrize(("asked", "honest"), ASKED, ids=str)
def test_a_live_answer_is_trained_if_its_logprobs_are_its_frequencies(asked: dict[str, object], honest: bool) -> None:
    """With 4,000 draws per step a share has a standard deviation of 0.8 %, so the bound of 4 % is five of them."""
    config = SamplingConfig(max_new_tokens=4, temperature=float(asked.get("temperature", 1.0)))  # type: ignore[arg-type]
    sampling = sampling_for(config, ClientSampling(seed=1, **asked), num_prompt=1, max_length=9)  # type: ignore[arg-type]
    assert replayable(sampling, config) is honest
    found = gap(sampling)
    assert found < 0.04 if honest else found > 0.08


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"min_new_tokens": 1}, "sampling.min_new_tokens: training needs 0, found 1"),
        ({"top_p": 0.9}, "top_p = 1"),
        ({"top_k": 5}, "top_k = 0"),
        ({"temperature": 0}, "temperature > 0"),
        ({"logit_bias": {"1": 2}}, "sampling.logit_bias"),
        ({"frequency_penalty": 0.5}, "sampling.frequency_penalty"),
        ({"repetition_penalty": 1.1}, "sampling.repetition_penalty"),
        ({"bad_words": ["x"]}, "sampling.bad_words"),
    ],
    ids=str,
)
def test_sampling_that_training_cannot_record_is_refused(kind: str, asked: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_job({**JOB, **KINDS[kind], "sampling": asked})


@pytest.mark.parametrize(
    "asked", [{"stop": ["x"]}, {"stop_token_ids": [3]}, {"ignore_eos": True}, {"temperature": 0.7}]
)
def test_allowed_sampling_is_recorded_exactly(asked: dict[str, object]) -> None:
    config = JobConfig.parse(
        {**JOB, "sampling": asked, "evaluation": {"sampling": {"min_new_tokens": 2, "top_p": 0.9}}}
    )
    ticket = Ticket(draw=Draw(0), epoch=1, min_version=0, deadline=0.0, purpose="train")
    ((sampling, _),) = requests_for(config, ticket)
    assert sampling.ignore_eos is bool(asked.get("ignore_eos"))
    assert gap(sampling) < 0.04
