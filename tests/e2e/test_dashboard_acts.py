"""Actions on the web page in a real browser: on jobs, workers, keys, webhooks, feedback, episodes and dead letters.

axe-core examines every dialog that the tests open.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from penstock.client import Client
from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import LineageForked, Redrawn
from penstock.shared.protocol.live.interaction import new_marked_id
from penstock.shared.protocol.messages import DRAW_HEADER

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(300)]

KEY = "e2e-key"
ROOT = Path(__file__).parents[2]
AXE = Path(__file__).with_name("axe") / "axe.min.js"
BROKEN = """async (place) => {
  const { violations, passes } = await axe.run(place ?? document, { resultTypes: ["violations"] });
  if (!passes.length) return ["axe-core tried nothing"];
  return violations.map(({ id, nodes }) => [id, nodes.slice(0, 3).map(({ html }) => html.slice(0, 200))]);
}"""
IS_DRAWN = """(canvas) => {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = "var(--c1)";
  const [colour] = [getComputedStyle(probe).color.match(/\\d+/g).map(Number), probe.remove()];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200 && colour.every((part, index) => Math.abs(part - data[at + index]) < 40)) return true;
  }
  return false;
}"""
"""Program that returns true if a canvas has a pixel in the colour of the first curve; axes are grey."""
LIVE = {
    "kind": "online_rl",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {
        "metrics": {"score": {"type": "float"}}, "max_wait_s": 600,
        "quarantine": {"min_items": 10, "window": 50},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def running(stack: Any) -> Iterator[str]:
    """Id of a job that runs as long as the tests of this file."""
    job: str = stack.submit("train.max_updates=200000", "checkpoint.every=200000", "checkpoint.keep=5", name="acted")
    stack.reach(job, 1)
    yield job
    stack.client.cancel(job, force=True)
    stack.finish(job)


@pytest.fixture(scope="module")
def live(stack: Any, make_job: Any) -> Iterator[str]:
    """Id of a job that serves its model and learns from feedback."""
    spec = {**make_job(name="judged"), **LIVE}
    job: str = stack.client.submit({name: part for name, part in spec.items() if name not in ("data", "reward")}).id
    stack.until(lambda: stack.status(job).phase == "running", "the job runs")
    yield job
    stack.client.cancel(job, force=True)
    stack.finish(job)


def flawless(page: Page, place: Locator | None = None, schemes: tuple[str, ...] = ("dark", "light")) -> None:
    """Check that axe-core finds no violation in these colour schemes, in a page or in the part ``place`` of it."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(f"(() => {{ {AXE.read_text()} }})()")
    for scheme in schemes:
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert page.evaluate(BROKEN, place and place.element_handle()) == [], (page.url, scheme)


def opened(page: Page, title: str | re.Pattern[str]) -> Locator:
    """Wait for the dialog with this title, check it with axe-core, and return it."""
    dialog = page.get_by_role("dialog", name=title)
    dialog.wait_for()
    flawless(page, dialog)
    return dialog


def leave(page: Page) -> None:
    """Close the open dialog with the keyboard."""
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def operation(stack: Any, job: str, kind: str) -> Any:
    """Wait until the newest operation of a kind has ended; return it."""

    def ended() -> Any:
        found = [one for one in stack.client.get(job).operations if one.kind == kind]
        return found and found[-1].state in ("succeeded", "failed") and found[-1]

    return stack.until(ended, f"the end of {kind}", 120, lambda: stack.client.get(job).operations)


def test_checkpoints_are_taken_downloaded_and_rolled_back_to(
    stack: Any, page: Page, enter: Any, running: str, tmp_path: Path
) -> None:
    enter(page, stack, where=f"#/jobs/{running}/checkpoints")
    page.evaluate("delete window.showSaveFilePicker")  # its dialog belongs to the system
    page.get_by_role("button", name="checkpoint", exact=True).click()
    page.get_by_text("acted: checkpoint is asked for").wait_for()
    assert operation(stack, running, "checkpoint").state == "succeeded"
    newest = stack.client.checkpoints(running)[-1]["number"]
    assert newest > 0
    rows = page.get_by_role("table", name="Checkpoints").locator("tbody tr")
    expect(rows.first.locator("td").first).to_have_text(f"{newest:,}")

    row = page.locator("tr[data-key='0']")
    row.locator("summary").click()
    with page.expect_download() as saved:
        row.get_by_role("button", name="model.safetensors").click()
    hashes = {file["name"]: file["sha256"] for file in stack.client.checkpoint(running, 0)["files"]}
    data = Path(saved.value.path()).read_bytes()
    assert saved.value.suggested_filename == "model.safetensors"
    assert hashlib.sha256(data).hexdigest() == hashes["model.safetensors"]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download checkpoint 0").click()
    assert saved.value.suggested_filename == "acted-0.tar"
    saved.value.save_as(tmp_path / "all.tar")
    with tarfile.open(tmp_path / "all.tar") as archive:
        assert set(hashes) <= {Path(name).name for name in archive.getnames()}

    page.get_by_role("button", name="Delete checkpoint 0").wait_for()
    before = stack.status(running).step
    page.get_by_role("button", name="Roll back to checkpoint 0").click()
    dialog = opened(page, "Roll back to checkpoint 0?")
    dialog.get_by_role("button", name="Roll back").click()
    page.get_by_text("Rolling back is asked for.").wait_for()
    assert operation(stack, running, "rollback").state == "succeeded"
    forks = [event for event in stack.ledger(running) if isinstance(event, LineageForked)]
    assert forks, "the ledger records a fork"
    stack.until(lambda: stack.status(running).phase == "running", "the job trains again")
    page.get_by_role("link", name="Job file").click()
    page.get_by_text(re.compile(r'^rollback {"checkpoint":0.*}: succeeded')).wait_for()
    assert before >= newest


def test_a_job_is_paused_and_resumed(stack: Any, page: Page, enter: Any, running: str) -> None:
    enter(page, stack, where=f"#/jobs/{running}")
    actions = page.locator(".actions")
    pause, resume = (actions.get_by_role("button", name=verb, exact=True) for verb in ("pause", "resume"))
    expect(resume).to_be_disabled()
    pause.click()
    page.get_by_text("acted: pause is asked for.").wait_for()
    page.locator(".heading .phase.paused").wait_for()
    expect(pause).to_be_disabled()
    paused = stack.status(running)
    assert paused.phase == "paused"
    resume.click()
    page.get_by_text("acted: resume is asked for.").wait_for()
    page.locator(".heading .phase.running").wait_for()
    expect(pause).to_be_enabled()
    stack.reach(running, paused.step + 1)


def test_the_staleness_of_a_job_is_drawn(stack: Any, page: Page, enter: Any, running: str) -> None:
    """The newest point of the curve is a measured value of an update with groups of an older version."""
    assert stack.client.get(running).spec["train"]["max_lag"] == 1
    enter(page, stack, where=f"#/jobs/{running}")
    canvas = page.get_by_label(re.compile(r"^Staleness: .*, by policy update\. Newest: lag/kl "))
    canvas.scroll_into_view_if_needed()
    stack.until(lambda: canvas.evaluate(IS_DRAWN), "a curve in its colour")
    value, step = re.findall(r"Newest: lag/kl (\S+) at update (\d+)$", str(canvas.get_attribute("aria-label")))[0]
    found = stack.client.metrics(running, names="lag/kl", max_points=10_000)
    measured = dict(zip(found["steps"], found["series"]["lag/kl"], strict=True))
    assert float(value) == pytest.approx(measured[int(step)], rel=0.05, abs=0), "as rounded on the page"


def test_a_running_job_is_changed(stack: Any, page: Page, enter: Any, running: str) -> None:
    """Only what differs from the job file is sent."""
    before = stack.client.get(running).spec
    enter(page, stack, where=f"#/jobs/{running}")
    button = page.locator(".actions").get_by_role("button", name="amend", exact=True)
    button.click()
    dialog = opened(page, "Change acted")
    rate, labels = dialog.get_by_label("Learning rate"), dialog.get_by_label("Labels (metadata)")
    expect(rate).to_have_value(str(before["optimizer"]["learning_rate"]))
    dialog.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text("acted: nothing was changed.").wait_for()
    button.click()
    opened(page, "Change acted")
    rate.fill("0.00025")
    labels.fill("owner=ana\nproject=house")
    dialog.get_by_role("button", name="Change", exact=True).click()
    page.get_by_text(re.compile(r"^acted: amend is asked for from update [\d,]+ on\.$")).wait_for()
    expected = before | {
        "optimizer": before["optimizer"] | {"learning_rate": 0.00025}, "metadata": {"owner": "ana", "project": "house"},
    }  # fmt: skip
    stack.until(lambda: stack.client.get(running).spec == expected, "the new job file")

    def rates() -> list[float]:
        found: dict[str, list[float]] = stack.client.metrics(running, names="optimizer/lr")["series"]
        return found.get("optimizer/lr", [])

    stack.until(lambda: rates()[-1:] == [pytest.approx(0.00025)], "an update at the new rate")


def test_workers_are_scaled_and_dialogs_of_a_job_are_left(stack: Any, page: Page, enter: Any, running: str) -> None:
    enter(page, stack, where=f"#/jobs/{running}")
    for verb, title in (("cancel", "Cancel acted?"), ("amend", "Change acted")):
        button = page.locator(".actions").get_by_role("button", name=verb, exact=True)
        button.press("Enter")
        opened(page, title)
        leave(page)
        expect(button).to_be_focused()
    for replicas in (2, 1):
        page.locator(".actions").get_by_role("button", name="scale").click()
        dialog = opened(page, "Scale workers")
        dialog.get_by_label("Service").select_option("rollout")
        dialog.get_by_label("Workers").fill(str(replicas))
        dialog.get_by_role("button", name="Scale").click()
        stack.until(lambda: ("rollout-1" in stack.stack.processes) == (replicas == 2), f"{replicas} workers")  # noqa: B023
    assert stack.status(running).phase == "running"


def test_the_page_shows_what_a_worker_waits_for(stack: Any, page: Page, enter: Any) -> None:
    """A trainer gets no batch because a scorer hangs: the table and the strip of the trainer show the reason."""
    reward = {"scorers": [{"type": "function", "path": "e2e_scorers:hangs"}], "timeout_s": 600, "processes": 1}
    job = stack.submit(name="waiting", reward=reward)

    def wait() -> str:
        rows = {row["service"]: row for row in stack.client.workers(job)}
        return str(rows.get("trainer", {}).get("waiting_for") or "")

    stack.until(wait, "the trainer waits", 90)
    enter(page, stack, where=f"#/jobs/{job}/workers")
    cell = page.locator("tr[data-key=trainer-0] td[data-label='waits for']")
    expect(cell).to_have_text(re.compile("."))
    reason = wait()
    expect(cell).to_have_text(reason)
    general = re.sub(r"(?<=[ (])\d[\d.]*", "…", reason)
    strip = page.locator(".strip[data-key=trainer-0]:has(.span)")
    expect(strip.locator(".strip-text")).to_have_text(
        re.compile(rf"^busy \d+ %, .*waiting for {re.escape(general)} \d+ %")
    )
    expect(
        strip.get_by_role("img", name=re.compile(f"^trainer-0: busy .*waiting for {re.escape(general)}"))
    ).to_be_visible()
    spans = strip.locator(".span.waiting")
    expect(spans.last).to_have_attribute("title", re.compile(rf"^waiting, for {re.escape(reason)}: \d+ s"))
    stack.client.cancel(job, force=True)
    stack.finish(job)


def test_logs_show_the_lines_of_the_services(stack: Any, page: Page, enter: Any, running: str) -> None:
    lines = stack.client.logs(running, service="trainer", tail=400)["lines"]
    texts = [json.loads(line["text"])["message"] for line in lines if line["text"].startswith("{")]
    wanted = next(text for text in texts if running in text)
    enter(page, stack, where=f"#/jobs/{running}/events")
    logs = page.get_by_role("region", name="Lines of the logs, newest first")
    page.get_by_label("Service").select_option("trainer")
    line = logs.locator("div").filter(has_text=wanted).first
    expect(line).to_contain_text(f" trainer-0: {wanted}")
    assert all(" trainer-" in text for text in logs.locator("div").all_inner_texts())
    page.get_by_label("Level").select_option("error")
    expect(line).to_have_count(0)


def test_keys_are_created_and_revoked(stack: Any, page: Page, enter: Any) -> None:
    enter(page, stack, where="#/deployment/keys")
    page.get_by_role("button", name="Make a key").click()
    dialog = opened(page, "Make a key")
    dialog.get_by_label("Name", exact=True).fill("reader")
    dialog.get_by_role("button", name="Make it").click()
    dialog = opened(page, "The key, shown this once")
    key = dialog.locator("pre").inner_text()
    dialog.get_by_role("button", name="I have stored it").click()
    row = page.get_by_role("table", name="Keys").locator("tbody tr")
    expect(row).to_contain_text("jobs:read, metrics:read")
    with httpx.Client(base_url=stack.stack.url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http:
        assert http.get("/v1/jobs").status_code == 200
        assert http.post("/v1/jobs", json={}).status_code == 403, "it may only read"
        page.get_by_role("button", name="Revoke reader").click()
        opened(page, "Revoke reader?").get_by_role("button", name="Revoke").click()
        page.get_by_text("None but those of the configuration.").wait_for()
        stack.until(lambda: http.get("/v1/jobs").status_code == 401, "it is refused")


def test_the_audit_log_is_filtered_by_key_and_job(stack: Any, page: Page, enter: Any, running: str) -> None:
    made = stack.client.keys.create("filtered", ["jobs:read", "jobs:write"])
    with Client(stack.stack.url, api_key=made.key) as client:
        client.resume(running)
    stack.client.resume(running)
    enter(page, stack, where="#/deployment/audit")
    rows = page.get_by_role("table", name="Requests that changed something").locator("tbody tr")
    key, job = page.get_by_label("Id of a key"), page.get_by_label("Id of a job")
    creations, others = rows.filter(has_text="POST /v1/keys"), rows.filter(has_not_text="filtered")
    expect(creations.first).to_be_visible()
    job.fill(running)
    job.press("Enter")
    expect(creations).to_have_count(0)
    expect(others.first).to_be_visible()
    links = [link.get_attribute("href") for link in rows.locator("td[data-label=job] a").all()]
    assert links == [f"#/jobs/{running}"] * rows.count(), "each request is about this job"
    key.fill(made.id)
    key.press("Enter")
    expect(others).to_have_count(0)
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("/resume")
    job.fill("")
    job.press("Enter")
    expect(rows).to_have_count(1)
    key.fill("nobody")
    key.press("Enter")
    page.get_by_text("None yet.").wait_for()
    key.fill("")
    key.press("Enter")
    expect(creations.first).to_be_visible()
    stack.client.keys.revoke(made.id)


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Address of a server that accepts webhooks, and the list of the bodies that it received."""
    sent: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", sent
    server.shutdown()
    server.server_close()
    serving.join()


def test_webhooks_are_added_tested_and_forgotten(stack: Any, page: Page, enter: Any, receiver: Any) -> None:
    url, sent = receiver
    enter(page, stack, where="#/deployment/webhooks")
    page.get_by_role("button", name="Add a webhook").click()
    dialog = opened(page, "Add a webhook")
    dialog.get_by_label("Address").fill(url)
    dialog.get_by_label("Description").fill("for the tests")
    dialog.get_by_role("button", name="Add it").click()
    opened(page, "Its secret, shown this once").get_by_role("button", name="I have stored it").click()
    row = page.get_by_role("table", name="Webhooks").locator("tbody tr")
    expect(row).to_contain_text(f"{url}for the tests")
    row.get_by_role("button", name="test").click()
    page.get_by_text("The receiver took the test.").wait_for()
    assert len(sent) == 1
    row.get_by_role("button", name="switch off").click()
    expect(row.locator("td[data-label=state]")).to_contain_text("off")
    assert [hook.enabled for hook in stack.client.webhooks.list()] == [False]
    row.get_by_role("button", name="forget").click()
    opened(page, "Forget this webhook?").get_by_role("button", name="Forget").click()
    page.get_by_text("None: events are posted nowhere.").wait_for()
    assert list(stack.client.webhooks.list()) == []


def test_dead_letters_are_shown_replayed_and_forgotten(stack: Any, page: Page, enter: Any, running: str) -> None:
    """The user forgets a dead letter that cannot be decoded, and replays one of a draw, whose prompt is drawn again."""
    reason = {"Penstock-Stream": subjects.TICKETS, "Penstock-Attempts": "3", "Penstock-Reason": "max deliveries"}
    of_draw = {**reason, "Penstock-Sequence": "9", DRAW_HEADER: "0.0"}
    stack.on_bus(lambda bus: bus.publish(subjects.experience(running), b"x", headers={"Penstock-Group": "[1"}))
    stack.until(lambda: stack.client.dead_letters.list(running), "the dead letter of the job")
    stack.on_bus(lambda bus: bus.publish(subjects.dead(running), b"abc", headers=of_draw))
    undecodable, drawn = stack.client.dead_letters.list(running)
    enter(page, stack, where=f"#/jobs/{running}/events")
    table = page.get_by_role("table", name="Dead letters")
    row = table.locator(f"tr[data-key='{undecodable.id}']")
    expect(row).to_contain_text("undecodable: Penstock-Group header does not decode")
    row.get_by_role("button", name="show").click()
    dialog = opened(page, f"Dead letter {undecodable.id}")
    assert json.loads(dialog.locator("pre").inner_text())["content"] == "x"
    dialog.get_by_role("button", name="Close").click()
    row.get_by_role("button", name="forget").click()
    expect(row).to_have_count(0)
    assert [one.id for one in stack.client.dead_letters.list(running)] == [drawn.id]

    table.locator(f"tr[data-key='{drawn.id}']").get_by_role("button", name="replay").click()
    page.get_by_text(f"Dead letter {drawn.id}: replay is asked for.").wait_for()
    expect(table.locator(f"tr[data-key='{drawn.id}']")).to_have_count(0)
    assert operation(stack, running, "replay_dead_letter").state == "succeeded"
    assert [event.letter for event in stack.ledger(running) if isinstance(event, Redrawn)] == [drawn.id]


def test_episodes_are_opened_and_their_turns_shown(stack: Any, page: Page, enter: Any, live: str) -> None:
    episode = stack.client.episodes.open(live)
    turn = {"model": live, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=90) as http:
        answer = stack.until(lambda: answered(http, f"{episode.base_url}/chat/completions", turn), "an answer", 90)
    enter(page, stack, where=f"#/jobs/{live}/feedback")
    row = page.get_by_role("table", name="Episodes").locator(f"tr[data-key='{episode.id}']")
    expect(row).to_contain_text("open")
    page.get_by_role("button", name=f"Turns of {episode.id}").click()
    dialog = opened(page, "Turns of the episode")
    expect(dialog.locator("li")).to_have_count(1)
    text = answer["choices"][0]["message"]["content"]
    assert dialog.locator("pre").text_content() == (text or "(empty)")
    assert dialog.locator("li").inner_text().startswith("turn 1: ")
    dialog.get_by_role("button", name="Close").click()
    stack.client.episodes.end(episode.id)
    expect(row).to_contain_text("ended")


def answered(http: httpx.Client, url: str, body: dict[str, Any]) -> Any:
    """Return the reply of a served model; None until there is one."""
    try:
        reply = http.post(url, json=body)
    except httpx.TransportError:
        return None
    return reply.json() if reply.is_success else None


def test_quarantined_feedback_is_released_and_dropped(stack: Any, page: Page, enter: Any, live: str) -> None:
    """The user releases one outlier in the view of the job, and drops the other one in the view of all jobs."""
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=90) as http:
        url, body = f"{stack.stack.url}/v1/completions", {"model": live, "prompt": "1+2="}
        asked = [stack.until(lambda: answered(http, url, body), "an answer", 90)["id"] for _ in range(2)]
    for number in range(12):
        stack.client.feedback("score", 0.01 * (-1) ** number, inference=new_marked_id(live))
    outliers = [stack.client.feedback("score", 1.0, inference=one).feedback_id for one in asked]

    def status(feedback: str) -> str:
        return str(stack.client.feedback_status(feedback).status)

    stack.until(lambda: [status(one) for one in outliers] == ["quarantined"] * 2, "both are quarantined")
    enter(page, stack, where=f"#/jobs/{live}/feedback")
    rows = page.get_by_role("table", name="Feedback that is held back").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("outlier: 1 is ")
    page.locator(f"tr[data-key='{outliers[0]}']").get_by_role("button", name="release").click()
    page.get_by_text("Feedback: release is on disk.").wait_for()
    expect(rows).to_have_count(1)
    page.goto(f"{stack.stack.url}/#/deployment/quarantine")
    row = page.locator(f"tr[data-key='{outliers[1]}']")  # other items may be quarantined, too
    row.get_by_role("button", name="drop").click()
    expect(row).to_have_count(0)
    stack.until(
        lambda: status(outliers[0]) in ("matched", "admitted", "trained"), "a release", 60, lambda: status(outliers[0])
    )
    stack.until(lambda: status(outliers[1]) == "rejected", "a drop", 60, lambda: status(outliers[1]))


SHOWN = {"jobs": "Jobs", "overview": "Conditions", "workers": "Services", "checkpoints": "Checkpoints",
         "audit": "Requests that changed something"}  # fmt: skip
"""Table that a view always has, whatever its job does; other tables appear only with content."""


def test_the_screenshots_of_the_manual_are_current(stack: Any, page: Page, enter: Any, running: str, live: str) -> None:
    """Tabs, headings, fields, buttons and columns are the same as when the screenshots were taken."""
    pictures = screenshots()
    recorded = json.loads((pictures.FOLDER / "structure.json").read_text())
    assert recorded.keys() == pictures.VIEWS.keys()
    jobs, names = {"job": running, "other": live, "live": live}, ["acted", "judged"]
    stack.client.feedback("score", 0.0, inference=new_marked_id(live))
    enter(page, stack)
    for size, viewport in pictures.SIZES.items():
        page.set_viewport_size(viewport)
        for view in pictures.VIEWS:
            pictures.visit(page, stack.stack.url, view, jobs)
            for scheme in ("light", "dark"):
                assert (pictures.FOLDER / f"{view}-{size}-{scheme}.png").is_file()
            expected = recorded[view][size]

            def differs(expected: Any = expected, view: str = view) -> dict[str, Any]:
                return differences(expected, pictures.structure_of(page, names), SHOWN.get(view))

            what = f"{view} on a {size}: run `make screenshots` if the page was changed on purpose"
            stack.until(lambda: not differs(), what, 60, differs)


def screenshots() -> Any:
    """Load the program that takes the screenshots of the manual."""
    spec = importlib.util.spec_from_file_location("screenshots", ROOT / "docs" / "screenshots.py")
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


def differences(recorded: dict[str, Any], found: dict[str, Any], table: str | None) -> dict[str, Any]:
    """Return the parts of a view that differ from its screenshot; compare the tables that both have."""
    parts = {name: (recorded[name], found[name]) for name in ("tabs", "headings", "fields", "buttons")}
    shared = recorded["tables"].keys() & found["tables"].keys()
    parts |= {name: (recorded["tables"][name], found["tables"][name]) for name in shared}
    if table is not None and table not in shared:
        parts[table] = ("there", "not there")
    return {name: (before, now) for name, (before, now) in parts.items() if before != now}


def test_the_key_dialog_and_the_page_of_the_api_are_accessible(stack: Any, page: Page) -> None:
    """axe-core finds no violation. Nothing is wider than the screen of a phone, with every operation unfolded."""
    page.goto(stack.stack.url)
    opened(page, "API key")
    for width, scheme in ((1440, "light"), (390, "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.goto(f"{stack.stack.url}/docs")
        page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
        flawless(page, schemes=(scheme,))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert "`" not in page.inner_text("main"), "code is rendered as code"
