"""Where a job's metrics are written beside its own stream."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.shared.config.base import StrictModel

__all__ = ["SwanLabTracker", "TensorBoardTracker", "TrackerConfig", "WandbTracker"]


class TensorBoardTracker(StrictModel):
    """Event files for TensorBoard (package tensorboard), in `tracking/JOB` of the coordinator's data directory."""

    type: Literal["tensorboard"] = "tensorboard"


class WandbTracker(StrictModel):
    """A run at Weights & Biases (package wandb). The key comes from the coordinator's environment, WANDB_API_KEY."""

    type: Literal["wandb"] = "wandb"
    project: str = Field(min_length=1)
    """Project of the run; its id is the job's, its name the job's name."""
    entity: str | None = None
    """User or team."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files for `wandb sync`."""


class SwanLabTracker(StrictModel):
    """An experiment at SwanLab (package swanlab). The key comes from the coordinator's environment, SWANLAB_API_KEY."""

    type: Literal["swanlab"] = "swanlab"
    project: str = Field(min_length=1)
    """Project of the experiment; its name is the job's name."""
    workspace: str | None = None
    """User or team."""
    mode: Literal["cloud", "local", "offline"] = "cloud"
    """`local` and `offline` write files only."""


TrackerConfig = Annotated[TensorBoardTracker | WandbTracker | SwanLabTracker, Field(discriminator="type")]
