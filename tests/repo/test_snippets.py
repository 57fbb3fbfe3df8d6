"""The snippets of the pages are valid: job files parse, commands have the options shown, clients have the methods.

``tests/e2e/test_manual.py`` executes the snippets, except those that ``tests/manual.py`` names.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import re
import shlex
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from pydantic import ValidationError
from typer.exceptions import TyperException

from penstock.client import Client
from penstock.services.coordinator.feedback.posts import POST
from penstock.shared.config.jobs.kinds import parse_job
from tests.manual import (
    BASES,
    FILLED,
    LANGUAGES,
    NOT_RUN,
    NOT_RUN_LIKE,
    PAGES,
    PARTS,
    ROOT,
    RUN_WHOLE,
    UNLABELLED,
    Snippet,
    is_mention,
    kind_of,
    parsed,
    snippets,
    text_of,
    to_run,
    whole_job,
)

ALL = list(chain.from_iterable(map(snippets, PAGES)))
DECISIONS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/adr").glob("*.md"))]


def of_kind(*kinds: str, pages: list[str] = PAGES) -> list[Any]:
    """Return the snippets of some kinds, as parameters of a test."""
    found = [(page, place, one) for page in pages for place, one in enumerate(snippets(page)) if one.kind in kinds]
    return [pytest.param(one, id=f"{page}-{place}") for page, place, one in found]


# -- nothing is left out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_of_a_page_is_found(page: str) -> None:
    """All fences have known languages, and fences that are not executed contain no command lines."""
    fences = [(info.partition(" ")[0], fence) for info, fence, inline in PARTS.findall(text_of(page)) if not inline]
    assert {language for language, _ in fences} <= LANGUAGES.keys()
    assert text_of(page).count("```") == 2 * len(fences), "fences stand at the left margin"
    assert [fence for language, fence in fences if LANGUAGES[language] is None and UNLABELLED.search(fence)] == []


@pytest.mark.parametrize("table", [NOT_RUN, FILLED], ids=["NOT_RUN", "FILLED"])
def test_every_entry_of_a_table_is_on_a_page(table: dict[str, str]) -> None:
    assert table.keys() - {one.name for one in ALL} == set(), "no page has these any more"


def test_patterns_and_pages_that_are_not_run_exist() -> None:
    assert [one for one in NOT_RUN_LIKE if not any(re.fullmatch(one, shown.name) for shown in ALL)] == []
    assert RUN_WHOLE.keys() <= set(PAGES)


@pytest.mark.parametrize("shown", [one for one in ALL if "run by" in one.not_run], ids=lambda one: one.name[:40])
def test_a_snippet_that_another_test_runs_is_named_there(shown: Snippet) -> None:
    """The test names the page of a fence or its folder, or the words of a command that a sentence contains."""
    (path,) = re.findall(r"run by (\S+)", shown.not_run)
    source = text_of(path)
    if shown.inline:
        verbs = [word for word in shown.text.split()[1:] if word.islower()]
        assert [word for word in verbs if f'"{word}"' not in source] == [], path
    else:
        assert shown.page in source or f'"{Path(shown.page).parent}"' in source, path


@pytest.mark.parametrize("page", PAGES)
def test_snippets_that_are_run_are_of_executable_kinds(page: str) -> None:
    """``tests/e2e/manual_reader.py`` executes these kinds; a table names other programs and patches."""
    for one in to_run(page):
        assert one.kind in {"python", "command", "job", "section", "call"}, one
        if one.kind == "command":
            assert re.match(r"(penstock|make|curl|sh|python -m) |[A-Z_]+=\$\(", one.text), one


def test_every_kind_is_run() -> None:
    assert {one.kind for page in PAGES for one in to_run(page)} == {"python", "command", "job", "section", "call"}
    assert {"penstock", "make", "curl", "sh"} <= {one.text.split()[0] for page in PAGES for one in to_run(page)}


# -- what is shown is valid -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shown", of_kind("job", "section"))
def test_a_job_file_of_a_page_is_valid(shown: Snippet) -> None:
    text = re.sub(r"\./(\w+)\.py:", r"\1:", shown.text)  # what the client makes of code beside the file
    parse_job(whole_job(text), where=shown.page)


@pytest.mark.parametrize("kind", BASES)
def test_the_job_files_that_complete_sections_are_valid(kind: str) -> None:
    assert kind_of(BASES[kind]) == kind
    parse_job(BASES[kind], where=kind)


@pytest.mark.parametrize("shown", of_kind("command", "mention", pages=[*PAGES, *DECISIONS]))
def test_a_command_of_a_page_exists_with_its_options(shown: Snippet) -> None:
    """A mention names an existing command, or several of one group (``a|b``), and only options of that command."""
    for line in re.split(r"\s(?:&&|\||;)\s", FILLED.get(shown.text, shown.text)):
        program, *words = shlex.split(line, comments=True)
        if program != "penstock":
            continue
        several = next((word for word in words if "|" in word), "")
        for verb in several.split("|"):
            one = [verb if word == several else "1" if word in ("VERSION", "DEAD_LETTER") else word for word in words]
            if not is_mention(shlex.join(["penstock", *one])):
                parsed(one)


def test_invalid_commands_are_found() -> None:
    parsed(["sweep", "job.yaml", "--grid", "optimizer.learning_rate=1e-4,3e-4"])
    for words in (["submit"], ["submit", "job.yaml", "--dryrun"], ["ls", "--limit", "many"]):
        with pytest.raises(TyperException):
            parsed(words)
    with pytest.raises(AssertionError, match="no command"):
        parsed(["ckpt", "list"])
    assert is_mention("penstock submit --dry-run")
    assert is_mention("penstock quarantine ls|show ITEM")
    assert not is_mention("penstock submit job.yaml --dryrun")
    assert not is_mention("penstock subscribe")


@pytest.mark.parametrize("shown", of_kind("python"))
def test_a_program_of_a_page_is_valid(shown: Snippet) -> None:
    tree = ast.parse(shown.text.replace("[…]", "[...]"))
    if "from penstock.client import Client" not in shown.text:
        return
    found = [call for call in ast.walk(tree) if isinstance(call, ast.Call) and words_of(call.func)[:1] == ["client"]]
    assert found
    for call in found:
        fits(call)


def fits(call: ast.Call) -> None:
    """Check that the client has the called method and that it takes the arguments. Raises AttributeError, TypeError."""
    with Client("http://127.0.0.1:1", api_key="none") as client:
        method: Any = client
        for word in words_of(call.func)[1:]:
            method = getattr(method, word)
    inspect.signature(method).bind(*call.args, **{str(word.arg): None for word in call.keywords})


def words_of(node: ast.expr) -> list[str]:
    """Return the names in ``a.b.c`` as a list; an empty list for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    inner = words_of(node.value) if isinstance(node, ast.Attribute) else []
    return [*inner, node.attr] if inner and isinstance(node, ast.Attribute) else []


def test_calls_that_no_client_has_are_found() -> None:
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


FENCES = {page: [fence for info, fence, _ in PARTS.findall(text_of(page)) if info[:4] == "json"] for page in PAGES}
ELLIPSES = {"0192…": lambda number: str(UUID(int=number)), "[…]": lambda _: "[0]"}
"""Ellipses that JSON may have beside the text "…", with what they stand for: each id is another one."""
BODIES = {
    "docs/online-feedback.md": POST.validate_python,
    "docs/online-learning.md": POST.validate_python,
    "docs/rewards.md": lambda _: None,
}
"""Pages with JSON, and the validation of what they show. In ``tests/contract/test_web_scorers.py`` a scorer sends the
request on the page about rewards, and reads the reply."""


def documents(fence: str) -> list[Any]:
    """Return the JSON documents in a fence, one after another. Raises ValueError."""
    numbers = itertools.count(1)
    text = re.sub(r"0192…|\[…\]", lambda found: ELLIPSES[found[0]](next(numbers)), fence).strip()
    if "…" in text.replace('"…"', ""):
        raise ValueError(f"an ellipsis without a meaning: {text}")
    found = []
    while text:
        value, end = json.JSONDecoder(parse_constant=refuse).raw_decode(text)
        found.append(value)
        text = text[end:].lstrip()
    return found


def refuse(constant: str) -> None:
    """Refuse NaN and infinities, which only Python's JSON has."""
    raise ValueError(constant)


def test_every_page_with_json_has_a_validation() -> None:
    assert {page for page in PAGES if FENCES[page]} == BODIES.keys()


@pytest.mark.parametrize("page", BODIES)
def test_the_json_of_a_page_is_valid(page: str) -> None:
    for one in chain.from_iterable(map(documents, FENCES[page])):
        BODIES[page](one)


def test_json_that_is_not_valid_is_found() -> None:
    assert documents('{"a": "ep_0192…", "b": […]}\n["…"]') == [{"a": f"ep_{UUID(int=1)}", "b": [0]}, ["…"]]
    for text in ('{"a": 1,}', '{"a": …}', '{"a": "b…"}', "{'a': 1}", '{"a": 1} or', "NaN"):
        with pytest.raises(ValueError):
            documents(text)
    (one, *_) = documents(FENCES["docs/online-feedback.md"][0])
    with pytest.raises(ValidationError):
        POST.validate_python({**one, "metric": one["metric_name"]})


METHODS = (ROOT / "docs/python.md").read_text(encoding="utf-8").partition("| what | methods |")[2].partition("\n\n")[0]


def test_methods_that_the_manual_lists_exist() -> None:
    missing = []
    with Client("http://127.0.0.1:1", api_key="none") as client:
        for what, listed in re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", METHODS, re.MULTILINE):
            groups = [getattr(client, name) for name in re.findall(r"`(\w+)`", what)] or [client]
            for name in re.findall(r"`(\w+)`", listed):
                if not any(hasattr(group, name) for group in groups):
                    missing.append(f"{what}: {name}")
    assert METHODS.count("\n") > 8
    assert missing == []


def test_api_keys_of_the_pages_are_ascii() -> None:
    """A key with an ellipsis character, which is not ASCII, makes a client fail."""
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    assert [page for page, text in texts.items() if re.search(r'api_key="[^"]*[^\x00-\x7f]', text)] == []
