"""Base models: partial job files that supply the settings which a fine-tuning request leaves open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from penstock.shared.config.algorithm import AlgorithmConfig
from penstock.shared.config.base import load_yaml
from penstock.shared.config.data import PromptConfig
from penstock.shared.config.evaluation import EvaluationConfig
from penstock.shared.config.optimizer import OptimizerConfig
from penstock.shared.errors import ConfigError

__all__ = ["BaseModelFile", "open_base"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_ALGORITHM: TypeAdapter[AlgorithmConfig] = TypeAdapter(AlgorithmConfig)
GROUPS = 8
"""Default number of rows per policy update, for a base model file without a batch size."""
CHAT = {"messages": "messages", "answer": None}
"""Default prompt settings, for a base model file without prompt settings: rows are in OpenAI's format."""


class _Length(BaseModel):
    """The settings of section ``train`` that determine batch size and length of the training; the job's validation
    checks all other keys of the section."""

    model_config = ConfigDict(extra="ignore")

    batch_size: int | None = Field(None, ge=1)
    data_epochs: int | None = Field(None, ge=1)
    max_updates: int | None = Field(None, ge=1)


@dataclass(frozen=True)
class BaseModelFile:
    """A partial job file. ``name``: name of the base model; '' for a model directory, or a checkpoint without a base
    model."""

    name: str
    sections: Mapping[str, Any]

    @property
    def group_size(self) -> int:
        """Completions per row."""
        return _ALGORITHM.validate_python(self.sections.get("algorithm", {})).group_size

    @property
    def groups(self) -> int:
        """Rows per policy update."""
        batch = self._length.batch_size
        return GROUPS if batch is None else max(1, batch // self.group_size)

    @property
    def epochs(self) -> int:
        """Passes over the training file."""
        return self._length.data_epochs or 1

    def updates(self, epochs: int, rows: int, groups: int) -> int:
        """Return the number of policy updates for ``epochs`` passes over ``rows`` rows, with ``groups`` rows per
        update; the file's ``max_updates`` is an upper bound."""
        most = max(1, epochs * rows // groups)
        return min(most, self._length.max_updates or most)

    @property
    def evaluation(self) -> EvaluationConfig:
        """Settings of the evaluation on held-out rows."""
        return EvaluationConfig.model_validate(self.sections.get("evaluation", {}))

    @property
    def _length(self) -> _Length:
        return _Length.model_validate(self.sections.get("train", {}))

    @property
    def learning_rate(self) -> float:
        """Peak learning rate."""
        return OptimizerConfig.model_validate(self.sections.get("optimizer", {})).learning_rate

    @property
    def prompt(self) -> PromptConfig:
        """Settings that turn rows into prompts."""
        return PromptConfig.model_validate(self.sections.get("data", {}).get("prompt", CHAT))

    def section(self, name: str) -> dict[str, Any]:
        """Return a copy of one section of the base model's file."""
        return dict(self.sections.get(name, {}))

    def with_model(self, path: str) -> BaseModelFile:
        """Return the same base with other weights and the same tokenizer. ``path``: model directory, or reference to a
        checkpoint."""
        kept = {key: value for key, value in self.section("model").items() if key not in ("path", "config")}
        return BaseModelFile(self.name, {**self.sections, "model": {**kept, "path": path}})


def open_base(model: str, folder: Path | None) -> BaseModelFile:
    """Open the base model of a request: a name in ``folder``, or a model directory. Reads the disk.

    Raises:
        ConfigError: ``model`` is neither, or its file is not a valid base of a job.
    """
    if folder is not None and _NAME.fullmatch(model) and (folder / f"{model}.yaml").is_file():
        base = BaseModelFile(model, load_yaml(folder / f"{model}.yaml"))
        _check(base, folder / f"{model}.yaml")
        return base
    if not (Path(model).is_absolute() and Path(model).is_dir()):
        known = sorted(path.stem for path in folder.glob("*.yaml")) if folder is not None else []
        there = f"it has {', '.join(known)}" if known else "it has none (PENSTOCK_BASE_MODELS)"
        raise ConfigError(
            f"model: '{model[:200]}' is no base model of this deployment: {there}; a model directory as the services "
            "see it and job:NAME@final will do, too"
        )
    return BaseModelFile("", {"model": {"path": model}})


def _check(base: BaseModelFile, path: Path) -> None:
    """Validate a base model file. Errors contain the file's name."""
    sections = ("algorithm", "data", "evaluation", "limits", "model", "optimizer", "reward", "train")
    if wrong := [name for name in sections if not isinstance(base.sections.get(name, {}), dict)]:
        raise ConfigError(f"base model file {path.name}: '{wrong[0]}' must be a mapping")
    try:
        _ = base.group_size, base.groups, base.learning_rate, base.prompt, base.evaluation
    except (ValidationError, ValueError, TypeError) as error:
        raise ConfigError(f"base model file {path.name}: {error}") from None
