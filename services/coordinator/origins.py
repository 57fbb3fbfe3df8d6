"""Resolves the references in a submitted job file: checkpoints of other jobs (``job:NAME@final``), and uploaded
models."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.training.checkpoints import choose_checkpoint, read_stored
from penstock.services.coordinator.training.ledger import LedgerState
from penstock.services.coordinator.training.ledger_cache import LedgerCache
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, parse_job
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.model import REFERENCE, parse_reference
from penstock.shared.config.service import checkpoint_path
from penstock.shared.data.files import is_uploaded
from penstock.shared.errors import ConfigError, NotFound
from penstock.shared.protocol.jobs import ModelOrigin

__all__ = ["WARMUP_UPDATES", "Origins", "warnings_of"]

WARMUP_UPDATES = 10
"""Warm-up of the learning rate of a job that starts from a checkpoint of another job and sets none."""


def warnings_of(spec: AnyJob, origin: ModelOrigin | None) -> list[str]:
    """Return warnings about settings that likely harm a policy that starts from a checkpoint of another job."""
    if origin is None or not isinstance(spec, JobConfig):
        return []
    found, start = [], spec.optimizer
    if spec.warm_start.steps:
        found.append(
            f"warm_start: its {spec.warm_start.steps} supervised steps train a policy that is trained already "
            f"({origin.model}), towards the reference answers alone: leave the section out"
        )
    if start.warmup_updates == 0:
        # Adam's first step divides the gradient by its own magnitude, so every weight moves by the whole learning rate.
        found.append(
            f"optimizer.warmup_updates: 0: the optimizer begins anew, and its first updates move every weight of "
            f"{origin.model} by about the whole learning rate ({start.learning_rate:g}), however small its gradient: "
            f"leave it out for a warm-up of {WARMUP_UPDATES} updates, lower optimizer.learning_rate, or go on with the "
            f"job's own optimizer: penstock extend {origin.name}"
        )
    return found


class Origins:
    """Finds checkpoints by name, and uploaded models.

    Args:
        uploaded: returns the directory of an uploaded model by its id; raises NotFound.
        data_dir: holds the checkpoints.
    """

    def __init__(self, jobs: JobStore, ledgers: LedgerCache, uploaded: Callable[[str], Path], data_dir: Path) -> None:
        self._jobs, self._ledgers, self._uploaded, self._data_dir = jobs, ledgers, uploaded, data_dir

    async def resolve(self, spec: AnyJob) -> tuple[AnyJob, ModelOrigin | None]:
        """Replace a reference to a checkpoint in ``model.path`` by the checkpoint's directory; return the new spec and
        the checkpoint's origin.

        Without such a reference the origin is None. The id of an uploaded model or tokenizer is replaced by its
        directory. A deployment takes the settings that it leaves unset from the job that wrote the checkpoint. A job
        that trains warms its new optimizer up, unless it sets ``optimizer.warmup_updates``.

        Raises:
            ConfigError: no such job, checkpoint or upload, or its files are gone; the text suggests a similar name.
        """
        spec = await asyncio.to_thread(self._with_uploaded_model, spec)
        path = None if isinstance(spec, EmbodiedJob) else spec.model.path
        if isinstance(spec, EmbodiedJob) or path is None or not path.startswith(REFERENCE):
            return spec, None
        try:
            origin, trained = await self.find(path)
        except (NotFound, ConfigError) as error:
            raise ConfigError(f"model.path: '{path[:200]}': {error}") from None
        if isinstance(spec, ServingJob):
            return spec.after(trained, origin.path), origin
        update: dict[str, Any] = {"model": spec.model.model_copy(update={"path": origin.path})}
        if isinstance(spec, JobConfig) and "warmup_updates" not in spec.optimizer.model_fields_set:
            warmup = min(WARMUP_UPDATES, (spec.train.max_updates or 2 * WARMUP_UPDATES) // 2)
            update["optimizer"] = spec.optimizer.model_copy(update={"warmup_updates": warmup})
        return spec.model_copy(update=update), origin

    def _with_uploaded_model(self, spec: AnyJob) -> AnyJob:
        if isinstance(spec, EmbodiedJob):
            return spec
        found = {}
        for key in ("path", "tokenizer"):
            if (value := getattr(spec.model, key)) is not None and is_uploaded(value):
                try:
                    found[key] = str(self._uploaded(value))
                except NotFound as error:
                    raise ConfigError(f"model.{key}: {error}") from None
        return spec.model_copy(update={"model": spec.model.model_copy(update=found)}) if found else spec

    async def find(self, reference: str) -> tuple[ModelOrigin, JobConfig]:
        """Return the checkpoint that ``reference`` (``job:JOB@WHICH``) names, and the config of its job. JOB is the id
        or the name of a job.

        Raises:
            ConfigError: the reference is malformed, or the job trains no language model.
            NotFound: no such job or checkpoint, or its files are not on this host.
        """
        job, which = parse_reference(reference)
        entry = await self.job(job)
        config = parse_job(entry.record().spec)
        if not isinstance(config, JobConfig):
            raise ConfigError(f"job '{entry.id}' is of kind '{entry.kind}': it has no checkpoints of a language model")
        state = await self._ledgers.state(entry.id)
        found = choose_checkpoint(state, which)
        path = checkpoint_path(self._data_dir, found.path)
        if await asyncio.to_thread(read_stored, path) is None:
            there = await asyncio.to_thread(self._numbers, state)
            raise NotFound(
                f"the files of checkpoint {found.number} of job '{entry.id}' are not on the coordinator's host (any "
                f"more); there are those of: {', '.join(map(str, there)) or 'none'}"
            )
        origin = ModelOrigin(
            model=reference, job=entry.id, name=entry.name, number=found.number, version=found.version,
            digest=found.digest, path=str(path),
        )  # fmt: skip
        return origin, config

    async def job(self, job: str) -> JobEntry:
        """Return the job with the id ``job``, else the newest job with the name ``job``, preferring jobs that train.
        Raises NotFound."""
        index = await self._jobs.index()
        if (known := index.get(job)) is not None:
            return known
        named = index.of_models(frozenset({job}))
        trained = [entry for entry in named if entry.trains]
        if trained or named:
            return (trained or named)[-1]
        names = sorted({entry.name for entry in index.all() if entry.trains})
        near = difflib.get_close_matches(job, names, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise NotFound(f"no job '{job}'{hint}")

    def _numbers(self, state: LedgerState) -> list[int]:
        paths = {number: checkpoint_path(self._data_dir, event.path) for number, event in state.checkpoints.items()}
        return [number for number, path in sorted(paths.items()) if read_stored(path) is not None]
