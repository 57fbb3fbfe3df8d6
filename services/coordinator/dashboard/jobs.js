// The list of jobs.

import { get } from "./api.js";
import { age, make, number, phase, table } from "./dom.js";

const EVERY_MS = 2000;

export function showJobs(page, signal, loop) {
  const list = make("div");
  page.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Jobs")), make("div", { class: "panel" }, list));
  loop(EVERY_MS, async () => {
    const { data } = await get("/v1/jobs?limit=100", signal);
    list.replaceChildren(table(COLUMNS, data, "No jobs yet. Submit one: penstock submit job.yaml"));
  });
}

const COLUMNS = [
  ["job", (job) => make("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.name)],
  ["kind", (job) => job.spec.kind ?? "rl"],
  ["phase", (job) => phase(job.status.phase)],
  ["update", (job) => `${number(job.status.step)}${job.status.total_steps ? ` / ${number(job.status.total_steps)}` : ""}`, "number"],
  ["version", (job) => number(job.status.policy_version), "number"],
  ["reward", (job) => number(job.status.reward), "number"],
  ["in flight", (job) => number(job.status.draws?.in_flight), "number"],
  ["age", (job) => age((Date.now() - Date.parse(job.created_at)) / 1000), "number"],
  ["", (job) => job.status.message, "wide soft"],
];
