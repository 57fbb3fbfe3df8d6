"""The policy model: a Hugging Face path, or a small architecture built from its config."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import OptionalFileName, StrictModel
from penstock.shared.config.lora import LoraConfig
from penstock.shared.errors import ConfigError

__all__ = [
    "CHECKPOINT_NAMES",
    "MAX_MODEL_FILES",
    "MODEL_FILE",
    "REFERENCE",
    "ArchitectureConfig",
    "ExpertsConfig",
    "MoEConfig",
    "ModelConfig",
    "parse_reference",
]


class ExpertsConfig(StrictModel):
    """Experts of every layer; `intermediate_size` of the architecture is the width of one expert."""

    number: int = Field(8, ge=2, le=1 << 16)
    """Experts per layer."""
    per_token: int = Field(2, ge=1)
    """Experts that process each token."""
    normalise: bool = True
    """Rescale the router probabilities of a token's experts to sum to 1 (`norm_topk_prob`)."""

    @model_validator(mode="after")
    def _choice_fits(self) -> ExpertsConfig:
        if self.per_token > self.number:
            raise ValueError(f"per_token {self.per_token} is larger than the number of experts, {self.number}")
        return self


class MoEConfig(StrictModel):
    """Router training of a mixture of experts."""

    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of each layer (Switch Transformer, arXiv 2101.03961, eq. 4-6); a balanced
    layer has loss 1. Costs one more forward pass per minibatch, which counts expert loads before the first gradient."""
    router_replay: bool = False
    """Record the experts of every token when sampling and route the same way in training (arXiv 2510.11370)."""
    replay_bytes_per_token: int | None = Field(None, ge=1)
    """Bytes that the recorded choice of experts takes per token, required for `router_replay` with `model.path`: MoE
    layers x experts per token, twice that above 256 experts. Counts against the job's byte budget; the sampler rejects
    a value that is too small and names the right one."""

    @model_validator(mode="after")
    def _size_of_a_table(self) -> MoEConfig:
        if self.replay_bytes_per_token is not None and not self.router_replay:
            raise ValueError("replay_bytes_per_token is read with router_replay only")
        return self


REFERENCE = "job:"
"""Prefix of a model path that refers to a checkpoint of a job."""
MAX_MODEL_FILES = 256
MODEL_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\.(json|safetensors|jinja|txt|model)", re.ASCII)
"""Pattern of the file names allowed in an uploaded model. It excludes code, pickles, and paths out of the folder."""
CHECKPOINT_NAMES = ("initial", "latest", "newest", "final", "best")
"""Names by which a checkpoint of a job can be selected, instead of by its number."""
_REFERENCE = re.compile(r"job:([A-Za-z0-9][A-Za-z0-9._-]{0,62})@((?:step:)?[A-Za-z0-9_]{1,32})", re.ASCII)


def parse_reference(text: str) -> tuple[str, str]:
    """Split ``job:JOB@WHICH`` into ``(job, which)``: a job's id or name, and the checkpoint to choose (see
    ``choose_checkpoint``).

    Raises:
        ConfigError: the text has another form.
    """
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"'{text[:200]}' is no checkpoint; write job:NAME@final, with the name or the id of a job; instead of "
            "final also best, latest, initial, or the number of updates (job:NAME@8 or job:NAME@step:8)"
        )
    return found[1], found[2]


class ArchitectureConfig(StrictModel):
    """Decoder built from scratch with random weights; the defaults give about one million parameters."""

    arch: Literal["qwen2", "qwen3", "llama", "qwen3_moe"] = "qwen3"
    """Architecture family of the transformers library."""
    hidden_size: int = Field(128, ge=8, multiple_of=8)
    """Width of the residual stream."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the MLP; with `experts`, of one expert."""
    experts: ExpertsConfig | None = None
    """Experts of a `qwen3_moe`; null for other families."""
    num_layers: int = Field(4, ge=1, le=128)
    """Number of decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Attention heads."""
    num_kv_heads: int = Field(2, ge=1)
    """Key/value heads (grouped-query attention)."""
    max_position_embeddings: int = Field(512, ge=16)
    """Longest sequence in tokens."""
    vocab_size: int | None = Field(None, ge=8)
    """Number of embedding rows; default: the size of the tokenizer."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding."""
    tie_word_embeddings: bool = True
    """Share the weights of embedding and output head."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ArchitectureConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        return self

    @model_validator(mode="after")
    def _experts_where_they_belong(self) -> ArchitectureConfig:
        if (self.experts is not None) != (self.arch == "qwen3_moe"):
            wrong = f"arch '{self.arch}' needs experts" if self.experts is None else "experts need arch 'qwen3_moe'"
            raise ValueError(wrong)
        return self


class ModelConfig(StrictModel):
    """Policy model. Exactly one of ``path`` and ``config`` is set."""

    path: OptionalFileName = None
    """Directory of a Hugging Face causal LM (config.json, safetensors, tokenizer), a hub id, or a checkpoint of
    another job, `job:NAME@final`, by the job's name (its newest job) or id. Alternatives to `final`: `best`,
    `latest`, `initial`, or a number of updates. The job's `origin` shows the checkpoint that was found. `./DIR` is
    relative to the job file, and uploaded if it is small; the id of an uploaded model will do, too."""
    config: ArchitectureConfig | None = None
    """Architecture of a model with random weights."""
    tokenizer: OptionalFileName = None
    """`char` (one token per character, for small tasks) or a path; default: the tokenizer in ``path``."""
    characters: str = "0123456789+-*/=?,.: abcdefghijklmnopqrstuvwxyz()%$"
    """Alphabet of the `char` tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and computation in trainer and sampler."""
    fp32_head: bool = False
    """Compute the logits of a bfloat16 model in float32, in trainer and sampler: keeps the precision of
    probabilities close to 1. Costs a float32 copy of the head's weights in each forward pass."""
    trust_remote_code: bool = False
    """Allow the library transformers to execute code of the model directory."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights; null: train all weights."""
    moe: MoEConfig | None = None
    """Load balancing and router replay of a mixture of experts."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.path is None) == (self.config is None):
            raise ValueError("give exactly one of model.path and model.config")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("model.tokenizer is needed with model.config: 'char' or a path")
        return self

    @model_validator(mode="after")
    def _routers_exist(self) -> ModelConfig:
        if self.moe is None:
            return self
        if self.config is not None and self.config.experts is None:
            raise ValueError(f"moe: arch '{self.config.arch}' has no routers")
        if self.moe.router_replay and self.config is None and not self.moe.replay_bytes_per_token:
            raise ValueError("moe.router_replay with model.path needs moe.replay_bytes_per_token: the budget counts it")
        if self.moe.aux_loss_coef and self.lora is not None:
            raise ValueError("moe.aux_loss_coef: adapters leave the routers as they are; there is nothing to balance")
        return self

    def check_room(self, key: str, max_new_tokens: int) -> None:
        """Raise ValueError if the model cannot hold a prompt of one token and a completion of ``max_new_tokens``.

        The message begins with ``key``, which names the keys of the job file that limit the completion.
        """
        most = self.config.max_position_embeddings if self.config is not None else None
        if most is not None and max_new_tokens >= most:
            raise ValueError(
                f"{key} {max_new_tokens} leaves no room for a prompt: the model takes {most} tokens "
                "(model.config.max_position_embeddings)"
            )

    @property
    def replay_bytes_per_token(self) -> int:
        """Bytes that the recorded choice of experts takes per token of a group; 0 without router replay."""
        if self.moe is None or not self.moe.router_replay:
            return 0
        if self.config is None or self.config.experts is None:
            return self.moe.replay_bytes_per_token or 0
        experts = self.config.experts
        return self.config.num_layers * experts.per_token * (1 if experts.number <= 1 << 8 else 2)
