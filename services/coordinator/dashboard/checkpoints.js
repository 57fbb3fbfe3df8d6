// Checkpoints of a job, and what can be done with one.

import { change, download, get } from "./api.js";
import { ask, bytes, clock, field, make, number, panel, patch, say, table } from "./dom.js";
import { TERMINAL } from "./jobs.js";

const EVERY_MS = 3000;

export function showCheckpoints({ content, signal, loop, path }) {
  const list = make("div");
  content.replaceChildren(panel("Checkpoints", [
    make("p", { class: "hint" }, "Newest first. Any of them can be the model of another job: ", make("code", {}, "model: {path: job:NAME@final}"), "."), list]));
  loop(EVERY_MS, async () => {
    const [job, { data }] = await Promise.all([get(path, signal), get(`${path}/checkpoints`, signal)]);
    patch(list, table("Checkpoints", columns(job, path), [...data].reverse(), "None yet.", (row) => String(row.number)));
  });
}

function columns(job, path) {
  return [
    ["number", (row) => number(row.number), "number"],
    ["version", (row) => number(row.version), "number"],
    ["time", (row) => clock(row.time)],
    ["why", (row) => [row.reason, ["initial", "best", "newest", "final"].filter((flag) => row[flag] && flag !== row.reason).map((flag) => make("span", { class: "label" }, flag))]],
    ["format", (row) => row.format ?? "–"],
    ["size", (row) => (row.available ? bytes(row.nbytes) : "–"), "number"],
    ["files", (row) => filesOf(row, path), "wide"],
    ["", (row) => actions(job, path, row)],
  ];
}

function filesOf(row, path) {
  if (!row.available) return make("span", { class: "soft" }, "deleted, or on another host");
  return make("details", {}, make("summary", {}, `${number(row.files.length)} files`), make("ul", { class: "plain" }, row.files.map((file) =>
    make("li", {}, make("button", { type: "button", class: "link", title: `sha256 ${file.sha256}`, onclick: () => save(`${path}/checkpoints/${row.number}/files/${file.name}`, file.name) }, file.name),
      make("span", { class: "soft" }, ` ${bytes(file.nbytes)}`)))));
}

function actions(job, path, row) {
  const isOver = TERMINAL.has(job.status.phase);
  const canDelete = row.available && (isOver || !(row.initial || row.best || row.newest));
  return make("div", { class: "actions" },
    make("button", { type: "button", disabled: !row.available, "aria-label": `Download checkpoint ${row.number}`,
      onclick: () => save(`${path}/checkpoints/${row.number}/archive`, `${job.name}-${row.number}.tar`) }, "download"),
    make("button", { type: "button", disabled: !row.available || !row.format, "aria-label": `Serve checkpoint ${row.number}`, onclick: () => serve(job, row) }, "serve"),
    make("button", { type: "button", disabled: isOver || row.newest, "aria-label": `Roll back to checkpoint ${row.number}`, onclick: () => rollBack(job, path, row) }, "roll back"),
    make("button", { type: "button", class: "danger", disabled: !canDelete, "aria-label": `Delete checkpoint ${row.number}`, onclick: () => remove(job, path, row) }, "delete"));
}

async function save(path, name) {
  try {
    say(`${name} is being downloaded.`);
    await download(path, name);
  } catch (problem) {
    if (problem.name !== "AbortError") say(`${name}: ${problem.message}`, "error");
  }
}

async function serve(job, row) {
  const name = make("input", { name: "name", required: true, maxlength: 63, pattern: "[a-z0-9][a-z0-9._\\-]*", value: `${job.name.slice(0, 50)}-${row.number}` });
  const values = await ask(`Serve checkpoint ${number(row.number)}?`, [
    make("p", {}, "It answers at /v1/chat/completions until the deployment, a job of its own, is cancelled."),
    field("Name of the model", name)], "Serve");
  if (values === null) return;
  const file = { kind: "serving", name: values.name, model: { path: `job:${job.id}@${row.number}` } };
  await tell(`Serving '${values.name}'`, change("POST", "/v1/jobs", file));
}

async function rollBack(job, path, row) {
  const text = `${job.name} gives up the ${number(job.status.step - row.number)} updates after checkpoint ${number(row.number)} and trains on from it, under a new version.`;
  if (await ask(`Roll back to checkpoint ${number(row.number)}?`, make("p", {}, text), "Roll back", "danger") === null) return;
  await tell("Rolling back", change("POST", `${path}/rollback`, { checkpoint: row.number }));
}

async function remove(job, path, row) {
  if (await ask(`Delete checkpoint ${number(row.number)}?`, make("p", {}, `Its ${bytes(row.nbytes)} are deleted. This cannot be undone.`), "Delete", "danger") === null) return;
  await tell("Deleting", change("DELETE", `${path}/checkpoints/${row.number}`));
}

async function tell(what, asked) {
  await asked.then(() => say(`${what} is asked for.`), (problem) => say(`${what}: ${problem.message}`, "error"));
}
