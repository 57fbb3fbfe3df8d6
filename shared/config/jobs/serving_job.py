"""Job file of a deployment: a checkpoint that rollout workers serve without training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.shared.config.base import StrictModel
from penstock.shared.config.environment import check_completions
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.training_job import PlacementConfig
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rollout import EmbeddedConfig, RolloutConfig, check_engine
from penstock.shared.config.sampling import SamplingConfig

__all__ = ["ServingConfig", "ServingJob"]


class ServingConfig(StrictModel):
    """Handling of requests, and lifetime of the deployment."""

    hold_s: float = Field(30.0, gt=0, le=600)
    """Longest wait of a request for a rollout worker that has loaded the model and has capacity (seconds). After that
    the reply asks the client to retry later."""
    idle_s: float | None = Field(None, gt=0)
    """Seconds without a request after which the deployment ends; null: it stays until a user cancels it."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template; default: those of the job that wrote the checkpoint."""


class ServingJob(StrictModel):
    """Deployment of one policy under the job's name: a checkpoint of another job (`model.path: job:NAME@final`), or a
    model directory.

    The deployment takes slots of every rollout worker and has no trainer and no ledger. For a checkpoint, the sections
    `model`, `sampling` and `placement` default to those of the job that wrote it.
    """

    kind: Literal["serving"]
    """Kind of job; `serving` answers at `/v1/chat/completions` and `/v1/completions`, and trains nothing."""
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the model for clients."""
    seed: int = Field(0, ge=0, lt=1 << 63)
    """Seed of the initial weights, if `model.config` builds them."""
    model: ModelConfig
    """Policy to serve."""
    sampling: SamplingConfig = SamplingConfig()
    """Default sampling settings of requests."""
    rollout: RolloutConfig = EmbeddedConfig()
    """Rollout engine of the deployment; it may differ from the engine of the job that wrote the checkpoint."""
    serving: ServingConfig = ServingConfig()
    """Handling of requests, and lifetime of the deployment."""
    placement: PlacementConfig = PlacementConfig()
    """Threads and devices of the services, and concurrent sequences of each engine."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    """Labels that the user chooses freely."""

    @model_validator(mode="after")
    def _model_can_be_served(self) -> ServingJob:
        check_completions(self.model, "sampling", self.sampling, None)
        if self.model.lora is not None:
            raise ValueError("model.lora: a deployment trains no adapter; leave it out")
        check_engine(self.rollout, self.model, iter(()), is_updated=False)
        return self

    def after(self, trained: JobConfig, path: str) -> ServingJob:
        """Return a serving job for the checkpoint in the directory ``path``; ``trained`` is the job that wrote it.

        Keys set in this file stay; all others are taken from that job, except those only needed for training.
        """
        model = {key: getattr(trained.model, key) for key in _MODEL} | _given(self.model) | {"path": path}
        sampling = trained.sampling.model_copy(update=_given(self.sampling))
        serving = {"chat_template_args": trained.data.prompt.chat_template_args} | _given(self.serving)
        return ServingJob.model_validate(
            {
                **_given(self), "model": model, "sampling": sampling, "serving": serving,
                "placement": trained.placement.model_copy(update=_given(self.placement)),
            }
        )  # fmt: skip


_MODEL = ("dtype", "fp32_head", "trust_remote_code")
"""Keys of `model` that a checkpoint does not determine, so that they are copied from the job that wrote it."""


def _given(section: StrictModel) -> dict[str, Any]:
    return {key: getattr(section, key) for key in section.model_fields_set}
