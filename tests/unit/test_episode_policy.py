"""Policies that act in simulators: densities, noise, statistics of observations, actions for a simulator, refusals."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from penstock.shared.config.embodied import PolicyConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.distributions import squashed_logprobs
from penstock.shared.models.episode_policy import EpisodePolicy, GaussianPolicy, SquashedPolicy, build_policy
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec

N, CHUNK = 40, 3
KINDS = ("gaussian", "categorical", "tokens", "squashed")


def spec_of(**keys: Any) -> EnvSpec:
    known: dict[str, Any] = {
        "env_id": "Reach", "backend": "gymnasium", "num_envs": 1, "max_episode_steps": 20, "has_success": True,
        "observations": {"state": ArraySpec((4,), "float64"), "goal": ArraySpec((1, 2), "float32")},
        "action_shape": (2,), "action_dtype": "float32", "num_actions": None, "versions": {},
        "action_low": [-1.0, 0.0], "action_high": [1.0, 10.0],
    }  # fmt: skip
    return EnvSpec(**known | keys)


DISCRETE = spec_of(action_shape=(), action_dtype="int64", num_actions=5, action_low=[], action_high=[])


def policy_of(kind: str, *, seed: int = 1, **keys: Any) -> EpisodePolicy:
    config = PolicyConfig.parse({"type": kind, "hidden_sizes": [16], "observations": ["state", "goal"], **keys})
    return build_policy(config, DISCRETE if kind == "categorical" else spec_of(), action_chunk=CHUNK, seed=seed)


def stirred(policy: EpisodePolicy) -> EpisodePolicy:
    """Give ``policy`` weights with which its decisions differ, and statistics of observations; return it."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator))
    policy.observe(observations_of(200, seed=9))
    return policy


def observations_of(count: int, *, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    return {
        "goal": torch.from_numpy(rng.normal(5, 3, (count, 1, 2)).astype(np.float32)),
        "state": torch.from_numpy(rng.normal(-2, 0.1, (count, 4))),
    }


def noise_of(policy: EpisodePolicy, count: int = N) -> Tensor:
    shape, rng = (count, *policy.noise_shape), np.random.default_rng(3)
    drawn = rng.random(shape) if policy.noise == "uniform" else rng.standard_normal(shape)
    return torch.from_numpy(drawn.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mean", [False, True])
def test_an_action_is_evaluated_as_it_was_drawn(kind: str, *, mean: bool) -> None:
    policy = stirred(policy_of(kind))
    observations, noise = observations_of(N), None if mean else noise_of(policy)
    drawn = policy.act(observations, noise)
    assert drawn.actions_NCA.shape == drawn.logprobs_NCA.shape == (N, *policy.noise_shape)
    assert drawn.actions_NCA.dtype == (torch.int64 if kind in ("categorical", "tokens") else torch.float32)
    assert drawn.logprobs_NCA.dtype == torch.float32
    assert not drawn.logprobs_NCA.requires_grad
    found = policy.evaluate(observations, drawn.actions_NCA)
    torch.testing.assert_close(found.logprobs_NCA, drawn.logprobs_NCA, rtol=0, atol=1e-6)
    assert found.entropy_N.shape == (N,)
    alone = policy.act({name: column[5:6] for name, column in observations.items()}, None if mean else noise[5:6])
    torch.testing.assert_close(alone.actions_NCA[0], drawn.actions_NCA[5], rtol=0, atol=1e-6)
    found.logprobs_NCA.sum().backward()
    assert all(param.grad is not None and param.grad.isfinite().all() for param in policy.parameters())


def test_gaussian_densities() -> None:
    policy = stirred(policy_of("gaussian", initial_log_std=-0.5))
    assert isinstance(policy, GaussianPolicy)
    observations, noise = observations_of(N), noise_of(policy)
    mean = policy.act(observations, None).actions_NCA
    drawn = policy.act(observations, noise)
    deviation = policy.log_std.detach().exp().reshape(policy.noise_shape)
    torch.testing.assert_close(drawn.actions_NCA, mean + deviation * noise)
    expected = Normal(mean, deviation)
    torch.testing.assert_close(drawn.logprobs_NCA, expected.log_prob(drawn.actions_NCA), rtol=1e-5, atol=1e-5)
    entropy = policy.evaluate(observations, drawn.actions_NCA).entropy_N
    torch.testing.assert_close(entropy, expected.entropy().sum((1, 2)))


@pytest.mark.parametrize(("kind", "choices"), [("categorical", 5), ("tokens", 8)])
def test_densities_of_discrete_actions(kind: str, choices: int) -> None:
    policy = stirred(policy_of(kind, bins=8))
    observations = observations_of(N)
    logits = policy.layers(policy.features(observations)).reshape(N, *policy.noise_shape, choices)
    expected = Categorical(logits=logits)
    drawn = policy.act(observations, noise_of(policy))
    found = policy.evaluate(observations, drawn.actions_NCA)
    torch.testing.assert_close(found.logprobs_NCA, expected.log_prob(drawn.actions_NCA))
    torch.testing.assert_close(found.entropy_N, expected.entropy().sum((1, 2)))
    likeliest = policy.act(observations, None).actions_NCA
    assert torch.equal(likeliest, expected.probs.argmax(-1))
    grid = ((torch.arange(2000) + 0.5) / 2000).reshape(-1, 1, 1).expand(-1, *policy.noise_shape)
    first = {name: column[:1].expand(2000, *column.shape[1:]) for name, column in observations.items()}
    share = nn.functional.one_hot(policy.act(first, grid).actions_NCA, choices).double().mean(0)
    torch.testing.assert_close(share, expected.probs[0].detach().double(), rtol=0, atol=1.1 / 2000)


def test_squashed_densities() -> None:
    policy = stirred(policy_of("squashed"))
    assert isinstance(policy, SquashedPolicy)
    observations, noise = observations_of(N), noise_of(policy)
    drawn = policy.act(observations, noise)
    squashed = policy.sample(policy.features(observations), noise)
    assert torch.equal(squashed.actions_NCA, torch.tanh(drawn.actions_NCA))
    assert torch.equal(squashed.logprobs_NCA, drawn.logprobs_NCA)
    mean, log_std = policy._parameters_of(policy.features(observations))
    torch.testing.assert_close(drawn.logprobs_NCA, squashed_logprobs(drawn.actions_NCA, mean, log_std))
    far = {name: 1e6 * column for name, column in observations.items()}
    _, log_std = policy._parameters_of(policy.features(far))
    assert (log_std.min() >= -5) & (log_std.max() <= 2)


@pytest.mark.parametrize("sizes", [(1000,), (1, 1, 998), (300, 0, 700)])
def test_observations_are_normalised_by_all_that_was_seen(sizes: tuple[int, ...]) -> None:
    policy = policy_of("gaussian")
    every = observations_of(1000)
    start = 0
    for size in sizes:
        policy.observe({name: column[start : start + size] for name, column in every.items()})
        start += size
    numbers = np.concatenate([every["state"].numpy(), every["goal"].double().numpy()[:, 0]], axis=1)
    expected = (numbers - numbers.mean(0)) / np.sqrt(numbers.var(0) + 1e-8)
    found = policy.features(every)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    outlier = {name: torch.full_like(column[:1], 1e9) for name, column in every.items()}
    assert policy.features(outlier).tolist() == [[10.0] * 6]


def test_statistics_are_precise_far_from_zero_and_travel_with_the_weights() -> None:
    """A sum of squares in float32 would lose a deviation of 1e-3 around 1e6."""
    config = PolicyConfig(hidden_sizes=(4,))
    spec = spec_of(observations={"state": ArraySpec((1,), "float64")})
    policy, copied = (build_policy(config, spec, action_chunk=1, seed=seed) for seed in (1, 2))
    values = 1e6 + 1e-3 * np.random.default_rng(0).standard_normal((5000, 1))
    for part in np.array_split(values, 7):
        policy.observe({"state": torch.from_numpy(part)})
    copied.load_state_dict(policy.state_dict())
    for each in (policy, copied):
        found = each.features({"state": torch.from_numpy(values)})
        assert float(found.std()) == pytest.approx(1 / math.sqrt(1 + 1e-8 / values.var()), rel=1e-3)


def test_observations_are_not_normalised_without_statistics() -> None:
    every = {"state": torch.tensor([[1.0, -30, 3, 4]]), "goal": torch.tensor([[[5.0, 6]]])}
    np.testing.assert_allclose(policy_of("gaussian").features(every), [[1, -10, 3, 4, 5, 6]], rtol=1e-6)
    plain = policy_of("gaussian", normalise_observations=False)
    plain.observe(every)
    assert plain.features(every).tolist() == [[1, -30, 3, 4, 5, 6]]
    only = policy_of("gaussian", observations=["goal"])
    np.testing.assert_allclose(only.features(every), [[5, 6]], rtol=1e-6)


def test_actions_for_the_simulator() -> None:
    gaussian = policy_of("gaussian").to_environment(torch.tensor([[[-3.0, 11.0], [0.5, 2.5], [1.0, -1.0]]]))
    assert gaussian.dtype == np.float32
    assert gaussian.tolist() == [[[-1, 10], [0.5, 2.5], [1, 0]]]
    squashed = policy_of("squashed").to_environment(torch.tensor([[[-50.0, 50.0], [0.0, 0.0], [math.atanh(0.5), 0.0]]]))
    np.testing.assert_allclose(squashed, [[[-1, 10], [0, 5], [0.5, 5]]], atol=1e-6)
    tokens = policy_of("tokens", bins=4).to_environment(torch.tensor([[[0, 0], [3, 3], [2, 1]]]))
    assert tokens.tolist() == [[[-0.75, 1.25], [0.75, 8.75], [0.25, 3.75]]]
    categorical = policy_of("categorical").to_environment(torch.tensor([[[4], [0], [2]]]))
    assert (categorical.dtype, categorical.tolist()) == (np.int64, [[4, 0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_are_a_function_of_the_seed(kind: str) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = policy_of(kind), policy_of(kind), policy_of(kind, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    weights, same = first.state_dict(), again.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, other.state_dict()[name]) for name, tensor in weights.items())
    assert copy.deepcopy(first).state_dict().keys() == weights.keys()


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "tokens"])
def test_first_weights_are_orthogonal_and_the_first_policy_ignores_observations(kind: str) -> None:
    policy = policy_of(kind, initial_log_std=-0.5, bins=4)
    first, last = (layer.weight for layer in policy.layers if isinstance(layer, nn.Linear))
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(6), rtol=1e-5, atol=1e-5)
    small = last @ last.T if len(last) <= 16 else last.T @ last
    torch.testing.assert_close(small, 1e-4 * torch.eye(len(small)), rtol=1e-4, atol=1e-7)
    entropy = policy.evaluate(observations_of(N), policy.act(observations_of(N), None).actions_NCA).entropy_N
    most = {"categorical": CHUNK * math.log(5), "tokens": 2 * CHUNK * math.log(4)}.get(kind)
    of_gaussian = 2 * CHUNK * (-0.5 + math.log(2 * math.pi * math.e) / 2)
    np.testing.assert_allclose(entropy.detach(), most or of_gaussian, rtol=1e-3)


@pytest.mark.parametrize(
    ("keys", "spec", "message"),
    [
        ({"observations": ["state", "depth"]}, spec_of(), "'depth' is no observation of 'Reach'.*'state', 'goal'"),
        ({}, DISCRETE, "'gaussian' gives vectors; actions of 'Reach'.* are one of 5 choices"),
        ({"type": "tokens"}, DISCRETE, "'tokens' gives vectors"),
        ({"type": "categorical"}, spec_of(), r"'categorical' chooses one of several.*'Reach'.* are float32 \[2\]"),
        ({"type": "squashed"}, spec_of(action_high=[1.0, math.inf]), "'squashed' needs finite bounds.*inf"),
        ({"type": "tokens"}, spec_of(action_low=[1.0, 0.0]), "'tokens' needs finite bounds.*low below high"),
        ({"type": "tokens"}, spec_of(action_low=[-3e308, 0.0], action_high=[3e308, 1.0]), "finite bounds"),
        ({}, spec_of(action_dtype="int32"), "'gaussian' gives floating-point numbers; actions of 'Reach'.* are int32"),
    ],
)
def test_a_refusal_names_policy_and_simulator(keys: dict[str, Any], spec: EnvSpec, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_policy(PolicyConfig.parse(keys), spec, action_chunk=1, seed=0)


def test_unbounded_actions_suit_a_gaussian_policy() -> None:
    spec = spec_of(action_low=[-math.inf, 0.0], action_high=[math.inf, math.inf])
    policy = build_policy(PolicyConfig(), spec, action_chunk=1, seed=0)
    assert policy.to_environment(torch.tensor([[[-1e6, -1.0]]])).tolist() == [[[-1e6, 0]]]
