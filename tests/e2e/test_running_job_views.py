"""Views of a running job in a browser: the dialog that changes the job, and the history of its workers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.shared.config.jobs.amendable import settings_of, with_patch
from penstock.shared.config.jobs.job import JobConfig

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(180)]

LONG = ["train.max_updates=20000", "checkpoint.every=20000"]
"""Changes that make a job so long that only the test ends it, however fast the machine is."""
LEAST = {"train.max_updates": 1, "checkpoint.every": 1, "checkpoint.keep": 1, "limits.byte_budget": 1024}
"""Smallest valid values that are not 0, by key."""


@pytest.mark.long
def test_the_dialog_sends_only_the_values_that_the_user_changed(stack: Any, page: Any, enter: Any) -> None:
    """Fields show current values and the ranges of the job file; the dialog sends no value that is out of range."""
    kl = {"group_size": 4, "kl": {"coef": 0.05}}
    job = stack.submit(*LONG, name="amended", algorithm=kl, metadata={"owner": "ana", "team": "a"})
    enter(page, stack, where=f"#/jobs/{job}")
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "PATCH" else None)

    page.get_by_role("button", name="amend").click()
    dialog = page.get_by_role("dialog")
    config = JobConfig.model_validate(stack.client.get(job).spec)
    dialog.get_by_label("Learning rate").wait_for()
    fields = {one.get_attribute("name"): one for one in dialog.locator("input[type=number]").all()}
    assert {name: float(one.input_value() or -1) for name, one in fields.items()} == {
        name: -1 if value is None else value for name, value in settings_of(config).items()
    }
    for name, one in fields.items():  # a value at the border is taken where the job file takes it
        least = LEAST.get(name, 0)
        one.fill(str(least))
        changed = with_patch(config.model_dump(mode="json"), nested(name, least))
        assert one.evaluate("one => one.checkValidity()") is not is_refused(changed), name
    page.keyboard.press("Escape")

    page.get_by_role("button", name="amend").click()
    dialog.get_by_role("button", name="Change").click()
    page.get_by_text("amended: nothing was changed.").wait_for()
    page.get_by_role("button", name="amend").click()
    rate, labels = dialog.get_by_label("Learning rate"), dialog.get_by_label("Labels")
    rate.fill("-1")
    dialog.get_by_role("button", name="Change").click()
    assert rate.evaluate("one => one.matches(':invalid')")
    rate.fill("0.0002")
    dialog.get_by_label("Weight of the KL").fill("0.1")
    labels.fill("owner=ben")
    dialog.get_by_role("button", name="Change").click()
    page.get_by_text("amended: amend is asked for").wait_for()
    wanted = {"optimizer": {"learning_rate": 0.0002}, "algorithm": {"kl": {"coef": 0.1}}}
    assert sent == [{**wanted, "metadata": {"owner": "ben", "team": None}}]
    spec = stack.client.get(job).spec
    assert (spec["optimizer"]["learning_rate"], spec["algorithm"]["kl"]["coef"]) == (0.0002, 0.1)
    assert spec["metadata"] == {"owner": "ben"}
    stack.client.cancel(job, checkpoint=False)
    assert stack.finish(job).status.phase == "cancelled"


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return ``{"a": {"b": value}}`` for the name ``a.b``."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return dict(value)


def is_refused(data: dict[str, Any]) -> bool:
    """Return True if a value is out of the range of its key; other reasons to refuse the job do not count."""
    try:
        JobConfig.model_validate(data)
    except ValidationError as error:
        return any(flaw["type"].startswith(("greater_than", "less_than")) for flaw in error.errors())
    return False


@pytest.mark.long
def test_the_strips_of_workers_begin_before_the_page_was_opened(stack: Any, page: Any, enter: Any) -> None:
    job = stack.submit(*LONG, name="strips")
    stack.reach(job, 1)

    def history_s() -> float:
        (row,) = [row for row in stack.client.workers(job, history=True) if row["worker"] == "rollout-0"]
        return max((span["start_age_s"] for span in row["spans"]), default=0.0)

    stack.until(lambda: history_s() > 8, "a history of some seconds")
    enter(page, stack, where=f"#/jobs/{job}/workers")
    caption = page.get_by_text(re.compile(r"^The last \d+ s, from their heartbeats"))
    caption.wait_for()
    since_opened, text = page.evaluate("one => [performance.now() / 1000, one.textContent]", caption.element_handle())
    assert float(text.split()[2]) > since_opened + 3, "the history begins before the page was opened"
    page.get_by_label(re.compile("^rollout-0: busy")).wait_for()
    by_shared_memory = re.compile(r"^shm, \d[\d.e-]* s$")
    page.locator("tr[data-key=rollout-0] td[data-label=weights]", has_text=by_shared_memory).wait_for()
    stack.client.cancel(job, checkpoint=False)
    assert stack.finish(job).status.phase == "cancelled"
