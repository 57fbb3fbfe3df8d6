// Every metric of a job in groups, or the same metrics of several jobs over each other.

import { download, get } from "./api.js";
import { Chart, noteOf } from "./charts.js";
import { choice, field, make, number, patch, say } from "./dom.js";

const EVERY_MS = 2500;
const NAMES_EVERY_MS = 10000;
const POINTS = 500;
const MOST_POINTS = 10_000;
const OPEN_GROUPS = 5;
const FIRST = ["reward", "eval", "mismatch", "lag", "policy", "loss", "length", "groups", "advantage", "optimizer"];
const look = { smooth: 0, log: false, byTime: false, filter: "" }; // as it was left in the view before

export function showMetrics({ content, signal, loop, id, job }) {
  show(content, { signal, loop }, [{ id, name: job.name }]);
}

export async function showComparison({ page, signal, loop, title }, ids) {
  title("Compare jobs");
  const content = make("div", { class: "view" });
  page.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Compare jobs")), content);
  let begun = false;
  loop(60_000, async () => {
    if (begun) return;
    const jobs = await Promise.all(ids.map((id) => get(`/v1/jobs/${encodeURIComponent(id)}`, signal)));
    begun = true;
    const names = namesOf(jobs);
    const links = jobs.map(({ id }, place) => make("a", { class: "label", href: `#/jobs/${encodeURIComponent(id)}` }, names[place]));
    content.before(make("p", { class: "links" }, links));
    show(content, { signal, loop }, jobs.map(({ id }, place) => ({ id, name: names[place] })));
  });
}

/** Names that tell jobs apart: their own, or the settings and seed that a sweep gave them, or with the end of their ids. */
function namesOf(jobs) {
  const swept = ({ name, spec }) => (spec.metadata?.settings ? `${spec.metadata.settings} seed ${spec.seed}` : name);
  const ways = [({ name }) => name, swept, ({ id, name }) => `${name} ${id.slice(-6)}`];
  return ways.map((way) => jobs.map(way)).find((names, place) => place === 2 || new Set(names).size === names.length);
}

function show(content, { signal, loop }, jobs) {
  const grid = { jobs, charts: new Map(), inSight: new Set(), observer: null, columns: new Map() };
  grid.observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) grid.inSight.add(target.dataset.title);
      else grid.inSight.delete(target.dataset.title);
    }
    drawn();
  }, { rootMargin: "200px" });
  const groups = make("div", { class: "groups" });
  const drawn = () => { for (const title of grid.inSight) draw(grid, title); };
  let known = [];
  const arrange = () => arrangeGroups(grid, groups, known);
  content.replaceChildren(controls(jobs, drawn, arrange), groups);
  loop(NAMES_EVERY_MS, async () => {
    const found = await Promise.all(jobs.map(({ id }) => get(`/v1/jobs/${encodeURIComponent(id)}/metrics/names`, signal)));
    known = [...new Set(found.flatMap(({ data }) => data.map(({ name }) => name)))].sort();
    arrange();
  });
  loop(EVERY_MS, async () => {
    const names = [...grid.inSight].flatMap((title) => grid.charts.get(title)?.names ?? []);
    if (!names.length) return;
    await Promise.all(jobs.map(async ({ id }) => {
      const path = `/v1/jobs/${encodeURIComponent(id)}/metrics?max_points=${POINTS}&names=${encodeURIComponent(names.join())}`;
      const { steps, wall, series } = await get(path, signal);
      const minutes = wall.map((time) => (time - wall[0]) / 60);
      const own = grid.columns.get(id) ?? new Map();
      for (const name of names) own.set(name, { steps, minutes, values: series[name] });
      grid.columns.set(id, own);
    }));
    drawn();
  });
}

function controls(jobs, drawn, arrange) {
  const shown = make("span", {}, String(look.smooth)); // an output would take the label that is the slider's
  const slider = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: look.smooth, oninput: ({ target }) => {
    look.smooth = Number(target.value);
    shown.textContent = String(look.smooth);
    drawn();
  } });
  return make("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    field("Search", make("input", { type: "search", value: look.filter, placeholder: "part of a metric's name", oninput: ({ target }) => {
      look.filter = target.value.trim().toLowerCase();
      arrange();
    } })),
    make("label", { class: "field" }, make("span", {}, "Smoothing ", shown), slider),
    field("Along", choice([["", "updates"], ["time", "minutes"]], look.byTime ? "time" : "", { onchange: ({ target }) => {
      look.byTime = target.value === "time";
      drawn();
    } })),
    make("label", { class: "check" }, make("input", { type: "checkbox", checked: look.log, onchange: ({ target }) => {
      look.log = target.checked;
      drawn();
    } }), " logarithmic scale"),
    jobs.map(({ id, name }) => make("button", { type: "button", "aria-label": `Download the metrics of ${name}`, onclick: () => save(id, name) },
      jobs.length > 1 ? `${name}.csv` : "Download CSV")),
    make("p", { class: "hint" }, "Drag over a chart to zoom, double-click to see all of it."));
}

async function save(id, name) {
  await download(`/v1/jobs/${encodeURIComponent(id)}/metrics?format=csv&max_points=${MOST_POINTS}`, `${name}.csv`)
    .catch((problem) => problem.name === "AbortError" || say(`${name}.csv: ${problem.message}`, "error"));
}

/** Charts by the first part of their names; quantiles and shares of one thing share a chart where one job is shown. */
function arrangeGroups(grid, place, known) {
  const titles = new Map();
  for (const name of known) {
    const title = grid.jobs.length > 1 ? name : name.replace(/_(p\d+|\d+)$/, "");
    titles.set(title, [...(titles.get(title) ?? []), name]);
  }
  const isMean = ([title]) => title.endsWith("/mean");
  const wanted = [...titles].filter(([title]) => title.toLowerCase().includes(look.filter)).sort((one, other) => isMean(other) - isMean(one));
  const groups = Map.groupBy ? Map.groupBy(wanted, groupOf) : wanted.reduce((map, entry) =>
    map.set(groupOf(entry), [...(map.get(groupOf(entry)) ?? []), entry]), new Map());
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  const order = [...groups].sort(([one], [other]) => rank(one) - rank(other) || one.localeCompare(other));
  if (!order.length) return patch(place, make("p", { class: "hint" }, known.length ? "No metric has such a name." : "Nothing was measured yet."));
  patch(place, order.map(([name, entries], index) => make("details", { "data-key": name, open: index < OPEN_GROUPS || Boolean(look.filter) },
    make("summary", {}, make("h2", {}, name), make("span", { class: "soft" }, ` ${number(entries.length)}`)),
    make("div", { class: "grid" }, entries.map(([title, names]) => chartOf(grid, title, names))))));
}

function groupOf([title]) {
  return title.includes("/") ? title.split("/")[0] : "other";
}

function chartOf(grid, title, names) {
  const old = grid.charts.get(title);
  if (old) {
    old.names = names;
    const { element } = old.chart;
    return element.isConnected ? make("figure", { "data-key": element.dataset.key }) : element;
  }
  const chart = new Chart(title, noteOf(title), look);
  chart.element.dataset.title = title;
  grid.charts.set(title, { chart, names });
  grid.observer.observe(chart.element);
  return chart.element;
}

function draw(grid, title) {
  const { chart, names } = grid.charts.get(title);
  const series = grid.jobs.flatMap(({ id, name: job }) => names.map((name) => {
    const { steps = [], minutes, values } = grid.columns.get(id)?.get(name) ?? {};
    return { label: grid.jobs.length > 1 ? job : name, steps: look.byTime && minutes ? minutes : steps, values };
  }));
  if (!chart.draw(series)) chart.element.hidden = false; // its place is what tells that it is in sight
}
