"""Strict configuration: frozen, unknown keys refused with the nearest valid name, YAML in, dotted overrides."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.shared.errors import ConfigError

__all__ = ["StrictModel", "explain", "load_yaml", "parse_override", "with_overrides"]

M = TypeVar("M", bound="StrictModel")


class StrictModel(BaseModel):
    """Base of all configuration: unknown keys fail, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def parse(cls: type[M], data: Mapping[str, Any], *, where: str = "job") -> M:
        """Validate ``data``.

        Raises:
            ConfigError: one line per problem, each with the dotted key; an unknown key names the nearest valid one.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            lines = [f"{pointer}: {detail}" for pointer, detail in explain(cls, error)]
            raise ConfigError(f"{where} is not valid:\n  " + "\n  ".join(lines)) from None


def explain(model: type[BaseModel], error: ValidationError) -> list[tuple[str, str]]:
    """Turn a pydantic error into ``(dotted key, what is wrong and what to do)`` pairs."""
    problems = []
    for item in error.errors(include_url=False):
        path = [str(part) for part in item["loc"]]
        detail = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            names = _field_names(model, path[:-1])
            near = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"valid keys: {', '.join(sorted(names))}"
            detail = f"unknown key; {hint}"
        problems.append((".".join(path) or "(top level)", detail))
    return problems


def _field_names(model: type[BaseModel], path: Iterable[str]) -> list[str]:
    """Names that would have been valid at ``path``; follows unions by their ``type`` tag."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        found: list[type[BaseModel]] = []
        for candidate in models:
            field = candidate.model_fields.get(part)
            if field is not None:
                found += _models_in(field.annotation)
        tagged = [m for m in models if "type" in m.model_fields and m.model_fields["type"].default == part]
        is_tag = len(models) > 1 and bool(tagged)  # of a union; there may also be a field of that name
        models = tagged if is_tag else found or tagged or models  # what is neither is a list index
    return sorted({name for m in models for name in m.model_fields})


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in get_args(annotation) for m in _models_in(arg)]


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping.

    Raises:
        ConfigError: the file is missing, is not YAML (line and column are named) or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{path} is not valid YAML{place}: {problem}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values, found {type(data).__name__}")
    return data


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=3`` → ``(["a", "b"], 3)``; the value is read as YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"override '{text}' must look like key.subkey=value")
    try:
        return key.strip().split("."), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"override '{text}': the value is not valid YAML") from None


def with_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of ``data`` with each ``a.b=value`` applied; missing levels are created."""
    result = yaml.safe_load(yaml.safe_dump(data))
    for text in overrides:
        path, value = parse_override(text)
        node = result
        for part in path[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(f"override '{text}': '{part}' is not a section")
            node = child
        node[path[-1]] = value
    return dict(result)
