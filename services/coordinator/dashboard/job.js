// One job: its heading, what can be done with it, and its views.

import { amendFields, amendment } from "./amend.js";
import { change, get } from "./api.js";
import { showCheckpoints } from "./checkpoints.js";
import { ask, choice, field, make, number, patch, phase, say } from "./dom.js";
import { showEvents } from "./events.js";
import { showFeedback } from "./feedback.js";
import { showFile } from "./jobfile.js";
import { TERMINAL, labelLinks, progress } from "./jobs.js";
import { showMetrics } from "./metrics.js";
import { showOverview } from "./overview.js";
import { showSamples } from "./samples.js";
import { showVideos } from "./videos.js";
import { showWorkers } from "./workers.js";

const EVERY_MS = 2000;
const VIEWS = {
  overview: ["Overview", showOverview], metrics: ["Metrics", showMetrics], samples: ["Samples", showSamples],
  videos: ["Videos", showVideos], workers: ["Workers", showWorkers], checkpoints: ["Checkpoints", showCheckpoints],
  feedback: ["Feedback", showFeedback], events: ["Events and logs", showEvents],
  file: ["Job file", showFile],
};

export async function showJob({ page, signal, loop, title }, id, tab, item) {
  const path = `/v1/jobs/${encodeURIComponent(id)}`;
  const [view, show] = VIEWS[tab] ?? VIEWS.overview;
  const [heading, views, content] = [make("div"), make("nav", { class: "tabs", "aria-label": "Views of the job" }), make("div", { class: "view" })];
  page.replaceChildren(heading, views, content);
  let begun = false;
  loop(EVERY_MS, async () => {
    const job = await get(path, signal);
    title(tab === "overview" ? job.name : `${view} of ${job.name}`);
    patch(heading, headingOf(job, path));
    patch(views, tabs(job, tab));
    if (begun) return;
    begun = true;
    show({ content, signal, loop, id, path, job, item });
  });
}

function tabs(job, tab) {
  const only = { feedback: "online_rl", videos: "embodied" };
  return Object.entries(VIEWS).filter(([name]) => (only[name] ?? job.spec.kind) === job.spec.kind).map(([name, [text]]) =>
    make("a", { href: `#/jobs/${encodeURIComponent(job.id)}${name === "overview" ? "" : `/${name}`}`, "aria-current": name === tab ? "page" : null }, text));
}

function headingOf(job, path) {
  const { phase: now, message } = job.status;
  const verb = (name, allowed, kind = "") => make("button", {
    type: "button", class: kind, disabled: !allowed, "data-key": name,
    onclick: () => act(job, path, name),
  }, name);
  const over = TERMINAL.has(now);
  return make("div", { class: "heading" },
    make("div", { class: "title" },
      make("h1", {}, job.name), phase(now), labelLinks(job), make("code", { class: "soft id" }, job.id),
      make("div", { class: "actions", role: "group", "aria-label": "Actions" },
        verb("pause", now === "running" || now === "pending"), verb("resume", now === "paused" || now === "pausing"),
        verb("cancel", !over, "danger"), verb("checkpoint", !over), verb("scale", !over), verb("amend", !over),
        make("a", { class: "button", href: `#/submit?from=${encodeURIComponent(job.id)}` }, "clone"))),
    progress(job),
    message && make("p", { class: now === "failed" ? "problem" : "soft" }, message));
}

const QUESTIONS = {
  cancel: (job) => ask(`Cancel ${job.name}?`, make("p", {}, "It trains what is under way, writes a checkpoint and ends. This cannot be undone."), "Cancel the job", "danger"),
  scale: () => ask("Scale workers", [
    make("p", { class: "hint" }, "They work for every job of the deployment. Those that stop finish their current work."),
    field("Service", choice([["rollout", "rollout"], ["reward", "reward"], ["env", "env"]], "rollout", { name: "pool" })),
    field("Workers", make("input", { name: "replicas", type: "number", min: 0, max: 64, value: 2, required: true }))], "Scale"),
  amend: async (job, path) => {
    const { data } = await get(`${path}/amendable`);
    const values = await ask(`Change ${job.name}`, amendFields(data, job), "Change");
    return values && { patch: amendment(data, job, values) };
  },
};

const REQUESTS = {
  checkpoint: (path) => change("POST", `${path}/checkpoints`),
  scale: (path, { pool, replicas }) => change("POST", `${path}/scale`, { pool, replicas: Number(replicas) }),
  amend: (path, { patch }, job) => {
    if (patch === null) say(`${job.name}: nothing was changed.`);
    return patch && change("PATCH", path, patch);
  },
};

async function act(job, path, verb) {
  try {
    const values = verb in QUESTIONS ? await QUESTIONS[verb](job, path) : {};
    if (values === null) return;
    const reply = await (REQUESTS[verb] ?? ((path) => change("POST", `${path}/${verb}`)))(path, values, job);
    if (reply === null) return;
    const from = reply.applies_at_step ? ` from update ${number(reply.applies_at_step)} on` : "";
    say(`${job.name}: ${verb} is asked for${from}.`);
  } catch (problem) {
    say(`${verb}: ${problem.message}`, "error");
  }
}
