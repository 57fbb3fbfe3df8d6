// Services that work for a job: what each does now and did in the last minutes, and the stages of the updates.

import { get } from "./api.js";
import { age, make, number, panel, patch, table } from "./dom.js";
import { TERMINAL } from "./jobs.js";

const EVERY_MS = 2000;
const UPDATES = 12;
const KEPT_S = 300;
const STAGES = ["generate", "wait", "train", "checkpoint"];
const PARTS = ["update", "wait", "fetch", "publish", "checkpoint"];
const MOST_WAITS = 2;

export function showWorkers({ content, signal, loop, path }) {
  const [services, activity, spent, stages] = Array.from({ length: 4 }, () => make("div"));
  const history = new Map();
  content.replaceChildren(panel("Services", services), panel("Busy and waiting", activity),
    panel("Time of the trainer", spent), panel("Stages of the newest updates", stages));
  loop(EVERY_MS, async () => {
    const query = history.size ? "workers" : "workers?history=true";
    const [now, { data }, why] = await Promise.all([path, `${path}/${query}`, `${path}/why`].map((url) => get(url, signal)));
    const rows = data.map((row) => ({ ...row, wait: waitOf(row, why.data) }));
    patch(services, table("Services", columns(rows, now.spec.train?.max_lag ?? 0), rows, "No service has been heard of.", (row) => row.worker));
    patch(spent, spentOf(rows));
    if (TERMINAL.has(now.status.phase)) return patch(activity, make("p", { class: "hint" }, "The job is over: nobody works for it."));
    if (!history.size) recall(history, data, Date.now() / 1000);
    note(history, rows, Date.now() / 1000);
    patch(activity, activityOf(history, Date.now() / 1000));
  });
  loop(EVERY_MS, async () => patch(stages, stagesOf((await get(`${path}/timeline?limit=${UPDATES}`, signal)).data)));
}

/** What a worker waits for: by itself, or because the job waits for something that somebody else holds. */
function waitOf(row, waits) {
  if (row.waiting_for) return row.waiting_for;
  if (row.running) return "";
  const other = waits.find(({ holder }) => holder && holder !== row.worker);
  return row.running === 0 && other ? `${other.holder}: ${other.waiting_for}` : "";
}

/** Columns of the services; a version further behind the newest one than the lag bound and a swap explain stands out. */
function columns(rows, maxLag) {
  const newest = Math.max(...rows.map((row) => row.version ?? -1));
  const isSkewed = (row) => row.version !== undefined && newest - row.version > maxLag + 1;
  return [
    ["service", (row) => row.service],
    ["worker", (row) => row.worker],
    ["host", (row) => row.host],
    ["state", (row) => make("span", { class: row.alive ? "is-true" : "is-false" }, row.alive ? "alive" : "lost")],
    ["version", (row) => make("span", { class: isSkewed(row) ? "is-false" : "" }, number(row.version)), "number"],
    ["running", (row) => number(row.running), "number"],
    ["weights", weightsOf],
    ["waits for", (row) => row.wait, "wide"],
  ];
}

/** How the newest weights came to a worker: transport, seconds, and what it fetched over the network. */
function weightsOf(row) {
  if (!row.transport) return row.chosen_transport ?? "";
  const fetched = row.fetched_bytes ? `, ${number(row.fetched_bytes / 1e6)} MB` : "";
  const instead = row.chosen_transport && row.chosen_transport !== row.transport ? ` (not ${row.chosen_transport})` : "";
  return `${row.transport}${instead}, ${number(row.stage_s)} s${fetched}`;
}

/** Begin with what the coordinator saw before this view was opened. */
function recall(history, rows, now) {
  for (const { worker, spans = [] } of rows) {
    history.set(worker, spans.map(({ kind, wait, start_age_s, end_age_s }) => ({ kind, wait, start: now - start_age_s, end: now - end_age_s })));
  }
}

function note(history, rows, now) {
  for (const row of rows) {
    const kind = !row.alive ? "lost" : row.running ? "busy" : "waiting";
    const spans = history.get(row.worker) ?? [];
    const last = spans.at(-1);
    if (last && last.kind === kind && last.wait === row.wait) last.end = now;
    else spans.push({ kind, wait: row.wait, start: last ? last.end : now, end: now });
    history.set(row.worker, spans.filter(({ end }) => now - end < KEPT_S));
  }
}

function activityOf(history, now) {
  const start = Math.max(now - KEPT_S, Math.min(...[...history.values()].flat().map((span) => span.start), now));
  if (now - start < 1) return make("p", { class: "hint" }, "Watching since now; a strip for each worker grows here.");
  const place = (time) => `${(100 * (Math.max(time, start) - start)) / (now - start)}%`;
  return [make("p", { class: "hint" }, `The last ${age(now - start)}, from their heartbeats.`, legend(["busy", "waiting", "lost"])),
    [...history].map(([worker, spans]) => {
      const text = sharesOf(spans, start, now);
      return make("div", { class: "strip reported", "data-key": worker }, make("span", { class: "strip-name" }, worker), make("div", { class: "track", role: "img", "aria-label": `${worker}: ${text}` },
        spans.map((span) => make("div", { class: `span ${span.kind}`, title: `${span.kind}${span.wait ? `, for ${span.wait}` : ""}: ${age(span.end - span.start)}`,
          style: { left: place(span.start), width: `calc(${place(span.end)} - ${place(span.start)})` } }))),
      make("span", { class: "strip-text soft" }, text));
    })];
}

/** How much of its time a worker was busy, and what it waited for in most of the rest. */
function sharesOf(spans, start, now) {
  const spent = new Map();
  for (const span of spans) {
    const name = span.kind === "waiting" && span.wait ? `waiting for ${generalOf(span.wait)}` : span.kind;
    spent.set(name, (spent.get(name) ?? 0) + span.end - Math.max(span.start, start));
  }
  const share = (seconds) => `${Math.round((100 * seconds) / (now - start))} %`;
  const waits = [...spent].filter(([name]) => name !== "busy").sort(([, one], [, other]) => other - one).slice(0, MOST_WAITS);
  return [`busy ${share(spent.get("busy") ?? 0)}`, ...waits.map(([name, seconds]) => `${name} ${share(seconds)}`)].join(", ");
}

/** A wait without what changes from one look to the next: its numbers. */
function generalOf(wait) {
  return wait.replace(/(?<=[ (])\d[\d.]*/g, "…");
}

/** Shares of what each trainer did since it took the job up: here its waits are measured, not looked at. */
function spentOf(rows) {
  const trainers = rows.filter((row) => row.seconds && Object.values(row.seconds).some((seconds) => seconds > 0));
  if (!trainers.length) return make("p", { class: "hint" }, "No trainer has spent time on it.");
  return [make("p", { class: "hint" }, "Measured since it took the job up. Waiting is for batches: then rollout, rewards or simulators are what holds the job up.", legend(PARTS)),
    trainers.map(({ worker, seconds }) => {
      const total = Object.values(seconds).reduce((sum, one) => sum + one, 0);
      const parts = PARTS.filter((name) => seconds[name] > 0);
      const share = (name) => `${((100 * seconds[name]) / total).toFixed(seconds[name] < 0.1 * total ? 1 : 0)} %`;
      const text = parts.map((name) => `${name} ${share(name)}`).join(", ");
      return make("div", { class: "strip reported", "data-key": worker }, make("span", { class: "strip-name" }, worker),
        make("div", { class: "track parts", role: "img", "aria-label": `${worker}: ${text} of ${age(total)}` },
          parts.map((name) => make("div", { class: `part ${name}`, title: `${name} ${age(seconds[name])}`, style: { width: `${(100 * seconds[name]) / total}%` } }))),
        make("span", { class: "strip-text soft" }, `${text} of ${age(total)}`));
    })];
}

function legend(names) {
  return make("span", { class: "legend" }, names.map((name) => make("span", {}, make("span", { class: `swatch ${name}` }), ` ${name}`)));
}

function stagesOf(spans) {
  if (!spans.length) return make("p", { class: "hint" }, "No update was made yet.");
  const [start, end] = [Math.min(...spans.map((span) => span.start)), Math.max(...spans.map((span) => span.end))];
  const place = (time) => `${(100 * (time - start)) / (end - start || 1)}%`;
  const steps = [...new Set(spans.map(({ step }) => step))];
  return [make("p", { class: "hint" }, `${age(end - start)} in all. An update waits where the trainer is still busy with the one before.`, legend(STAGES)),
    steps.map((step) => {
      const own = spans.filter((span) => span.step === step);
      const text = own.map((span) => `${span.stage} ${(span.end - span.start).toFixed(2)} s`).join(", ");
      return make("div", { class: "strip", "data-key": `update ${step}` }, make("span", { class: "strip-name" }, `update ${number(step)}`), make("div", { class: "track", role: "img", "aria-label": `Update ${step}: ${text}` },
        own.map((span) => make("div", { class: `span ${span.stage}`, title: `${span.stage}: ${(span.end - span.start).toFixed(3)} s`,
          style: { left: place(span.start), width: `calc(${place(span.end)} - ${place(span.start)})` } }))));
    })];
}
