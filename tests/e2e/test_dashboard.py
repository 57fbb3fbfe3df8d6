"""The web page in a real browser, over a real stack."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect, sync_playwright

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(180)]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
WAIT_MS = 60_000
LIVE = {
    "kind": "online_rl",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {"metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 1},
}


@pytest.fixture
def page() -> Iterator[Page]:
    """A tab of a browser on this machine; what its console says in anger fails the test."""
    program = os.environ.get("PENSTOCK_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        message = f"none of {', '.join(BROWSERS)} is installed; PENSTOCK_CHROMIUM may name one"
        (pytest.fail if os.environ.get("PENSTOCK_REQUIRE_BROWSER") else pytest.skip)(message)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=QUIET)
        tab = browser.new_page(viewport={"width": 1300, "height": 1000})
        tab.set_default_timeout(WAIT_MS)
        angry: list[str] = []
        tab.on("pageerror", lambda error: angry.append(str(error)))
        tab.on("console", lambda line: angry.append(line.text) if "Content Security Policy" in line.text else None)
        yield tab
        browser.close()
        assert angry == []


def enter(page: Page, stack: Any, key: str) -> None:
    """Open the page, give it a key when it asks, and wait until it uses the key: a test may open another page then."""
    page.goto(f"{stack.stack.url}/")
    page.wait_for_selector("#ask-key[open]")
    page.fill("#key-text", key)
    with page.expect_request(lambda request: request.headers.get("authorization") == f"Bearer {key}"):
        page.click("#ask-key button[value=use]")


def test_a_job_can_be_watched_and_cancelled(stack: Any, page: Page) -> None:
    hosts = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    job = stack.submit("train.max_updates=2000", "checkpoint.every=1000", name="watched")
    enter(page, stack, "e2e-key")
    page.click("text=watched")
    page.wait_for_selector(".chart canvas >> visible=true")
    page.wait_for_selector(".events >> text=first policy update done")
    assert page.inner_text("h1") == "watched"
    services = page.locator("section:has(h2:text('Services')) tbody tr")
    assert {"coordinator", "rollout", "reward", "trainer"} <= set(services.locator("td:first-child").all_inner_texts())
    assert not page.locator("section:has(h2:text('Feedback'))").is_visible(), "it has none"
    for queue in ("tickets", "groups", "batches"):
        assert page.locator(f".figures div:has(dt:text-is('{queue} queued')) dd").inner_text().isdigit()
    expect(page.locator(".figures div:has(dt:text-is('tickets queued')) dd")).to_have_text(re.compile("[1-9]"))
    step = page.locator(".figures dd").first
    before = step.inner_text()
    expect(step).not_to_have_text(before, timeout=WAIT_MS)
    page.on("dialog", lambda question: question.accept())
    page.click("button:text('cancel')")
    page.wait_for_selector(".phase.cancelled")
    assert stack.finish(job).status.phase == "cancelled"
    assert hosts == {stack.stack.url.split("/")[2]}, "everything came from the coordinator"


def test_the_events_of_a_job_that_is_over_have_an_end(stack: Any, page: Page) -> None:
    """All of them once, then that nothing follows, and no other connection for more."""
    job = stack.submit("train.max_updates=2", name="brief")
    assert stack.finish(job).status.phase == "succeeded"
    connections: list[str] = []
    page.on("request", lambda request: connections.append(request.url) if request.url.endswith("/events") else None)
    enter(page, stack, "e2e-key")
    page.goto(f"{stack.stack.url}/#/jobs/{job}")
    log = page.locator(".events")
    log.get_by_text("The job is over: no event follows.").wait_for()
    rows = log.locator("div").all_inner_texts()
    assert len(rows) == 1 + len(list(stack.client.events(job)))
    assert not any("undefined" in row or "NaN" in row for row in rows)
    assert not page.locator("section:has(h2:text('Feedback'))").is_visible(), "it has none"
    page.wait_for_timeout(3000)  # three times as long as the page waits before it connects again
    assert log.locator("div").count() == len(rows)
    assert len(connections) == 1, connections


def test_a_wrong_key_is_asked_for_again(stack: Any, page: Page) -> None:
    enter(page, stack, "wrong")
    page.wait_for_selector("#ask-key[open]")
    assert page.locator("table").count() == 0


def test_the_fate_of_feedback_is_shown(stack: Any, page: Page, make_job: Any) -> None:
    """Three verdicts, one of them taken back: as many bars as fates, as long as their shares."""
    spec = {**make_job(name="judged"), **LIVE}
    job = stack.client.submit({name: part for name, part in spec.items() if name not in ("data", "reward")}).id
    stack.until(lambda: stack.status(job).phase == "running", "the job runs")
    enter(page, stack, "e2e-key")
    page.goto(f"{stack.stack.url}/#/jobs/{job}")
    feedback = page.locator("section:has(h2:text('Feedback'))")
    feedback.get_by_text("None yet: POST /feedback.").wait_for()

    unknown = [str(uuid.uuid4()) for _ in range(3)]
    said = [stack.client.feedback("liked", True, inference=inference).feedback_id for inference in unknown]
    feedback.get_by_text("3 items").wait_for()
    assert feedback.locator("tbody tr").all_inner_texts() == ["received\t3\t"], "nobody asked that: they wait"
    stack.client.retract(said[0])
    expect(feedback.locator("tbody tr")).to_have_count(2, timeout=WAIT_MS)
    rows = {row.split("\t")[0]: row.split("\t")[1] for row in feedback.locator("tbody tr").all_inner_texts()}
    assert rows == {"received": "2", "retracted": "1"}
    room, *bars = [
        feedback.locator(where).bounding_box()["width"]  # type: ignore[index]
        for where in ("td.wide >> nth=0", ".bar >> nth=0", ".bar >> nth=1")
    ]
    assert bars[0] == pytest.approx(2 * bars[1], abs=2)
    assert 0 < bars[0] < room
    stack.client.cancel(job, force=True)
    stack.finish(job)


def test_what_others_wrote_is_text(stack: Any, page: Page) -> None:
    """A scorer's error reaches the page; markup in it must stay text."""
    reward = {"scorers": [{"type": "function", "path": "e2e_scorers:raises_markup"}], "timeout_s": 5.0}
    job = stack.submit("train.max_updates=5", name="marked", reward=reward)
    assert stack.finish(job).status.phase == "failed"
    assert "<img" in stack.status(job).message
    enter(page, stack, "e2e-key")
    page.goto(f"{stack.stack.url}/#/jobs/{job}")
    page.wait_for_selector(".title >> text=<img src=x")
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.attacked") is None
