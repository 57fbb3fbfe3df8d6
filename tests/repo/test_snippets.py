"""Snippets of the pages can be used: job files parse, commands have these options, clients have these methods."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_group

from penstock.cli import app
from penstock.client import Client
from penstock.shared.config.jobs.amendable import with_patch
from penstock.shared.config.jobs.kinds import parse_job

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODEL = {"path": "/models/policy"}
PROMPTS = {
    "name": "a", "model": MODEL, "data": {"train": {"type": "addition"}}, "reward": {"scorers": [{"type": "exact"}]},
    "train": {"batch_size": 64, "max_updates": 9},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "rl": PROMPTS,
    "evaluation": {
        "kind": "evaluation", "name": "a", "model": MODEL, "reward": PROMPTS["reward"],
        "data": {"eval": {"type": "addition"}},
    },
    "serving": {"kind": "serving", "name": "a", "model": MODEL},
    "online_rl": {
        "kind": "online_rl", "name": "a", "model": MODEL, "algorithm": {"type": "reinforce_pp"},
        "train": {"batch_size": 64, "max_lag": 2}, "online": {"metrics": {"accepted": {"type": "boolean"}}},
        "data": {"eval": {"type": "addition"}}, "reward": PROMPTS["reward"], "evaluation": {"every": 1},
    },
    "embodied": {
        "kind": "embodied", "name": "a", "policy": {"type": "gaussian"}, "algorithm": {"type": "ppo"},
        "environment": {"backend": "gymnasium", "task": "CartPole-v1", "horizon": 100},
        "train": {"batch_size": 64, "max_updates": 9},
    },
}  # fmt: skip
"""A valid job of each kind, for fences that show a section of one."""
CALLED = re.compile(r"^(?:\$ )?(penstock [^#\n]*)", re.MULTILINE)
INTERNAL = {"job-rl.md", "job-online.md", "job-embodied.md", "job-evaluation.md", "job-serving.md"}
"""Made from the code."""


class Snippet(NamedTuple):
    """A fence of a page."""

    page: str
    place: int
    text: str


def snippets(*languages: str) -> list[Snippet]:
    found = []
    for page in PAGES:
        for place, (language, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if language in languages and page.name not in INTERNAL:
                whole = text.replace("{ ... }", "{type: object, properties: {}}").replace("[…]", "[...]")
                whole = re.sub(r"\./(\w+)\.py:", r"\1:", whole)  # what the client makes of code beside the file
                found.append(Snippet(str(page.relative_to(ROOT)), place, whole))
    return found


def named(one: Any) -> str:
    return f"{one.page}-{one.place}"


def kind_of(shown: dict[str, Any]) -> str:
    """The kind of job that a fence is about."""
    if "kind" in shown:
        return str(shown["kind"])
    environment = shown.get("environment", {})
    if "policy" in shown or {"task", "backend"} & environment.keys() or "demonstrations" in shown.get("warm_start", {}):
        return "embodied"
    return "online_rl" if "online" in shown or "baseline" in shown.get("algorithm", {}) else "rl"


@pytest.mark.parametrize("shown", snippets("yaml"), ids=named)
def test_a_job_file_of_a_page_is_one(shown: Snippet) -> None:
    data = yaml.safe_load(shown.text)
    if "observations" in data:  # a section of a section
        data = {"environment": {"tools": [{"type": "calculator"}], **data}}
    if "name" not in data:
        base = BASES[kind_of(data)]
        data = {**with_patch(base, data), **{name: data[name] for name in ("model",) if name in data}}
    parse_job(data, where=shown.page)


@pytest.mark.parametrize("kind", BASES)
def test_what_sections_are_tried_in_is_valid(kind: str) -> None:
    assert kind_of(BASES[kind]) == kind
    parse_job(BASES[kind], where=kind)


@pytest.mark.parametrize("shown", snippets("bash", "console", "", "text"), ids=named)
def test_a_command_of_a_page_has_these_options(shown: Snippet) -> None:
    for found in CALLED.findall(shown.text.replace("\\\n", " ")):
        for line in re.split(r"\s(?:&&|\||;)\s", found):
            words = shlex.split(line)
            if words[:1] == ["penstock"]:
                parsed(words[1:])


@functools.cache
def group() -> Any:
    """The command line: typer reads all signatures for it."""
    return get_group(app)


def parsed(words: list[str]) -> None:
    """Read a command line as ``penstock`` does, and do nothing. Raises TyperException."""
    command: Any = group()
    while isinstance(command, TyperGroup):
        assert words[:1] != [], "names no command"
        assert words[0] in command.commands, f"there is no command '{words[0]}'"
        command, words = command.commands[words[0]], words[1:]
    command.make_context("penstock", list(words))


def test_commands_that_are_none_are_noticed() -> None:
    parsed(["sweep", "job.yaml", "--grid", "optimizer.learning_rate=1e-4,3e-4"])
    for words in (["submit"], ["submit", "job.yaml", "--dryrun"], ["ls", "--limit", "many"]):
        with pytest.raises(TyperException):
            parsed(words)
    with pytest.raises(AssertionError, match="no command"):
        parsed(["ckpt", "list"])


@pytest.mark.parametrize("shown", snippets("python"), ids=named)
def test_a_program_of_a_page_is_one(shown: Snippet) -> None:
    tree = ast.parse(shown.text)
    if "from penstock.client import Client" not in shown.text:
        return
    found = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and words_of(call.func)[:1] == ["client"]]
    assert found
    for call in found:
        fits(call)


def fits(call: ast.Call) -> None:
    """The client has the method of a call, with these arguments. Raises AttributeError, TypeError."""
    with Client("http://127.0.0.1:1", api_key="none") as client:
        method: Any = client
        for word in words_of(call.func)[1:]:
            method = getattr(method, word)
    inspect.signature(method).bind(*call.args, **{str(word.arg): None for word in call.keywords})


def words_of(node: ast.expr) -> list[str]:
    """``a.b.c`` as a list; empty where it is something else."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = words_of(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def test_calls_that_no_client_has_are_noticed() -> None:
    def tried(text: str) -> None:
        (line,) = ast.parse(text).body
        assert isinstance(line, ast.Expr)
        assert isinstance(line.value, ast.Call)
        fits(line.value)

    tried("client.episodes.open('agent', user='eve')")
    with pytest.raises(AttributeError):
        tried("client.episodes.begin('agent')")
    with pytest.raises(TypeError):
        tried("client.feedback('accepted', True, inferences='x')")


METHODS = (ROOT / "docs/python.md").read_text(encoding="utf-8").partition("| what | methods |")[2].partition("\n\n")[0]


def test_methods_that_the_manual_lists_are_there() -> None:
    missing = []
    with Client("http://127.0.0.1:1", api_key="none") as client:
        for what, listed in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", METHODS, re.MULTILINE):
            groups = [getattr(client, name) for name in re.findall(r"`(\w+)`", what)] or [client]
            for name in re.findall(r"`(\w+)`", listed):
                if not any(hasattr(group, name) for group in groups):
                    missing.append(f"{what}: {name}")
    assert METHODS.count("\n") > 8
    assert missing == []
