// How a job stands now: figures, waits, the curves that matter, lag, drops and conditions.

import { get } from "./api.js";
import { Chart, OVERVIEW } from "./charts.js";
import { age, clock, make, number, panel, patch, table } from "./dom.js";
import { TERMINAL } from "./jobs.js";

const EVERY_MS = 2000;
const POINTS = 400;
const LAG_UPDATES = 50;
const MOST_POINTS = 10_000;
const LENGTHS_EVERY_MS = 20_000;

export function showOverview({ content, signal, loop, path }) {
  const charts = OVERVIEW.map(({ title, note, names }) => [new Chart(title, note), names]);
  const [health, now, waits, lag, dropped, lengths, conditions] = Array.from({ length: 7 }, () => make("div"));
  const none = make("p", { class: "hint" }, "No update was measured yet: curves appear with the first ones.");
  content.replaceChildren(health,
    make("div", { class: "grid pair" }, panel("Now", now), panel("Waits for", waits)),
    make("section", {}, make("h2", {}, "Curves"), none, make("div", { class: "grid" }, charts.map(([chart]) => chart.element))),
    make("div", { class: "grid" }, panel("Lag of trained groups", lag), panel("Dropped draws", [dropped, lengths]), panel("Conditions", conditions)));
  loop(EVERY_MS, async () => {
    const [job, why] = await Promise.all([get(path, signal), get(`${path}/why`, signal)]);
    patch(health, warningsOf(job));
    patch(now, figuresOf(job));
    patch(waits, table("Waits", WAITS, why.data, TERMINAL.has(job.status.phase) ? "Nothing: it is over." : "Nothing."));
    patch(dropped, droppedOf(job));
    patch(conditions, table("Conditions", conditionsOf(job), job.status.conditions, "None yet."));
  });
  const names = charts.flatMap(([, names]) => names).join();
  loop(EVERY_MS, async () => {
    const { steps, series } = await get(`${path}/metrics?max_points=${POINTS}&names=${encodeURIComponent(names)}`, signal);
    const drawn = charts.map(([chart, names]) => chart.draw(names.map((name) => ({ label: name, steps, values: series[name] }))));
    none.hidden = drawn.some(Boolean);
  });
  loop(3 * EVERY_MS, async () => patch(lag, await lagOf(path, signal)));
  loop(LENGTHS_EVERY_MS, async () => patch(lengths, await lengthsOf(path, signal)));
}

/** Warnings of the job's health; nothing where all is well. */
function warningsOf(job) {
  const { warnings = [] } = job.status;
  if (!warnings.length) return null;
  const since = (row) => clock(Date.parse(row.since) / 1000);
  return panel("Warnings", make("ul", { class: "plain warnings" }, warnings.map((row) => make("li", { "data-key": row.kind },
    make("strong", {}, row.kind.replaceAll("_", " ")), ` ${row.message} `, make("span", { class: "soft" }, `(since ${since(row)})`)))), "warned");
}

function figuresOf(job) {
  const { status } = job;
  const rows = [
    ["update", number(status.step) + (status.total_steps ? ` / ${number(status.total_steps)}` : "")],
    ["policy version", number(status.policy_version)],
    ...(Number.isInteger(status.served_version) ? [["served version", number(status.served_version)]] : []),
    ["reward", number(status.reward)], ["drawn", number(status.draws?.drawn ?? 0)], ["trained", number(status.draws?.trained ?? 0)],
    ["in flight", number(status.draws?.in_flight ?? 0)],
    ...Object.entries(status.queues ?? {}).map(([name, count]) => [`${name} queued`, number(count)]),
  ];
  return make("dl", { class: "figures" }, rows.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
}

const WAITS = [
  ["what", (row) => row.waiting_for, "wide"],
  ["held by", (row) => row.holder ?? ""],
  ["for", (row) => age(row.age_s), "number"],
];
/** Of a job that is over, only its success is good or bad. */
function conditionsOf(job) {
  const tells = (row) => !TERMINAL.has(job.status.phase) || row.type === "Succeeded";
  return [
    ["condition", (row) => row.type],
    ["is", (row) => make("span", { class: tells(row) ? `is-${row.status.toLowerCase()}` : "" }, row.status)],
    ["reason", (row) => `${row.reason}${row.message ? `: ${row.message}` : ""}`, "wide"],
  ];
}

/** Horizontal bars: `rows` are [name, count, text]; their lengths are shares of `whole`. */
export function bars(name, rows, whole) {
  return make("table", { class: "bars", "aria-label": name }, make("tbody", {}, rows.map(([text, count, shown]) => {
    const share = `${(100 * count) / (whole || 1)}%`;
    return make("tr", {}, make("th", { scope: "row" }, text), make("td", { class: "number" }, shown),
      make("td", { class: "wide" }, make("div", { class: "bar", style: { width: share } })));
  })));
}

function droppedOf(job) {
  const { dropped = {}, drawn = 0 } = job.status.draws ?? {};
  const rows = Object.entries(dropped).filter(([, count]) => count).sort((one, other) => other[1] - one[1]);
  if (!rows.length) return make("p", { class: "hint" }, "None.");
  const most = rows[0][1];
  return [make("p", { class: "hint" }, `${number(rows.reduce((sum, [, count]) => sum + count, 0))} of ${number(drawn)} draws, by reason:`),
    bars("Dropped draws by reason", rows.map(([reason, count]) => [reason, count, number(count)]), most)];
}

/** Dropped groups by the mean length of their completions, so that a bias against long ones is seen. */
async function lengthsOf(path, signal) {
  const { data } = await get(`${path}/metrics/names`, signal);
  const names = data.map(({ name }) => name).filter((name) => /^dropped_length\/\d+$/.test(name));
  if (!names.length) return null;
  const counts = new Map(names.map((name) => [name, 0]));
  for (let from = 0; from <= lastOf(data, names); from += MOST_POINTS) { // all of them: a reply leaves out what is more
    const steps = `step_from=${from}&step_to=${from + MOST_POINTS - 1}&max_points=${MOST_POINTS}`;
    const { series } = await get(`${path}/metrics?${steps}&names=${encodeURIComponent(names.join())}`, signal);
    for (const name of names) counts.set(name, counts.get(name) + (series[name] ?? []).reduce((sum, value) => sum + (value ?? 0), 0));
  }
  const rows = [...counts].map(([name, count]) => [Number(name.split("/")[1]), count]).sort(([one], [other]) => one - other);
  return [make("p", { class: "hint gap" }, "By the mean length of the completions, in tokens:"),
    bars("Dropped draws by length", rows.map(([most, count]) => [bucket(most), count, number(count)]),
      Math.max(...rows.map(([, count]) => count)))];
}

/** The last update with one of these metrics; `data` is the reply of GET …/metrics/names. */
function lastOf(data, names) {
  return Math.max(...data.filter(({ name }) => names.includes(name)).map((row) => row.last_step));
}

/** A bucket that ends at a power of two, as a person reads it; 0 holds those whose length nobody knows. */
function bucket(most) {
  if (!most) return "unknown";
  return most <= 2 ? String(most) : `${number(most / 2 + 1)} to ${number(most)}`;
}

/** Shares of groups by lag over the newest updates. */
async function lagOf(path, signal) {
  const { data } = await get(`${path}/metrics/names`, signal);
  const names = data.map(({ name }) => name).filter((name) => /^lag\/share_\d+$/.test(name));
  if (!names.length) return make("p", { class: "hint" }, "Nothing was trained yet.");
  const last = lastOf(data, names), from = Math.max(0, last - LAG_UPDATES + 1);
  const { steps, series } = await get(`${path}/metrics?max_points=${LAG_UPDATES}&step_from=${from}&step_to=${last}&names=${encodeURIComponent(names.join())}`, signal);
  const found = names.map((name) => [Number(name.split("_")[1]), series[name] ?? []]).sort(([one], [other]) => one - other);
  const measured = steps.filter((_, place) => found.some(([, values]) => typeof values[place] === "number")).length;
  const rows = found.map(([lag, values]) => [lag, values.reduce((sum, value) => sum + (value ?? 0), 0) / (measured || 1)]);
  const text = (lag) => (lag === 0 ? "0 (on policy)" : `${lag} version${lag > 1 ? "s" : ""}`);
  return [make("p", { class: "hint" }, `Share of groups by how many versions behind the trained one they were sampled, over the newest ${number(measured)} measured updates:`),
    bars("Lag of trained groups", rows.map(([lag, share]) => [text(lag), share, `${(100 * share).toFixed(0)} %`]), 1)];
}
