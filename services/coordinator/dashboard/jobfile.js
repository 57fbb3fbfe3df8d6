// Job files: that of a job, and one to be submitted.

import { change, get } from "./api.js";
import { make, number, panel, patch, say } from "./dom.js";

const START = `name: addition
model:
  config: {hidden_size: 128, intermediate_size: 512, num_layers: 4, num_heads: 4, num_kv_heads: 2}
  tokenizer: char
data:
  train: {type: addition, digits: 1}
  prompt: {max_tokens: 8}
reward:
  scorers: [{type: exact}]
algorithm: {type: grpo, group_size: 8}
sampling: {max_new_tokens: 6}
warm_start: {steps: 70, batch_size: 64, learning_rate: 1.0e-3}
optimizer: {learning_rate: 2.0e-4}
train: {batch_size: 256, max_lag: 1, max_updates: 300}
`;

export function showFile({ content, job }) {
  const text = yaml(job.spec);
  content.replaceChildren(panel("Job file", [
    make("p", { class: "links" },
      make("a", { class: "button", href: `#/submit?from=${encodeURIComponent(job.id)}` }, "Clone"),
      make("button", { type: "button", onclick: () => navigator.clipboard.writeText(text).then(() => say("Copied.")) }, "Copy")),
    make("pre", { class: "code", tabindex: 0, role: "region", "aria-label": "Job file" }, text)]),
  panel("Operations", job.operations.length ? make("ul", { class: "plain" }, [...job.operations].reverse().map((one) =>
    make("li", {}, `${one.kind} ${JSON.stringify(one.args)}: ${one.state}${one.message ? `, ${one.message}` : ""}`))) : make("p", { class: "hint" }, "None was asked for.")));
}

/** A form that checks a job file and submits it; `from` is the id of a job whose file it begins with. */
export function showSubmission({ page, signal, loop, title }, from) {
  title("Submit a job");
  const text = make("textarea", { id: "job-file", rows: 24, spellcheck: "false", autocomplete: "off", "aria-describedby": "job-hint" });
  const result = make("div", { role: "status" });
  const submit = async (isDry) => {
    patch(result, make("p", { class: "hint" }, isDry ? "Checking…" : "Submitting…"));
    try {
      const reply = await change("POST", `/v1/jobs${isDry ? "?dry_run=true" : ""}`, text.value);
      if (isDry) patch(result, planOf(reply.plan));
      else location.hash = `#/jobs/${encodeURIComponent(reply.id)}`;
    } catch (problem) {
      patch(result, make("p", { class: "problem" }, problem.message));
    }
  };
  page.replaceChildren(make("div", { class: "title" }, make("h1", {}, from ? "Clone a job" : "Submit a job")),
    make("form", { class: "panel submission", onsubmit: (event) => { event.preventDefault(); submit(false); } },
      make("label", { for: "job-file" }, "Job file"), text,
      make("p", { class: "hint", id: "job-hint" }, "YAML or JSON. Files and modules that it names are those of the services' hosts."),
      make("div", { class: "actions" }, make("button", { type: "button", onclick: () => submit(true) }, "Dry run"),
        make("button", { class: "primary" }, "Submit")), result));
  if (!from) {
    text.value = START;
    return;
  }
  let isFilled = false;
  loop(3_600_000, async () => {
    if (isFilled) return;
    const { spec } = await get(`/v1/jobs/${encodeURIComponent(from)}`, signal);
    text.value = yaml({ ...spec, name: `${spec.name}-2`.slice(-63) });
    isFilled = true;
  });
}

function planOf(plan) {
  const { batch = {}, data = {}, bytes = {}, warnings = [] } = plan;
  const rows = [...Object.entries(batch), ["rows per epoch", data.rows_per_epoch], ["byte budget", bytes.budget], ["largest group (bytes)", bytes.group_max]]
    .filter(([, value]) => typeof value === "number" || typeof value === "string");
  return [make("p", { class: "fine" }, "The job file is valid."),
    [...warnings, ...(data.notes ?? [])].map((warning) => make("p", { class: "warned" }, typeof warning === "string" ? warning : JSON.stringify(warning))),
    make("dl", { class: "figures small" }, rows.map(([name, value]) => make("div", {}, make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, typeof value === "number" ? number(value) : value)))),
    make("details", {}, make("summary", {}, "The file with every default"), make("pre", { class: "code", tabindex: 0, role: "region", "aria-label": "File with every default" }, yaml(plan.spec ?? {})))];
}

/** A value as YAML; texts in quotes unless they can be nothing else. */
export function yaml(value, indent = "") {
  if (Array.isArray(value)) {
    if (!value.length || value.every((one) => typeof one !== "object" || one === null)) return ` [${value.map(scalar).join(", ")}]\n`;
    return `\n${value.map((one) => `${indent}- ${nested(one, `${indent}  `).trimStart()}`).join("")}`;
  }
  if (value === null || typeof value !== "object") return ` ${scalar(value)}\n`;
  const text = nested(value, indent);
  return indent ? `\n${text}` : text;
}

function nested(value, indent) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return `${indent}${yaml(value, indent).trimStart()}`;
  const entries = Object.entries(value);
  if (!entries.length) return `${indent}{}\n`;
  return entries.map(([key, one]) => {
    const isEmpty = one && typeof one === "object" && !Array.isArray(one) && !Object.keys(one).length;
    return `${indent}${scalar(key)}:${isEmpty ? " {}\n" : yaml(one, `${indent}  `)}`;
  }).join("");
}

function scalar(value) {
  if (typeof value === "number") return JSON.stringify(value).replace(/^(-?\d+)e/, "$1.0e"); // YAML 1.1 takes 1e-8 for a text
  if (typeof value !== "string") return JSON.stringify(value) ?? "null";
  const isPlain = /^[A-Za-z_][\w./@-]*$/.test(value) && !/^(y|n|yes|no|on|off|true|false|null)$/i.test(value);
  return isPlain ? value : JSON.stringify(value);
}
