"""The first steps of docs/online.md, executed as written: submit an example, ask with OpenAI's SDK, post feedback."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

API_KEY = "e2e-key"
ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "docs/online.md").read_text(encoding="utf-8").partition("## First steps\n")[2].partition("\n## ")[0]
BATCH = 16
SMALLER = "limits.byte_budget=33554432"
"""Change that makes the byte budget of a job fit the small streams of the tests."""


def blocks(language: str) -> list[str]:
    """Return the code blocks of the section in one language."""
    return re.findall(rf"```{language}\n(.*?)```", SECTION, flags=re.DOTALL)


@pytest.fixture
def url(stack: Any) -> Iterator[str]:
    """Address that serves the job of the example; the fixture cancels the job after the test."""
    start, _ = blocks("bash")
    _, submit = (shlex.split(line) for line in start.splitlines())
    assert submit[:2] == ["penstock", "submit"]
    result = stack.cli("submit", str(ROOT / submit[2]), "--set", SMALLER, "--json")
    assert result.exit_code == 0, result.output
    job = json.loads(result.stdout)["id"]
    stack.until(lambda: stack.status(job).phase == "running", "the job to run", 90, lambda: stack.client.why(job))
    yield stack.stack.url
    stack.client.cancel(job)
    assert stack.finish(job).status.phase == "cancelled"
    stack.check_audit(job)


def ask(url: str, question: str) -> tuple[str, str]:
    """Run the Python of the section with another question; return id and model of the answer."""
    (code,) = blocks("python")
    made = 'Path("~/.penstock/api.key").expanduser().read_text().strip()'
    for old, new in {"http://127.0.0.1:8000": url, made: repr(API_KEY), "3+4=": question}.items():
        assert old in code
        code = code.replace(old, new)
    found: dict[str, Any] = {}
    try:
        exec(code, found)
    finally:
        found["client"].close()
    return found["answer"].id, found["answer"].model


def judge(url: str, answer: str, *, value: bool) -> str:
    """Post the feedback of the curl command in the section, for another answer; return the id of the feedback."""
    _, curl = blocks("bash")
    words = shlex.split(curl.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/feedback"]
    options = list(zip(words[2::2], words[3::2], strict=True))
    headers = dict(value.split(": ") for name, value in options if name == "-H")
    (body,) = (json.loads(value) for name, value in options if name == "-d")
    body |= {"inference_id": answer, "value": value}
    headers["Authorization"] = headers["Authorization"].replace("$KEY", API_KEY)
    reply = httpx.post(f"{url}/feedback", content=json.dumps(body), headers=headers, timeout=60)
    assert reply.status_code == 202, reply.text
    return str(reply.json()["feedback_id"])


@pytest.mark.long
def test_an_agent_that_is_asked_and_judged_gets_new_versions(stack: Any, url: str) -> None:
    first, model = stack.until(lambda: answered(url), "an answer", 60)
    assert model == "agent@0"
    feedback = [judge(url, first, value=True)]
    for number in range(BATCH - 1):
        feedback.append(judge(url, ask(url, f"{number % 10}+2=")[0], value=number % 2 == 0))
    statuses: dict[str, str] = {}

    def all_are_trained() -> bool:
        statuses.update({name: stack.client.feedback_status(name).status for name in feedback})
        return set(statuses.values()) == {"trained"}

    job = stack.client.find("agent").id
    stack.until(all_are_trained, "the feedback to be trained", 90, lambda: (statuses, stack.client.why(job)))
    stack.until(lambda: version(ask(url, "3+4=")[1]) >= 1, "a later version to answer", 60)


def version(model: str) -> int:
    """Return the policy version in the model name of an answer."""
    name, _, number = model.partition("@")
    assert name == "agent"
    return int(number)


def answered(url: str) -> tuple[str, str] | None:
    """Return id and model of an answer, or None while nothing answers."""
    import openai

    try:
        return ask(url, "3+4=")
    except openai.APIStatusError:
        return None
