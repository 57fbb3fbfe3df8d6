"""Sections of an embodied job: simulator, policy, algorithm, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from penstock.shared.config.algorithm import DynamicSampling
from penstock.shared.config.base import FileName, StrictModel
from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.errors import ConfigError
from penstock.shared.protocol.embodied.environment import OpenEnv, Picture

__all__ = [
    "IMAGE",
    "EmbodiedAlgorithm",
    "EncoderConfig",
    "EpisodeEvaluationConfig",
    "EpisodeGRPOConfig",
    "EpisodePPOConfig",
    "EpisodeWarmStartConfig",
    "ImageConfig",
    "PolicyConfig",
    "ReplayBufferConfig",
    "SimulatorBase",
    "SimulatorConfig",
    "SoftActorCriticConfig",
]


AUTO_VIDEOS = 1
IMAGE = "image"
"""Name of the observation that `environment.image` adds."""
RESERVED = ("id", "env_id", "disable_env_checker")
"""Keyword arguments that the adapter of a simulator sets itself."""


class ImageConfig(StrictModel):
    """Camera images of the simulator, as the observation `image`."""

    height: int = Field(64, ge=8, le=512)
    """Image height in pixels. The simulator renders a larger picture; each pixel is the mean of the pixels that it
    covers."""
    width: int = Field(64, ge=8, le=512)
    """Image width in pixels."""
    grey: bool = False
    """Use brightness (ITU-R BT.601) instead of three colour channels."""
    frames: int = Field(1, ge=1, le=8)
    """Frames stacked in one observation: the current one and those before it, from which a policy can infer
    velocities."""

    @property
    def picture(self) -> Picture:
        """Image settings as a ``Picture``, for the request that opens a simulator session."""
        return Picture(height=self.height, width=self.width, grey=self.grey, frames=self.frames)


class SimulatorBase(StrictModel):
    """Simulator that plays episodes. The reset id determines everything random in an episode."""

    backend: str = "gymnasium"
    """Name of the simulator; `penstock sims ls` lists the simulators."""
    task: str = Field(min_length=1)
    """Task or environment id of that simulator, such as `reach-v3` or `HalfCheetah-v5`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, except `id`, `env_id` and `disable_env_checker`."""
    image: ImageConfig | None = None
    """Add camera images as observation `image`: uint8 [height, width, channels of all frames]. Needs a simulator
    with a camera and, for MuJoCo, a rendering library; null: only the simulator's own observations."""
    horizon: int = Field(ge=1)
    """Steps after which an episode is truncated; the value of the final observation still counts."""
    num_envs: int = Field(8, ge=1, le=4096)
    """Number of environments in each session that a rollout worker opens; each plays one episode at a time."""
    num_processes: int = Field(1, ge=1)
    """Child processes over which the environments of a session are distributed."""
    step_limit_s: float = Field(60.0, gt=0)
    """Time limit of one simulator request (seconds); a simulator that exceeds it is killed and its episodes are
    redrawn."""

    @field_validator("options")
    @classmethod
    def _leaves_what_is_given(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in RESERVED if name in options]:
            raise ValueError(
                f"'{taken[0]}' is no option: `task` names the environment, and its simulator does the rest"
            )
        return options

    def opening(self, num_envs: int, *, idle_s: float = 60.0, camera: bool = False) -> OpenEnv:
        """Return the request that opens a session of ``num_envs`` environments."""
        return OpenEnv(
            env_id=self.task, num_envs=num_envs, backend=self.backend, options=self.options, idle_s=idle_s,
            num_processes=self.num_processes, step_limit_s=self.step_limit_s, camera=camera,
            picture=None if self.image is None else self.image.picture,
        )  # fmt: skip


class SimulatorConfig(SimulatorBase):
    """Simulator whose episodes the policy is trained on."""

    action_chunk: int = Field(1, ge=1, le=64)
    """Actions that the policy chooses per decision."""
    sessions: int = Field(2, ge=1, le=8)
    """Sessions of each rollout worker. With two, the environments of one session step while the policy decides for the
    environments of the other."""
    first_reset_id: int = Field(0, ge=0)
    """Reset id of the first draw."""
    num_reset_ids: int | None = Field(None, ge=1)
    """Number of reset ids, which draws reuse in turn; null: each draw has a reset id of its own."""
    bytes_per_step: int = Field(2048, ge=64)
    """Upper bound of the bytes that one decision adds to a stored group: observations, actions, log-probs, rewards.
    A job whose simulator's observations need more is rejected."""

    def reset_id(self, ordinal: int) -> int:
        """Return the reset id of position ``ordinal`` in the job's data order."""
        return self.first_reset_id + (ordinal if self.num_reset_ids is None else ordinal % self.num_reset_ids)


class EncoderConfig(StrictModel):
    """Convolutional image encoder: layers with padding and ReLU, then one linear layer."""

    channels: tuple[PositiveInt, ...] = Field((16, 32, 32), min_length=1)
    """Output channels of each convolution."""
    kernel_size: int = Field(3, ge=1, le=15)
    """Side of each kernel in pixels; odd."""
    stride: int = Field(2, ge=1, le=8)
    """Stride of each convolution in pixels."""
    features: int = Field(128, ge=1)
    """Size of the output vector."""

    @field_validator("kernel_size")
    @classmethod
    def _has_a_middle(cls, size: int) -> int:
        if size % 2 == 0:
            raise ValueError(f"found {size}; must be odd")
        return size


class PolicyConfig(StrictModel):
    """Small policy network; the trainer and the rollout workers build equal networks from these keys."""

    type: Literal["gaussian", "categorical", "tokens", "squashed"] = "gaussian"
    """Action distribution. `gaussian`: one standard deviation per dimension, independent of the observation;
    `categorical`: one of the environment's discrete actions; `tokens`: each dimension of a continuous action is one
    of `bins` values; `squashed`: a Gaussian squashed into the bounds by tanh, required by soft actor-critic."""
    hidden_sizes: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers."""
    observations: tuple[str, ...] = Field(("state",), min_length=1)
    """Names of the observations that the policy reads, concatenated in this order; images go through `encoder`
    first."""
    encoder: EncoderConfig = EncoderConfig()
    """Image encoder of policy and value network for uint8 [H, W, C], with separate weights for each. Pixels are
    scaled to [0, 1] and not normalised by running statistics."""
    normalise_observations: bool = True
    """Normalise observations by the mean and standard deviation of all observations trained on so far. The
    statistics are published with the weights, so each version acts with the statistics that it was trained with."""
    initial_log_std: float = 0.0
    """Initial logarithm of the standard deviation of every action dimension (`gaussian`)."""
    bins: int = Field(32, ge=2, le=1024)
    """Number of values per action dimension (`tokens`)."""


COPIES = 2
"""Largest number of replay buffers in a trainer's memory: a checkpoint is written from a copy."""


class ReplayBufferConfig(StrictModel):
    """Replay buffer of an off-policy algorithm."""

    capacity: int = Field(1_000_000, ge=1)
    """Largest number of transitions; a new one replaces the oldest."""
    max_bytes: int = Field(1 << 30, ge=1)
    """Largest memory in bytes; a job whose `capacity` needs more is rejected. The trainer's host (or container) must
    have twice what `capacity` needs, because a checkpoint copies the buffer."""

    def check_bytes(self, *, observation_size: int, action_size: int, memory_bytes: int | None = None) -> None:
        """Check that a full buffer fits into ``max_bytes``, and that the trainer's memory has room for it and a copy.

        A transition takes two observations, an action and a reward in float32, and one byte for a flag.

        Args:
            observation_size, action_size: components of one observation and of one action.
            memory_bytes: memory of the trainer; None: unknown, and not checked.

        Raises:
            ConfigError: the buffer needs more; the message says which capacity would fit.
        """
        row_bytes = 4 * (2 * observation_size + action_size + 1) + 1
        if self.capacity * row_bytes > self.max_bytes:
            raise ConfigError(
                f"algorithm.buffer.capacity {self.capacity} needs {self.capacity * row_bytes} bytes ({row_bytes} for "
                f"each transition), algorithm.buffer.max_bytes allows {self.max_bytes}: at most "
                f"{self.max_bytes // row_bytes} fit"
            )
        needed = COPIES * self.capacity * row_bytes
        if memory_bytes is not None and needed > memory_bytes:
            raise ConfigError(
                f"algorithm.buffer.capacity {self.capacity} needs {needed} bytes (the buffer, and the copy that a "
                f"checkpoint makes), and this trainer has {memory_bytes} bytes of memory: at most "
                f"{memory_bytes // (COPIES * row_bytes)} fit"
            )


class _EpisodeAlgorithm(StrictModel):
    min_group: int | None = Field(None, ge=1)
    """Smallest number of non-failed episodes in a trained group; a group with fewer is dropped and redrawn. Default:
    half of group_size."""

    @property
    def smallest_group(self) -> int:
        """Smallest number of non-failed episodes in a group that is still trained."""
        size: int = self.group_size  # type: ignore[attr-defined]  # every algorithm has this key
        return self.min_group if self.min_group is not None else max(1, size // 2)

    @property
    def greedy_baseline(self) -> bool:
        """Always False: no group has an additional episode, played with the policy's mean actions, as its baseline."""
        return False


class _Alone(_EpisodeAlgorithm):
    """Fields of algorithms that do not compare episodes with each other."""

    group_size: int = Field(1, ge=1)
    """Episodes per draw; all begin in the same state."""

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """Always None: no group is replaced, because an episode carries signal even without other episodes to compare
        it with."""
        return None


class EpisodePPOConfig(_Alone):
    """PPO with a value network and GAE (arXiv 1707.06347, 1506.02438)."""

    type: Literal["ppo"] = "ppo"
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per decision."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of GAE: 0 relies on the value network, 1 uses full returns."""
    normalise_advantages: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over all decisions of the batch."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    value_clip: float | None = Field(None, gt=0)
    """Clip range of value updates: a value that has moved this far towards its target gets no further gradient; null:
    no clipping."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(8, ge=1)
    """Passes over the batch per policy update."""
    minibatches: int = Field(8, ge=1)
    """Optimizer steps per pass, each on its own part of the batch."""
    max_kl: float | None = Field(None, gt=0)
    """Bound of the mean KL from the behaviour policy (nats): a pass that exceeds it is the last pass of the update;
    null: no bound."""
    value_hidden_sizes: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers of the value network."""
    policy: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the policy."""
    value: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the value network."""


class EpisodeGRPOConfig(_EpisodeAlgorithm):
    """GRPO over episodes that begin in the same state; all decisions of an episode share its advantage."""

    type: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2)
    """Episodes per draw; all begin in the same state and are compared with each other."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group (unbiased, + 1e-6)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(4, ge=1)
    """Passes over the batch per policy update."""
    minibatches: int = Field(4, ge=1)
    """Optimizer steps per pass, each on its own part of the batch."""
    max_kl: float | None = Field(None, gt=0)
    """Bound of the mean KL from the behaviour policy (nats): a pass that exceeds it is the last pass of the update;
    null: no bound."""
    policy: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the policy."""
    dynamic_sampling: DynamicSampling | None = None
    """Replacement of groups without signal by new draws. A group has no signal if all its returns are equal, or if all
    its episodes succeed or all fail in a simulator that reports success. null: train on such groups."""


class SoftActorCriticConfig(_Alone):
    """Soft actor-critic with twin critics and automatic temperature (arXiv 1812.05905)."""

    type: Literal["sac"] = "sac"
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per transition."""
    tau: float = Field(0.005, gt=0, le=1)
    """Polyak coefficient: fraction by which the target critics move towards the critics after each step."""
    batch_size: int = Field(256, ge=1)
    """Transitions per step, drawn uniformly with replacement."""
    steps_per_update: int = Field(1, ge=1)
    """Steps of critics, actor and temperature per policy update."""
    warmup_transitions: int = Field(1000, ge=1)
    """Transitions to collect before training begins; until then updates only fill the buffer."""
    critic_hidden_sizes: tuple[PositiveInt, ...] = Field((256, 256), min_length=1)
    """Widths of the hidden layers of the critics."""
    initial_temperature: float = Field(1.0, gt=0)
    """Initial weight of the entropy."""
    target_entropy: float | None = None
    """Entropy that the temperature is adapted to (nats); null: minus the number of action dimensions."""
    actor: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the actor."""
    critic: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of both critics."""
    temperature: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the logarithm of the temperature."""
    buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Replay buffer."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> SoftActorCriticConfig:
        if self.warmup_transitions > self.buffer.capacity:
            raise ValueError(
                f"warmup_transitions {self.warmup_transitions} never fit into buffer.capacity {self.buffer.capacity}"
            )
        return self


EmbodiedAlgorithm = Annotated[EpisodePPOConfig | EpisodeGRPOConfig | SoftActorCriticConfig, Field(discriminator="type")]
"""Algorithms that train on groups of episodes."""


class EpisodeWarmStartConfig(StrictModel):
    """Behaviour cloning before version 0 is published: the policy imitates the actions of demonstrations."""

    demonstrations: FileName
    """File written by `penstock record`, as the coordinator and the trainer see it."""
    epochs: int = Field(20, ge=1)
    """Passes over the steps of the demonstrations."""
    batch_size: int = Field(256, ge=1)
    """Simulator steps per optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate (AdamW)."""


class EpisodeEvaluationConfig(StrictModel):
    """Held-out evaluation: the policy plays each held-out reset id once, at an exact version and with its mean
    actions."""

    episodes: int = Field(20, ge=0)
    """Number of held-out reset ids; 0 disables the evaluation."""
    first_reset_id: int = Field(1_000_000, ge=0)
    """First held-out reset id; training never draws held-out ids."""
    every: int = Field(0, ge=0)
    """Policy updates between evaluations; 0: evaluate only where at_start and at_end require it."""
    at_start: bool = True
    """Evaluate version 0."""
    at_end: bool = True
    """Evaluate the final version."""
    videos: Annotated[int, Field(ge=0, le=16)] | Literal["auto"] = 0
    """Number of held-out episodes that each evaluation replays and films, in parallel with training; the job is
    rejected if no env worker can render. `auto`: one, or none if no env worker can render."""
    environment: SimulatorBase | None = None
    """Another simulator for held-out episodes, such as the real one if training uses a world model. Its actions, and
    the observations that the policy reads, must be those of the section `environment`. null: the simulator of the
    section `environment`."""

    @model_validator(mode="after")
    def _videos_are_of_episodes(self) -> EpisodeEvaluationConfig:
        if self.videos != "auto" and self.videos > self.episodes:
            raise ValueError(f"videos {self.videos}: only {self.episodes} episodes are held out")
        return self

    @model_validator(mode="after")
    def _environment_plays(self) -> EpisodeEvaluationConfig:
        if self.environment is not None and not self.episodes:
            raise ValueError("environment: no episode is held out; raise episodes, or leave it out")
        return self

    @property
    def num_videos(self) -> int:
        """Number of videos per evaluation if the environment can render; `auto` means at most one."""
        return min(AUTO_VIDEOS, self.episodes) if self.videos == "auto" else self.videos

    @property
    def num_prompts(self) -> int:
        """Held-out reset ids per evaluation."""
        return self.episodes

    @property
    def completions(self) -> int:
        """Episodes per reset id; 0 if the evaluation is disabled."""
        return int(self.episodes > 0)

    @property
    def sampling(self) -> None:
        """Always None: held-out episodes use the policy's mean actions."""

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of this evaluation."""
        return ["eval/return", "eval/success", "eval/length"]

    def metrics_of(self, sources: Sequence[str]) -> list[str]:
        """Return the names of the metrics of this evaluation; [] if ``sources`` is empty or the evaluation is
        disabled."""
        return self.metrics if sources and self.episodes else []
