"""Submission of jobs: checks of the job file, a preview of the submission's effects, and job ids by submission key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from penstock.services.coordinator.auth import is_loopback
from penstock.services.coordinator.graders import GraderBench
from penstock.services.coordinator.jobs.environments import check_camera, check_followed, describe_environment
from penstock.services.coordinator.jobs.job_index import JobEntry
from penstock.services.coordinator.jobs.members import Members
from penstock.services.coordinator.jobs.retention import check_room
from penstock.services.coordinator.jobs.store import JobStore
from penstock.services.coordinator.ledger_room import reserve_ledger
from penstock.services.coordinator.origins import Origins, warnings_of
from penstock.services.coordinator.trackers import check_trackers
from penstock.services.coordinator.training.health import rate_warnings
from penstock.services.coordinator.user_code import CodeTrials, check_uploaded
from penstock.shared.config.data import DataConfig
from penstock.shared.config.environment import completion_tokens, room_of
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.job import ROW_BYTES, JobConfig
from penstock.shared.config.jobs.kinds import AnyJob, AnyTraining, TextJob
from penstock.shared.config.jobs.needs import Need, needs
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob
from penstock.shared.config.jobs.training_job import MAX_GROUP_BYTES
from penstock.shared.config.model import ModelConfig
from penstock.shared.config.rewards.reward import RewardConfig
from penstock.shared.config.rollout import AnyRollout, TransformersConfig, check_decoder, longest_exact
from penstock.shared.config.service import ServiceSettings
from penstock.shared.data.check import DataSummary, check_data
from penstock.shared.data.demonstrations import check_demonstrations, read_demonstrations
from penstock.shared.errors import ConfigError, Conflict, DataError, Invalid, StreamFull, Unavailable
from penstock.shared.protocol import subjects
from penstock.shared.protocol.bus_clock import bus_time
from penstock.shared.protocol.codec import MAX_INLINE_BYTES
from penstock.shared.protocol.embodied.environment import EnvSpec
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.jobs import JobRecord
from penstock.shared.transport.bus import Bus

__all__ = [
    "SubmissionIds",
    "Submissions",
    "beginning_note",
    "check_budget",
    "check_groups",
    "check_packages",
    "plan_job",
]

SEALED_BYTES, REWARD_BYTES = 140, 9
"""Bytes that a group takes in the ledger entry and in the manifest of its batch, and bytes that each of its rewards
adds."""
ENTRY_ROOM = 128 << 10
"""Bytes reserved in the ledger entry of a batch for other events of the same decision."""
FILM_S = 60.0
"""Deadline for describing a simulator with a camera (seconds): its first rendered frame is slow on a busy CPU."""
DESCRIBE_S = 30.0
"""Deadline for an env worker to create and describe a simulator at submission (seconds). A submitted job has no such
limit."""
JOB_PREFIX = "job"
SERVED = ("online_rl", "serving")
"""Kinds of jobs that clients address by name, as models."""
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip
"""Files of which a tokenizer directory must hold at least one."""


class Submissions:
    """Submits jobs and previews them. Every method may raise Unavailable."""

    def __init__(
        self, bus: Bus, store: JobStore, members: Members, settings: ServiceSettings, *, origins: Origins,
        graders: GraderBench,
    ) -> None:  # fmt: skip
        self._bus, self._store, self._members, self._settings = bus, store, members, settings
        self._origins, self._graders, self._ids = origins, graders, SubmissionIds(bus)

    async def submit(
        self, spec: AnyJob, raw: dict[str, Any], *, key: str = "", fine_tuning: dict[str, Any] | None = None
    ) -> JobRecord:
        """Store a new job durably and return its record; ``raw`` is the job file as the user wrote it.

        A repeated submission with the same ``key`` (made of its sender and request) returns the same job, on every
        replica. ``fine_tuning`` is the fine-tuning request that the job file was made from.

        Raises:
            ConfigError: the job file is valid but the job cannot run here (data missing, memory, budgets).
            NoRoom: the ledger has no room for another job.
            StreamFull: no room; the client may retry.
        """
        id = await self._ids.job_id(key, json.dumps(raw, default=str).encode()) if key else ""
        if id and (known := await self._store.find(id)) is not None:
            return known
        spec, origin = await self._origins.resolve(spec)
        try:
            plan = await self._plan(spec)
        except ConfigError:
            if id and (known := await self._store.find(id)) is not None:  # what it collides with is itself
                return known
            raise
        record = await self._store.create(spec, id, fine_tuning=fine_tuning, origin=origin)
        await self._warn(record.id, [*plan["warnings"], *warnings_of(spec, origin)])
        return record

    async def dry_run(self, spec: AnyJob) -> dict[str, Any]:
        """Return the effects that ``submit`` would have, without submitting: resolved batch sizes, a summary of the
        data, memory.

        Raises:
            ConfigError: as for ``submit``.
        """
        spec, origin = await self._origins.resolve(spec)
        plan = await self._plan(spec)
        plan["warnings"] += await CodeTrials(self._bus, self._graders, self._members).run(spec)
        if origin is None:
            return plan
        plan["warnings"] += warnings_of(spec, origin)
        return plan | {"origin": origin.model_dump(mode="json")}

    async def _plan(self, spec: AnyJob) -> dict[str, Any]:
        await asyncio.to_thread(check_uploaded, spec, self._settings.data_dir)
        await asyncio.sleep(self._members.complete_at - time.monotonic())
        if isinstance(spec, AnyTraining):
            await reserve_ledger(self._bus)
        atomic = (await self._bus.stream_state(subjects.EXPERIENCE)).atomic
        running = (await self._store.index()).unfinished()
        return await plan_job(
            spec, running, self._settings, self._members, stores_parts=atomic, describe=self._describe
        )

    async def _describe(self, spec: EmbodiedJob) -> EnvSpec:
        camera = spec.evaluation.num_videos > 0
        return await describe_environment(self._bus, spec, deadline_s=FILM_S if camera else DESCRIBE_S, camera=camera)

    async def _warn(self, job: str, warnings: Sequence[str]) -> None:
        """Publish warnings as events of a job. A failure is ignored, because the job is already submitted."""
        for text in warnings:
            row = {"time": bus_time(), "level": "warning", "type": "submitted", "message": text, "data": {}}
            with contextlib.suppress(Unavailable, StreamFull):
                await self._bus.publish(subjects.events(job), msgspec.json.encode(row))


async def plan_job(
    spec: AnyJob,
    running: Sequence[JobEntry],
    settings: ServiceSettings,
    members: Members | None = None,
    *,
    stores_parts: bool,
    describe: Callable[[EmbodiedJob], Awaitable[EnvSpec]] | None = None,
) -> dict[str, Any]:
    """Check that a job can run here, and return its effects (resolved batch, data, bytes, warnings).

    Args:
        members: the workers; None: unknown.
        stores_parts: True if EXPERIENCE accepts groups above 1 MiB.
        describe: has an env worker describe the simulator of an embodied job; None: the simulator is checked
            when the job begins.

    Raises:
        ConfigError: the job cannot run: model or data missing, a package missing everywhere, groups too large, or no
            room beside the running jobs.
    """
    if isinstance(spec, EmbodiedJob):
        return await _plan_embodied(spec, running, settings, members, stores_parts=stores_parts, describe=describe)
    if isinstance(spec, ServingJob):
        return _plan_serving(spec, running)
    longest = max((spec.sampling, spec.evaluation_sampling), key=lambda s: completion_tokens(s, spec.environment))
    notes = _check_model(spec, completion_tokens(longest, spec.environment), room_of(longest, spec.environment))
    check_room(running, spec.limits.byte_budget, experience_bytes=settings.experience_bytes)
    if isinstance(spec, OnlineJob):
        check_alias(spec, running)
    data = _with_unmeasured(spec, await _open_data(spec))
    plan = await _plan_training(spec, data) if isinstance(spec, JobConfig) else _plan_evaluation(spec, data)
    check_groups(spec, data.row_bytes, stores_parts=stores_parts)
    return {
        "spec": spec.model_dump(mode="json"),
        **plan,
        "data": msgspec.to_builtins(replace(data, notes=(*data.notes, *await asyncio.to_thread(beginning_note, spec)))),
        "bytes": {"group_max": spec.max_group_bytes + data.row_bytes, "budget": spec.limits.byte_budget},
        "warnings": [
            *notes,
            *_warnings(spec, settings.http_host),
            *rate_warnings(spec),
            *check_packages(spec, members or Members(), time.monotonic()),
        ],
    }


async def _plan_embodied(
    spec: EmbodiedJob,
    running: Sequence[JobEntry],
    settings: ServiceSettings,
    members: Members | None,
    *,
    stores_parts: bool,
    describe: Callable[[EmbodiedJob], Awaitable[EnvSpec]] | None,
) -> dict[str, Any]:
    check_room(running, spec.limits.byte_budget, experience_bytes=settings.experience_bytes)
    check_trackers(spec.tracking)
    check_groups(spec, 0, stores_parts=stores_parts)
    _check_entry(spec)
    sim, warnings = spec.environment, rate_warnings(spec)
    plan: dict[str, Any] = {"spec": spec.model_dump(mode="json"), "batch": _batch_of(spec)}
    shown = None
    if spec.warm_start is not None:
        shown = await asyncio.to_thread(read_demonstrations, Path(spec.warm_start.demonstrations))
        plan["warm_start"] = {"episodes": shown.num_episodes, "steps": len(shown), "about": shown.about}
    if describe is None or members is None or not members.of("env", time.monotonic()):
        warnings.append(f"no env worker runs here: {sim.backend} '{sim.task}' is checked when the job begins")
    else:
        plan["environment"] = msgspec.to_builtins(found := await describe(spec))
        warnings += check_camera(spec, found) + check_followed(spec, found)
        if shown is not None:
            check_demonstrations(shown, spec.policy.observations, found)
    held_out = spec.evaluation
    return plan | {
        "evaluation": {"episodes": held_out.episodes, "metrics": held_out.metrics if held_out.episodes else []},
        "bytes": {"group_max": spec.max_group_bytes, "budget": spec.limits.byte_budget},
        "warnings": warnings,
    }


def _plan_serving(spec: ServingJob, running: Sequence[JobEntry]) -> dict[str, Any]:
    notes = _check_model(spec, spec.sampling.max_new_tokens, "sampling.max_new_tokens")
    check_alias(spec, running)
    return {
        "spec": spec.model_dump(mode="json"),
        "serving": {"model": spec.name, "hold_s": spec.serving.hold_s, "idle_s": spec.serving.idle_s},
        "warnings": notes,
    }


async def check_budget(spec: AnyJob, *, stores_parts: bool) -> None:
    """Measure the largest row of a job's data, and run ``check_groups`` with it.

    Raises:
        ConfigError: groups do not fit, or the data is gone.
    """
    if isinstance(spec, ServingJob):
        return
    row_bytes = 0 if isinstance(spec, EmbodiedJob) else (await _open_data(spec)).row_bytes
    check_groups(spec, row_bytes, stores_parts=stores_parts)


def check_groups(spec: TextJob | EmbodiedJob, row_bytes: int, *, stores_parts: bool) -> None:
    """Refuse a job if one of its groups could exceed the size limit of a group, or all groups stored at once could
    exceed the job's byte budget.

    Args:
        row_bytes: bytes that the largest row of the data adds to a group.

    Raises:
        ConfigError: one group, or all that must be stored at once, do not fit; the message has the sizes.
    """
    size = spec.max_group_bytes + row_bytes
    if isinstance(spec, EmbodiedJob):
        parts = f"{spec.completions_per_group} episodes of up to {spec.environment.horizon} steps"
    else:
        parts = f"{spec.completions_per_group} completions of up to {spec.max_completion_tokens} tokens"
    if row_bytes:
        parts += f" and a data row of up to {row_bytes + ROW_BYTES} bytes"
    if size > MAX_GROUP_BYTES:
        raise ConfigError(f"a group of {parts} may take {size} bytes, more than a group may have ({MAX_GROUP_BYTES})")
    if size > MAX_INLINE_BYTES and not stores_parts:
        raise ConfigError(
            f"a group of {parts} may take {size} bytes; above {MAX_INLINE_BYTES} it is stored in parts, and this NATS "
            "server cannot do that: use version 2.12.1 or newer, or smaller groups"
        )
    if isinstance(spec, AnyTraining):
        need = 2 * (spec.train.max_lag + 2) * spec.groups_per_batch * size
        what = f"{spec.train.max_lag + 2} batches of {spec.groups_per_batch} groups of {parts} must fit in half of it"
    else:
        need = spec.evaluation.num_prompts * size
        what = f"{spec.evaluation.num_prompts} prompts with groups of {parts} must fit"
    if need > spec.limits.byte_budget:
        raise ConfigError(f"limits.byte_budget: {what}: raise it from {spec.limits.byte_budget} to at least {need}")


def check_packages(spec: AnyJob, members: Members, now: float) -> list[str]:
    """Return a warning for each package of the job that some workers lack; on such a worker the job would fail.

    Raises:
        ConfigError: every running worker of a service lacks a package or the engine that the job needs.
    """
    warnings = []
    for need in needs(spec):
        known = [member.beat for member in members.of(need.service, now) if member.beat.packages is not None]
        lacking = [beat.worker for beat in known if need.package not in (beat.packages or ())]
        if not lacking:
            continue
        text = _engine_missing(need) if need.is_engine else _package_missing(need, lacking)
        if len(lacking) == len(known):
            raise ConfigError(text)
        if not need.is_engine:
            warnings.append(text)
    return warnings


def _package_missing(need: Need, lacking: list[str]) -> str:
    return (
        f"{need.key}: every {need.service} worker needs the package '{need.package}', and it is missing beside "
        f"{', '.join(sorted(lacking))}: install penstock[{need.extra}] there"
    )


def _engine_missing(need: Need) -> str:
    return (
        f"{need.key}: no {need.service} worker that runs has the engine '{need.package}': start the deployment with "
        f"penstock up --engine {need.package}, or add a worker that has it"
    )


def _warnings(spec: TextJob, http_host: str) -> list[str]:
    """Return warnings about allowed settings that are likely mistakes. ``http_host`` is the address on which the API
    listens."""
    if is_loopback(http_host) or not isinstance(spec, OnlineJob) or spec.online.is_defended:
        return []
    return [
        f"online: the API listens on {http_host}, and nothing bounds what one sender of feedback can do to the policy; "
        "set online.defences: standard, or shares, raters, quarantine or promotion of your own"
    ]


async def _plan_training(spec: JobConfig, data: DataSummary) -> dict[str, Any]:
    check_trackers(spec.tracking)
    if spec.warm_start.data:
        await _open(spec.warm_start_data)
    size = spec.groups_per_batch
    _check_entry(spec)
    prompts = data.rows_per_epoch * (spec.train.data_epochs or size)
    if prompts < size and spec.data.train:
        raise ConfigError(f"train.data_epochs: {prompts} prompts do not fill one batch of {size} groups")
    return {"batch": {**_batch_of(spec), "optimizer_steps": spec.train.epochs * spec.train.minibatches}}


def _batch_of(spec: AnyTraining) -> dict[str, int]:
    return {
        "trajectories": spec.train.batch_size,
        "groups": spec.groups_per_batch,
        "group_size": spec.algorithm.group_size,
        "draws_in_flight": spec.max_draws,
    }


def _check_entry(spec: AnyTraining) -> None:
    """Raise ConfigError if a batch has too many groups. The ledger entry and the manifest of a batch must each fit into
    one message."""
    nbytes = SEALED_BYTES + REWARD_BYTES * spec.completions_per_group
    if spec.groups_per_batch * nbytes > MAX_INLINE_BYTES - ENTRY_ROOM:
        raise ConfigError(
            f"train.batch_size: {spec.groups_per_batch} groups of {spec.completions_per_group} completions are too "
            f"many for one batch: their entry in the ledger has {nbytes} bytes a group and {MAX_INLINE_BYTES} in all"
        )


def check_alias(spec: OnlineJob | ServingJob, running: Sequence[JobEntry]) -> None:
    """Refuse a job if a running job already serves a model under the same name.

    Raises:
        ConfigError: another running job has the name; the message gives its id.
    """
    for job in running:
        if job.kind in SERVED and job.name == spec.name:
            raise ConfigError(
                f"name: '{spec.name}' is the model of job '{job.id}', which runs: clients address what is served "
                "by its name; choose another one, or cancel that job"
            )


def _with_unmeasured(spec: TextJob, data: DataSummary) -> DataSummary:
    """Return ``data`` with a note on each held-out source that is never evaluated, because earlier sources already have
    ``evaluation.num_prompts`` rows.

    Raises:
        ConfigError: early stopping or the choice of the best checkpoint uses a metric of such an unmeasured source.
    """
    size, starts = spec.evaluation.num_prompts, accumulate((source.rows for source in data.eval), initial=0)
    unmeasured = [source.name for source, start in zip(data.eval, starts, strict=False) if start >= size]
    notes = [f"data.eval: evaluation.num_prompts ({size}) ends before source '{name}'" for name in unmeasured]
    rules = (spec.early_stop, spec.checkpoint.keep_best) if isinstance(spec, JobConfig) else ()
    for name, note in zip(unmeasured, notes, strict=True):
        for rule in rules:
            if rule is not None and rule.metric in [f"{metric}/{name}" for metric in spec.evaluation.metrics]:
                raise ConfigError(f"{note}, so '{rule.metric}' is never measured: raise it, or put that source first")
    return replace(data, notes=(*data.notes, *notes))


def _plan_evaluation(spec: EvaluationJob, data: DataSummary) -> dict[str, Any]:
    prompts = min(data.num_eval, spec.evaluation.num_prompts)
    if not prompts:
        raise ConfigError("data.eval: there is not a single row to evaluate")
    measures = {"prompts": prompts, "completions": prompts * spec.completions_per_group}
    return {"evaluation": measures | {"metrics": spec.evaluation.metrics}}


async def _open_data(spec: TextJob) -> DataSummary:
    return await _open(spec.data if isinstance(spec, JobConfig) else spec.data_config, spec.reward)


async def _open(config: DataConfig, reward: RewardConfig | None = None) -> DataSummary:
    try:
        return await asyncio.to_thread(check_data, config, reward)
    except DataError as error:
        raise ConfigError(str(error)) from None


def _check_tokenizer(model: ModelConfig) -> None:
    source = model.tokenizer
    if source is None or not (source.startswith((".", "/", "~")) or Path(source).exists()):
        return
    folder = Path(source).expanduser()
    if not folder.exists():
        raise ConfigError(f"model.tokenizer: '{source}' does not exist (as seen by the coordinator)")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.tokenizer: '{source}' holds no tokenizer: none of {', '.join(TOKENIZER_FILES)}")


def _check_model(spec: TextJob | ServingJob, longest: int, where: str) -> list[str]:
    """Check the directory of a job's model, and its tokenizer. Return warnings about code in the directory.

    Raises:
        ConfigError: the directory is no model, the embedded engine would have to decode it and cannot, or completions
            of ``longest`` tokens leave no room for a prompt; ``where`` names the key that sets ``longest``.
    """
    model, path = spec.model, spec.model.path
    _check_tokenizer(model)
    if path is not None and (path.startswith((".", "/", "~")) or Path(path).exists()):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"model.path: '{path}' does not exist (as seen by the coordinator)")
        if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
            return []  # an adapter: its base model is not checked here
        if not (folder / "config.json").is_file():
            raise ConfigError(f"model.path: '{path}' holds no config.json; is it a Hugging Face model directory?")
        described = _described(file := folder / "config.json")
        _check_length(spec.rollout, longest, where, described, file)
        check_decoder(spec.rollout, described, str(file), lora=model.lora is not None)
        return _check_code(model, folder, described)
    return []


def _check_length(rollout: AnyRollout, longest: int, where: str, described: Mapping[str, Any], file: Path) -> None:
    """Check that a completion of ``longest`` tokens leaves room for a prompt in the context of the model, and in that
    of the engine if the job file limits it.

    Raises:
        ConfigError: no room is left, or the engine's limit exceeds the context of the model.
    """
    most = described.get("max_position_embeddings")
    if isinstance(rollout, TransformersConfig):
        most, wanted = longest_exact(described), rollout.max_length
        if wanted is not None and most is not None and wanted > most:
            raise ConfigError(f"rollout.max_length {wanted}: the model takes {most} tokens ({file})")
        if wanted is not None and longest >= wanted:
            raise ConfigError(f"{where} {longest} leaves no room for a prompt: rollout.max_length is {wanted}")
    if isinstance(most, int) and longest >= most:
        raise ConfigError(f"{where} {longest} leaves no room for a prompt: the model takes {most} tokens ({file})")


def _described(file: Path) -> dict[str, Any]:
    """Return a model's config.json. Raises ConfigError if it cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}") from None


def _check_code(model: ModelConfig, folder: Path, described: dict[str, Any]) -> list[str]:
    """Return a warning if a model's directory contains code that workers do not run, as it is not trusted.

    Raises:
        ConfigError: the code is trusted, and a file of it is missing.
    """
    classes = described.get("auto_map")
    if not isinstance(classes, dict) or not classes:
        return []
    if not model.trust_remote_code:
        return [
            f"model.path: config.json in {folder} names code of the model's own ({', '.join(sorted(classes))}), which "
            f"is not run: the job fails as it begins, unless transformers knows '{described.get('model_type')}' by "
            "itself; read that code, then set model.trust_remote_code: true"
        ]
    for key in ("AutoConfig", "AutoModelForCausalLM"):  # the classes that workers load
        name = classes.get(key)
        if not isinstance(name, str) or "--" in name:  # MODULE.Class; another repository's stands before "--"
            continue
        file = f"{name.partition('.')[0]}.py"
        if not (folder / file).is_file():
            raise ConfigError(f"model.path: config.json in {folder} names the code '{name}', and {file} is not there")
    return []


def beginning_note(spec: TextJob) -> list[str]:
    """Return a note on the special token, if any, that the tokenizer puts before plain-text prompts. Return [] if the
    job file does not leave this to the tokenizer, or if the tokenizer's files are not on this host.

    The post-processor in the tokenizer's file decides, as it does in the library with which workers load the tokenizer.
    """
    prompt = spec.data_config.prompt
    source = spec.model.tokenizer or spec.model.path or "char"
    folder = Path(source).expanduser()
    if prompt.add_bos is not None or prompt.chat or prompt.messages is not None or not folder.is_dir():
        return []
    try:
        described = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
        rules = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=dict[str, Any])["post_processor"]
    except (OSError, msgspec.MsgspecError, KeyError):
        return [f"data.prompt.add_bos: prompts begin as the tokenizer in {source} begins a text"]
    token = described.get("bos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if token is None or token not in _first_tokens(rules):
        return [f"data.prompt.add_bos: prompts begin with their text, as the tokenizer in {source} has it"]
    return [f"data.prompt.add_bos: prompts begin with '{token}', as the tokenizer in {source} has it; false: without"]


def _first_tokens(rules: Any) -> set[str]:
    """Return the special tokens that ``rules``, the post-processor of a tokenizer file, puts before a single text."""
    if not isinstance(rules, dict):
        return set()
    inner = [_first_tokens(each) for each in rules.get("processors", ())]
    first = [piece["SpecialToken"]["id"] for piece in rules.get("single", ())[:1] if "SpecialToken" in piece]
    return set().union(*inner, first, [rules["cls"][0]] if "cls" in rules else [])


class SubmissionIds:
    """Job ids by submission key, so that every coordinator maps a repeated submission to the same job.

    The bucket `answers` stores the id under the key for half an hour, before the job's record is created. A repeated
    submission therefore creates a record with the same id, or finds it.
    """

    def __init__(self, bus: Bus) -> None:
        self._kv = bus.kv(subjects.ANSWERS)

    async def job_id(self, key: str, body: bytes) -> str:
        """Return the id for a submission with this key: a new id, or the id of an earlier equal submission.

        Raises:
            Invalid: the key was used with another body before.
            Unavailable: the bus does not answer.
        """
        name = f"{JOB_PREFIX}.{hashlib.sha256(key.encode()).hexdigest()[:32]}"
        digest = hashlib.sha256(body).hexdigest()
        new_id = new_job_id()
        try:
            await self._kv.create(name, f"{new_id} {digest}".encode())
            return new_id
        except Conflict:
            entry = await self._kv.get(name)
        if entry is None or not entry.value:
            raise Unavailable("an earlier submission with this Idempotency-Key was forgotten just now; send it again")
        job, _, known = entry.value.decode().partition(" ")
        if known != digest:
            detail = "this Idempotency-Key was used with another job file; use a new key"
            raise Invalid("idempotency_key_reused", detail)
        return job
