"""Metric trackers, which record a job's metrics in addition to the metrics stream."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["SwanLabTracker", "TensorBoardTracker", "TrackerConfig", "WandbTracker"]


class TensorBoardTracker(StrictModel):
    """Event files for TensorBoard (package tensorboard), in `tracking/JOB` of the coordinator's data directory."""

    type: Literal["tensorboard"] = "tensorboard"


class WandbTracker(StrictModel):
    """Run at Weights & Biases (package wandb). The API key is the variable WANDB_API_KEY of the coordinator."""

    type: Literal["wandb"] = "wandb"
    project: str = Field(min_length=1)
    """Project of the run; the run's id is that of the job, its name the job's name."""
    entity: str | None = None
    """User or team."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`."""


class SwanLabTracker(StrictModel):
    """Experiment at SwanLab (package swanlab). The API key is the variable SWANLAB_API_KEY of the coordinator."""

    type: Literal["swanlab"] = "swanlab"
    project: str = Field(min_length=1)
    """Project of the experiment, which has the job's name."""
    workspace: str | None = None
    """User or team."""
    mode: Literal["cloud", "local", "offline"] = "cloud"
    """`local` and `offline` only write files."""


TrackerConfig = Annotated[TensorBoardTracker | WandbTracker | SwanLabTracker, Field(discriminator="type")]
