// One job: what it does, what it waits for, who works for it.

import { follow, get, post } from "./api.js";
import { CHARTS, Chart } from "./charts.js";
import { age, clock, make, number, panel, phase, table } from "./dom.js";
import { funnel } from "./feedback.js";

const EVERY_MS = 2000;
const EVENTS_SHOWN = 200;
const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);

export function showJob(page, signal, loop, id) {
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const charts = CHARTS.map(({ title, names }) => new Chart(title, names));
  const [title, figures, waits, workers, conditions, dropped, learning] = Array.from({ length: 7 }, () => make("div"));
  const events = make("div", { class: "events", role: "log" });
  const feedback = panel("Feedback", learning);
  feedback.hidden = true;
  page.replaceChildren(
    title,
    make("div", { class: "grid" },
      panel("Now", figures), panel("Waits for", waits), feedback, charts.map((chart) => chart.element),
      panel("Services", workers, "all"), panel("Conditions", conditions), panel("Draws that were dropped", dropped),
      panel("Events", events, "all")),
  );
  loop(EVERY_MS, async () => {
    const [job, why, members] = await Promise.all([path, `${path}/why`, `${path}/workers`].map((url) => get(url, signal)));
    title.replaceChildren(heading(job, path));
    figures.replaceChildren(figuresOf(job));
    waits.replaceChildren(table(WAITS, why.data, TERMINAL.has(job.status.phase) ? "Nothing: it is over." : "Nothing."));
    workers.replaceChildren(table(workerColumns(members.data, job.spec.train?.max_lag ?? 0), members.data, "No service has been heard of."));
    conditions.replaceChildren(table(CONDITIONS, job.status.conditions, "None yet."));
    dropped.replaceChildren(table(DROPPED, Object.entries(job.status.draws?.dropped ?? {}), "None."));
    if (job.spec.kind === "online_rl") {
      feedback.hidden = false;
      learning.replaceChildren(funnel(await get(`${path}/feedback`, signal)));
    }
  });
  loop(EVERY_MS, async () => {
    const names = CHARTS.flatMap((chart) => chart.names).join();
    const columns = await get(`${path}/metrics?max_points=600&names=${encodeURIComponent(names)}`, signal);
    for (const chart of charts) chart.draw(columns);
  });
  const log = (row) => {
    events.prepend(row);
    while (events.childElementCount > EVENTS_SHOWN) events.lastElementChild.remove();
  };
  follow(id, (_, event) => log(eventRow(event)), signal).then((ended) => {
    if (ended) log(make("div", { class: "soft" }, "The job is over: no event follows."));
  });
}

function heading(job, path) {
  const verb = (name, allowed) =>
    make("button", { disabled: !allowed, onclick: (click) => act(click.currentTarget, job.name, path, name) }, name);
  const { phase: now } = job.status;
  const buttons = [
    verb("pause", now === "running" || now === "pending"), verb("resume", now === "paused" || now === "pausing"),
    verb("cancel", !TERMINAL.has(now)),
  ];
  return make("div", { class: "title" },
    make("h1", {}, job.name), phase(now), make("span", { class: "soft" }, job.id),
    make("span", { class: now === "failed" ? "failed" : "soft" }, job.status.message),
    make("span", { class: "actions" }, buttons));
}

async function act(button, name, path, verb) {
  if (verb === "cancel" && !confirm(`Cancel ${name}? This cannot be undone.`)) return;
  button.disabled = true;
  await post(`${path}/${verb}`).catch((problem) => alert(`${verb}: ${problem.message}`));
}

function figuresOf(job) {
  const { status } = job;
  const total = status.total_steps ? ` / ${number(status.total_steps)}` : "";
  const rows = [
    ["update", number(status.step) + total], ["policy version", number(status.policy_version)],
    ...(Number.isInteger(status.served_version) ? [["served version", number(status.served_version)]] : []),
    ["reward", number(status.reward)], ["in flight", number(status.draws?.in_flight)],
    ["drawn", number(status.draws?.drawn)], ["trained", number(status.draws?.trained)],
    ...Object.entries(status.queues ?? {}).map(([name, count]) => [`${name} queued`, number(count)]),
  ];
  return make("dl", { class: "figures" }, rows.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
}

const WAITS = [
  ["what", (row) => row.waiting_for, "wide"],
  ["held by", (row) => row.holder ?? ""],
  ["for", (row) => age(row.age_s), "number"],
];
const CONDITIONS = [
  ["condition", (row) => row.type],
  ["", (row) => make("span", { class: row.status.toLowerCase() }, row.status)],
  ["reason", (row) => `${row.reason}${row.message ? `: ${row.message}` : ""}`, "wide"],
];
const DROPPED = [["reason", ([reason]) => reason], ["draws", ([, count]) => number(count), "number"]];

/** Columns of the services; a version further behind the newest one than the lag bound and a swap explain stands out. */
function workerColumns(rows, maxLag) {
  const newest = Math.max(...rows.map((row) => row.version ?? -1));
  const isSkewed = (row) => row.version !== undefined && newest - row.version > maxLag + 1;
  return [
    ["service", (row) => row.service],
    ["worker", (row) => row.worker],
    ["host", (row) => row.host],
    ["state", (row) => make("span", { class: row.alive ? "running" : "lost" }, row.alive ? "alive" : "lost")],
    ["version", (row) => make("span", { class: isSkewed(row) ? "skew" : "" }, number(row.version)), "number"],
    ["running", (row) => number(row.running), "number"],
    ["waits for", (row) => row.waiting_for ?? "", "wide"],
  ];
}

function eventRow(event) {
  return make("div", { class: event.level }, `${clock(event.time)}  ${event.type}: ${event.message}`);
}
