"""The teacher of a distillation job: a frozen model of any shape that scores the policy's tokens on the job's backend.

Shape legend: M = scored tokens of a microbatch.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from penstock.services.trainer.backends.base import TensorLayout
from penstock.services.trainer.backends.frozen import FrozenModel
from penstock.services.trainer.batch.packing import Microbatch
from penstock.services.trainer.ranks.collective import Collective
from penstock.shared.config.algorithm import DistillationConfig
from penstock.shared.config.backend import FSDPConfig
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.models.compatibility import check_same_tokens
from penstock.shared.models.loading import build_model, build_tokenizer
from penstock.shared.weights import digest_of_tensors

__all__ = ["Teacher", "open_teacher"]


class Teacher(Protocol):
    """Model that scores tokens. A teacher is never trained; a checkpoint holds only the teacher's path and digest.

    On several ranks ``score`` is a collective: all ranks call it equally often.
    """

    @property
    def digest(self) -> str:
        """Digest of the teacher's weights."""

    def layout(self) -> TensorLayout:
        """Return the layout of the whole weights."""

    def score(self, microbatch: Microbatch | None) -> Tensor:
        """Return log-probs of the scored tokens, float32 [M]; empty on a rank that has no more microbatches."""


def open_teacher(
    config: JobConfig, tokenizer: PreTrainedTokenizerFast, collective: Collective, device: str
) -> Teacher | None:
    """Load the model at ``algorithm.teacher``; return None if the algorithm has none.

    Raises:
        ConfigError: the teacher cannot be loaded or sharded, or its tokenizer differs from the policy's.
    """
    if not isinstance(config.algorithm, DistillationConfig):
        return None
    path = config.algorithm.teacher
    source = config.model.model_copy(
        update={"path": path, "config": None, "tokenizer": None, "lora": None, "moe": None}
    )
    theirs = build_tokenizer(source)
    check_same_tokens(tokenizer, theirs, what=f"the teacher '{path}'")
    model = build_model(source, max(len(theirs), len(tokenizer)), seed=0)
    digest = digest_of_tensors((name, parameter.detach()) for name, parameter in model.named_parameters())
    if isinstance(config.backend, FSDPConfig):
        from penstock.services.trainer.backends.fsdp.frozen import ShardedFrozenModel

        return ShardedFrozenModel(model, digest, config.backend, collective, device=device)
    return FrozenModel(model, digest, device=device)
