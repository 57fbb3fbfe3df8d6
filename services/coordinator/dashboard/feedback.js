// What became of the feedback of an online job, what is held back of it, and its episodes.

import { change, get } from "./api.js";
import { ask, clock, make, number, panel, patch, say, table } from "./dom.js";
import { bars } from "./overview.js";

const EVERY_MS = 2500;
const STAGES = ["received", "matched", "admitted", "trained", "rejected", "quarantined", "expired", "retracted"];

export function showFeedback({ content, signal, loop, path, job }) {
  const [funnel, sources, outcomes, versions, held, episodes] = Array.from({ length: 6 }, () => make("div"));
  content.replaceChildren(
    make("div", { class: "grid" }, panel("Feedback", funnel), panel("What is served", versions), panel("Answers", outcomes)),
    panel("By metric and source", sources), panel("Held back", held), panel("Episodes", episodes));
  loop(EVERY_MS, async () => {
    const [counts, served] = await Promise.all([get(`${path}/feedback`, signal), get(`${path}/versions`, signal)]);
    patch(funnel, funnelOf(counts));
    patch(sources, table("Feedback by metric and source", SOURCES, counts.data ?? [], "None yet."));
    patch(outcomes, table("What became of the answers", OUTCOMES, counts.interactions ?? [], "None was decided about yet."));
    patch(versions, versionsOf(served));
  });
  loop(2 * EVERY_MS, () => fill(held, async () => heldTable((await get(`${path}/quarantine?limit=100`, signal)).data, `${path}/quarantine`)));
  loop(2 * EVERY_MS, () => fill(episodes, async () => {
    const { data, has_more: more } = await get(`/v1/episodes?limit=100&model=${encodeURIComponent(job.name)}`, signal);
    return [table("Episodes", EPISODES, data.reverse(), "None was opened.", (row) => row.id), more && make("p", { class: "hint" }, "The oldest hundred.")];
  }));
}

/** Put what `work` gives in `place`; where the key may not, or nobody collects feedback here, say so there. */
export async function fill(place, work) {
  try {
    patch(place, await work());
  } catch (problem) {
    if (![403, 404, 409].includes(problem.status)) throw problem;
    patch(place, make("p", { class: "hint" }, problem.message));
  }
}

/** Bars by status, the whole first; `counts` is the reply of GET …/feedback. */
function funnelOf(counts) {
  const byStatus = counts.by_status ?? {};
  const total = Object.values(byStatus).reduce((sum, count) => sum + count, 0);
  if (!total) return make("p", { class: "hint" }, "None yet: POST /feedback.");
  const rows = STAGES.filter((stage) => byStatus[stage]).map((stage) => [stage, byStatus[stage], number(byStatus[stage])]);
  return [make("p", { class: "hint" }, `${number(total)} items`), bars("Feedback by status", rows, total)];
}

const SOURCES = [
  ["metric", (row) => row.metric], ["source", (row) => row.source, "wide"], ["status", (row) => row.status], ["items", (row) => number(row.items), "number"],
];
const OUTCOMES = [["status", (row) => row.status], ["reason", (row) => row.reason, "wide"], ["answers", (row) => number(row.interactions), "number"]];
const EPISODES = [
  ["episode", (row) => make("code", {}, row.id), "wide"], ["opened", (row) => clock(Date.parse(row.created_at) / 1000)],
  ["state", (row) => (row.ended_at ? "ended" : Date.parse(row.expires_at) < Date.now() ? "expired" : "open")], ["split", (row) => row.split],
  ["group", (row) => row.group_id ?? "–"], ["turns", (row) => make("button", { type: "button", "aria-label": `Turns of ${row.id}`, onclick: () => showTurns(row.id) }, "show")],
];

async function showTurns(episode) {
  try {
    const { data } = await get(`/v1/episodes/${encodeURIComponent(episode)}/interactions?limit=50`);
    const turns = data.map((turn, index) => make("li", {}, make("div", { class: "soft" }, `turn ${index + 1}: ${turn.finish}, ${number(turn.token_ids.length)} tokens, ${turn.decision?.status ?? (turn.untrainable || "not decided")}`),
      make("pre", { class: "code" }, turn.text || "(empty)")));
    await ask("Turns of the episode", turns.length ? make("ol", { class: "turns", tabindex: 0, "aria-label": "Turns" }, turns) : make("p", { class: "hint" }, "None."), "Close");
  } catch (problem) {
    say(problem.message, "error");
  }
}

function versionsOf({ newest, served, canary }) {
  const rows = [["newest", number(newest)], ["served", number(served)]];
  if (canary) rows.push(["on trial", number(canary.version)], ["share", `${(100 * canary.share).toFixed(0)} %`], ["reward on trial", number(canary.reward)], ["reward served", number(canary.served_reward)]);
  return make("dl", { class: "figures" }, rows.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
}

/** What is held back below `path`, with the two decisions about it. */
export function heldTable(rows, path) {
  const decide = async (row, verdict) => {
    await change("POST", `${path}/${encodeURIComponent(row.feedback_id)}/${verdict}`)
      .then(() => say(`Feedback: ${verdict} is on disk.`), (problem) => say(problem.message, "error"));
  };
  return table("Feedback that is held back", [
    ["came", (row) => clock(row.received)], ["metric", (row) => row.metric], ["source", (row) => row.source, "wide"], ["why it is held", (row) => row.reason, "wide"],
    ["", (row) => make("div", { class: "actions" },
      make("button", { type: "button", onclick: () => decide(row, "release") }, "release"),
      make("button", { type: "button", class: "danger", onclick: () => decide(row, "drop") }, "drop"))],
  ], rows, "Nothing is held back.", (row) => row.feedback_id);
}
