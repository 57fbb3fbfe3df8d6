"""Image policies: equality with plain PyTorch, one policy in worker and trainer, exact continuation, stored bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal
from torch.nn import functional

from penstock.services.rollout.embodied.engine import PolicyEngine
from penstock.services.trainer.checkpoint.state import load_checkpoint, save_checkpoint
from penstock.services.trainer.learners.embodied_learner import EmbodiedLearner
from penstock.services.trainer.ranks.sharding import BatchShard
from penstock.shared.config.embodied import PolicyConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models import observations as observations_module
from penstock.shared.models.episode_policy import EpisodePolicy, build_policy
from penstock.shared.protocol.embodied.environment import ArraySpec, EnvSpec
from penstock.shared.protocol.embodied.episode_group import (
    EpisodeGroup,
    decode_episode_group,
    encode_episode_group,
)
from tests.unit.trainer.episode_batches import CHUNK, DISCRETE, group_of, job_of, spec_of

IMAGE = (11, 14, 2)
ENCODER = {"channels": [4, 6], "kernel_size": 3, "stride": 2, "features": 10}
NAMES = ["goal", "image", "state"]
KINDS = [("ppo", "gaussian"), ("ppo", "categorical"), ("grpo", "categorical"), ("grpo", "tokens")]


def pictured(spec: EnvSpec) -> EnvSpec:
    """Return ``spec`` with an image observation added."""
    keys = {name: getattr(spec, name) for name in spec.__struct_fields__}
    return EnvSpec(**keys | {"observations": {**spec.observations, "image": ArraySpec(IMAGE, "uint8")}})


def space_of(kind: str) -> EnvSpec:
    return pictured(DISCRETE if kind == "categorical" else spec_of())


def policy_of(kind: str, *, observations: list[str] | None = None, seed: int = 1) -> EpisodePolicy:
    config = PolicyConfig.parse(
        {"type": kind, "hidden_sizes": [16], "observations": observations or NAMES, "encoder": ENCODER, "bins": 4}
    )
    return build_policy(config, space_of(kind), action_chunk=CHUNK, seed=seed)


def stirred(policy: EpisodePolicy) -> EpisodePolicy:
    """Change the weights of ``policy`` at random, update its observation statistics, and return it."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in policy.parameters():
            param.add_(0.2 * torch.randn(param.shape, generator=generator))
    policy.observe(tensors(batch_of(policy, 3)))
    return policy


def batch_of(policy: EpisodePolicy, ordinal: int = 0, **keys: Any) -> EpisodeGroup:
    return group_of(policy, ordinal, image=IMAGE, **keys)


def tensors(group: EpisodeGroup) -> dict[str, Tensor]:
    return {name: torch.from_numpy(column) for name, column in group.observations.items()}


def plain_features(weights: dict[str, Tensor], seen: dict[str, Tensor], prefix: str = "") -> Tensor:
    """Return the input of the layers: normalised vectors in the order of their names, then the encoded image."""
    numbers = torch.cat([seen["goal"].flatten(1), seen["state"]], dim=1).double()
    variance = weights["normaliser.squares_O"] / weights["normaliser.count"]
    numbers = ((numbers - weights["normaliser.mean_O"]) / (variance + 1e-8).sqrt()).clamp(-10, 10).float()
    image = seen["image"].permute(0, 3, 1, 2).float() / 255
    of = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
    for index in (0, 2):
        kernel, bias = (of[f"encoder.images.0.layers.{index}.{part}"] for part in ("weight", "bias"))
        image = functional.conv2d(image, kernel, bias, stride=2, padding=1).relu()
    linear = (of[f"encoder.images.0.layers.5.{part}"] for part in ("weight", "bias"))
    return torch.cat([numbers, functional.linear(image.flatten(1), *linear).relu()], dim=1)


def plain_layers(weights: dict[str, Tensor], features: Tensor) -> Tensor:
    hidden = torch.tanh(functional.linear(features, weights["layers.0.weight"], weights["layers.0.bias"]))
    return functional.linear(hidden, weights["layers.2.weight"], weights["layers.2.bias"])


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
async def test_worker_and_trainer_equal_plain_pytorch(kind: str) -> None:
    """The policy of a rollout worker and that of a trainer equal the plain PyTorch of this file."""
    policy = stirred(policy_of(kind))
    group = batch_of(policy, lengths=(20, 9))
    seen, weights = tensors(group), policy.state_dict()
    numbers = plain_layers(weights, plain_features(weights, seen))
    expected: Normal | Categorical
    if kind == "gaussian":
        deviation = weights["log_std"].exp().reshape(policy.noise_shape)
        expected = Normal(numbers.unflatten(1, policy.noise_shape), deviation)
    else:
        expected = Categorical(logits=numbers.unflatten(1, (*policy.noise_shape, 4)))
    engine = PolicyEngine(policy)
    drawn, shape = np.random.default_rng(0), (29, *policy.noise_shape)
    noise = drawn.standard_normal(shape) if kind == "gaussian" else drawn.random(shape)
    decided = await engine.decide(group.observations, noise.astype(np.float32))
    await engine.close()
    actions = torch.from_numpy(decided.actions_NCA)
    if isinstance(expected, Normal):
        mean = policy.act(seen, None).actions_NCA
        torch.testing.assert_close(mean, expected.mean, rtol=1e-5, atol=1e-5)
    found = policy.evaluate(seen, actions)
    torch.testing.assert_close(found.logprobs_NCA, expected.log_prob(actions), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(decided.logprobs_NCA, found.logprobs_NCA.detach(), rtol=0, atol=1e-6)
    alone = policy.act({name: column[5:6] for name, column in seen.items()}, None).actions_NCA
    torch.testing.assert_close(alone[0], policy.act(seen, None).actions_NCA[5], rtol=0, atol=1e-5)


def test_the_encoder_has_the_gradient_of_plain_pytorch() -> None:
    policy = stirred(policy_of("gaussian"))
    group = batch_of(policy)
    seen, actions = tensors(group), torch.from_numpy(group.actions)
    policy.evaluate(seen, actions).logprobs_NCA.sum().backward()
    weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
    names = [name for name, _ in policy.named_parameters()]
    for name in names:
        weights[name].requires_grad_()
    mean = plain_layers(weights, plain_features(weights, seen)).unflatten(1, policy.noise_shape)
    deviation = weights["log_std"].exp().reshape(policy.noise_shape)
    Normal(mean, deviation).log_prob(actions).sum().backward()
    assert sum("encoder" in name for name in names) == 6
    for name, param in policy.named_parameters():
        torch.testing.assert_close(param.grad, weights[name].grad, rtol=1e-4, atol=1e-4)


def test_many_images_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = stirred(policy_of("gaussian"))
    seen = tensors(batch_of(policy, lengths=(30, 21)))
    whole = policy.features(seen)
    monkeypatch.setattr(observations_module, "MOST_IMAGES", 16)
    torch.testing.assert_close(policy.features(seen), whole, rtol=0, atol=1e-5)


def test_images_alone_are_enough() -> None:
    policy = policy_of("categorical", observations=["image"])
    assert (policy.vectors, policy.normaliser, policy.num_features) == ((), None, 10)
    group = batch_of(policy)
    found = policy.evaluate(tensors(group), torch.from_numpy(group.actions))
    np.testing.assert_allclose(found.logprobs_NCA.detach(), group.logprobs, rtol=0, atol=1e-6)
    policy.observe({})


def test_the_number_of_products_counts_every_pixel() -> None:
    """``num_products`` counts convolutions at 6 x 7 and 3 x 4 positions, the layers behind them, and other weights."""
    policy = policy_of("gaussian")
    of_encoder = 6 * 7 * 2 * 4 * 9 + 3 * 4 * 4 * 6 * 9 + 3 * 4 * 6 * 10
    of_layers = (5 + 10) * 16 + 16 + 16 * 4 + 4
    assert policy.num_products == of_encoder + of_layers + 2 * CHUNK
    vectors = policy_of("gaussian", observations=["state"])
    assert vectors.num_products == sum(tensor.numel() for tensor in vectors.parameters())


def test_first_weights_follow_from_the_seed_and_are_orthogonal() -> None:
    first, again, other = policy_of("gaussian"), policy_of("gaussian"), policy_of("gaussian", seed=2)
    weights, same = first.state_dict(), again.state_dict()
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    name = "encoder.images.0.layers.0.weight"
    assert not torch.equal(weights[name], other.state_dict()[name])
    kernels = weights[name].flatten(1)
    torch.testing.assert_close(kernels @ kernels.T, 2 * torch.eye(4), rtol=1e-5, atol=1e-5)


def learner_of(algorithm: str, kind: str) -> EmbodiedLearner:
    policy = {"type": kind, "observations": NAMES, "encoder": ENCODER, "bins": 4}
    return EmbodiedLearner(job_of({"type": algorithm}, policy), space_of(kind))


def shard(learner: EmbodiedLearner, index: int) -> BatchShard[EpisodeGroup]:
    return BatchShard.whole([batch_of(learner.policy, 2 * index + i) for i in range(2)])


def everything(learner: EmbodiedLearner) -> dict[str, Tensor]:
    state = learner.state()
    return {**state.models["policy"].weights, **{f"rule.{name}": tensor for name, tensor in state.rule.items()}}


@pytest.mark.parametrize(("algorithm", "kind"), KINDS)
def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path: Path, algorithm: str, kind: str) -> None:
    going, resumed = learner_of(algorithm, kind), learner_of(algorithm, kind)
    first = everything(going)
    report = going.update(shard(going, 0), update_index=0)
    assert abs(report["mismatch/logprob"]) < 1e-6, "one policy acted and is trained"
    moved = {name for name, tensor in everything(going).items() if not torch.equal(tensor, first[name])}
    encoders = {name for name in first if "encoder" in name and "optimizer" not in name}
    assert encoders <= moved, "policy and value network learn to see"
    assert any(name.startswith("rule.value.encoder") for name in encoders) == (algorithm == "ppo")
    resumed.load_state(load_checkpoint(save_checkpoint(tmp_path, "job_1", 1, going.state(), {})).state)
    for index in (1, 2):
        batch = shard(going, index)
        assert resumed.update(batch, update_index=index) == going.update(batch, update_index=index)
    ours, theirs = everything(going), everything(resumed)
    assert [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])] == []


def test_a_group_with_images_is_stored_byte_for_byte_within_its_budget() -> None:
    policy = policy_of("gaussian")
    group = batch_of(policy, lengths=(20, 9))
    data, header = encode_episode_group(group)
    read = decode_episode_group(data)
    for ours, theirs in (
        (group.observations, read.observations),
        (group.final_observations, read.final_observations),
    ):
        assert ours.keys() == theirs.keys()
        for name, column in ours.items():
            assert (theirs[name].dtype, theirs[name].shape) == (column.dtype, column.shape)
            assert np.array_equal(theirs[name], column)
    job = job_of({"group_size": 2})
    environment = job.environment.model_copy(
        update={"horizon": 20 * CHUNK, "bytes_per_step": math.prod(IMAGE) + 5 * 8 + CHUNK * (2 * 12 + 6) + 96}
    )
    bound = job.model_copy(update={"environment": environment}).max_group_bytes
    assert math.prod(IMAGE) * 31 < header.nbytes <= bound


def test_soft_actor_critic_takes_no_images() -> None:
    config = job_of({"type": "sac"}, {"type": "squashed", "observations": NAMES, "encoder": ENCODER})
    with pytest.raises(ConfigError, match="'sac' learns from vectors, not from images"):
        EmbodiedLearner(config, space_of("squashed"))
