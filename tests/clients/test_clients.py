"""Clients that others wrote, unmodified, against a running deployment: each works, and each answer is recorded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPTS = sorted(file.stem for file in (Path(__file__).parent / "scripts").glob("*.py"))

pytestmark = [pytest.mark.clients, pytest.mark.timeout(480)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_client_works_and_every_answer_is_recorded_once(name: str, run_client: Any) -> None:
    ran = run_client(name)
    assert len(ran.records) == ran.output["answers"]
    for feedback in ran.output.get("feedback", []):
        ran.deployment.await_training(feedback)


def test_every_script_has_its_requirements() -> None:
    pinned = sorted(file.stem for file in (Path(__file__).parent / "requirements").glob("*.txt"))
    assert pinned == SCRIPTS
