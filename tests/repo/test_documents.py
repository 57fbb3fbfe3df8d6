"""The manual, the change log, the examples and the settings agree with the code."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from penstock.client.beside import read_job
from penstock.shared.config import ServiceSettings
from penstock.shared.config.base import StrictModel
from penstock.shared.config.jobs.kinds import parse_job

ROOT = Path(__file__).resolve().parents[2]
JOBS = sorted([*(ROOT / "examples").rglob("*.yaml"), *(ROOT / "deploy").glob("smoke.yaml")])
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def test_tables_in_the_manual_are_current() -> None:
    command = [sys.executable, ROOT / "docs/reference.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_setting_is_documented() -> None:
    manual = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    for name, field in ServiceSettings.model_fields.items():
        assert field.description, f"{name} has no docstring"
        assert f"`PENSTOCK_{name.upper()}`" in manual


def _config_classes(base: type[BaseModel]) -> list[type[BaseModel]]:
    return [*base.__subclasses__(), *(c for child in base.__subclasses__() for c in _config_classes(child))]


@pytest.mark.parametrize("model", _config_classes(StrictModel), ids=lambda model: str(model.__name__))
def test_every_key_of_the_job_file_is_documented(model: type[BaseModel]) -> None:
    silent = [
        name
        for name, field in model.model_fields.items()
        if name not in {"type", "kind", "engine"} and not field.description and "Config" not in str(field.annotation)
    ]
    assert silent == []


FILES = [path for root in ("services", "shared", "src") for path in (ROOT / root).rglob("*.py")]
PASSED_ON = {"GraderSampling"}
"""Sections whose keys the code does not read, because a request takes the whole section."""


@functools.cache
def _attributes_read() -> set[str]:
    return {name for path in FILES for name in re.findall(r"\.([a-z_]\w*)", path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("model", _config_classes(StrictModel), ids=lambda model: str(model.__name__))
def test_every_key_of_the_job_file_is_read(model: type[BaseModel]) -> None:
    idle = [name for name in model.model_fields if name not in _attributes_read()]
    assert idle == [] or model.__name__ in PASSED_ON


@pytest.mark.parametrize("path", JOBS, ids=lambda path: str(path.name))
def test_examples_are_valid_jobs(path: Path) -> None:
    parse_job(read_job(path).data, where=path.name)


def test_there_are_examples() -> None:
    assert any(path.parent.name == "examples" for path in JOBS)


def test_the_change_log_has_room_for_the_next_change() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_have_targets(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [t for t in targets if "://" not in t and not t.startswith("mailto:") and not (page.parent / t).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_named_in_the_documents_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:shared|services|src/penstock|deploy|docs|examples|benchmarks|tests)/[\w./-]+)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_stands_in_the_table_of_contents() -> None:
    nav = str(_mkdocs()["nav"])
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if page not in nav] == []


def _mkdocs() -> dict[str, object]:
    class Loader(yaml.SafeLoader):
        """YAML loader that ignores the tags of mkdocs."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    document: dict[str, object] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    return document


def test_decision_records_are_numbered_without_gaps() -> None:
    records = sorted(path.name for path in (ROOT / "docs/adr").glob("[0-9]*.md"))
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    for name in records:
        text = (ROOT / "docs/adr" / name).read_text(encoding="utf-8")
        assert [part for part in ("## Context", "## Decision", "## Consequences") if part not in text] == [], name


NAMED = re.compile(r"penstock_[a-z_]+(?=[`{])")
EXPORTED = re.compile(r"metrics\.(counter|gauge|histogram)\(\s*\"([a-z_]+)\"")


def test_every_metric_that_the_manual_names_exists() -> None:
    exported = set()
    for path in FILES:
        for kind, name in EXPORTED.findall(path.read_text(encoding="utf-8")):
            exported.add(f"penstock_{name}_total" if kind == "counter" else f"penstock_{name}")
    named = {name for page in PAGES for name in NAMED.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert named - exported == set()
