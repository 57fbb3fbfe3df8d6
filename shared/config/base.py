"""Strict configuration: frozen models, unknown keys rejected with the nearest valid name, YAML input, dotted
overrides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.shared.config.explain import explain
from penstock.shared.errors import ConfigError

__all__ = [
    "CodeName", "FileName", "OptionalCodeName", "OptionalFileName", "StrictModel", "YAMLLoader", "load_yaml", "named",
    "parse_override", "parse_yaml", "with_overrides",
]  # fmt: skip

M = TypeVar("M", bound="StrictModel")

Names = Literal["code", "file"]
_FUNCTION = Field(pattern=r"^[A-Za-z_][\w.]*(@[0-9a-f]{64})?:[A-Za-z_]\w*$")
CodeName = Annotated[str, _FUNCTION, "code"]
"""Code that a service imports, `package.module:function`, or code of an uploaded file, `name@SHA256:function`. The
client uploads the file of `./name.py:function` and replaces the name by the second form."""
OptionalCodeName = Annotated[str | None, _FUNCTION, "code"]
FileName = Annotated[str, "file"]
"""Path of a file or directory that a service reads, or an id on a hub."""
OptionalFileName = Annotated[str | None, "file"]


def named(model: BaseModel, what: Names, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``(dotted key, value)`` for each field of ``model`` and its sections that refers to code (if ``what`` is
    "code") or to a file (if ``what`` is "file"). Leave out fields without a value. ``where`` is the prefix of the
    keys."""
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        if isinstance(value, str) and what in field.metadata:
            yield f"{where}{key}", value
        yield from _named_in(value, what, f"{where}{key}")


def _named_in(value: object, what: Names, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, BaseModel):
        yield from named(value, what, f"{where}.")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_in(each, what, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _named_in(each, what, f"{where}[{place}]")


class StrictModel(BaseModel):
    """Base of all configuration: unknown keys are errors, values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @classmethod
    def parse(cls: type[M], data: Mapping[str, Any], *, where: str = "job") -> M:
        """Validate ``data`` and return the configuration.

        Raises:
            ConfigError: one line per problem, each with the dotted key; an unknown key names the nearest valid one.
        """
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            lines = [f"{pointer}: {detail}" for pointer, detail in explain(cls, error)]
            raise ConfigError(f"{where} is not valid:\n  " + "\n  ".join(lines)) from None


class YAMLLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # has no types
    """Safe YAML loader that rejects duplicate keys of a mapping, because the later value would silently win."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._seen: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Check a mapping and expand its merge keys (`<<`). Own keys override merged keys; of several merged mappings,
        the first one wins.

        This replaces PyYAML's own merge, because its versions disagree: in 6.0.4 a later mapping of a list overrides an
        earlier one.

        Raises:
            yaml.MarkedYAMLError: the mapping has a key twice (the message names both lines), or a merge key whose value
                is not a mapping.
        """
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        _check_keys(node)
        merged: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        own: dict[Any, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for mapping in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if not isinstance(mapping, yaml.MappingNode):
                        problem = "'<<' must name a mapping, or a list of mappings"
                        raise yaml.MarkedYAMLError(problem=problem, problem_mark=mapping.start_mark)
                    self.flatten_mapping(mapping)
                    for pair in mapping.value:
                        merged.setdefault(_identity(pair[0]), pair)
            else:
                if key.tag == "tag:yaml.org,2002:value":  # the plain scalar `=`
                    key.tag = "tag:yaml.org,2002:str"
                own[_identity(key)] = key, value
        node.value = [*{**merged, **own}.values()]


def _identity(key: yaml.Node) -> tuple[str, str] | int:
    """Return a dictionary key for a YAML node. Scalar nodes with the same tag and text have equal keys; the key of any
    other node is unique."""
    return (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key)


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = key.tag, key.value
        if name in lines:
            problem = f"the key '{key.value}' stands here and at line {lines[name]}; keep one of them"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
        lines[name] = key.start_mark.line + 1


def load_yaml(path: Path) -> dict[str, Any]:
    """Read the YAML file ``path``, which must contain a mapping.

    Raises:
        ConfigError: the file is missing, is not YAML (line and column are named), has a key twice or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return parse_yaml(text, where=str(path))


def parse_yaml(text: str, *, where: str) -> dict[str, Any]:
    """Parse a YAML mapping. Raises ConfigError as ``load_yaml`` does; error messages call the text ``where``."""
    try:
        data = yaml.load(text, Loader=YAMLLoader)  # a safe loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise ConfigError(f"{where} is not valid YAML{place}: {problem}") from None
    if data is None:
        raise ConfigError(f"{where} is empty: it must hold a mapping of keys to values")
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold a mapping of keys to values, found {type(data).__name__}")
    return data


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parse an override such as ``a.b=3`` into ``(["a", "b"], 3)``; the value is parsed as YAML."""
    key, sep, value = text.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"override '{text}' must look like key.subkey=value")
    try:
        return key.strip().split("."), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"override '{text}': the value is not valid YAML") from None


def with_overrides(data: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of ``data`` with each ``a.b=value`` applied; missing levels are created."""
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
