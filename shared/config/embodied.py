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
    "SimulatorConfig",
    "SoftActorCriticConfig",
]


AUTO_VIDEOS = 1
IMAGE = "image"
"""Name of the observation that `environment.image` adds."""
RESERVED = ("id", "env_id", "disable_env_checker")
"""Keyword arguments that a simulator's adapter gives itself."""


class ImageConfig(StrictModel):
    """Pictures of the simulator's camera, as the observation `image`."""

    height: int = Field(64, ge=8, le=512)
    """Rows of pixels. The simulator draws a larger picture; each pixel is the mean of those that it covers."""
    width: int = Field(64, ge=8, le=512)
    """Columns of pixels."""
    grey: bool = False
    """Brightness (ITU-R BT.601) in place of three colours."""
    frames: int = Field(1, ge=1, le=8)
    """Pictures that one observation holds: that of this step and the ones before, so that a policy sees speeds."""

    @property
    def picture(self) -> Picture:
        """The request for it."""
        return Picture(height=self.height, width=self.width, grey=self.grey, frames=self.frames)


class SimulatorConfig(StrictModel):
    """The simulator whose episodes are trained on. Everything random in an episode follows from its reset id."""

    backend: str = "gymnasium"
    """Simulator; `penstock sims ls` lists them."""
    task: str = Field(min_length=1)
    """Task or environment id of that simulator, such as `reach-v3` or `HalfCheetah-v5`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment, but for `id`, `env_id` and `disable_env_checker`."""
    image: ImageConfig | None = None
    """Observe pictures, too, as `image`: uint8 [height, width, channels of all frames]. Needs a simulator with a camera
    and, for MuJoCo, a library that draws; null: only what the simulator observes by itself."""
    horizon: int = Field(ge=1)
    """Steps after which an episode is cut off; the value of what would follow still counts."""
    action_chunk: int = Field(1, ge=1, le=64)
    """Actions that the policy decides on at once."""
    num_envs: int = Field(8, ge=1, le=4096)
    """Environments of each session that a rollout worker opens; each runs one episode at a time."""
    sessions: int = Field(2, ge=1, le=8)
    """Sessions of each rollout worker. With two, one half of its environments steps while the policy decides for the
    other."""
    num_processes: int = Field(1, ge=1)
    """Child processes over which the environments of a session are spread."""
    step_limit_s: float = Field(60.0, gt=0)
    """A simulator that takes longer for one request has hung: it is killed and its episodes are drawn again."""
    first_reset_id: int = Field(0, ge=0)
    """Reset id of the first draw."""
    num_reset_ids: int | None = Field(None, ge=1)
    """Draws go round these many reset ids; null: each draw has one of its own."""
    bytes_per_step: int = Field(2048, ge=64)
    """Upper bound of what one decision adds to a stored group: observations, actions, log-probs, rewards. The job is
    refused where the simulator's observations need more."""

    @field_validator("options")
    @classmethod
    def _leaves_what_is_given(cls, options: dict[str, Any]) -> dict[str, Any]:
        if taken := [name for name in RESERVED if name in options]:
            raise ValueError(
                f"'{taken[0]}' is no option: `task` names the environment, and its simulator does the rest"
            )
        return options

    def opening(self, num_envs: int, *, idle_s: float = 60.0, camera: bool = False) -> OpenEnv:
        """The request for so many of its environments."""
        return OpenEnv(
            env_id=self.task, num_envs=num_envs, backend=self.backend, options=self.options, idle_s=idle_s,
            num_processes=self.num_processes, step_limit_s=self.step_limit_s, camera=camera,
            picture=None if self.image is None else self.image.picture,
        )  # fmt: skip

    def reset_id(self, ordinal: int) -> int:
        """Reset id of the draw with this ordinal."""
        return self.first_reset_id + (ordinal if self.num_reset_ids is None else ordinal % self.num_reset_ids)


class EncoderConfig(StrictModel):
    """Convolutions that make numbers of an image: each layer with padding and ReLU, then one linear layer."""

    channels: tuple[PositiveInt, ...] = Field((16, 32, 32), min_length=1)
    """Channels of each convolution."""
    kernel_size: int = Field(3, ge=1, le=15)
    """Pixels of a side of each kernel; odd."""
    stride: int = Field(2, ge=1, le=8)
    """Each convolution leaves one pixel of so many in a row."""
    features: int = Field(128, ge=1)
    """Numbers that an image becomes."""

    @field_validator("kernel_size")
    @classmethod
    def _has_a_middle(cls, size: int) -> int:
        if size % 2 == 0:
            raise ValueError(f"found {size}; must be odd")
        return size


class PolicyConfig(StrictModel):
    """A small policy network; trainer and rollout workers build the same one."""

    type: Literal["gaussian", "categorical", "tokens", "squashed"] = "gaussian"
    """Distribution of actions. `gaussian`: a deviation per dimension that does not depend on the observation;
    `categorical`: one of the environment's discrete actions; `tokens`: each dimension of a continuous action is one of
    `bins` values; `squashed`: a Gaussian squashed into the bounds by tanh, which soft actor-critic needs."""
    hidden_sizes: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers."""
    observations: tuple[str, ...] = Field(("state",), min_length=1)
    """Names of the observations that the policy reads, one after another; images go through `encoder` first."""
    encoder: EncoderConfig = EncoderConfig()
    """How policy and value network read images, uint8 [H, W, C], each with weights of its own. Pixels are scaled to
    [0, 1]; no statistics normalise them."""
    normalise_observations: bool = True
    """Shift and scale observations by the mean and deviation of all that was trained on; they travel with the
    weights, so a version always acts on what it was trained with."""
    initial_log_std: float = 0.0
    """Logarithm of the deviation of every action dimension at the start (`gaussian`)."""
    bins: int = Field(32, ge=2, le=1024)
    """Values of each action dimension (`tokens`)."""


class ReplayBufferConfig(StrictModel):
    """Where the transitions of an off-policy algorithm are kept."""

    capacity: int = Field(1_000_000, ge=1)
    """Transitions that are kept; a new one takes the place of the oldest."""
    max_bytes: int = Field(1 << 30, ge=1)
    """A capacity whose columns need more than this is refused."""

    def check_bytes(self, *, observation_size: int, action_size: int) -> None:
        """Look whether the columns fit: two observations, an action and a reward in float32, and one flag.

        Args:
            observation_size, action_size: numbers of one transition.

        Raises:
            ConfigError: they need more than ``max_bytes``; says what would fit.
        """
        row_bytes = 4 * (2 * observation_size + action_size + 1) + 1
        if self.capacity * row_bytes > self.max_bytes:
            raise ConfigError(
                f"algorithm.buffer.capacity {self.capacity} needs {self.capacity * row_bytes} bytes ({row_bytes} for "
                f"each transition), algorithm.buffer.max_bytes allows {self.max_bytes}: at most "
                f"{self.max_bytes // row_bytes} fit"
            )


class _EpisodeAlgorithm(StrictModel):
    min_group: int | None = Field(None, ge=1)
    """A group with fewer episodes that did not fail is dropped and redrawn; default: half of group_size."""

    @property
    def smallest_group(self) -> int:
        """Fewest episodes with which a group still trains."""
        size: int = self.group_size  # type: ignore[attr-defined]  # every algorithm has this key
        return self.min_group if self.min_group is not None else max(1, size // 2)

    @property
    def greedy_baseline(self) -> bool:
        """False: no group holds an episode of the policy's mean."""
        return False


class _Alone(_EpisodeAlgorithm):
    """Episodes are not compared with each other."""

    group_size: int = Field(1, ge=1)
    """Episodes of one draw: they begin in the same state."""

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """None: an episode needs no other one to learn from."""
        return None


class EpisodePPOConfig(_Alone):
    """PPO with a value network and GAE (arXiv 1707.06347, 1506.02438)."""

    type: Literal["ppo"] = "ppo"
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of one decision."""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of GAE: 0 trusts the value network, 1 uses whole returns."""
    normalise_advantages: bool = True
    """Mean 0 and deviation 1 over all decisions of the batch."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    value_clip: float | None = Field(None, gt=0)
    """A value that has moved this far towards its target in an update gets no further gradient; null: no limit."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(8, ge=1)
    """Passes over the batch in one policy update."""
    minibatches: int = Field(8, ge=1)
    """Optimizer steps of one pass, each on its own part of the batch."""
    max_kl: float | None = Field(None, gt=0)
    """No further pass after one in which the mean KL from the behaviour policy was larger, in nats; null: no bound."""
    value_hidden_sizes: tuple[PositiveInt, ...] = Field((64, 64), min_length=1)
    """Widths of the hidden layers of the value network."""
    policy: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the policy."""
    value: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the value network."""


class EpisodeGRPOConfig(_EpisodeAlgorithm):
    """GRPO over episodes that begin in the same state; every decision of an episode has its advantage."""

    type: Literal["grpo"] = "grpo"
    group_size: int = Field(8, ge=2)
    """Episodes of one draw: they begin in the same state and are compared with each other."""
    scale_by_std: bool = True
    """Divide advantages by the standard deviation of the group (unbiased, + 1e-6)."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    epochs: int = Field(4, ge=1)
    """Passes over the batch in one policy update."""
    minibatches: int = Field(4, ge=1)
    """Optimizer steps of one pass, each on its own part of the batch."""
    max_kl: float | None = Field(None, gt=0)
    """No further pass after one in which the mean KL from the behaviour policy was larger, in nats; null: no bound."""
    policy: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, eps=1e-5, max_grad_norm=0.5)
    """Optimizer of the policy."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace groups whose returns are all equal (all succeeded, or all failed) by new draws; null trains on them."""


class SoftActorCriticConfig(_Alone):
    """Soft actor-critic with twin critics and automatic temperature (arXiv 1812.05905)."""

    type: Literal["sac"] = "sac"
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount of one transition."""
    tau: float = Field(0.005, gt=0, le=1)
    """Part of the way that the target critics go to the critics after each step."""
    batch_size: int = Field(256, ge=1)
    """Transitions of one step, drawn uniformly with replacement."""
    steps_per_update: int = Field(1, ge=1)
    """Steps of critics, actor and temperature in one policy update."""
    warmup_transitions: int = Field(1000, ge=1)
    """Updates only fill the buffer until it has got as many."""
    critic_hidden_sizes: tuple[PositiveInt, ...] = Field((256, 256), min_length=1)
    """Widths of the hidden layers of the critics."""
    initial_temperature: float = Field(1.0, gt=0)
    """Weight of the entropy at the start."""
    target_entropy: float | None = None
    """The temperature steers the policy's entropy to this, in nats; null: minus the number of action dimensions."""
    actor: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the actor."""
    critic: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of both critics."""
    temperature: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, max_grad_norm=10.0)
    """Optimizer of the logarithm of the temperature."""
    buffer: ReplayBufferConfig = ReplayBufferConfig()
    """Where transitions are kept."""

    @model_validator(mode="after")
    def _warmup_fits(self) -> SoftActorCriticConfig:
        if self.warmup_transitions > self.buffer.capacity:
            raise ValueError(
                f"warmup_transitions {self.warmup_transitions} never fit into buffer.capacity {self.buffer.capacity}"
            )
        return self


EmbodiedAlgorithm = Annotated[EpisodePPOConfig | EpisodeGRPOConfig | SoftActorCriticConfig, Field(discriminator="type")]
"""Which loss a group of episodes is trained with."""


class EpisodeWarmStartConfig(StrictModel):
    """Behaviour cloning before version 0 is published: the policy learns the actions of demonstrations."""

    demonstrations: FileName
    """File of `penstock record`, as coordinator and trainer see it."""
    epochs: int = Field(20, ge=1)
    """Passes over its steps."""
    batch_size: int = Field(256, ge=1)
    """Steps of the simulator in one optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate of AdamW."""


class EpisodeEvaluationConfig(StrictModel):
    """Held-out episodes at an exact version, without noise, each reset id once."""

    episodes: int = Field(20, ge=0)
    """Held-out reset ids; 0 measures nothing."""
    first_reset_id: int = Field(1_000_000, ge=0)
    """The first of them; training never draws them."""
    every: int = Field(0, ge=0)
    """Policy updates between evaluations; 0 evaluates only where at_start / at_end say so."""
    at_start: bool = True
    """Evaluate version 0."""
    at_end: bool = True
    """Evaluate the final version."""
    videos: Annotated[int, Field(ge=0, le=16)] | Literal["auto"] = 0
    """Held-out episodes of each evaluation that are played once more and filmed, beside the training; the job is
    refused where no env worker can draw. `auto`: one, or none where nobody can."""

    @model_validator(mode="after")
    def _videos_are_of_episodes(self) -> EpisodeEvaluationConfig:
        if self.videos != "auto" and self.videos > self.episodes:
            raise ValueError(f"videos {self.videos}: only {self.episodes} episodes are held out")
        return self

    @property
    def num_videos(self) -> int:
        """Films of one evaluation, if there is a camera."""
        return min(AUTO_VIDEOS, self.episodes) if self.videos == "auto" else self.videos

    @property
    def num_prompts(self) -> int:
        """Held-out reset ids of one evaluation."""
        return self.episodes

    @property
    def completions(self) -> int:
        """Episodes of one reset id; 0 measures nothing."""
        return int(self.episodes > 0)

    @property
    def sampling(self) -> None:
        """None: held-out episodes take the mean of the policy."""

    @property
    def metrics(self) -> list[str]:
        """Names of the values that this measures."""
        return ["eval/return", "eval/success", "eval/length"]

    def metrics_of(self, sources: Sequence[str]) -> list[str]:
        """Names of the values, none where nothing is measured; there is one source, the simulator."""
        return self.metrics if sources and self.episodes else []
