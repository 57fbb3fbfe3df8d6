// What belongs to no single job: keys, webhooks, what is held back, data sets, the audit log, health and limits.

import { change, get } from "./api.js";
import { age, ask, bytes, clock, field, make, number, panel, patch, say, table } from "./dom.js";
import { fill, heldTable } from "./feedback.js";

const EVERY_MS = 4000;
const SCOPES = ["jobs:read", "metrics:read", "artifacts:read", "jobs:write", "models:read", "inference:write", "episodes:write", "feedback:write", "feedback:admin", "jobs:code", "admin"];
const VIEWS = {
  keys: ["Keys", keys], webhooks: ["Webhooks", webhooks], quarantine: ["Held back", quarantine], files: ["Data sets", files],
  audit: ["Audit log", auditLog], health: ["Health and limits", health],
};

export function showDeployment({ page, signal, loop, title }, tab) {
  const [view, show] = VIEWS[tab] ?? VIEWS.keys;
  title(view);
  const content = make("div", { class: "view" });
  page.replaceChildren(make("div", { class: "title" }, make("h1", {}, "Deployment")),
    make("nav", { class: "tabs", "aria-label": "Views of the deployment" }, Object.entries(VIEWS).map(([name, [text]]) =>
      make("a", { href: `#/deployment/${name}`, "aria-current": name === tab ? "page" : null }, text))), content);
  show(content, signal, loop);
}

/** A panel with `above` and a part that `work` fills again and again. */
function live(content, loop, name, above, work) {
  const place = make("div");
  content.replaceChildren(panel(name, [above, place]));
  loop(EVERY_MS, () => fill(place, work));
}

async function attempt(what, asked) {
  return asked.then((reply) => { say(`${what}: done.`); return reply ?? true; }, (problem) => { say(`${what}: ${problem.message}`, "error"); return null; });
}

const when = (text) => (text ? clock(Date.parse(text) / 1000) : "never");

function keys(content, signal, loop) {
  const create = async () => {
    const values = await ask("Make a key", [
      field("Name", make("input", { name: "name", required: true, maxlength: 64 })),
      make("fieldset", {}, make("legend", {}, "Scopes"), SCOPES.map((scope) =>
        make("label", { class: "check" }, make("input", { type: "checkbox", name: scope, checked: ["jobs:read", "metrics:read"].includes(scope) }), ` ${scope}`))),
      field("Only these models (names, comma-separated; empty: all)", make("input", { name: "models" })),
      field("Days until it expires (empty: never)", make("input", { name: "days", type: "number", min: 0, step: "any" }))], "Make it");
    if (!values) return;
    const models = values.models.split(",").map((name) => name.trim()).filter(Boolean);
    const body = { name: values.name, scopes: SCOPES.filter((scope) => scope in values), ...(models.length ? { models } : {}), ...(values.days ? { expires_in_s: 86400 * Number(values.days) } : {}) };
    const made = await attempt("Making the key", change("POST", "/v1/keys", body));
    if (made) await ask("The key, shown this once", make("pre", { class: "code", tabindex: 0 }, made.key), "I have stored it");
  };
  const revoke = async (row) => {
    if (await ask(`Revoke ${row.name}?`, make("p", {}, "Whoever uses it is refused from now on."), "Revoke", "danger")) await attempt("Revoking", change("DELETE", `/v1/keys/${row.id}`));
  };
  const columns = [
    ["name", (row) => row.name, "wide"], ["scopes", (row) => row.scopes.join(", "), "wide"], ["models", (row) => row.models?.join(", ") ?? "all", "wide"],
    ["made", (row) => when(row.created_at)], ["expires", (row) => when(row.expires_at)],
    ["", (row) => make("button", { type: "button", class: "danger", "aria-label": `Revoke ${row.name}`, onclick: () => revoke(row) }, "revoke")],
  ];
  live(content, loop, "Keys", make("p", { class: "links" }, make("button", { type: "button", onclick: create }, "Make a key")), async () =>
    table("Keys", columns, (await get("/v1/keys", signal)).data, "None but those of the configuration.", (row) => row.id));
}

function webhooks(content, signal, loop) {
  const add = async () => {
    const values = await ask("Add a webhook", [
      field("Address", make("input", { name: "url", type: "url", required: true })), field("Description", make("input", { name: "description", maxlength: 200 }))], "Add it");
    if (!values) return;
    const made = await attempt("Adding the webhook", change("POST", "/v1/webhooks", values));
    if (made) await ask("Its secret, shown this once", make("pre", { class: "code", tabindex: 0 }, made.secret), "I have stored it");
  };
  const test = async (row) => {
    const reply = await attempt("Sending a test", change("POST", `/v1/webhooks/${row.id}/test`));
    if (reply) say(reply.delivered ? "The receiver took the test." : `The receiver did not take it: ${reply.error}`, reply.delivered ? "" : "error");
  };
  const remove = async (row) => {
    if (await ask("Forget this webhook?", make("p", {}, row.url), "Forget", "danger")) await attempt("Forgetting", change("DELETE", `/v1/webhooks/${row.id}`));
  };
  const columns = [
    ["address", (row) => [row.url, row.description && make("div", { class: "soft" }, row.description)], "wide"], ["types", (row) => row.types.join(", "), "wide"], ["job", (row) => row.job ?? "all"],
    ["state", (row) => make("span", { class: row.enabled ? "is-true" : "is-false" }, row.enabled ? "on" : `off ${row.disabled_reason}`)],
    ["", (row) => make("div", { class: "actions" },
      make("button", { type: "button", onclick: () => test(row) }, "test"),
      make("button", { type: "button", onclick: () => attempt("Switching", change("PATCH", `/v1/webhooks/${row.id}`, { enabled: !row.enabled })) }, row.enabled ? "switch off" : "switch on"),
      make("button", { type: "button", class: "danger", onclick: () => remove(row) }, "forget"))],
  ];
  live(content, loop, "Webhooks", make("p", { class: "links" }, make("button", { type: "button", onclick: add }, "Add a webhook")), async () =>
    table("Webhooks", columns, (await get("/v1/webhooks", signal)).data, "None: events are posted nowhere.", (row) => row.id));
}

function quarantine(content, signal, loop) {
  live(content, loop, "Held back", make("p", { class: "hint" }, "Feedback of all jobs that is unlike what its source said before."), async () =>
    heldTable((await get("/v1/quarantine?limit=100", signal)).data, "/v1/quarantine"));
}

function files(content, signal, loop) {
  const columns = [["file", (row) => row.filename, "wide"], ["id", (row) => make("code", {}, row.id), "wide"], ["purpose", (row) => row.purpose], ["size", (row) => bytes(row.bytes), "number"], ["made", (row) => clock(row.created_at)]];
  live(content, loop, "Data sets", null, async () => table("Data sets", columns, (await get("/v1/files?limit=100", signal)).data, "None was uploaded.", (row) => row.id));
}

const MOST_PAGES = 10; // of 100 requests each

function auditLog(content, signal, loop) {
  const asked = { key: "", job: "" };
  let pages = 1;
  const on = (name) => ({ target }) => { asked[name] = target.value.trim(); pages = 1; };
  const columns = [
    ["time", (row) => clock(row.time)], ["key", (row) => row.key_name || row.key, "wide"], ["from", (row) => row.address], ["request", (row) => make("code", {}, `${row.method} ${row.route}`), "wide"],
    ["status", (row) => String(row.status), "number"], ["job", (row) => row.job && make("a", { href: `#/jobs/${encodeURIComponent(row.job)}` }, `…${row.job.slice(-8)}`)],
  ];
  const older = make("button", { type: "button", hidden: true, onclick: () => { pages += 1; } }, "Show older");
  const above = make("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    field("Id of a key", make("input", { type: "search", onchange: on("key") })), field("Id of a job", make("input", { type: "search", onchange: on("job") })), older);
  live(content, loop, "Audit log", above, async () => {
    const query = new URLSearchParams({ limit: 100, ...Object.fromEntries(Object.entries(asked).filter(([, text]) => text)) });
    let [rows, more] = [[], true];
    for (let page = 0; more && page < pages; page += 1) {
      if (rows.length) query.set("after", rows.at(-1).id);
      const found = await get(`/v1/audit-log?${query}`, signal);
      [rows, more] = [[...rows, ...found.data], found.has_more];
    }
    older.hidden = !more || pages === MOST_PAGES;
    return table("Requests that changed something", columns, rows, "None yet.", (row) => String(row.id));
  });
}

function health(content, signal, loop) {
  const state = make("div");
  const limits = make("div");
  content.replaceChildren(panel("Health", state), panel("Limits", limits));
  const rowsOf = (value, prefix = "") => Object.entries(value).flatMap(([name, one]) =>
    one !== null && typeof one === "object" ? rowsOf(one, `${prefix}${name}.`) : [[prefix + name, one]]);
  const text = (name, value) => (typeof value !== "number" ? String(value ?? "none") : name.includes("bytes") ? bytes(value) : name.endsWith("_s") ? age(value) : number(value));
  loop(EVERY_MS, async () => {
    const found = await get("/readyz", signal);
    patch(state, table("Health", [["check", ([name]) => name], ["is", ([, one]) => make("span", { class: one.ok ? "is-true" : "is-false" }, one.ok ? "good" : "bad")], ["detail", ([, one]) => one.detail, "wide"]],
      Object.entries(found.checks), "No checks."));
  });
  loop(60_000, async () => patch(limits, table("Limits", [["limit", ([name]) => name], ["value", ([name, value]) => text(name, value), "wide"]], rowsOf(await get("/v1/limits", signal)), "None.")));
}
