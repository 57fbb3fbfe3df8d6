"""Write the tables in this manual that come from the code, so that they cannot drift from it.

    python docs/reference.py           rewrite them
    python docs/reference.py --check   exit with 1 and name the pages that are not current

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.core import TyperGroup
from typer.main import get_group

from penstock.cli.app import app
from penstock.shared import errors
from penstock.shared.config import JobConfig, ServiceSettings
from penstock.shared.config.jobs.embodied_job import EmbodiedJob
from penstock.shared.config.jobs.evaluation_job import EvaluationJob
from penstock.shared.config.jobs.online_job import OnlineJob
from penstock.shared.config.jobs.serving_job import ServingJob

__all__ = ["TABLES", "commands", "environment", "error_tree", "job_file", "render"]

DOCS = Path(__file__).resolve().parent
_BOUNDS = {
    "gt": ">",
    "ge": "≥",
    "lt": "<",
    "le": "≤",
    "multiple_of": "multiple of",
    "min_length": "at least",
    "max_length": "at most",
}
"""Attributes of constraints, and how a reader says them."""
_HOST_DEFAULTS = {
    "host_id": "host name", "worker_id": "host name and process id", "data_dir": "`~/.penstock`",
    "sims_dir": "`~/.penstock/sims`", "engines_dir": "`~/.penstock/engines`",
}  # fmt: skip
"""Defaults that depend on the machine: described, not evaluated."""


def environment() -> str:
    """One row per field of ServiceSettings."""
    rows = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, field in ServiceSettings.model_fields.items():
        default = _HOST_DEFAULTS.get(name) or _default(field)
        rows.append(f"| `PENSTOCK_{name.upper()}` | {_type(field)} | {default} | {_text(field.description)} |")
    return "\n".join(rows)


def job_file() -> str:
    """One section per config class, in the order in which the job file refers to them."""
    return "\n\n".join(_section(path, model) for path, model in _sections(JobConfig, "", set()))


def evaluation_job() -> str:
    """The sections of an evaluation job that a training job does not have."""
    seen: set[type] = set()
    list(_sections(JobConfig, "", seen))
    text = "\n\n".join(_section(path, model) for path, model in _sections(EvaluationJob, "", seen))
    return re.sub(r"^## (.*)$", r"## \1 of an evaluation job", text, flags=re.MULTILINE)


def serving_job() -> str:
    """The sections of a deployment that a training job does not have."""
    seen: set[type] = set()
    list(_sections(JobConfig, "", seen))
    text = "\n\n".join(_section(path, model) for path, model in _sections(ServingJob, "", seen))
    return re.sub(r"^## (.*)$", r"## \1 of a deployment", text, flags=re.MULTILINE)


def online_job() -> str:
    """The sections of an online job, as far as a job on a data set does not have them."""
    seen: set[type] = set()
    list(_sections(JobConfig, "", seen))
    text = "\n\n".join(_section(path, model) for path, model in _sections(OnlineJob, "", seen))
    return re.sub(r"^## (.*)$", r"## \1 of an online job", text, flags=re.MULTILINE)


def embodied_job() -> str:
    """The sections of an embodied job, as far as a job on a data set does not have them."""
    seen: set[type] = set()
    list(_sections(JobConfig, "", seen))
    text = "\n\n".join(_section(path, model) for path, model in _sections(EmbodiedJob, "", seen))
    return re.sub(r"^## (.*)$", r"## \1 of an embodied job", text, flags=re.MULTILINE)


def error_tree() -> str:
    """The tree of errors, as drawn in shared/errors.py."""
    tree = (errors.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]
    return "```\n" + "\n".join(line.removeprefix("    ") for line in tree.splitlines()) + "\n```"


def commands() -> str:
    """One row per command of the command line."""
    return "\n".join(["| command | does | options |", "|---|---|---|", *_commands("penstock", get_group(app))])


def _commands(prefix: str, group: TyperGroup) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from _commands(f"{prefix} {name}", command)
            continue
        options = [f"`{max(p.opts, key=len)}`" for p in command.params if p.param_type_name == "option"]
        places = [str(p.name).upper() for p in command.params if p.param_type_name == "argument"]
        yield f"| `{' '.join([prefix, name, *places])}` | {_text(command.help)} | {', '.join(options)} |"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "environment": ("operations.md", environment),
    "commands": ("cli.md", commands),
    "job": ("job-rl.md", job_file),
    "evaluation-job": ("job-evaluation.md", evaluation_job),
    "serving-job": ("job-serving.md", serving_job),
    "online-job": ("job-online.md", online_job),
    "embodied-job": ("job-embodied.md", embodied_job),
    "errors": ("architecture.md", error_tree),
}
"""Marker -> page and what writes it."""


def render(text: str, name: str, table: str) -> str:
    """``text`` with the part between the markers of ``name`` replaced.

    Raises:
        ValueError: the page does not hold both markers exactly once.
    """
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    result, count = re.subn(pattern, lambda m: f"{m[1]}\n{table}\n\n{m[2]}", text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected the markers of '{name}' once, found them {count} times")
    return result


def _sections(model: type[BaseModel], path: str, seen: set[type]) -> Iterator[tuple[str, type[BaseModel]]]:
    if model in seen:
        return
    seen.add(model)
    yield path, model
    for name, field in model.model_fields.items():
        listed = "[]" if get_origin(field.annotation) is list else ""
        for child in _models(field.annotation):
            yield from _sections(child, f"{path}.{name}{listed}".lstrip("."), seen)


def _section(path: str, model: type[BaseModel]) -> str:
    tag = _tag(model)
    head = f"## `{path}`" + (f" with `{_tag_name(model)}: {tag}`" if tag else "") if path else "## Top level"
    lines = [head, "", _text(model.__doc__), "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        if tag and name == _tag_name(model):
            continue
        meaning = _text(field.description) or _reference(f"{path}.{name}".lstrip("."), field)
        lines.append(f"| `{name}` | {_type(field)} | {_default(field)} | {meaning} |")
    return "\n".join(lines)


def _tag_name(model: type[BaseModel]) -> str:
    return next((name for name in ("type", "engine") if name in model.model_fields), "")


def _tag(model: type[BaseModel]) -> str:
    """Value that tells a section from others of the same key: its ``type``, or ``engine``, where that has one value."""
    name = _tag_name(model)
    values = get_args(model.model_fields[name].annotation) if name else ()
    return str(values[0]) if len(values) == 1 else ""


def _reference(path: str, field: FieldInfo) -> str:
    if _models(field.annotation):
        return f"Section `{path}` below."
    return "The only value." if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1 else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for arg in get_args(annotation) for model in _models(arg)]


def _type(field: FieldInfo) -> str:
    bounds = ", ".join(_bound(item) for item in field.metadata if _bound(item))
    return _name(field.annotation) + (f", {bounds}" if bounds else "")


def _bound(item: Any) -> str:
    for attribute, sign in _BOUNDS.items():
        if hasattr(item, attribute):
            return f"{sign} {_number(getattr(item, attribute))}"
    pattern = getattr(item, "pattern", None)
    return f"`{pattern}`".replace("|", "\\|") if pattern else ""


def _name(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " \\| ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        return " \\| ".join(dict.fromkeys("null" if arg is type(None) else _name(arg) for arg in args))
    if hasattr(annotation, "__metadata__"):
        return _name(args[0])
    if origin is not None:
        return f"{origin.__name__} of {', '.join(_name(arg) for arg in args if arg is not ...)}"
    return "section" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        return "null"
    return f"`{_plain(value)}`".replace("|", "\\|")


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return _number(value)
    if isinstance(value, tuple):
        return str(list(value))
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(exclude_defaults=True))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    return str(value) if value != "" else '""'


def _number(value: float) -> str:
    power = value.bit_length() - 1 if isinstance(value, int) else 0
    exact = isinstance(value, int) and power >= 16 and value & (value - 1) == 0
    return f"2^{power}" if exact else str(value)


def _text(description: str | None) -> str:
    return " ".join((description or "").split()).replace("|", "\\|").replace("``", "`")


def main(arguments: list[str]) -> int:
    """Rewrite or check every page; the exit status."""
    stale = []
    for name, (page, table) in TABLES.items():
        path = DOCS / page
        text = path.read_text(encoding="utf-8")
        current = render(text, name, table())
        if current != text:
            stale.append(page)
            if "--check" not in arguments:
                path.write_text(current, encoding="utf-8")
    for page in stale:
        print(f"docs/{page} " + ("is not current: run `make reference`" if "--check" in arguments else "rewritten"))
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
