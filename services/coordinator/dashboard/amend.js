// The dialog that changes a job while it runs: a field for each key that may change, and what is sent of them. `rows` are
// those of `/amendable`: key, present value, range, description. `backend` may change, too, but its keys depend on its
// type: that is left to the command line.

import { field, make } from "./dom.js";

const LABELS = {
  "train.max_updates": "Updates at most", "optimizer.learning_rate": "Learning rate", "sampling.temperature": "Temperature",
  "algorithm.kl.coef": "Weight of the KL", "checkpoint.every": "Updates between checkpoints", "checkpoint.keep": "Checkpoints kept",
  "limits.byte_budget": "Bytes at most", "limits.timeout_s": "Seconds at most",
};

const linesOf = (labels = {}) => Object.entries(labels).map(([name, value]) => `${name}=${value}`).join("\n");

/** What the dialog holds: each field with its present value, its range and what it means. */
export function amendFields(rows, { spec }) {
  const numbers = rows.map(({ key, value, type, minimum, above, optional, description }) => {
    const about = `about-${key}`;
    const input = make("input", { name: key, type: "number", step: type === "integer" ? 1 : "any", min: minimum ?? above + Number.EPSILON ** 2,
      required: !optional, value: value ?? "", placeholder: optional ? "none" : null, "aria-describedby": about });
    const range = `${type === "integer" ? "A whole number" : "A number"}, ${minimum === null ? `above ${above}` : `at least ${minimum}`}`;
    return explained(`${LABELS[key] ?? key} (${key})`, input, about, `${description} ${range}${optional ? "; empty: none" : ""}.`);
  });
  const labels = make("textarea", { name: "metadata", rows: 2, spellcheck: "false", "aria-describedby": "about-metadata" });
  labels.value = linesOf(spec.metadata);
  return [make("p", { class: "hint" }, "What you change holds from the next batch on, and nothing else is sent."), numbers,
    explained("Labels (metadata)", labels, "about-metadata", "One on each line, like owner=ana. They change nothing of the training.")];
}

function explained(label, control, id, text) {
  return make("div", {}, field(label, control), make("small", { class: "hint", id }, text));
}

/** The merge patch of what differs from the job file in the values of the dialog; null where nothing does. */
export function amendment(rows, { spec }, values) {
  const changed = {};
  for (const { key, value } of rows) {
    const wanted = values[key].trim() === "" ? null : Number(values[key]);
    if (wanted !== value) put(changed, key.split("."), wanted);
  }
  const [before, after] = [spec.metadata ?? {}, parsedLabels(values.metadata)];
  for (const name of Object.keys({ ...before, ...after })) {
    if (before[name] !== after[name]) put(changed, ["metadata", name], after[name] ?? null);
  }
  return Object.keys(changed).length ? changed : null;
}

function put(target, path, value) {
  const [name, ...rest] = path;
  if (rest.length) put(target[name] ??= {}, rest, value);
  else target[name] = value;
}

function parsedLabels(text) {
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return Object.fromEntries(lines.map((line) => {
    const [name, ...rest] = line.split("=");
    return [name.trim(), rest.join("=").trim()];
  }));
}
