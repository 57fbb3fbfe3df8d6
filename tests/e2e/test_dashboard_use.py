"""The web page in a real browser: use by keyboard alone, and charts and tables compared with the numbers they show."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Page, expect

from penstock.shared.protocol import subjects
from penstock.shared.protocol.events import BatchSealed, BatchTrained, Dropped
from penstock.shared.protocol.ids import new_job_id
from penstock.shared.transport.bus import Bus
from penstock.shared.transport.message import Outgoing

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.long, pytest.mark.browser, pytest.mark.timeout(240)]

KEY = "e2e-key"
LONG = ["train.max_updates=20000", "checkpoint.every=20000"]
"""Changes that make a job so long that only the test ends it, however fast the machine is."""
PARTS = [
    {"type": "format", "pattern": "[0-4+].*", "name": "begins"},
    {"type": "format", "pattern": ".*[5-9]", "name": "ends", "weight": 0.5},
]
MOST_STEPS = 200
FOCUSED = """() => {
  const one = document.activeElement;
  const [style, box] = [getComputedStyle(one), one.getBoundingClientRect()];
  return {
    name: one.getAttribute("aria-label") ?? one.labels?.[0]?.firstElementChild?.textContent ??
      one.labels?.[0]?.textContent ?? one.textContent.trim(),
    outlined: one.matches(":focus-visible") && style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2,
    seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth,
  };
}"""


@pytest.fixture(scope="module")
def used(stack: Any) -> str:
    """Id of a job that was cancelled after some updates; some of its completions were written by several versions."""
    reward = {"scorers": PARTS, "processes": 1}
    changes = ["train.max_lag=2", "sampling.max_new_tokens=20", "train.max_updates=20000", "checkpoint.every=20000"]
    job: str = stack.submit(*changes, name="used", reward=reward, metadata={"owner": "eve"})
    stack.reach(job, 4, 120)
    stack.until(lambda: mixed(stack, job), "a completion of two versions", 120)
    stack.client.cancel(job)
    assert stack.finish(job, 120).status.phase == "cancelled"
    return job


def mixed(stack: Any, job: str) -> Any:
    """Return a completion that several versions wrote, or None."""
    rows = stack.client.samples(job, limit=100)
    return next((row for row in rows if row.min_version != row.max_version), None)


@pytest.fixture(scope="module")
def compared(stack: Any) -> str:
    """Id of a job with two completions per prompt; dynamic sampling replaced groups whose rewards were equal."""
    algorithm = {"group_size": 2, "dynamic_sampling": {}}
    job: str = stack.submit("train.max_updates=4", name="compared", seed=5, algorithm=algorithm)
    assert stack.finish(job, 120).status.phase == "succeeded"
    return job


def walk(page: Page, name: str, *, back: bool = False) -> None:
    """Press Tab until the element with this name has the focus; check that each focused element is visible."""
    passed = []
    for _ in range(MOST_STEPS):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        found = page.evaluate(FOCUSED)
        assert found["outlined"], found
        assert found["seen"], found
        if re.fullmatch(name, found["name"]):
            return
        passed.append(found["name"])
    pytest.fail(f"the focus never came to {name!r}, but to {passed}")


@pytest.mark.long
def test_the_keyboard_is_enough_from_the_login_to_a_comparison(
    stack: Any, page: Page, used: str, compared: str
) -> None:
    """The test uses only Tab, Shift-Tab, Enter, Escape and the arrow keys, and sets no focus by a script."""
    page.goto(stack.stack.url)
    page.wait_for_selector("#ask-key[open]")
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("link", name="used", exact=True).wait_for()
    walk(page, "used")
    page.keyboard.press("Enter")
    expect(page).to_have_title("used · Penstock")
    page.get_by_role("link", name="Samples").wait_for()
    walk(page, "Samples")
    page.keyboard.press("Enter")
    page.locator(".tokens").wait_for()
    assert page.evaluate(FOCUSED)["name"] == "Samples", "the focus stays on the chosen tab"

    walk(page, r".*, \d\d tokens.*")
    page.keyboard.press("Enter")
    expect(page.locator("[aria-label=Completions] [aria-current=true]")).to_be_focused()
    page.locator(".tokens .token").nth(9).wait_for(state="attached")
    walk(page, "Tokens: the arrow keys read them")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".reading")).to_have_text(re.compile("^Token 2 of "))
    walk(page, "Colour by", back=True)
    page.keyboard.press("ArrowDown")
    page.get_by_text(
        re.compile(r"One version, \d+, chose every token.|Each version of the policy has a colour")
    ).wait_for()
    assert page.evaluate(FOCUSED)["name"] == "Colour by"
    walk(page, "compare")
    page.keyboard.press("Enter")
    page.get_by_role("region", name="Difference").wait_for()
    assert page.evaluate(FOCUSED)["name"] == "compare", "the focus stays, although the page redraws the view"
    walk(page, "Difference")
    walk(page, "The two compared")

    jobs = {row.id for row in stack.client.list()}
    walk(page, "Checkpoints", back=True)
    page.keyboard.press("Enter")
    page.get_by_role("table", name="Checkpoints").wait_for()
    walk(page, r"Serve checkpoint \d+")
    opener = page.evaluate(FOCUSED)["name"]
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    walk(page, "Not now")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert page.evaluate(FOCUSED) == {"name": opener, "outlined": True, "seen": True}
    assert {row.id for row in stack.client.list()} == jobs, "a dialog that was left does nothing"


@pytest.mark.long
def test_the_keyboard_is_enough_to_filter_jobs_and_to_submit_one(
    stack: Any, page: Page, enter: Any, used: str, compared: str
) -> None:
    """The test sets no focus by a script; it edits the job file with the keys of an editor."""
    enter(page, stack)
    page.get_by_role("link", name="compared", exact=True).wait_for()
    walk(page, "Search")
    page.keyboard.type("compar")
    expect(page.get_by_role("link", name="used", exact=True)).to_have_count(0)
    walk(page, "State")
    page.keyboard.type("can")  # the option `cancelled`
    expect(page.get_by_role("link", name="compared", exact=True)).to_have_count(0)
    walk(page, "Clear")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="used", exact=True).wait_for()
    walk(page, "Submit a job")
    page.keyboard.press("Enter")
    page.get_by_label("Job file").wait_for()

    walk(page, "Job file")
    page.keyboard.press("Control+Home")
    page.keyboard.press("Shift+End")
    page.keyboard.type("nam: typed")
    walk(page, "Dry run")
    page.keyboard.press("Enter")
    page.get_by_text(re.compile("name.*required")).wait_for()
    walk(page, "Job file", back=True)
    page.keyboard.press("Control+Home")
    page.keyboard.press("Shift+End")
    page.keyboard.type("name: typed\nlimits: {byte_budget: 33554432}")  # fits the small streams of the tests
    walk(page, "Dry run")
    page.keyboard.press("Enter")
    page.get_by_text("The job file is valid.").wait_for()
    walk(page, "Submit")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("#/jobs/job_"))
    job = page.url.rsplit("/", 1)[1]
    assert stack.client.get(job).name == "typed"
    stack.client.cancel(job, checkpoint=False)
    assert stack.finish(job).status.phase == "cancelled"


def shares_of_lag(stack: Any, job: str, newest: int) -> list[float]:
    """Return the share of groups at each lag, over the ``newest`` last trained batches in the ledger of a job."""
    events = stack.ledger(job)
    trained = {event.number for event in events if isinstance(event, BatchTrained)}
    batches = [event for event in events if isinstance(event, BatchSealed) and event.number in trained]
    lags = [[batch.start_version - group.min_version for group in batch.groups] for batch in batches]
    counts = Counter(lag for batch in lags[-newest:] for lag in batch)
    return [counts[lag] / counts.total() for lag in range(max(max(batch) for batch in lags) + 1)]


def percents(page: Page, name: str) -> list[float]:
    """Return the numbers in a table of bars, as the page shows them."""
    rows = page.get_by_role("table", name=name).locator("td.number")
    rows.first.wait_for()
    return [float(text.split()[0].replace(",", "")) for text in rows.all_inner_texts()]


def lengths(page: Page, name: str) -> list[float]:
    """Return the lengths of the bars of a table, in percent of the cell."""
    return (
        page.get_by_role("table", name=name)
        .locator(".bar")
        .evaluate_all(  # type: ignore[no-any-return]
            "all => all.map((one) => 100 * one.offsetWidth / one.parentElement.clientWidth)"
        )
    )


def test_lags_and_drops_are_those_of_the_ledger(stack: Any, page: Page, enter: Any, used: str, compared: str) -> None:
    expected = [100 * share for share in shares_of_lag(stack, used, 50)]
    assert len(expected) > 1, "some were sampled by an older version"
    enter(page, stack, where=f"#/jobs/{used}")
    assert percents(page, "Lag of trained groups") == pytest.approx(expected, abs=0.51)
    assert lengths(page, "Lag of trained groups") == pytest.approx(expected, abs=1.5)
    page.get_by_text(f"over the newest {min(50, stack.status(used).step)} measured updates").wait_for()

    events = stack.ledger(compared)
    last = max(index for index, event in enumerate(events) if isinstance(event, BatchTrained))
    dropped = [event for event in events if isinstance(event, Dropped) and event.reason == "no_signal"]
    counted = [event for event in events[:last] if isinstance(event, Dropped) and event.reason == "no_signal"]
    by_length = Counter(1 << (length - 1).bit_length() for event in counted for length in event.lengths)
    assert by_length.total() > 0
    page.goto(f"{stack.stack.url}/#/jobs/{compared}")
    expect(page.get_by_role("table", name="Dropped draws by reason").locator("tr")).to_have_text(
        re.compile(rf"^no_signal{sum(len(event.draws) for event in dropped)}$")
    )
    assert percents(page, "Dropped draws by length") == [by_length[length] for length in sorted(by_length)]
    most = max(by_length.values())
    shares = [100 * by_length[length] / most for length in sorted(by_length)]
    assert lengths(page, "Dropped draws by length") == pytest.approx(shares, abs=1.5)


NUM_ROWS = 10_050
"""Updates that each dropped something: more than one reply about metrics holds."""


@pytest.mark.long
def test_lags_and_drops_of_a_long_job_count_each_update_once(stack: Any, page: Page, enter: Any, compared: str) -> None:
    """Shares are means over those of the newest fifty rows that have shares; rows of evaluations have none."""
    record = stack.client.get(compared)
    copy = record.model_copy(update={"id": new_job_id(), "name": "long-ago"})
    lags = [{"lag/share_0": 0.25, "lag/share_1": 0.75}, {"lag/share_0": 1.0}, {}]
    rows = [{"dropped_length/8": 1.0, "lag/share_0": 0.0, "lag/share_1": 1.0} for _ in range(NUM_ROWS)]
    rows[-50:] = [{"dropped_length/8": 1.0, **lags[0 if n < 20 else 1 if n < 40 else 2]} for n in range(50)]
    rows[-1] |= lags[1]
    about = {"kind": "train", "entry": 0, "time": 1.8e9}
    messages = [
        Outgoing(
            subjects.metrics(copy.id),
            msgspec.json.encode({**about, "step": n, "batch": n, "version": n, "values": row}),
        )
        for n, row in enumerate(rows, 1)
    ]

    async def store(bus: Bus) -> None:
        await bus.kv(subjects.JOBS).update(copy.id, copy.stored(), 0)
        for start in range(0, NUM_ROWS, 500):
            await bus.publish_many(messages[start : start + 500], deadline_s=60)

    stack.on_bus(store)
    try:
        enter(page, stack, where=f"#/jobs/{copy.id}")
        shares = [(20 * 0.25 + 21) / 41, 20 * 0.75 / 41]
        assert percents(page, "Lag of trained groups") == pytest.approx([100 * share for share in shares], abs=0.51)
        page.get_by_text("over the newest 41 measured updates").wait_for()
        assert percents(page, "Dropped draws by length") == [NUM_ROWS]
    finally:
        stack.on_bus(lambda bus: bus.kv(subjects.JOBS).delete(copy.id))


TEXTS = "all => all.map((one) => one.textContent)"
COLOURS = "all => all.map((one) => getComputedStyle(one).backgroundColor)"


def opacity(colour: str) -> float:
    """Return the alpha of the colour of a token: how strong the colour is."""
    if colour == "transparent":
        return 0.0
    found = re.search(r"/ ([\d.e-]+)\)$|rgba\(.*, ([\d.e-]+)\)$", colour)
    return float(found[1] or found[2]) if found else 1.0


def test_colours_of_tokens_follow_their_values(stack: Any, page: Page, enter: Any, used: str) -> None:
    """A token that is less likely has a stronger colour. All tokens of a completion have the colour of its advantage.

    Advantages of different signs have different hues.
    """
    rows = stack.client.samples(used, limit=100)

    def spread(row: Any) -> float:
        logprobs = stack.client.sample(used, row.id).logprobs
        return float(max(logprobs) - min(logprobs))

    praised = max((row for row in rows if row.advantage > 0), key=spread)
    blamed = max((row for row in rows if row.advantage < 0), key=spread)
    two = mixed(stack, used)
    hues = {}
    for row in (praised, blamed):
        if row is praised:
            enter(page, stack, where=f"#/jobs/{used}/samples/{row.id}")
        else:
            page.goto(f"{stack.stack.url}/#/jobs/{used}/samples/{row.id}")
        detail = stack.client.sample(used, row.id)
        tokens = page.locator(".tokens .token")
        texts = [text.replace("\n", "⏎\n") for text in detail.token_texts]
        stack.until(lambda: tokens.evaluate_all(TEXTS) == texts, "the tokens are shown")  # noqa: B023
        page.get_by_label("Colour by").select_option("logprob")
        shades = [opacity(colour) for colour in tokens.evaluate_all(COLOURS)]
        assert shades == pytest.approx([0.75 * min(1, -one / 5) for one in detail.logprobs], abs=0.01)
        order = sorted(zip(detail.logprobs, shades, strict=True))
        assert order[0][1] > order[-1][1], "two that differ"
        page.get_by_label("Colour by").select_option("advantage")
        page.get_by_text(re.compile("Every token of it is pushed by its advantage")).wait_for()
        (hue,) = set(tokens.evaluate_all(COLOURS))
        hues[row.id] = hue
        page.get_by_label("Colour by").select_option("none")
        assert {opacity(colour) for colour in tokens.evaluate_all(COLOURS)} == {0.0}
        figures = page.locator("section", has=page.get_by_role("heading", name="Reward", exact=True)).locator("dd")
        parts = [*detail.parts.values(), detail.reward]
        assert [float(text) for text in figures.all_inner_texts()] == pytest.approx(parts, abs=5e-4)
        assert list(detail.parts) == ["begins", "ends"]
    assert len(set(hues.values())) == 2, hues

    page.goto(f"{stack.stack.url}/#/jobs/{used}/samples/{two.id}")
    detail = stack.client.sample(used, two.id)
    page.get_by_text("Each version of the policy has a colour").or_(page.get_by_label("Colour by")).first.wait_for()
    expect(page.locator(".figures div:has(dt:text-is('policy version')) dd")).to_have_text(
        f"{two.min_version} to {two.max_version}"
    )
    page.get_by_label("Colour by").select_option("version")
    colours = page.locator(".tokens .token").evaluate_all(COLOURS)
    by_version: dict[int, set[str]] = {}
    for version, colour in zip(detail.versions, colours, strict=True):
        by_version.setdefault(version, set()).add(colour)
    assert len(by_version) > 1
    assert all(len(some) == 1 for some in by_version.values()), by_version
    assert len(set.union(*by_version.values())) == len(by_version), by_version


def test_a_difference_holds_both_texts(stack: Any, page: Page, enter: Any, used: str) -> None:
    """Without its insertions a difference is the opened completion; without its deletions it is the other one."""
    enter(page, stack, where=f"#/jobs/{used}/samples")
    page.locator(".tokens .token").first.wait_for()
    detail = stack.client.sample(used, page.url.rsplit("/", 1)[1])
    others = [stack.client.sample(used, one) for one in detail.siblings]
    assert any(one.completion != detail.completion for one in others)
    buttons = page.locator(".sibling").get_by_role("button", name="compare", exact=True)
    seen = []
    for place, shown in enumerate(page.locator(".sibling .clip").all_inner_texts()):
        buttons.nth(place).click()
        region = page.get_by_role("region", name="Difference")
        region.wait_for()
        before, after = (region.evaluate(LEFT, gone) for gone in ("ins", "del"))
        assert before == detail.completion
        assert after == ("" if shown == "(empty)" else shown)
        seen.append(after)
        assert (region.locator("ins, del").count() > 0) is (before != after)
    assert Counter(seen) == Counter(one.completion for one in others)


LEFT = """(place, gone) => {
  const copy = place.cloneNode(true);
  for (const one of copy.querySelectorAll(gone)) one.remove();
  return copy.textContent;
}"""


def test_a_difference_of_long_texts_loses_nothing(stack: Any, page: Page) -> None:
    """The texts have more words than the page compares one by one."""
    page.goto(stack.stack.url)
    one = " ".join(f"w{n}" for n in range(1800))
    other = one.replace("w100 ", "").replace("w1700", "changed") + " and more"
    found = page.evaluate(
        """async ([one, other]) => {
          const { difference } = await import("/assets/samples.js");
          return difference(one, other).map((part) => [part.localName ?? "", part.textContent ?? part]);
        }""",
        [one, other],
    )
    assert "".join(text for kind, text in found if kind != "ins") == one
    assert "".join(text for kind, text in found if kind != "del") == other
    marked = [text.strip() for kind, text in found if kind and text.strip()]
    assert {"w100", "w1700", "changed", "more"} <= set(" ".join(marked).split())


RECORDED = """(() => {
  window.plots = [];
  const plain = uPlot;
  window.uPlot = new Proxy(plain, { construct(target, given) {
    const plot = new target(...given);
    window.plots.push(plot);
    return plot;
  } });
})()"""
"""Record every plot of the page, so that a test can read what the plot draws."""
CURVE = """(title) => {
  const place = document.querySelector(`.chart[data-title='${title}'] .plot`);
  const plot = window.plots.filter((one) => place.contains(one.root)).at(-1);
  return {
    legend: [...place.querySelectorAll(".u-series:not(.faint)")].map((row) => row.textContent.replaceAll(/\\s/g, "")),
    cursor: [...place.querySelectorAll(".u-cursor-x")].map((one) => one.style.transform),
    at: plot.cursor.idx ?? null, steps: plot.data[0], values: plot.data.slice(1), distr: plot.scales.y.distr ?? 1,
  };
}"""


@pytest.mark.long
def test_curves_are_smoothed_logarithmic_and_share_a_cursor(stack: Any, page: Page, enter: Any, used: str) -> None:
    enter(page, stack, where=f"#/jobs/{used}/metrics")
    page.get_by_label("reward/mean, by policy update. Newest:").wait_for()
    page.evaluate(RECORDED)
    truth = stack.client.metrics(used, names=["reward/mean", "mismatch/kl"])
    steps, series = truth["steps"], truth["series"]
    known = [value for value in series["reward/mean"] if value is not None]

    slider = page.get_by_role("slider", name="Smoothing")
    for _ in range(25):
        slider.press("ArrowRight")
    expect(page.locator("label:has(input[type=range])")).to_have_text("Smoothing 0.5")
    curve = page.evaluate(CURVE, "reward/mean")
    smooth, total, mass = [], 0.0, 0.0
    for value in known:
        total, mass = 0.5 * total + 0.5 * value, 0.5 * mass + 0.5
        smooth.append(total / mass)
    raw, drawn = ([value for value in column if value is not None] for column in curve["values"])
    assert raw == pytest.approx(known), "the values themselves stay, faint"
    assert drawn == pytest.approx(smooth)
    assert curve["legend"][-1].startswith(f"reward/mean{smooth[-1]:.4f}")
    slider.press("Home")

    one, other = page.locator("[data-title='reward/mean'] .u-over"), page.locator("[data-title='reward/std'] .u-over")
    one.scroll_into_view_if_needed()
    box = one.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    other.wait_for()
    page.wait_for_function(f"title => (({CURVE})(title)).at !== null", arg="reward/std")
    here, there = (page.evaluate(CURVE, title) for title in ("reward/mean", "reward/std"))
    assert here["at"] == there["at"] is not None
    assert all("(-" not in line for curve in (here, there) for line in curve["cursor"]), "each chart shows the line"
    at = here["steps"][here["at"]]
    assert here["legend"][0] == there["legend"][0] == f"update{at}"
    value = float(here["legend"][1].removeprefix("reward/mean"))
    assert value == pytest.approx(series["reward/mean"][steps.index(at)], abs=1e-4)
    page.mouse.move(0, 0)

    assert curve["distr"] == 1
    page.get_by_label("logarithmic scale").check()
    page.wait_for_function(f"title => (({CURVE})(title)).distr === 3", arg="reward/mean")
    curve = page.evaluate(CURVE, "reward/mean")
    assert all(value is None or value > 0 for value in curve["values"][0])
    assert [value for value in curve["values"][0] if value] == pytest.approx([value for value in known if value > 0])


def test_two_jobs_that_trained_are_two_curves(stack: Any, page: Page, enter: Any, used: str, compared: str) -> None:
    enter(page, stack, where=f"#/compare?jobs={used},{compared}")
    curves = page.get_by_label(re.compile("^reward/mean, by policy update. Newest: "))
    curves.wait_for()
    newest = []
    for job in (used, compared):
        truth = stack.client.metrics(job, names=["reward/mean"])
        at = max(
            step
            for step, value in zip(truth["steps"], truth["series"]["reward/mean"], strict=True)
            if value is not None
        )
        newest.append((truth["series"]["reward/mean"][truth["steps"].index(at)], at))
    shown = re.findall(r"(\w+) ([\d.]+) at update (\d+)", (curves.get_attribute("aria-label") or ""))
    assert [name for name, _, _ in shown] == ["used", "compared"]
    assert [(float(value), int(at)) for _, value, at in shown] == [(pytest.approx(v, abs=1e-4), at) for v, at in newest]
    legend = page.locator(".chart[data-title='reward/mean'] .u-legend .u-series")
    assert [re.sub(r"[\d.]+( \(at \d+\))?$", "", row) for row in legend.all_inner_texts()] == [
        "update",
        "used",
        "compared",
    ]
    inks = legend.locator(".u-marker").evaluate_all("all => all.map((one) => getComputedStyle(one).borderColor)")
    assert len(set(inks[-2:])) == 2, inks


def test_jobs_are_found_by_kind_and_text_and_say_when_they_end(stack: Any, page: Page, enter: Any, used: str) -> None:
    """A running job has a progress bar, and the time left by the estimate of the coordinator."""
    job = stack.submit(*LONG, name="running-still")
    stack.reach(job, 2)
    enter(page, stack)
    row = page.locator(f"tr[data-key={job}]")
    expect(row.locator(".steps-text")).to_have_text(re.compile(r"^[\d,]+ / 20,000[\d.]+ (s|min|h|d) left$"))
    bar = row.get_by_role("progressbar", name="running-still: updates made")
    expect(bar).to_have_attribute("max", "20000")
    first = int(bar.get_attribute("value") or 0)
    assert 1 <= first <= stack.status(job).step
    expect(bar).not_to_have_attribute("value", str(first))
    left = stack.status(job).expected_end.timestamp() - stack.status(job).heartbeat_at.timestamp()
    assert left > 0

    page.get_by_label("Kind").select_option("evaluation")
    page.get_by_text("No job fits these filters.").wait_for()
    page.get_by_label("Kind").select_option("rl")
    page.get_by_role("searchbox", name="Search").fill("RUNNING-st")
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    expect(row).to_be_visible()
    page.get_by_role("searchbox", name="Search").fill(used)
    expect(page.locator("table.jobs tbody tr")).to_have_count(1)
    expect(page.locator(f"tr[data-key={used}]")).to_be_visible()
    stack.client.cancel(job, force=True)
    stack.finish(job)
