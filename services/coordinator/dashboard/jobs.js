// The list of jobs: filters, progress, and the reward of those in sight.

import { get } from "./api.js";
import { sparkline } from "./charts.js";
import { age, choice, field, make, number, patch, phase } from "./dom.js";

const EVERY_MS = 2500;
const PAGE = 100;
const MOST_PAGES = 10;
const ROWS = 60;
const CURVE_POINTS = 40;
const CURVE_EVERY_MS = 15000;
const CURVES_AT_ONCE = 3;
const CURVES_A_ROUND = 12;
export const TERMINAL = new Set(["succeeded", "failed", "cancelled"]);
const STATES = [
  ["", "all"], ["active", "not over"], ["running", "running"], ["pending", "pending"], ["paused", "paused"],
  ["succeeded", "succeeded"], ["failed", "failed"], ["cancelled", "cancelled"],
];
const KINDS = [["", "all"], ["rl", "rl"], ["online_rl", "online_rl"], ["embodied", "embodied"], ["evaluation", "evaluation"], ["serving", "serving"]];

const filters = { text: "", state: "", kind: "", label: "" };

/** `asked` is what the address says of the filters, as a query; without one they stay as they were. */
export function showJobs({ page, signal, loop, title }, asked = "") {
  title("Jobs");
  if (asked) {
    const query = new URLSearchParams(asked);
    for (const name of Object.keys(filters)) filters[name] = query.get(name) ?? "";
  }
  const state = { pages: [], shown: ROWS, curves: new Map(), chosen: new Set() };
  const list = make("div", { class: "panel flush" });
  const summary = make("p", { class: "hint", role: "status" });
  const draw = () => {
    const jobs = state.pages.flat();
    const found = jobs.filter(isWanted);
    patch(list, rows(found.slice(0, state.shown), jobs.length, state, draw));
    patch(summary, `${number(found.length)} of ${number(jobs.length)} jobs`,
      state.chosen.size > 1 && make("a", { class: "button", href: `#/compare?jobs=${[...state.chosen].join()}` },
        `Compare ${state.chosen.size} jobs`),
      found.length > state.shown && make("button", { type: "button", onclick: () => { state.shown += ROWS; draw(); } }, "Show more"));
    watch(list, state);
  };
  page.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Jobs"),
    make("a", { class: "button primary", href: "#/submit" }, "Submit a job")), controls(draw), list, summary);
  keepFilters();
  loop(EVERY_MS, async () => {
    await load(state, signal, draw);
    draw();
    await drawCurves(state, signal, draw);
  });
}

/** The first page, and of the others those that are not known yet or hold a job that is not over. */
async function load(state, signal, draw) {
  for (let index = 0; index < MOST_PAGES; index += 1) {
    const before = state.pages[index - 1];
    if (index && before.length < PAGE) break;
    if (index && state.pages[index]?.every((job) => TERMINAL.has(job.status.phase)) && state.pages[index][0]?.id < before.at(-1).id) continue;
    const after = before ? `&after=${before.at(-1).id}` : "";
    const { data } = await get(`/v1/jobs?limit=${PAGE}${after}`, signal);
    state.pages[index] = data;
    draw();
  }
}

/** Write the filters into the address, so that it can be kept, sent, and loaded again. */
function keepFilters() {
  const set = Object.entries(filters).filter(([, text]) => text);
  document.querySelector("#clear").hidden = !set.length;
  history.replaceState(null, "", set.length ? `#/?${new URLSearchParams(set)}` : "#/");
}

function controls(draw) {
  const on = (name) => (event) => {
    filters[name] = event.target.value.trim();
    keepFilters();
    draw();
  };
  return make("form", { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
    field("Search", make("input", { type: "search", value: filters.text, placeholder: "name, id or message", oninput: on("text") })),
    field("State", choice(STATES, filters.state, { onchange: on("state") })),
    field("Kind", choice(KINDS, filters.kind, { onchange: on("kind") })),
    field("Label", make("input", { type: "search", value: filters.label, placeholder: "key=value", oninput: on("label") })),
    make("a", { class: "button", id: "clear", href: "#/?text=" }, "Clear"));
}

function isWanted(job) {
  const { phase: now, message } = job.status;
  if (filters.state && (filters.state === "active" ? TERMINAL.has(now) : now !== filters.state)) return false;
  if (filters.kind && (job.spec.kind ?? "rl") !== filters.kind) return false;
  const labels = Object.entries(job.spec.metadata ?? {}).map(([key, value]) => `${key}=${value}`);
  if (filters.label && !labels.some((label) => label.startsWith(filters.label))) return false;
  return `${job.name} ${job.id} ${message} ${labels.join(" ")}`.toLowerCase().includes(filters.text.toLowerCase());
}

function rows(jobs, total, state, draw) {
  if (!jobs.length) {
    return make("div", { class: "empty" }, make("p", {}, total ? "No job fits these filters." : "No jobs yet."),
      !total && make("p", { class: "hint" }, "Submit one with the button above, or: ", make("code", {}, "penstock submit job.yaml")));
  }
  return make("table", { class: "jobs", "aria-label": "Jobs" },
    make("thead", {}, make("tr", {}, ["compare", "job", "state", "progress", "reward", "lately", "in flight", "age"].map((text) =>
      make("th", { scope: "col", class: ["reward", "in flight", "age"].includes(text) ? "number" : null },
        text === "compare" ? make("span", { class: "unseen" }, text) : text)))),
    make("tbody", {}, jobs.map((job) => row(job, state, draw))));
}

function row(job, state, draw) {
  const { status } = job;
  const curve = state.curves.get(job.id)?.values ?? [];
  const choose = ({ target }) => {
    if (target.checked) state.chosen.add(job.id);
    else state.chosen.delete(job.id);
    draw();
  };
  return make("tr", { "data-key": job.id },
    make("td", { class: "pick" }, make("input", { type: "checkbox", "aria-label": `Compare ${job.name}`, onchange: choose })),
    make("td", { class: "name" }, make("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, title: `${job.name}, ${job.id}` }, job.name), make("div", { class: "about" }, labels(job),
      status.message && make("div", { class: `message ${status.phase === "failed" ? "bad" : "soft"}`, title: status.message }, status.message))),
    make("td", { class: "state" }, phase(status.phase), make("div", { class: "soft kind" }, job.spec.kind ?? "rl"), warned(job)),
    make("td", { class: "progress" }, progress(job)),
    make("td", { class: "number", "data-label": "reward" }, number(status.reward)),
    make("td", { class: "curve" }, sparkline(curve, `Reward of ${job.name}, from ${number(curve[0])} to ${number(curve.at(-1))}`)),
    make("td", { class: "number", "data-label": "in flight" }, number(status.draws?.in_flight ?? 0)),
    make("td", { class: "number", "data-label": "age" }, age((Date.now() - Date.parse(job.created_at)) / 1000)));
}

/** Kinds of warnings that hold: what learnt nothing must not look like what did. */
function warned(job) {
  return (job.status.warnings ?? []).map((row) => make("div", { class: "warns kind", title: row.message }, `⚠ ${row.kind.replaceAll("_", " ")}`));
}

export function labels(job) {
  return Object.entries(job.spec.metadata ?? {}).map(([key, value]) => make("span", { class: "label" }, `${key}=${value}`));
}

/** The labels of a job, each leading to the list of those that carry it. */
export function labelLinks(job) {
  return Object.entries(job.spec.metadata ?? {}).map(([key, value]) =>
    make("a", { class: "label", href: `#/?${new URLSearchParams({ label: `${key}=${value}` })}` }, `${key}=${value}`));
}

/** Updates made of those to be made, as a bar, and when that is over. */
export function progress(job) {
  const { status } = job;
  const total = status.total_steps;
  const left = status.expected_end ? (Date.parse(status.expected_end) - Date.now()) / 1000 : null;
  const text = `${number(status.step)}${total ? ` / ${number(total)}` : ""}`;
  return make("div", { class: "steps" }, make("div", { class: "steps-text" }, make("span", {}, text),
    left !== null && status.phase === "running" && make("span", { class: "soft" }, `${age(left)} left`)),
    total && make("progress", { max: total, value: Math.min(status.step, total), "aria-label": `${job.name}: updates made` }));
}

/** Note which rows are in sight: only their curves are asked for. */
function watch(list, state) {
  state.inSight ??= new Map();
  state.observer ??= new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) state.inSight.set(target.dataset.key, isIntersecting);
  });
  for (const tr of list.querySelectorAll("tbody tr")) state.observer.observe(tr);
}

/** Ask for the curves of rows in sight that have grown, a few at a time and not often. */
async function drawCurves(state, signal, draw) {
  const now = Date.now();
  const due = state.pages.flat().filter((job) => {
    const known = state.curves.get(job.id);
    return job.status.step > 1 && state.inSight?.get(job.id) && job.status.step !== known?.step && now - (known?.time ?? 0) > CURVE_EVERY_MS;
  }).slice(0, CURVES_A_ROUND);
  for (let start = 0; start < due.length; start += CURVES_AT_ONCE) {
    await Promise.all(due.slice(start, start + CURVES_AT_ONCE).map(async (job) => {
      const path = `/v1/jobs/${encodeURIComponent(job.id)}/metrics?names=reward/mean&max_points=${CURVE_POINTS}`;
      const { series } = await get(path, signal);
      state.curves.set(job.id, { step: job.status.step, time: now, values: series["reward/mean"] ?? [] });
    }));
    draw();
  }
}
