"""One config class per algorithm, told apart by ``type``. A key an algorithm does not use does not exist in its class.

Every class answers the same questions (`group_size`, `aggregation`, `critic`, `dynamic_sampling`, …), either by a key
or by a property that is fixed for the algorithm, so that services need not ask which algorithm they serve.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.shared.config.base import FileName, StrictModel
from penstock.shared.config.correction import ImportanceConfig, KLConfig, OverlongPunishment, RewardShaping
from penstock.shared.config.optimizer import OptimizerConfig

__all__ = [
    "AlgorithmConfig",
    "CISPOConfig",
    "CriticConfig",
    "DAPOConfig",
    "DistillationConfig",
    "DrGRPOConfig",
    "DynamicSampling",
    "GRPOConfig",
    "GSPOConfig",
    "PPOConfig",
    "REMAXConfig",
    "RLOOConfig",
    "ReinforcePPBaselineConfig",
    "ReinforcePPConfig",
    "ValueTracker",
]

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class DynamicSampling(StrictModel):
    """Groups whose rewards are all equal are replaced by new draws (DAPO, arXiv 2503.14476, eq. 11)."""

    max_resampled: float = Field(3.0, ge=0)
    """At most this many times the groups of a batch are replaced for one batch; beyond it they train as they are."""


class CriticConfig(StrictModel):
    """The value model of PPO: the policy's architecture with a scalar head, started from the policy's weights."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critic."""
    warmup_updates: int = Field(0, ge=0)
    """First updates that train the critic alone."""
    clip: float | None = Field(0.2, gt=0)
    """A value that has moved this far towards its target in an update gets no further gradient; null: no limit."""
    huber_delta: float | None = Field(None, gt=0)
    """Errors beyond this count linearly; null is the squared error."""


ChosenAggregation = Annotated[
    Aggregation,
    Field(
        description="Denominator of the loss: tokens of the minibatch, tokens of each sequence then sequences, or "
        "sequences times max_new_tokens."
    ),
]
DualClip = Annotated[
    float | None,
    Field(gt=1, description="Bound of ratio * |A| for negative advantages (arXiv 1912.09729); null: none."),
]
ScaleByStd = Annotated[
    bool, Field(description="Divide advantages by the standard deviation of the group (unbiased, + 1e-6).")
]
Resampling = Annotated[
    DynamicSampling | None,
    Field(description="Replace groups without signal by new draws; null trains on them as drawn."),
]
Discount = Annotated[float, Field(gt=0, le=1, description="Discount of each scored token.")]


class _Algorithm(StrictModel):
    smallest: ClassVar[int] = 2
    """Fewest trajectories with which a group has a baseline."""

    group_size: int = Field(8, ge=2)
    """Sampled completions of each prompt, G."""
    min_group: int | None = Field(None, ge=1)
    """A group with fewer trajectories that did not fail is dropped and redrawn; default: half of group_size."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """Denominator of the ratio: log-probs of the sampler, or of the trainer's weights at the start of the update."""
    importance: ImportanceConfig | None = None
    """Correction of recomputed against sampled log-probs; needs `proximal: recomputed`. null: weights of 1."""
    kl: KLConfig | None = None
    """KL to a reference policy; null keeps no reference model."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    overlong_filter: bool = False
    """Leave completions that hit the token limit out of the loss and its denominators (statistics keep them)."""

    @model_validator(mode="after")
    def _min_group_fits(self) -> _Algorithm:
        if self.min_group is not None and not self.smallest <= self.min_group <= self.group_size:
            raise ValueError(f"min_group {self.min_group} must lie in {self.smallest}..group_size ({self.group_size})")
        return self

    @model_validator(mode="after")
    def _importance_has_two_policies(self) -> _Algorithm:
        if self.importance is not None and self.proximal == "behaviour":
            raise ValueError(
                "importance corrects recomputed against sampled log-probs and needs 'proximal: recomputed': with "
                "'proximal: behaviour' the ratio itself is that correction"
            )
        return self

    @property
    def smallest_group(self) -> int:
        """Fewest trajectories with which a group still trains."""
        return self.min_group if self.min_group is not None else max(self.smallest, self.group_size // 2)

    @property
    def needs_reference(self) -> bool:
        """True if a frozen reference policy is kept."""
        return self.kl is not None

    @property
    def needs_critic(self) -> bool:
        """True if a value model is trained beside the policy."""
        return False

    @property
    def greedy_baseline(self) -> bool:
        """True if each group holds one more completion, decoded greedily, whose reward is the baseline."""
        return False


class _Rewarded(StrictModel):
    """The policy learns from rewards."""

    shaping: RewardShaping = RewardShaping()
    """Changes of rewards before advantages."""
    overlong_punishment: OverlongPunishment | None = None
    """Soft punishment of long completions; null: none."""


class _CriticFree(_Algorithm):
    @property
    def critic(self) -> CriticConfig | None:
        """None: the baseline is not learnt."""
        return None


class _Alone(_CriticFree):
    smallest: ClassVar[int] = 1

    group_size: int = Field(1, ge=1)
    """Sampled completions of each prompt."""

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """None: equal rewards of a group are no lack of signal."""
        return None


class GRPOConfig(_CriticFree, _Rewarded):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2)."""

    type: Literal["grpo"] = "grpo"
    scale_by_std: ScaleByStd = True
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None


class DrGRPOConfig(_CriticFree, _Rewarded):
    """GRPO without its two biases (arXiv 2503.20783): no division by the deviation, a constant as denominator."""

    type: Literal["dr_grpo"] = "dr_grpo"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None

    @property
    def scale_by_std(self) -> bool:
        """False: the deviation weighs prompts by their difficulty."""
        return False

    @property
    def aggregation(self) -> Aggregation:
        """The constant is max_new_tokens: a mean over the sequence favours long wrong answers."""
        return "constant"


class DAPOConfig(_CriticFree, _Rewarded):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476): clip-higher, token-level loss, soft punishment."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = DynamicSampling()
    overlong_punishment: OverlongPunishment | None = OverlongPunishment()
    """Soft punishment of long completions; null: none."""

    @property
    def scale_by_std(self) -> bool:
        """True, as in the paper (eq. 9)."""
        return True

    @property
    def aggregation(self) -> Aggregation:
        """Every token weighs the same (eq. 8)."""
        return "token_mean"


class RLOOConfig(_CriticFree, _Rewarded):
    """REINFORCE with the mean of the other completions as baseline (arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None


class ValueTracker(StrictModel):
    """A baseline for answers without siblings: the tracked mean reward of their kind (SPO, arXiv 2509.13232, §3.2)."""

    tag: str | None = None
    """Tag of an interaction (`metadata`) that says of which kind it is; null: all are of one."""
    buckets: list[str] = Field(default_factory=list, max_length=64)
    """Values of the tag that are tracked by themselves; others count for the whole alone."""
    keep: float = Field(0.9, gt=0, le=1)
    """How much of the past remains after a batch."""
    value: float = 0.0
    """Expected reward before anything is known."""
    weight: float = Field(8.0, gt=0)
    """So many rewards of the whole's value a kind begins with, and the whole with so many of `value`."""
    siblings: bool = False
    """Answers to one request (`n` > 1), or of one `group_id` of their key, that are in one batch are compared with each
    other instead: the baseline is the mean reward of the others (RLOO, arXiv 2402.14740), without the other turns of
    the same episode."""

    @model_validator(mode="after")
    def _buckets_have_a_tag(self) -> ValueTracker:
        if bool(self.buckets) != (self.tag is not None):
            raise ValueError("tag and buckets: give both, or neither")
        return self


class ReinforcePPConfig(_Alone, _Rewarded):
    """REINFORCE++ (arXiv 2501.03262): discounted returns, normalised over all tokens of the batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: ValueTracker | None = None
    """Subtracted before the normalisation; only in jobs of kind `online_rl`. null: none."""
    gamma: Discount = 1.0
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None


class ReinforcePPBaselineConfig(_CriticFree, _Rewarded):
    """REINFORCE++ with baseline (arXiv 2501.03262): less the mean of the group, then normalised over the batch."""

    type: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None


class REMAXConfig(_Alone, _Rewarded):
    """REINFORCE with the reward of the greedy completion as baseline (ReMax, arXiv 2310.10505)."""

    type: Literal["remax"] = "remax"
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None

    @property
    def greedy_baseline(self) -> bool:
        """True: group_size does not count it."""
        return True


class PPOConfig(_Algorithm, _Rewarded):
    """Proximal Policy Optimization with a critic (arXiv 1707.06347; GAE: arXiv 1506.02438)."""

    smallest: ClassVar[int] = 1

    type: Literal["ppo"] = "ppo"
    group_size: int = Field(1, ge=1)
    """Sampled completions of each prompt."""
    gamma: Discount = 1.0
    lam: float = Field(1.0, ge=0, le=1)
    """λ of GAE: 0 trusts the critic, 1 uses whole returns."""
    normalise_advantages: bool = True
    """Mean 0 and deviation 1 over all scored tokens of the batch."""
    critic: CriticConfig = CriticConfig()
    """The value model."""
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None

    @property
    def needs_critic(self) -> bool:
        """True."""
        return True

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """None: equal rewards of a group are no lack of signal."""
        return None


class GSPOConfig(_CriticFree, _Rewarded):
    """Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5-7): one ratio for each sequence."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The length-normalised ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The length-normalised ratio is clipped above at 1 + clip_high."""
    scale_by_std: ScaleByStd = True
    dynamic_sampling: Resampling = None

    @property
    def aggregation(self) -> Aggregation:
        """Mean over the tokens of each sequence: the loss of a sequence is its ratio times its advantage."""
        return "sequence_mean"


class CISPOConfig(_CriticFree, _Rewarded):
    """Clipped importance weights, no token loses its gradient (MiniMax-M1, arXiv 2506.13585, eq. 4-5)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    """The weight is at least 1 - clip_low; 1 is no lower bound."""
    clip_high: float = Field(4.0, gt=0)
    """The weight is at most 1 + clip_high."""
    scale_by_std: ScaleByStd = True
    aggregation: ChosenAggregation = "token_mean"
    dynamic_sampling: Resampling = None


class DistillationConfig(_Alone):
    """On-policy distillation (arXiv 2306.13649, with reverse KL): the policy samples, a teacher judges each token.

    The advantage of a token is ``log π_teacher - log π``, discounted; rewards are measured and not trained on.
    """

    type: Literal["distillation"] = "distillation"
    teacher: FileName
    """Directory or hub id of a frozen model of any shape that numbers tokens as the policy does; in `model.dtype`."""
    gamma: float = Field(0.0, ge=0, le=1)
    """Discount of what later tokens earn: 0 judges each token by itself, 1 minimises KL of whole completions."""
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None

    @model_validator(mode="after")
    def _no_reward_to_take_it_off(self) -> DistillationConfig:
        if self.kl is not None and self.kl.place == "reward":
            raise ValueError("kl.place: rewards are not trained on here, so a KL is a term of the loss: place: loss")
        return self

    @property
    def shaping(self) -> RewardShaping:
        """As they are: rewards are measured alone."""
        return RewardShaping()

    @property
    def overlong_punishment(self) -> OverlongPunishment | None:
        """None: rewards are measured alone."""
        return None


def _grpo_unless_named(data: Any) -> Any:
    return {"type": "grpo", **data} if isinstance(data, dict) else data


AlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | DAPOConfig
    | RLOOConfig
    | ReinforcePPConfig
    | ReinforcePPBaselineConfig
    | REMAXConfig
    | PPOConfig
    | GSPOConfig
    | CISPOConfig
    | DistillationConfig,
    Field(discriminator="type"),
    BeforeValidator(_grpo_unless_named),
]
