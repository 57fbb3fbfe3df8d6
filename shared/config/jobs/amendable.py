"""Keys of a job file that may change while the job runs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from penstock.shared.config.jobs.job import JobConfig
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.training_job import TrainingJob

__all__ = [
    "AMENDABLE",
    "BACKEND",
    "TEMPERATURE",
    "changed_keys",
    "is_amendable",
    "leaves",
    "ranges_of",
    "settings_of",
    "value_at",
    "with_patch",
]

AMENDABLE = (
    "algorithm.kl.coef",
    "checkpoint.every",
    "checkpoint.keep",
    "limits.byte_budget",
    "limits.timeout_s",
    "optimizer.learning_rate",
    "sampling.temperature",
    "train.max_updates",
)
"""Settings that may change between batches, besides ``metadata`` and ``backend``. All others are fixed."""
BACKEND = "backend"
"""Section that may change as a whole: the trainer writes a checkpoint and resumes from it with the new backend. Fixed
in jobs with a promotion gate, which may have to recompute a served version bit for bit from an earlier checkpoint, with
the backend of that checkpoint."""
TEMPERATURE = "sampling.temperature"
"""Key of the sampling temperature. A change applies to later draws; an earlier draw is trained at the temperature at
which it was sampled."""
LABELS = "metadata"


def settings_of(config: TrainingJob) -> dict[str, Any]:
    """Return the value of every amendable key; the value is None if the job file lacks the section of the key."""
    spec = config.model_dump(mode="json")
    return {key: value_at(spec, key) for key in AMENDABLE}


def ranges_of(config: BaseModel) -> list[dict[str, Any]]:
    """Return a description of each setting that may change in a job with this ``config``: its value, type and bounds.
    The order is that of AMENDABLE.

    A description has ``key``, the current ``value``, ``type`` (integer or number), the lower bounds ``minimum``
    (inclusive) and ``above`` (exclusive; None: no such bound), ``optional`` (True if null is valid), and
    ``description``.
    """
    return [_range(config, key) for key in AMENDABLE if is_amendable(config, key) and _owner(config, key) is not None]


def _owner(config: BaseModel, key: str) -> BaseModel | None:
    """Return the section that holds the dotted key ``key``, or None if the job lacks this section."""
    node: Any = config
    for part in key.split(".")[:-1]:
        node = getattr(node, part, None)
    return node if isinstance(node, BaseModel) else None


def _range(config: BaseModel, key: str) -> dict[str, Any]:
    owner, name = _owner(config, key), key.rpartition(".")[2]
    assert owner is not None
    schema = type(owner).model_json_schema()["properties"][name]
    kinds = schema.get("anyOf", [schema])
    (number,) = (kind for kind in kinds if kind["type"] != "null")
    return {
        "key": key, "value": getattr(owner, name), "type": number["type"], "minimum": number.get("minimum"),
        "above": number.get("exclusiveMinimum"), "optional": len(kinds) > 1, "description": schema["description"],
    }  # fmt: skip


def is_amendable(config: BaseModel, key: str) -> bool:
    """Return True if ``key`` may change in a job whose current configuration is ``config``."""
    if key == LABELS or key.startswith(f"{LABELS}."):
        return True
    if not isinstance(config, TrainingJob):
        return False
    if key == BACKEND or key.startswith(f"{BACKEND}."):
        return not (isinstance(config, OnlineJob) and config.online.promotion is not None)
    if key not in AMENDABLE:
        return False
    kl = config.algorithm.kl if isinstance(config, JobConfig) else None
    return key != "algorithm.kl.coef" or (kl is not None and kl.adaptive is None)


def changed_keys(old: BaseModel, new: BaseModel) -> list[str]:
    """Return the dotted keys whose values differ between ``old`` and ``new``; default values are compared, too."""
    before, after = dict(leaves(old.model_dump(mode="json"))), dict(leaves(new.model_dump(mode="json")))
    missing = object()
    return sorted(k for k in before.keys() | after.keys() if before.get(k, missing) != after.get(k, missing))


def leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted key, value)`` for every leaf of a configuration: a scalar, a list (as one value) or an empty
    section."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def value_at(data: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, or None if the data has no such section."""
    node: Any = data
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def with_patch(data: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data`` with a JSON merge patch (RFC 7396) applied: null removes a key, which resets it to its
    default."""
    result = dict(data)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            inner = result.get(name)
            result[name] = with_patch(inner if isinstance(inner, Mapping) else {}, value)
        else:
            result[name] = value
    return result
