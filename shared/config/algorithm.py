"""One config class per algorithm, selected by ``type``. A class has only the keys that its algorithm uses.

Every class has the same attributes (`group_size`, `aggregation`, `critic`, `dynamic_sampling`, …), either as a key or
as a property fixed for the algorithm, so that services need no case distinction by algorithm.
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
    """Dynamic sampling: new draws replace groups whose rewards are all equal (DAPO, arXiv 2503.14476, eq. 11)."""

    max_resampled: float = Field(3.0, ge=0)
    """Limit on replaced groups per batch, as a multiple of the groups in a batch; beyond the limit, groups with equal
    rewards are trained, too."""


class CriticConfig(StrictModel):
    """Value model of PPO: the policy's architecture with a scalar head, initialised from the policy's weights."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critic."""
    warmup_updates: int = Field(0, ge=0)
    """Number of first updates that train only the critic."""
    clip: float | None = Field(0.2, gt=0)
    """Clip range of value updates: a value that has moved this far towards its target gets no further gradient; null:
    no clipping."""
    huber_delta: float | None = Field(None, gt=0)
    """Threshold of the Huber loss: larger errors count linearly; null: squared error."""


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
    """Smallest number of trajectories in a group from which the algorithm can compute a baseline."""

    group_size: int = Field(8, ge=2)
    """Completions sampled per prompt, G."""
    min_group: int | None = Field(None, ge=1)
    """Smallest number of non-failed trajectories in a trained group; a group with fewer is dropped and redrawn.
    Default: half of group_size."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """Denominator of the ratio: log-probs of the sampler, or log-probs recomputed by the trainer at the start of the
    update."""
    importance: ImportanceConfig | None = None
    """Importance weights that correct the difference between recomputed and sampled log-probs; needs `proximal:
    recomputed`. null: all weights are 1."""
    kl: KLConfig | None = None
    """KL penalty to a reference policy; null: no reference model is loaded."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    overlong_filter: bool = False
    """Exclude completions that hit the token limit from the loss and its denominators (statistics still count them)."""

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
        """Smallest number of non-failed trajectories in a group that is still trained."""
        return self.min_group if self.min_group is not None else max(self.smallest, self.group_size // 2)

    @property
    def needs_reference(self) -> bool:
        """True if the trainer keeps a frozen reference policy."""
        return self.kl is not None

    @property
    def needs_critic(self) -> bool:
        """True if the trainer also trains a value model."""
        return False

    @property
    def greedy_baseline(self) -> bool:
        """True if each group has one additional, greedily decoded completion whose reward is the baseline."""
        return False


class _Rewarded(StrictModel):
    """Fields of algorithms that learn from rewards."""

    shaping: RewardShaping = RewardShaping()
    """Transformation of rewards before advantages are computed."""
    overlong_punishment: OverlongPunishment | None = None
    """Soft penalty for long completions; null: no penalty."""


class _CriticFree(_Algorithm):
    @property
    def critic(self) -> CriticConfig | None:
        """Always None: the algorithm has no learned baseline."""
        return None


class _Alone(_CriticFree):
    smallest: ClassVar[int] = 1

    group_size: int = Field(1, ge=1)
    """Completions sampled per prompt."""

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """Always None: no group is replaced, because groups with equal rewards still carry signal."""
        return None


class GRPOConfig(_CriticFree, _Rewarded):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2)."""

    type: Literal["grpo"] = "grpo"
    scale_by_std: ScaleByStd = True
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None


class DrGRPOConfig(_CriticFree, _Rewarded):
    """GRPO without its two biases (arXiv 2503.20783): no division by the standard deviation, a constant denominator."""

    type: Literal["dr_grpo"] = "dr_grpo"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None

    @property
    def scale_by_std(self) -> bool:
        """Always False: dividing by the standard deviation would weight prompts by their difficulty."""
        return False

    @property
    def aggregation(self) -> Aggregation:
        """Always `constant`: sums are divided by max_new_tokens, because a mean would favour long wrong answers."""
        return "constant"


class DAPOConfig(_CriticFree, _Rewarded):
    """Decoupled clip and dynamic sampling (arXiv 2503.14476): clip-higher, token-level loss, soft overlong
    punishment."""

    type: Literal["dapo"] = "dapo"
    clip_high: float = Field(0.28, gt=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = DynamicSampling()
    overlong_punishment: OverlongPunishment | None = OverlongPunishment()
    """Soft penalty for long completions; null: no penalty."""

    @property
    def scale_by_std(self) -> bool:
        """Always True: advantages are divided by the standard deviation of the group, as in the paper (eq. 9)."""
        return True

    @property
    def aggregation(self) -> Aggregation:
        """Always `token_mean`: every token has the same weight in the loss (eq. 8 of the paper)."""
        return "token_mean"


class RLOOConfig(_CriticFree, _Rewarded):
    """REINFORCE with the mean reward of the other completions as baseline (RLOO, arXiv 2402.14740)."""

    type: Literal["rloo"] = "rloo"
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None
    dynamic_sampling: Resampling = None


class ValueTracker(StrictModel):
    """Baseline for answers without a group: a running mean reward per kind of prompt (SPO, arXiv 2509.13232, §3.2)."""

    tag: str | None = None
    """Tag of an interaction (`metadata`) whose value is the kind of its prompt; null: all prompts are of one kind."""
    buckets: list[str] = Field(default_factory=list, max_length=64)
    """Values of the tag that have a running mean of their own; other values count only towards the overall mean."""
    keep: float = Field(0.9, gt=0, le=1)
    """Decay: fraction of the accumulated rewards kept after each batch."""
    value: float = 0.0
    """Prior mean: expected reward before any answer was rewarded."""
    weight: float = Field(8.0, gt=0)
    """Prior strength, in rewards: a kind of prompt starts as if it had seen this many rewards equal to the overall
    mean; the overall mean starts as if it had seen this many rewards equal to `value`."""
    siblings: bool = False
    """Compare answers of one batch that belong to the same request (`n` > 1), or have the same `group_id` and API key.
    The baseline of an answer is then the mean reward of the other answers (RLOO, arXiv 2402.14740), without turns of
    the answer's own episode."""

    @model_validator(mode="after")
    def _buckets_have_a_tag(self) -> ValueTracker:
        if bool(self.buckets) != (self.tag is not None):
            raise ValueError("tag and buckets: give both, or neither")
        return self


class ReinforcePPConfig(_Alone, _Rewarded):
    """REINFORCE++ (arXiv 2501.03262): discounted returns, normalised over all tokens of the batch."""

    type: Literal["reinforce_pp"] = "reinforce_pp"
    baseline: ValueTracker | None = None
    """Baseline subtracted before the normalisation; only in jobs of kind `online_rl`. null: no baseline."""
    gamma: Discount = 1.0
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None


class ReinforcePPBaselineConfig(_CriticFree, _Rewarded):
    """REINFORCE++ with baseline (arXiv 2501.03262): subtracts the mean of the group, then normalises over the batch."""

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
        """Always True: each group has one greedy completion as baseline, which group_size does not count."""
        return True


class PPOConfig(_Algorithm, _Rewarded):
    """Proximal Policy Optimization with a critic (arXiv 1707.06347; GAE: arXiv 1506.02438)."""

    smallest: ClassVar[int] = 1

    type: Literal["ppo"] = "ppo"
    group_size: int = Field(1, ge=1)
    """Completions sampled per prompt."""
    gamma: Discount = 1.0
    lam: float = Field(1.0, ge=0, le=1)
    """λ of GAE: 0 relies on the critic, 1 uses full returns."""
    normalise_advantages: bool = True
    """Normalise advantages to mean 0 and standard deviation 1 over all scored tokens of the batch."""
    critic: CriticConfig = CriticConfig()
    """Settings of the value model."""
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None

    @property
    def needs_critic(self) -> bool:
        """Always True: PPO trains a critic."""
        return True

    @property
    def dynamic_sampling(self) -> DynamicSampling | None:
        """Always None: no group is replaced, because groups with equal rewards still carry signal."""
        return None


class GSPOConfig(_CriticFree, _Rewarded):
    """Group Sequence Policy Optimization (arXiv 2507.18071, eq. 5-7): one importance ratio per sequence."""

    type: Literal["gspo"] = "gspo"
    clip_low: float = Field(3e-4, gt=0, lt=1)
    """The length-normalised ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(4e-4, gt=0)
    """The length-normalised ratio is clipped above at 1 + clip_high."""
    scale_by_std: ScaleByStd = True
    dynamic_sampling: Resampling = None

    @property
    def aggregation(self) -> Aggregation:
        """`sequence_mean`: the loss of a sequence is its ratio times its advantage."""
        return "sequence_mean"


class CISPOConfig(_CriticFree, _Rewarded):
    """Clipped importance weights; no token loses its gradient (CISPO: MiniMax-M1, arXiv 2506.13585, eq. 4-5)."""

    type: Literal["cispo"] = "cispo"
    clip_low: float = Field(1.0, gt=0, le=1)
    """Lower bound of the weight is 1 - clip_low; 1: no lower bound."""
    clip_high: float = Field(4.0, gt=0)
    """Upper bound of the weight is 1 + clip_high."""
    scale_by_std: ScaleByStd = True
    aggregation: ChosenAggregation = "token_mean"
    dynamic_sampling: Resampling = None


class DistillationConfig(_Alone):
    """On-policy distillation (arXiv 2306.13649, with reverse KL): the policy samples, a teacher scores each token.

    The advantage of a token is ``log π_teacher - log π``, discounted; rewards are measured but not trained on.
    """

    type: Literal["distillation"] = "distillation"
    teacher: FileName
    """Directory or hub id of a frozen model whose tokenizer assigns the same token ids as the policy's; loaded in
    `model.dtype`. Its architecture may differ."""
    gamma: float = Field(0.0, ge=0, le=1)
    """Discount of the advantages of later tokens: 0 scores each token by itself, 1 minimises the KL of whole
    completions."""
    aggregation: ChosenAggregation = "token_mean"
    dual_clip: DualClip = None

    @model_validator(mode="after")
    def _no_reward_to_take_it_off(self) -> DistillationConfig:
        if self.kl is not None and self.kl.place == "reward":
            raise ValueError("kl.place: rewards are not trained on here, so a KL is a term of the loss: place: loss")
        return self

    @property
    def shaping(self) -> RewardShaping:
        """Always the identity: rewards are measured but not trained on, so they need no transformation."""
        return RewardShaping()

    @property
    def overlong_punishment(self) -> OverlongPunishment | None:
        """Always None: rewards are measured but not trained on, so long completions are not punished."""
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
