"""The files of the dashboard: access, content policy, and that they load nothing from elsewhere."""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(str(files("penstock.services.coordinator").joinpath("dashboard")))
OWN = sorted(path for path in FOLDER.iterdir() if path.suffix in {".html", ".js", ".css"})


async def test_page_needs_no_key_and_its_policy_is_strict(connect: Any) -> None:
    async with connect(api_keys="root") as client:
        reply = await client.get("/")
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/html")
        policy = reply.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'")
        assert "unsafe" not in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        named = set(re.findall(r'(?:src|href)="(/assets/[^"]+)"', reply.text))
        assert len(named) >= 4
        for path in named:
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/v1/jobs")).status_code == 401, "the page is open, the jobs are not"


async def test_a_known_file_is_not_sent_again(connect: Any) -> None:
    async with connect() as client:
        first = await client.get("/assets/app.js")
        again = await client.get("/assets/app.js", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "name", ["../service.py", "%2e%2e/service.py", "vendor", "vendor/SHA256SUMS", "nothing.js", ""]
)
async def test_only_files_of_the_page_are_served(connect: Any, name: str) -> None:
    async with connect() as client:
        reply = await client.get(f"/assets/{name}")
        assert reply.status_code == 404
        assert reply.headers["content-type"] == "application/problem+json"


def test_nothing_is_loaded_from_elsewhere() -> None:
    for path in OWN:
        addresses = re.findall(r"https?://[^\s\"'`)]+", path.read_text())
        assert addresses == [], path.name


def test_text_never_becomes_markup() -> None:
    unsafe = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function")
    for path in OWN:
        assert not unsafe.search(path.read_text()), path.name


def test_vendored_files_are_those_that_were_published() -> None:
    lines = (FOLDER / "vendor" / "SHA256SUMS").read_text().splitlines()
    assert len(lines) == 2
    for digest, name in (line.split() for line in lines):
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest, name
