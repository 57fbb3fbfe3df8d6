"""The web page of a real deployment in a real browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from playwright.sync_api import Page, expect

from penstock.client import Client
from penstock.shared.errors import NotFound
from penstock.shared.protocol import subjects
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.protocol.live.interaction import new_marked_id
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.message import Outgoing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(180)]

WAIT_MS = 60_000
KEY = "e2e-key"
DESKTOP, PHONE = {"width": 1440, "height": 1000}, {"width": 390, "height": 844}
ROBOT = {
    "kind": "embodied",
    "name": "filmed",
    "environment": {"task": "CartPole-v1", "horizon": 100, "num_envs": 4, "bytes_per_step": 256},
    "policy": {"type": "categorical", "hidden_sizes": [16]},
    "train": {"batch_size": 8, "max_updates": 2},
    "evaluation": {"episodes": 2, "videos": 1},
    "limits": {"byte_budget": 4 << 20},
}
LIVE = {
    "kind": "online_rl",
    "sampling": {"max_new_tokens": 6},
    "train": {"batch_size": 8, "max_lag": 4},
    "algorithm": {"type": "reinforce_pp"},
    "online": {"metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 1},
}
LONG = ["train.max_updates=20000", "checkpoint.every=20000"]
"""Changes that make a job so long that only the test ends it, however fast the machine is."""

CELLS = "(table) => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.innerText))"
"""Program that returns the texts of the cells of a table, by row."""


@pytest.fixture(scope="module")
def brief(stack: Any) -> str:
    """Id of a job of two updates that has ended."""
    job: str = stack.submit("train.max_updates=2", name="brief", metadata={"owner": "ana"})
    assert stack.finish(job).status.phase == "succeeded"
    return job


def test_a_job_can_be_watched_and_cancelled(stack: Any, page: Page, enter: Any) -> None:
    hosts = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    job = stack.submit(*LONG, name="watched")
    enter(page, stack)
    page.get_by_role("link", name="watched").click()
    page.wait_for_selector(".chart canvas >> visible=true")
    expect(page).to_have_title("watched · Penstock")
    assert page.inner_text("h1") == "watched"
    for queue in ("tickets", "groups", "batches"):
        expect(page.locator(f".figures div:has(dt:text-is('{queue} queued')) dd")).to_have_text(re.compile(r"^\d+$"))
    expect(page.get_by_label(re.compile("^Reward, by policy update. Newest: reward/mean"))).to_be_visible()

    page.locator(".actions").get_by_role("button", name="cancel").focus()
    page.evaluate("document.activeElement.marked = true")
    step = page.locator(".figures dd").first
    for _ in range(2):  # the page is redrawn twice, and keeps the focus and its element
        before = step.inner_text()
        expect(step).not_to_have_text(before, timeout=WAIT_MS)
    assert page.evaluate("document.activeElement.marked && document.activeElement.textContent") == "cancel"

    page.get_by_role("link", name="Workers").click()
    services = page.get_by_role("region", name="Services").locator("tbody td:first-child")
    expect(services.filter(has_text="trainer")).to_have_count(1)
    assert {"coordinator", "rollout", "reward", "trainer"} <= set(services.all_inner_texts())
    page.get_by_label(re.compile("^rollout-0: busy")).wait_for()
    expect(page.locator(".strip[data-key=rollout-0] .strip-text")).to_have_text(re.compile(r"^busy \d+ %"))
    page.get_by_label(re.compile(r"^trainer-0: update .* of \d+ ")).wait_for()
    page.get_by_label(re.compile(r"^Update \d+: generate .* s, ")).first.wait_for()
    page.get_by_role("link", name="Events and logs").click()
    page.get_by_role("log").get_by_text("first policy update done").wait_for()

    page.locator(".actions").get_by_role("button", name="cancel").press("Enter")
    page.get_by_role("button", name="Cancel the job").press("Enter")
    page.wait_for_selector(".phase.cancelled")
    assert stack.finish(job).status.phase == "cancelled"
    assert hosts == {stack.stack.url.split("/")[2]}, "everything came from the coordinator"


@pytest.mark.long
def test_the_list_of_events_of_an_ended_job_is_complete(stack: Any, page: Page, enter: Any, brief: str) -> None:
    """The page shows each event once and then a last line, and opens no further connection."""
    connections: list[str] = []
    page.on("request", lambda request: connections.append(request.url) if request.url.endswith("/events") else None)
    enter(page, stack, where=f"#/jobs/{brief}/events")
    log = page.get_by_role("log")
    log.get_by_text("The job is over: no event follows.").wait_for()
    rows = log.locator("div").all_inner_texts()
    assert len(rows) == 1 + len(list(stack.client.events(brief)))
    assert not any("undefined" in row or "NaN" in row for row in rows)
    page.wait_for_timeout(3000)  # three times as long as the page waits before it connects again
    assert log.locator("div").count() == len(rows)
    assert len(connections) == 1, connections


@pytest.mark.long
def test_warnings_of_a_job_stand_first(stack: Any, page: Page, enter: Any) -> None:
    never = {"scorers": [{"type": "format", "pattern": "never"}], "processes": 1}
    job = stack.submit(name="unwell", reward=never)
    assert stack.finish(job).status.phase == "succeeded"
    enter(page, stack)
    expect(page.locator(f"tr[data-key={job}] .warns").filter(has_text="no signal")).to_have_text("⚠ no signal")
    page.get_by_role("link", name="unwell").click()
    warned = page.locator(".panel.warned")
    expect(warned.get_by_role("heading")).to_have_text("Warnings")
    expect(warned.locator("li[data-key=no_signal]")).to_contain_text("of the last 8 updates teach nothing")


def test_a_key_is_asked_for_once(stack: Any, page: Page, enter: Any) -> None:
    """The page asks again after a wrong key. Other tabs use a valid key, too, until the user removes it in one."""
    enter(page, stack, "wrong")
    page.wait_for_selector("#ask-key[open]")
    assert page.locator("table").count() == 0
    page.fill("#key-text", KEY)
    page.keyboard.press("Enter")
    page.get_by_role("status").filter(has_text="jobs").first.wait_for()
    other = page.context.new_page()
    other.goto(f"{stack.stack.url}/#/deployment/health")
    other.get_by_role("table", name="Health").wait_for()
    assert not other.locator("#ask-key").is_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""], "the browser stores the key in no file"
    other.click("#key")
    other.fill("#key-text", "")
    other.get_by_role("button", name="Use").click()
    page.wait_for_selector("#ask-key[open]")
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_jobs_are_found_compared_and_distinguished_on_a_phone(stack: Any, page: Page, enter: Any, brief: str) -> None:
    reward = {"scorers": [{"type": "function", "path": "e2e_scorers:raises_markup"}], "timeout_s": 5.0}
    labels = {"owner": "ben", "purpose": "to-see-what-a-page-makes-of-it"}
    broken = stack.submit("train.max_updates=5", name="marked", reward=reward, metadata=labels)
    left = stack.submit(*LONG, name="a-name-as-long-as-names-may-be-and-nobody-would-ever-type-again")
    stack.client.cancel(left, force=True)
    assert stack.finish(broken).status.phase == "failed"
    assert "<img" in stack.status(broken).message
    stack.finish(left)
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    enter(page, stack)
    rows = page.locator("table.jobs tbody tr")
    rows.filter(has_text="marked").wait_for()
    heights = rows.evaluate_all("rows => rows.map((row) => row.clientHeight)")
    assert max(heights) <= 124, "a row is a card, however long its name, message and labels are"
    rows.filter(has_text="brief").get_by_role("img", name="Reward of brief, from").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    colours = {name: page.locator(f".phase.{name}").first.evaluate("(one) => getComputedStyle(one).color")
               for name in ("failed", "cancelled", "succeeded")}  # fmt: skip
    assert len(set(colours.values())) == 3, colours

    page.get_by_label("State").select_option("failed")
    expect(rows.filter(has_text="brief")).to_have_count(0)
    page.get_by_label("State").select_option("")
    page.get_by_label("Label").fill("owner=ana")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("owner=ana")
    page.reload()
    expect(rows).to_have_count(1, timeout=WAIT_MS)  # the address holds the filters
    rows.get_by_role("link", name="brief").click()
    page.locator(".title a.label").click()
    expect(rows).to_have_count(1)
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_label("Label")).to_have_value("")
    page.get_by_label("Compare brief").check()
    page.get_by_label("Compare marked").check()
    page.get_by_role("link", name="Compare 2 jobs").click()
    expect(page).to_have_title("Compare jobs · Penstock")
    page.get_by_label(re.compile("^reward/mean, by policy update. Newest: brief")).wait_for()

    page.goto(f"{stack.stack.url}/#/jobs/{broken}")
    page.wait_for_selector("p.problem >> text=<img src=x")
    assert page.locator("main img").count() == 0, "text of users stays text"
    assert page.evaluate("window.attacked") is None


@pytest.mark.long
def test_the_status_of_feedback_is_shown(stack: Any, page: Page, enter: Any, make_job: Any) -> None:
    """Three items of feedback, one of them retracted, give one bar for each status, as long as its share."""
    spec = {**make_job(name="judged"), **LIVE}
    job = stack.client.submit({name: part for name, part in spec.items() if name not in ("data", "reward")}).id
    stack.until(lambda: stack.status(job).phase == "running", "the job runs")
    enter(page, stack, where=f"#/jobs/{job}/feedback")
    page.get_by_text("None yet: POST /feedback.").wait_for()

    unknown = [new_marked_id(job) for _ in range(3)]
    feedback = [stack.client.feedback("liked", True, inference=inference).feedback_id for inference in unknown]
    page.get_by_text("3 items").wait_for()
    rows = page.get_by_role("table", name="Feedback by status").locator("tr")
    assert [row.split() for row in rows.all_inner_texts()] == [["received", "3"]], "they wait for unknown answers"
    stack.client.retract(feedback[0])
    expect(rows).to_have_count(2, timeout=WAIT_MS)
    assert sorted(row.split() for row in rows.all_inner_texts()) == [["received", "2"], ["retracted", "1"]]
    room, *bars = [
        rows.locator(where).bounding_box()["width"]  # type: ignore[index]
        for where in ("td.wide >> nth=0", ".bar >> nth=0", ".bar >> nth=1")
    ]
    assert bars[0] == pytest.approx(2 * bars[1], abs=2)
    assert 0 < bars[0] < room
    page.get_by_text("Nothing is held back.").wait_for()
    page.get_by_text("None was opened.").wait_for()
    for scheme, size in SIZES.items():
        page.set_viewport_size(size)  # type: ignore[arg-type]
        examine(page, scheme, ["judged", *FEEDBACK])
    stack.client.cancel(job, force=True)
    stack.finish(job)


@pytest.mark.long
def test_feedback_and_answers_are_counted(stack: Any, page: Page, enter: Any, make_job: Any) -> None:
    """Two keys judge three answers, and answers that do not exist; an episode ends without feedback on its answer.

    An answer waits for `liked`, which the job declares, but not for `reward`. The batch never fills.
    """
    online = {"metrics": {"liked": {"type": "boolean"}}, "max_wait_s": 600}
    spec = {**make_job(name="counted"), **LIVE, "online": online}
    job = stack.client.submit({name: part for name, part in spec.items() if name not in ("data", "reward")}).id
    body = {"model": job, "messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}, timeout=90) as http:

        def answer(base_url: str) -> str:
            reply = stack.until(
                lambda: (found := http.post(f"{base_url}/chat/completions", json=body)).is_success and found.json(),
                "an answer", 90, lambda: stack.client.why(job),
            )  # fmt: skip
            return str(reply["id"])

        good, bad, undecided = (answer(f"{stack.stack.url}/v1") for _ in range(3))
        episode = stack.client.episodes.open(job)
        answer(episode.base_url)
    stack.client.episodes.end(episode.id)
    ada, ben = (stack.client.keys.create(name, ["feedback:write"]) for name in ("ada", "ben"))
    with Client(stack.stack.url, api_key=ada.key) as client:
        client.feedback("liked", True, inference=good)
        client.feedback("liked", False, inference=bad)
        client.feedback("liked", True, inference=new_marked_id(job))
        withdrawn = client.feedback("liked", True, inference=new_marked_id(job)).feedback_id
    with Client(stack.stack.url, api_key=ben.key) as client:
        client.feedback("reward", 0.5, inference=undecided)
    stack.client.retract(withdrawn)
    expected = {
        "Feedback by metric and source": [
            ["liked", ada.id, "admitted", "2"], ["liked", ada.id, "received", "1"], ["liked", ada.id, "retracted", "1"],
            ["reward", ben.id, "matched", "1"],
        ],
        "What became of the answers": [["admitted", "feedback", "2"], ["rejected", "no_feedback", "1"]],
    }  # fmt: skip
    enter(page, stack, where=f"#/jobs/{job}/feedback")

    def shown() -> dict[str, list[list[str]]]:
        return {name: sorted(page.get_by_role("table", name=name).evaluate(CELLS)) for name in expected}

    stack.until(lambda: shown() == expected, "the rows of both tables", 60, shown)
    for made in (ada, ben):
        stack.client.keys.revoke(made.id)
    stack.client.cancel(job, force=True)
    stack.finish(job)


@pytest.mark.long
def test_videos_of_held_out_episodes_are_played(stack: Any, page: Page, enter: Any, tmp_path: Path) -> None:
    """Videos reach the list, a player by ranges, the command line and the page; deleting the job deletes them."""
    job = stack.client.submit(ROBOT).id
    assert stack.finish(job).status.phase == "succeeded"
    videos = f"/v1/jobs/{job}/videos"
    stack.until(lambda: [row["version"] for row in stack.client.videos(job)] == [0, 2], "both films are there")
    first = stack.client.videos(job)[0]
    assert (first["name"], first["error"], first["href"]) == ("0-1000000.mp4", "", f"{videos}/0-1000000.mp4")
    assert first["steps"] == first["reward"] > 0, "CartPole pays 1 a step"
    with httpx.Client(base_url=stack.stack.url, headers={"Authorization": "Bearer e2e-key"}) as http:
        whole = http.get(first["href"])
        assert (whole.status_code, whole.headers["content-type"]) == (200, "video/mp4")
        part = http.get(first["href"], headers={"Range": "bytes=4-7"})
        assert (part.status_code, part.content) == (206, b"ftyp")
        assert part.headers["content-range"] == f"bytes 4-7/{len(whole.content)}"
        assert http.get(first["href"], headers={"Range": "bytes=9999999-"}).status_code == 416
        assert http.get(f"{videos}/7-7.mp4").status_code == 404
        shown = http.get(f"/v1/jobs/{job}/samples").json()
        assert first["href"] in shown["videos"]
        held_out = shown["held_out"]
        assert (held_out["step"], held_out["version"], held_out["values"]["eval/success"]) == (2, 2, None)
        assert held_out["values"]["eval/length"] == held_out["values"]["eval/return"] > 0, "over two episodes"
        assert httpx.get(f"{stack.stack.url}{first['href']}").status_code == 401, "without a key no video is shown"
    assert stack.cli("videos", job, "--to", str(tmp_path)).exit_code == 0
    assert (tmp_path / "filmed-0-1000000.mp4").read_bytes() == whole.content

    length = f"eval/length {held_out['values']['eval/length']:.4g}"
    assert length in " ".join(stack.cli("samples", job).output.split())

    enter(page, stack, "e2e-key")
    page.goto(f"{stack.stack.url}/#/jobs/{job}")
    curve = page.locator("canvas[aria-label^='Episode length (actions), by policy update']")
    expect(curve).to_have_attribute("aria-label", re.compile(f"{length.replace('eval', '; eval')} at update 2$"))
    expect(page.locator("canvas[aria-label^='Success']"), "CartPole reports no success").to_have_count(0)
    page.goto(f"{stack.stack.url}/#/jobs/{job}/videos")
    films = page.locator(".videos video")
    expect(films).to_have_count(2, timeout=WAIT_MS)
    expect(films.first).to_have_js_property("readyState", 4, timeout=WAIT_MS)
    assert page.evaluate("document.querySelector('.videos video').duration") > 1
    page.set_viewport_size(PHONE)  # type: ignore[arg-type]
    examine(page, "dark", ["filmed"], also="light")

    stack.client.delete(job)
    with pytest.raises(NotFound):
        stack.client.videos(job)


VIEWS = {
    "#/": ("table.jobs", ["Jobs"]),
    "#/jobs/{job}": (
        ".chart canvas",
        ["brief", "Now", "Waits for", "Curves", "Lag of trained groups", "Dropped draws", "Conditions"],
    ),
    "#/jobs/{job}/metrics": (".chart canvas", ["brief", "reward", "mismatch", "lag", "policy"]),
    "#/jobs/{job}/samples": (
        ".tokens .token",
        ["brief", "Completion", "Reward", "Token by token", "Its group"],
    ),
    "#/jobs/{job}/workers": (
        ".span.train",
        ["brief", "Services", "Busy and waiting", "Time of the trainer", "Stages of the newest updates"],
    ),
    "#/jobs/{job}/checkpoints": ("td .label:text('final')", ["brief", "Checkpoints"]),
    "#/jobs/{job}/events": (".log .info", ["brief", "Events", "Logs", "Dead letters"]),
    "#/jobs/{job}/file": ("pre.code", ["brief", "Job file", "Operations"]),
    "#/submit?from={job}": ("textarea", ["Clone a job"]),
    "#/deployment/keys": (":text('None but those of the configuration.')", ["Deployment", "Keys"]),
    "#/compare?jobs={job}": (".chart canvas", ["Compare jobs", "reward"]),
    "#/deployment/webhooks": ("button:text('Add a webhook')", ["Deployment", "Webhooks"]),
    "#/deployment/quarantine": (":text('unlike what its source')", ["Deployment", "Held back"]),
    "#/deployment/files": ("section.panel", ["Deployment", "Data sets"]),
    "#/deployment/audit": ("td code:text-matches('^(POST|PUT|PATCH|DELETE) /')", ["Deployment", "Audit log"]),
    "#/deployment/health": ("table[aria-label=Limits]", ["Deployment", "Health", "Limits"]),
}
"""For every view of ``brief``: an element that only the complete view has, and its first headings."""
FEEDBACK = ["Feedback", "What is served", "Answers", "By metric and source", "Held back", "Episodes"]
"""Headings of the feedback view, which only jobs of kind ``online_rl`` have."""
AXE = Path(__file__).with_name("axe") / "axe.min.js"
SIZES = {"light": DESKTOP, "dark": PHONE}
"""Screen sizes on which axe-core tries every rule. In the other scheme of a size it tries rules on colours."""
EVERY_RULE: dict[str, Any] = {"resultTypes": ["violations"]}
COLOURS = {**EVERY_RULE, "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
EXAMINED = """async (rules) => {
  const { violations, passes } = await axe.run(rules);
  return {
    broken: violations.map(({ id, nodes }) => [id, nodes.slice(0, 3).map(({ html }) => html.slice(0, 200))]),
    passed: passes.length,
    width: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor,
  };
}"""


def examine(page: Page, own: str, headings: list[str], *, also: str = "", rules: bool = True) -> dict[str, str]:
    """Check the view that a page shows; return the colour of the background by colour scheme.

    The view begins with ``headings``, nothing is wider than the screen, and axe-core finds no violation. axe-core tries
    every rule in the scheme ``own``, which the page has afterwards (unless ``rules`` is False), and rules on colours in
    the scheme ``also``.
    """
    if not page.evaluate("'axe' in window"):  # half a megabyte: once for a document, not once for a view
        page.evaluate(f"(() => {{ {AXE.read_text()} }})()")
    assert page.viewport_size is not None
    backgrounds = {}
    for scheme in filter(None, (also, own)):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        if scheme == own and not rules:
            continue
        where = (page.url, page.viewport_size, scheme)
        found = page.locator("main :is(h1, h2):visible").all_inner_texts()
        shown = [heading for heading in found if heading != "Warnings"]  # a job this small may have some
        assert shown[: len(headings)] == headings, where
        seen = page.evaluate(EXAMINED, EVERY_RULE if scheme == own else COLOURS)
        assert seen["broken"] == [], where
        assert seen["passed"] > 0, "axe-core tried something"
        assert seen["width"] <= page.viewport_size["width"], where
        backgrounds[scheme] = seen["background"]
    return backgrounds


@pytest.mark.long
@pytest.mark.parametrize("every", [False, True])
def test_views_are_accessible(stack: Any, page: Page, enter: Any, brief: str, every: bool) -> None:
    """axe-core finds no violation. Each view is loaded at one width in one scheme; with ``every``, at both.

    With ``every`` the colours of both schemes are checked, and rules that the other case tries are not tried again.
    """
    enter(page, stack, where="#/deployment/files")
    titles, backgrounds = set(), set()
    for scheme, size in SIZES.items():
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size(size)  # type: ignore[arg-type]
        for number, (view, (sign, headings)) in enumerate(VIEWS.items()):
            quick = number % 2 != (scheme == "dark")
            if not every and not quick:
                continue
            page.goto(f"{stack.stack.url}/{view.format(job=brief)}")  # another view of the loaded document
            page.wait_for_selector(f"main {sign} >> visible=true")
            titles.add(page.title())
            also = "".join(SIZES.keys() - {scheme}) if every else ""
            rules = not (every and quick)
            backgrounds |= set(examine(page, scheme, headings, also=also, rules=rules).items())
    assert len(titles) == len(VIEWS), titles
    assert len(backgrounds) == len({colour for _, colour in backgrounds}) == len(SIZES), "each scheme has its own"


@pytest.mark.long
def test_a_checkpoint_is_served_from_the_page(stack: Any, page: Page, enter: Any, brief: str) -> None:
    enter(page, stack, where=f"#/jobs/{brief}/checkpoints")
    page.get_by_role("button", name=re.compile("^Serve checkpoint")).first.click()
    page.get_by_label("Name of the model").fill("from-the-page")
    page.get_by_role("dialog").get_by_role("button", name="Serve", exact=True).click()
    page.get_by_text("Serving 'from-the-page' is asked for.").wait_for()
    record = stack.client.find("from-the-page")
    assert (record.kind, record.origin.job) == ("serving", brief)
    stack.client.cancel(record.id)
    assert stack.finish(record.id).status.phase == "cancelled"


def test_samples_are_read_token_by_token(stack: Any, page: Page, enter: Any, brief: str) -> None:
    enter(page, stack, where=f"#/jobs/{brief}/samples")
    tokens = page.locator(".tokens .token")
    tokens.first.wait_for()
    chosen = page.url.rsplit("/", 1)[1]
    detail = stack.client.sample(brief, chosen)
    assert tokens.evaluate_all("all => all.map((one) => one.textContent)") == detail.token_texts
    first = detail.token_texts[0]
    assert first
    assert detail.completion.startswith(first)
    expect(tokens.first).to_have_attribute("title", re.compile(f"log-prob {detail.logprobs[0]:.3f}, prob.*, version "))
    page.get_by_label("Colour by").select_option("version")
    page.get_by_text(re.compile("One version, [01], chose every token.")).wait_for()
    page.get_by_role("button", name="compare", exact=True).first.click()
    page.get_by_role("region", name="Difference").wait_for()
    compared = page.get_by_role("table", name="The two compared").locator("tr").filter(has_text="reward")
    assert compared.locator("td").nth(1).inner_text() == f"{detail.reward:g}"
    tokens.first.click()  # a screen reader can read what hovering shows
    for index, key in enumerate(("", "ArrowRight", "End", "ArrowRight", "Home", "ArrowLeft")):
        if key:
            page.get_by_role("region", name=re.compile("^Tokens")).press(key)
        place = [0, 1, -1, -1, 0, 0][index] % len(detail.token_ids)
        expect(page.locator(".reading")).to_have_text(
            re.compile(rf"^Token {place + 1} of .* log-prob {detail.logprobs[place]:.3f}, probability .* %, version ")
        )
    page.get_by_label("Search in what is loaded").fill("no completion says this")
    page.get_by_text("No loaded completion holds this text.").wait_for()


@pytest.mark.long
def test_older_completions_are_searched(stack: Any, page: Page, enter: Any) -> None:
    """If no loaded completion holds a text, the user can search the older completions."""
    job = stack.submit("train.max_updates=5", "checkpoint.every=20000", name="searched")
    assert stack.finish(job).status.phase == "succeeded"
    rows = list(stack.client.samples(job, limit=100))
    late, early = {row.prompt for row in rows[:50]}, [row.prompt for row in rows[50:]]
    wanted = next((prompt for prompt in early if not any(prompt in one for one in late)), None)
    assert wanted is not None, "a hundred sums, few of which came twice"
    enter(page, stack, where=f"#/jobs/{job}/samples")
    page.locator(".samples li").first.wait_for()
    page.get_by_label("Search in what is loaded").fill(wanted)
    page.get_by_text("No loaded completion holds this text.").wait_for()
    page.get_by_role("button", name="Search older ones").click()
    expect(page.locator(".sample-list .clip").filter(has_text=wanted).first).to_be_visible()


@pytest.mark.long
def test_a_job_file_is_dry_run_and_submitted(stack: Any, page: Page, enter: Any, brief: str) -> None:
    """A clone keeps every value of its file; a dry run names the key of a mistake."""
    enter(page, stack, where=f"#/submit?from={brief}")
    file = page.get_by_label("Job file")
    expect(file).to_have_value(re.compile("name: brief-2"))
    text = file.input_value()
    file.fill(text.replace("max_updates:", "max_update:"))
    page.get_by_role("button", name="Dry run").click()
    page.get_by_text(re.compile("max_update.*did you mean 'max_updates'")).wait_for()
    file.fill(text)
    page.get_by_role("button", name="Dry run").click()
    page.get_by_text("The job file is valid.").wait_for()
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url(re.compile("#/jobs/job_"))
    job = page.url.rsplit("/", 1)[1]
    assert stack.finish(job).spec == {**stack.client.get(brief).spec, "name": "brief-2"}


def test_labels_of_an_axis_read_as_its_values(stack: Any, page: Page) -> None:
    """Labels of ticks differ and read as their values; a logarithmic axis has a label for each decade."""
    page.goto(stack.stack.url)
    cases = [[0, 2e-4, 4e-4], [0, 0.025, 0.05, 0.075], [0, 1e-7, 2e-7], [1.0001e6, 1.0002e6], [-0.5, 0, 0.5], [3, 4, 5]]
    for values in cases:
        shown = page.evaluate(
            "(values) => import('/assets/charts.js').then(({ ticks }) => ticks(values, values[1] - values[0]))", values
        )
        assert len(set(shown)) == len(values), shown
        assert [float(text) for text in shown] == pytest.approx(values)
    decades = page.evaluate("import('/assets/charts.js').then(({ decades }) => decades([1e-8, null, 0.1, 1, 1000]))")
    assert decades == ["1e-8", "", "0.1", "1", "1000"]


DRAWN = """async () => {
  const { Chart } = await import("/assets/charts.js");
  const chart = new Chart("Rate", "", {});
  document.querySelector("main").replaceChildren(chart.element);
  const series = (...values) => [{ label: "often", steps: values.map((_, step) => step), values },
    { label: "once", steps: [0], values: [0.5] }];
  chart.draw(series(0.1, 0.2, 0.3, 0.4));
  await Promise.resolve();
  const legend = chart.place.querySelector(".u-legend").textContent;
  const settled = () => new Promise((resolve) => requestAnimationFrame(resolve));
  chart.plot.setScale("x", { min: 1, max: 2 });
  await settled();
  chart.draw(series(0.1, 0.2, 0.3, 0.4, 0.5));
  const flat = new Chart("Flat", "", {});
  document.querySelector("main").append(flat.element);
  flat.draw([{ label: "never", steps: [0, 1], values: [0, 0] }]);
  await settled();
  const { min, max } = chart.plot.scales.x;
  const { y } = flat.plot.scales;
  return { legend, zoomed: [min, max], newest: chart.plot.data[1].at(-1), flat: [y.min, y.max] };
}"""


@pytest.mark.long
def test_a_chart_shows_the_newest_values_and_stays_zoomed(stack: Any, page: Page) -> None:
    page.goto(stack.stack.url)
    found = page.evaluate(DRAWN)
    assert re.sub(r"\s", "", found["legend"]) == "update3often0.4000once0.5000(at0)"
    assert (found["zoomed"], found["newest"]) == ([1, 2], 0.5), "new values keep the zoom of the user"
    assert found["flat"] == [0, 1]


def test_metrics_are_explained_and_downloaded(stack: Any, page: Page, enter: Any, brief: str) -> None:
    """A sentence explains each metric; curves run along updates or minutes; the user can download the values."""
    enter(page, stack, where=f"#/jobs/{brief}/metrics")
    expect(page.locator(".chart[data-title='mismatch/kl'] figcaption")).to_contain_text("computes something else")
    note = page.evaluate("import('/assets/charts.js').then(({ noteOf }) => noteOf('lag/kl'))")
    assert "is no error" in note, "a job this short may have no such curve"
    page.get_by_label("reward/mean, by policy update. Newest:").wait_for()
    page.get_by_label("Along").select_option("time")
    page.get_by_label(re.compile(r"^reward/mean, by time. Newest: reward/mean \S+ at [\d.]+ minutes")).wait_for()
    with page.expect_download() as saved:
        page.evaluate("delete window.showSaveFilePicker")  # its dialog belongs to the system
        page.get_by_role("button", name="Download the metrics of brief").click()
    header, *rows = Path(saved.value.path()).read_text().splitlines()
    assert header.startswith("step,wall,")
    assert len(rows) >= 2

    page.get_by_role("link", name="Checkpoints").press("Enter")
    page.get_by_role("table", name="Checkpoints").wait_for()
    assert page.evaluate("document.activeElement.textContent") == "Checkpoints", "the keyboard goes on from its tab"


NUM_JOBS, NUM_UPDATES, NUM_METRICS = 200, 2000, 50
MOST_BYTES, MOST_ROWS, MOST_POINTS, MOST_METRICS_BYTES = 300_000, 60, 400, 200_000
LONGEST = {"8": 1, "512": 2, "1024": 3}


@pytest.mark.long
def test_the_page_is_small_and_renders_soon(stack: Any, page: Page, enter: Any, brief: str) -> None:
    """With many jobs and a hundred thousand points the page loads few bytes, and no script delays the first paint."""
    record = stack.client.get(brief)
    copies = [record.model_copy(update={"id": new_job_id(), "name": f"many-{n}"}) for n in range(NUM_JOBS)]
    names = [f"group{n % 5}/metric_{n}" for n in range(NUM_METRICS)] + ["reward/mean"]
    rows = [
        {"kind": "train", "step": step, "batch": step, "version": step, "entry": 0, "time": 1.8e9 + step,
         "values": dict.fromkeys(names, step % 97 / 97)}
        for step in range(NUM_UPDATES)
    ]  # fmt: skip
    for step, (length, count) in enumerate(LONGEST.items()):
        rows[step]["values"] |= {f"dropped_length/{length}": count}

    async def store(bus: Bus) -> None:
        for copy in copies:
            await bus.kv(subjects.JOBS).update(copy.id, copy.stored(), 0)
        subject = subjects.metrics(copies[-1].id)
        for start in range(0, NUM_UPDATES, 500):
            some = [Outgoing(subject, msgspec.json.encode(row)) for row in rows[start : start + 500]]
            await bus.publish_many(some, deadline_s=60)

    async def remove(bus: Bus) -> None:
        for copy in copies:
            await bus.kv(subjects.JOBS).delete(copy.id)

    stack.on_bus(store)
    try:
        enter(page, stack)
        page.get_by_text(re.compile(rf"{NUM_JOBS}|\b[2-9]\d\d\b of ")).first.wait_for()
        sizes = page.evaluate(
            "performance.getEntriesByType('resource').concat(performance.getEntriesByType('navigation'))"
            ".filter(({ name }) => !name.includes('/v1/')).map((one) => one.encodedBodySize)"
        )
        assert len(sizes) > 10
        assert 50_000 < sum(sizes) <= MOST_BYTES, sum(sizes)
        assert page.locator("table.jobs tbody tr").count() == MOST_ROWS, "the user can ask for more rows"
        head = httpx.get(stack.stack.url).text.split("</head>")[0]
        scripts = re.findall("<script[^>]*>", head)
        assert len(scripts) == 2
        assert all("defer" in one or 'type="module"' in one for one in scripts), "the first paint waits for no script"
        paints = page.evaluate("performance.getEntriesByType('paint').map(({ name, startTime }) => [name, startTime])")
        assert 0 < dict(paints)["first-contentful-paint"] < WAIT_MS, "what the benchmark measures"

        replies: list[Any] = []
        page.on("response", lambda reply: replies.append(reply) if "/metrics?" in reply.url else None)
        page.goto(f"{stack.stack.url}/#/jobs/{copies[-1].id}")
        page.wait_for_selector(".chart canvas >> visible=true")
        curves = next(reply for reply in replies if "reward%2Fmean" in reply.url)
        found = curves.body()
        assert len(found) <= MOST_METRICS_BYTES
        assert 100 < len(msgspec.json.decode(found)["steps"]) <= MOST_POINTS, f"of {NUM_UPDATES}"
        lengths = page.get_by_role("table", name="Dropped draws by length").locator("tr")
        lengths.first.wait_for()
        assert [row.split("\t")[:2] for row in lengths.all_inner_texts()] == [
            ["5 to 8", "1"], ["257 to 512", "2"], ["513 to 1,024", "3"]
        ]  # fmt: skip
    finally:
        stack.on_bus(remove)
