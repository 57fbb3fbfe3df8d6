"""Policies that act in a simulator: used both by rollout workers to act and by the trainer to learn.

Shape legend: N = decisions, C = actions of a decision, A = components of an action, K = possible values of a
discrete component, O = components of an observation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.shared.config.embodied import PolicyConfig
from penstock.shared.errors import ConfigError
from penstock.shared.models.building import building
from penstock.shared.models.control import orthogonal, perceptron
from penstock.shared.models.distributions import (
    categorical_entropy,
    categorical_logprobs,
    choose,
    gaussian_entropy,
    gaussian_logprobs,
    squashed_logprobs,
    squashed_sample,
)
from penstock.shared.models.observations import Normaliser, ObservationEncoder, Seen
from penstock.shared.protocol.embodied.environment import EnvSpec

__all__ = ["Decision", "EpisodePolicy", "Evaluation", "SquashedPolicy", "build_policy"]

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
"""Bounds of the squashed policy's log standard deviation: from 0.007 up to values that tanh saturates."""
MOST_SQUASHED = 1 - 1e-6
"""Absolute value at which actions in [-1, 1] are clipped before the inverse of tanh."""

Noise = Literal["normal", "uniform"]


class Decision(NamedTuple):
    """Sampled actions and the log-prob of each action component, both [N, C, A]."""

    actions_NCA: Tensor
    """Sampled actions: float32, or int64 if a component is the index of a discrete action or of a bin."""
    logprobs_NCA: Tensor
    """Log-probs, float32, in nats."""


class Evaluation(NamedTuple):
    """Log-probs of given actions, one per action component, and the entropy of each decision, a sum over its action
    components. Both are in nats and differentiable."""

    logprobs_NCA: Tensor
    entropy_N: Tensor


class EpisodePolicy(nn.Module, ABC):
    """Perceptron over named observations, with images encoded by convolutions, that chooses a chunk of actions at once.

    Actions are kept as sampled: ``to_environment`` converts them to what the simulator accepts.

    Attributes:
        noise: kind of the random numbers that ``act`` needs, one per action component.
        noise_shape: (C, A).
        observed: names of the observations that the policy reads.
        vectors: names of the observations in ``observed`` that are not images.
        encoder: encodes images as vectors.
        layers: all other weights, except a standard deviation that is independent of the observation.
    """

    noise: Noise
    layers: nn.Sequential

    def __init__(self, config: PolicyConfig, spec: EnvSpec, noise_shape: tuple[int, int]) -> None:
        super().__init__()
        self.observed, self._spec = config.observations, spec
        self.noise_shape = noise_shape
        self._images = tuple(name for name in self.observed if spec.observations[name].is_image)
        self.vectors = tuple(name for name in self.observed if name not in self._images)
        num_numbers = sum(math.prod(spec.observations[name].shape) for name in self.vectors)
        normalises = config.normalise_observations and num_numbers > 0
        self.normaliser = Normaliser(num_numbers) if normalises else None
        images = [spec.observations[name].shape for name in self._images]
        self.encoder = ObservationEncoder(config.encoder, num_numbers, images)
        self.num_features = self.encoder.num_features

    @property
    def num_products(self) -> int:
        """Approximate number of weight multiplications in one decision."""
        reused = sum(tensor.numel() for tensor in self.encoder.parameters())
        return sum(tensor.numel() for tensor in self.parameters()) - reused + self.encoder.num_products

    @property
    def trunk(self) -> nn.Module:
        """Module with all trained weights, except a vector of standard deviations that does not depend on the
        observation."""
        return nn.ModuleList((self.encoder, self.layers))

    def features(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return the input of the policy's layers, [N, F]."""
        features_NF: Tensor = self.encoder(self.read(observations))
        return features_NF

    def read(self, observations: Mapping[str, Tensor]) -> Seen:
        """Return the input of the encoder, in the policy or in a value network: normalized vectors, and images."""
        numbers_NO = self.normalised(self.numbers(observations))
        return Seen(numbers_NO, tuple(observations[name] for name in self._images))

    def numbers(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return all vector observations that the policy reads, concatenated, [N, O]."""
        if not self.vectors:
            image = observations[self._images[0]]
            return image.new_zeros((len(image), 0), dtype=torch.float32)
        return torch.cat([observations[name].flatten(1) for name in self.vectors], dim=1)

    def normalised(self, numbers_NO: Tensor) -> Tensor:
        """Return ``numbers_NO`` normalized, as policy, value network and critics read them, float32 [N, O]."""
        normal_NO: Tensor = numbers_NO.float() if self.normaliser is None else self.normaliser(numbers_NO)
        return normal_NO

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """Add observations to the normalisation statistics; called by the trainer after an update."""
        if self.normaliser is not None:
            self.normaliser.observe(self.numbers(observations))

    @torch.no_grad()
    def act(self, observations: Mapping[str, Tensor], noise_NCA: Tensor | None) -> Decision:
        """Sample actions from noise, or return the most likely actions if there is no noise.

        Args:
            noise_NCA: standard normal or uniform in [0, 1), according to ``noise``; None: return the mean, or the most
                likely value of each component.
        """
        return self._act(self.features(observations), noise_NCA)

    def evaluate(self, observations: Mapping[str, Tensor], actions_NCA: Tensor) -> Evaluation:
        """Return the log-probs and entropy of ``actions_NCA``. This or another version of the policy sampled them, by
        ``act``."""
        return self._evaluate(self.features(observations), actions_NCA)

    def facts(self) -> dict[str, float]:
        """Return metrics of the current weights."""
        return {}

    @abstractmethod
    def to_environment(self, actions_NCA: Tensor) -> NDArray[Any]:
        """Convert actions to the simulator's format, [N, C, ...] in its dtype, by clipping, scaling or taking the
        centers of bins."""

    @abstractmethod
    def from_environment(self, actions: NDArray[Any]) -> Tensor:
        """Convert actions [N, C, ...] of a simulator to the form in which this policy samples them, [N, C, A].

        ``to_environment`` converts the result back, up to clipping and the width of a bin.
        """

    @abstractmethod
    def _act(self, features_NO: Tensor, noise_NCA: Tensor | None) -> Decision: ...

    @abstractmethod
    def _evaluate(self, features_NO: Tensor, actions_NCA: Tensor) -> Evaluation: ...

    def _flat(self, actions: NDArray[Any]) -> NDArray[Any]:
        return actions.reshape(len(actions), *self.noise_shape)

    def _shaped(self, actions_NCA: NDArray[Any]) -> NDArray[Any]:
        return actions_NCA.astype(self._spec.action_dtype).reshape(*actions_NCA.shape[:2], *self._spec.action_shape)


class _Bounds:
    """Lower and upper bounds of the components of an action."""

    def __init__(self, spec: EnvSpec) -> None:
        self._low_A, self._high_A = np.array([spec.action_low, spec.action_high], np.float64)

    def clip(self, actions_NCA: NDArray[Any]) -> NDArray[Any]:
        clipped_NCA: NDArray[Any] = np.clip(actions_NCA, self._low_A, self._high_A)
        return clipped_NCA

    def between(self, parts_NCA: NDArray[Any]) -> NDArray[Any]:
        """Map fractions in [0, 1] to values between the lower and the upper bound."""
        return self.clip(self._low_A + (self._high_A - self._low_A) * parts_NCA)

    def parts(self, actions_NCA: NDArray[Any]) -> NDArray[Any]:
        """Return fractions in [0, 1] that ``between`` maps to these actions; actions are clipped first."""
        clipped_NCA = self.clip(actions_NCA.astype(np.float64))
        parts_NCA: NDArray[Any] = (clipped_NCA - self._low_A) / (self._high_A - self._low_A)
        return parts_NCA


class GaussianPolicy(EpisodePolicy):
    """Gaussian actions whose mean depends on the observation and whose standard deviation does not.

    Orthogonal weights; those of the last layer are small, so that the initial policy is the same for all observations
    (arXiv 2006.05990, §3.2).
    """

    noise: Noise = "normal"

    def __init__(self, config: PolicyConfig, spec: EnvSpec, action_chunk: int) -> None:
        super().__init__(config, spec, (action_chunk, len(spec.action_low)))
        self._bounds = _Bounds(spec)
        sizes = [self.num_features, *config.hidden_sizes, math.prod(self.noise_shape)]
        self.layers = orthogonal(perceptron(sizes, nn.Tanh), last_gain=0.01)
        self.log_std = nn.Parameter(
            torch.full((math.prod(self.noise_shape),), config.initial_log_std, dtype=torch.float32)
        )
        """Logarithm of the standard deviation. It is a vector, as biases are, so that weight decay, which the optimizer
        applies to matrices, leaves it out."""

    def to_environment(self, actions_NCA: Tensor) -> NDArray[Any]:
        """Clip actions to the simulator's bounds."""
        return self._shaped(self._bounds.clip(actions_NCA.double().cpu().numpy()))

    def from_environment(self, actions: NDArray[Any]) -> Tensor:
        """Return the actions unchanged."""
        return torch.from_numpy(self._flat(actions).astype(np.float32))

    def facts(self) -> dict[str, float]:
        """Return the metric ``policy/std``, the mean standard deviation."""
        return {"policy/std": float(self.log_std.detach().exp().mean())}

    def _act(self, features_NO: Tensor, noise_NCA: Tensor | None) -> Decision:
        mean_NCA, log_std_CA = self._parameters_of(features_NO)
        actions_NCA = mean_NCA if noise_NCA is None else mean_NCA + log_std_CA.exp() * noise_NCA
        return Decision(actions_NCA, gaussian_logprobs(actions_NCA, mean_NCA, log_std_CA))

    def _evaluate(self, features_NO: Tensor, actions_NCA: Tensor) -> Evaluation:
        logprobs_NCA = gaussian_logprobs(actions_NCA, *self._parameters_of(features_NO))
        return Evaluation(logprobs_NCA, gaussian_entropy(self.log_std).sum().expand(len(features_NO)))

    def _parameters_of(self, features_NO: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean for each decision, [N, C, A], and the logarithm of the standard deviation, [C, A]."""
        mean_NCA: Tensor = self.layers(features_NO).unflatten(-1, self.noise_shape)
        return mean_NCA, self.log_std.view(self.noise_shape)


class SquashedPolicy(EpisodePolicy):
    """Actions ``tanh(u)`` in (-1, 1), u Gaussian; mean and standard deviation depend on the observation (arXiv
    1812.05905).

    A decision stores u, which cannot be recovered from a saturated action. Its log-prob is the density of ``tanh(u)``.
    """

    noise: Noise = "normal"

    def __init__(self, config: PolicyConfig, spec: EnvSpec, action_chunk: int) -> None:
        super().__init__(config, spec, (action_chunk, len(spec.action_low)))
        self._bounds = _Bounds(spec)
        sizes = [self.num_features, *config.hidden_sizes, 2 * math.prod(self.noise_shape)]
        self.layers = perceptron(sizes, nn.ReLU)

    def to_environment(self, actions_NCA: Tensor) -> NDArray[Any]:
        """Squash actions and scale them to the simulator's bounds."""
        return self._shaped(self._bounds.between((torch.tanh(actions_NCA.double()).cpu().numpy() + 1) / 2))

    def from_environment(self, actions: NDArray[Any]) -> Tensor:
        """Invert scaling and squashing. Actions at the bounds, which ``tanh`` never reaches, are moved slightly
        inside."""
        squashed_NCA = 2 * self._bounds.parts(self._flat(actions)) - 1
        return torch.from_numpy(np.arctanh(squashed_NCA.clip(-MOST_SQUASHED, MOST_SQUASHED)).astype(np.float32))

    def sample(self, features_NO: Tensor, noise_NCA: Tensor) -> Decision:
        """Sample ``tanh(u)`` in [-1, 1] and its log-probs; both differentiable."""
        return Decision(*squashed_sample(*self._parameters_of(features_NO), noise_NCA))

    def _act(self, features_NO: Tensor, noise_NCA: Tensor | None) -> Decision:
        mean_NCA, log_std_NCA = self._parameters_of(features_NO)
        raw_NCA = mean_NCA if noise_NCA is None else mean_NCA + log_std_NCA.exp() * noise_NCA
        return Decision(raw_NCA, squashed_logprobs(raw_NCA, mean_NCA, log_std_NCA))

    def _evaluate(self, features_NO: Tensor, actions_NCA: Tensor) -> Evaluation:
        """Return log-probs and entropy. The entropy is that of the Gaussian ``u``, because the entropy of the action
        ``tanh(u)`` has no closed form."""
        mean_NCA, log_std_NCA = self._parameters_of(features_NO)
        entropy_N = gaussian_entropy(log_std_NCA).sum((1, 2))
        return Evaluation(squashed_logprobs(actions_NCA, mean_NCA, log_std_NCA), entropy_N)

    def _parameters_of(self, features_NO: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the standard deviation. A tanh keeps the logarithm within its bounds, so that
        its gradient never vanishes."""
        mean_NCA, raw_NCA = self.layers(features_NO).unflatten(-1, (2, *self.noise_shape)).unbind(1)
        return mean_NCA, MIN_LOG_STD + (MAX_LOG_STD - MIN_LOG_STD) * (torch.tanh(raw_NCA) + 1) / 2


class _ChoosingPolicy(EpisodePolicy):
    """Policy with discrete action components. Each component has K possible values, and one uniform random number
    selects among them."""

    noise: Noise = "uniform"

    def __init__(self, config: PolicyConfig, spec: EnvSpec, noise_shape: tuple[int, int], num_choices: int) -> None:
        super().__init__(config, spec, noise_shape)
        self._num_choices = num_choices
        sizes = [self.num_features, *config.hidden_sizes, math.prod(noise_shape) * num_choices]
        self.layers = orthogonal(perceptron(sizes, nn.Tanh), last_gain=0.01)

    def _act(self, features_NO: Tensor, noise_NCA: Tensor | None) -> Decision:
        logits_NCAK = self._logits(features_NO)
        actions_NCA = logits_NCAK.argmax(-1) if noise_NCA is None else choose(logits_NCAK, noise_NCA)
        return Decision(actions_NCA, categorical_logprobs(actions_NCA, logits_NCAK))

    def _evaluate(self, features_NO: Tensor, actions_NCA: Tensor) -> Evaluation:
        logits_NCAK = self._logits(features_NO)
        entropy_N = categorical_entropy(logits_NCAK).sum((1, 2))
        return Evaluation(categorical_logprobs(actions_NCA, logits_NCAK), entropy_N)

    def _logits(self, features_NO: Tensor) -> Tensor:
        logits_NCAK: Tensor = self.layers(features_NO).unflatten(-1, (*self.noise_shape, self._num_choices))
        return logits_NCAK


class CategoricalPolicy(_ChoosingPolicy):
    """Policy over the simulator's discrete actions."""

    def __init__(self, config: PolicyConfig, spec: EnvSpec, action_chunk: int) -> None:
        assert spec.num_actions is not None, "build_policy checks the action space"
        super().__init__(config, spec, (action_chunk, 1), spec.num_actions)

    def to_environment(self, actions_NCA: Tensor) -> NDArray[Any]:
        """Return the sampled action indices unchanged."""
        return self._shaped(actions_NCA.cpu().numpy())

    def from_environment(self, actions: NDArray[Any]) -> Tensor:
        """Return the simulator's action indices unchanged."""
        return torch.from_numpy(self._flat(actions).astype(np.int64))


class TokensPolicy(_ChoosingPolicy):
    """Policy in which each component of a continuous action is one of ``bins`` values between its bounds."""

    def __init__(self, config: PolicyConfig, spec: EnvSpec, action_chunk: int) -> None:
        super().__init__(config, spec, (action_chunk, len(spec.action_low)), config.bins)
        self._bounds = _Bounds(spec)

    def to_environment(self, actions_NCA: Tensor) -> NDArray[Any]:
        """Return the centres of the bins."""
        return self._shaped(self._bounds.between((actions_NCA.cpu().numpy() + 0.5) / self._num_choices))

    def from_environment(self, actions: NDArray[Any]) -> Tensor:
        """Return the bins that contain the actions."""
        bins_NCA = np.floor(self._bounds.parts(self._flat(actions)) * self._num_choices)
        return torch.from_numpy(bins_NCA.clip(0, self._num_choices - 1).astype(np.int64))


_POLICIES: dict[str, type[GaussianPolicy | SquashedPolicy | CategoricalPolicy | TokensPolicy]] = {
    "gaussian": GaussianPolicy,
    "squashed": SquashedPolicy,
    "categorical": CategoricalPolicy,
    "tokens": TokensPolicy,
}


def build_policy(config: PolicyConfig, spec: EnvSpec, *, action_chunk: int, seed: int) -> EpisodePolicy:
    """Build the policy of a job with its initial weights, a pure function of the arguments.

    Args:
        spec: specification of the simulator; its ``num_envs`` is ignored.
        action_chunk: actions per decision.

    Raises:
        ConfigError: the simulator lacks an observation of the policy, or its actions do not fit the policy's type.
    """
    _check_observations(config.observations, spec)
    _check_actions(config.type, spec)
    with building(seed):
        return _POLICIES[config.type](config, spec, action_chunk)


def _check_observations(names: Sequence[str], spec: EnvSpec) -> None:
    missing = [name for name in names if name not in spec.observations]
    if missing:
        raise ConfigError(
            f"policy.observations: '{missing[0]}' is no observation of '{spec.env_id}' ({spec.backend}); it gives "
            f"{', '.join(map(repr, spec.observations))}"
        )


def _check_actions(kind: str, spec: EnvSpec) -> None:
    discrete, where = spec.num_actions is not None, f"actions of '{spec.env_id}' ({spec.backend})"
    if kind == "categorical" and not discrete:
        raise ConfigError(
            f"policy.type: 'categorical' chooses one of several actions; {where} are {spec.action_dtype} "
            f"{list(spec.action_shape)}: take 'gaussian', 'tokens' or, for algorithm 'sac', 'squashed'"
        )
    if kind != "categorical" and discrete:
        raise ConfigError(
            f"policy.type: '{kind}' gives vectors; {where} are one of {spec.num_actions} choices: take 'categorical'"
        )
    if not discrete and np.dtype(spec.action_dtype).kind != "f":
        raise ConfigError(f"policy.type: '{kind}' gives floating-point numbers; {where} are {spec.action_dtype}")
    if kind in ("squashed", "tokens"):
        low_A, high_A = np.array([spec.action_low, spec.action_high], np.float64)
        if not (np.isfinite(high_A - low_A) & (low_A < high_A)).all():
            raise ConfigError(
                f"policy.type: '{kind}' needs finite bounds of every dimension, low below high; {where} lie between "
                f"{spec.action_low} and {spec.action_high}: bound the simulator's actions, or take 'gaussian'"
            )
