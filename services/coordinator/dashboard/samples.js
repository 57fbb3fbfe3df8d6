// Completions of a job: a list to search, and one of them token by token beside the others of its group.

import { get } from "./api.js";
import { choice, field, make, number, panel, patch, table } from "./dom.js";

const PAGE = 50;
const PAGES_A_SEARCH = 20;
const SORTS = [["", "newest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-length", "longest"], ["length", "shortest"]];
const COLOURINGS = [["logprob", "log-prob of the sampler"], ["version", "policy version"], ["advantage", "advantage"], ["none", "nothing"]];
const SURPRISE_NATS = 5;
const MOST_WORDS = 2000;

export function showSamples({ content, signal, loop, id, path, item }) {
  const asked = { step: "", sort: "", min: "", text: "" };
  const state = { rows: [], more: false, chosen: item ?? "", colour: "logprob", detail: null, siblings: [], other: "", token: 0, searching: false };
  const [list, detail] = [make("div", { class: "sample-list" }), make("div", { class: "sample" })];
  const draw = () => drawList(list, state, asked, { more: () => load(true), search, choose });
  const load = guarded(async (isMore) => {
    const query = new URLSearchParams({ limit: PAGE });
    if (asked.step) query.set("step", asked.step);
    if (asked.sort) query.set("sort", asked.sort);
    if (asked.min) query.set("min_reward", asked.min);
    if (isMore && state.rows.length) query.set("after", state.rows.at(-1).id.slice(id.length + 1));
    const found = await get(`${path}/samples?${query}`, signal);
    state.rows = isMore ? [...state.rows, ...found.data] : found.data;
    state.more = found.has_more;
    draw();
    if (!state.chosen && state.rows.length) choose(state.rows[0].id);
  }, list);
  /** Load older ones until one holds the text that is searched for. */
  const search = guarded(async () => {
    state.searching = true;
    const before = matching(state, asked).length;
    try {
      for (let page = 0; page < PAGES_A_SEARCH && state.more && matching(state, asked).length === before; page += 1) await load(true);
    } finally {
      state.searching = false;
      draw();
    }
  }, list);
  const choose = guarded(async (sample) => {
    state.chosen = sample;
    history.replaceState(null, "", `#/jobs/${encodeURIComponent(id)}/samples/${encodeURIComponent(sample)}`);
    draw();
    state.detail = await get(`/v1/samples/${encodeURIComponent(sample)}`, signal);
    state.siblings = await siblingsOf(state, path, signal);
    state.other = "";
    state.token = 0;
    drawDetail(detail, state, choose);
  }, detail);
  const on = (name, isLocal) => ({ target }) => {
    asked[name] = target.value.trim();
    if (isLocal) draw();
    else load(false);
  };
  content.replaceChildren(
    make("form", { class: "controls", role: "search", onsubmit: (event) => event.preventDefault() },
      field("Search in what is loaded", make("input", { type: "search", placeholder: "prompt, completion or answer", oninput: on("text", true) })),
      field("Order", choice(SORTS, "", { onchange: on("sort") })),
      field("Update", make("input", { type: "number", min: 0, placeholder: "any", onchange: on("step") })),
      field("Reward at least", make("input", { type: "number", step: "any", placeholder: "any", onchange: on("min") })),
      make("button", { type: "button", onclick: () => load(false) }, "Load again")),
    make("div", { class: "split" }, list, detail));
  loop(3_600_000, async () => {
    if (state.rows.length) return;
    await load(false);
    if (item) await choose(item);
  });
}

/** `work`, whose failure is shown in `place`. */
function guarded(work, place) {
  return async (...given) => {
    try {
      await work(...given);
    } catch (problem) {
      if (problem.name === "AbortError") return;
      if (problem.status === 401 || problem.status === undefined) throw problem;
      patch(place, make("p", { class: "problem" }, problem.message));
    }
  };
}

async function siblingsOf({ detail, rows }, path, signal) {
  const wanted = detail.siblings ?? [];
  const known = new Map(rows.map((row) => [row.id, row]));
  const missing = wanted.filter((id) => !known.has(id)).slice(0, 16);
  for (const one of await Promise.all(missing.map((id) => get(`/v1/samples/${encodeURIComponent(id)}`, signal).catch(() => null)))) {
    if (one) known.set(one.id, one);
  }
  return wanted.map((id) => known.get(id)).filter(Boolean);
}

function matching({ rows }, asked) {
  const text = asked.text.toLowerCase();
  return rows.filter((row) => `${row.prompt}\n${row.completion}\n${row.answer ?? ""}`.toLowerCase().includes(text));
}

function drawList(place, state, asked, { more, search, choose }) {
  const found = matching(state, asked);
  const older = asked.text && state.more && make("button", { type: "button", disabled: state.searching, onclick: search },
    state.searching ? `Searching: ${number(state.rows.length)} looked at` : "Search older ones");
  if (!found.length) {
    return patch(place, make("p", { class: "hint empty" }, state.rows.length ? "No loaded completion holds this text." : "No completion was trained yet, or none fits."), older);
  }
  patch(place, make("ul", { class: "samples", "aria-label": "Completions" }, found.map((row) => make("li", { "data-key": row.id },
    make("button", { type: "button", "aria-current": row.id === state.chosen ? "true" : null, onclick: () => choose(row.id) },
      make("span", { class: "sample-head" }, make("span", { class: `reward ${tone(row)}` }, row.failed ? "failed" : number(row.reward)),
        make("span", { class: "soft" }, `update ${number(row.step)}, ${number(row.tokens)} ${row.steps === undefined ? "tokens" : "decisions"}`)),
      make("span", { class: "clip" }, row.prompt || "(no prompt)"), make("span", { class: "clip answer" }, row.completion || "(empty)"))))),
  make("p", { class: "hint" }, `${number(found.length)} of ${number(state.rows.length)} loaded`,
    older || (state.more && make("button", { type: "button", onclick: more }, "Load more"))));
}

function tone(row) {
  if (row.failed) return "bad";
  return row.advantage > 0 ? "good" : row.advantage < 0 ? "poor" : "";
}

function drawDetail(place, state, choose) {
  const { detail } = state;
  const again = () => drawDetail(place, state, choose);
  patch(place,
    panel("Completion", [facts(detail),
      block("Prompt", detail.prompt || "(none)"),
      detail.answer !== null && detail.answer !== undefined && block("Expected", typeof detail.answer === "string" ? detail.answer : JSON.stringify(detail.answer)),
      block("Completion", detail.completion || "(empty)")]),
    panel("Reward", parts(detail)),
    detail.token_ids && panel("Token by token", [
      field("Colour by", choice(COLOURINGS, state.colour, { onchange: ({ target }) => { state.colour = target.value; again(); } })),
      make("p", { class: "hint" }, LEGENDS[state.colour](detail)),
      tokens(detail, state, (index) => { state.token = Math.min(Math.max(index, 0), detail.token_ids.length - 1); again(); }),
      make("p", { class: "reading", role: "status" }, reading(detail, state.token))]),
    detail.actions && panel("Rewards by decision", make("p", { class: "code", tabindex: 0 }, detail.rewards.map((value) => number(value)).join("  "))),
    panel("Its group", group(state, choose, again)));
}

function facts(detail) {
  const versions = detail.min_version === detail.max_version ? number(detail.min_version) : `${number(detail.min_version)} to ${number(detail.max_version)}`;
  const rows = [["reward", number(detail.reward)], ["advantage", number(detail.advantage)], ["tokens", number(detail.tokens)], ["ended by", detail.finish],
    ["log-prob", number(detail.logprob)], ["policy version", versions], ["update", number(detail.step)], ["draw", detail.draw], ["worker", detail.worker || "–"]];
  return make("dl", { class: "figures small" }, rows.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))));
}

function block(title, text) {
  return make("div", { class: "block" }, make("h3", {}, title), make("pre", { class: "code", tabindex: 0, role: "region", "aria-label": title }, text));
}

function parts(detail) {
  const rows = Object.entries(detail.parts ?? {});
  if (detail.failed) return make("p", { class: "problem" }, "It failed: it is not trained.");
  if (!rows.length) return make("p", { class: "hint" }, `No parts; the whole is ${number(detail.reward)}.`);
  return make("dl", { class: "figures small" }, [...rows, ["sum", detail.reward]].map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, typeof value === "number" ? number(value) : String(value)))));
}

const LEGENDS = {
  logprob: () => `The stronger the colour, the less the sampler expected the token: from certain to ${SURPRISE_NATS} nats and more.`,
  version: (detail) => (detail.min_version === detail.max_version ? `One version, ${number(detail.min_version)}, chose every token.` : "Each version of the policy has a colour; the weights changed while it wrote."),
  advantage: (detail) => `Every token of it is pushed by its advantage within the group, ${number(detail.advantage)}: green up, red down.`,
  none: () => "Underlined tokens are observations: the policy did not choose them.",
};

/** The tokens with what is known of each; as texts where the coordinator knows the tokenizer, else as ids. One of them is
 *  read out below: that which was clicked on, or where the arrow keys went. */
function tokens(detail, { colour, token }, read) {
  const first = detail.min_version;
  const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
  const onkeydown = (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    read(token + steps[event.key]);
  };
  return make("div", { class: "tokens code", tabindex: 0, role: "region", "aria-label": "Tokens: the arrow keys read them", onkeydown }, detail.token_ids.map((_, index) => {
    const isOwn = detail.mask[index] === 1;
    const colours = isOwn ? shade(colour, detail, detail.logprobs[index], detail.versions[index] - first) : "";
    return make("span", { class: `token ${isOwn ? "" : "observed"} ${index === token ? "read" : ""}`, title: reading(detail, index), onclick: () => read(index), style: { backgroundColor: colours } },
      textOf(detail, index));
  }));
}

function textOf(detail, index) {
  return (detail.token_texts?.[index] ?? `${detail.token_ids[index]} `).replaceAll("\n", "⏎\n");
}

/** A token in words. */
function reading(detail, index) {
  const name = `Token ${index + 1} of ${detail.token_ids.length}, id ${detail.token_ids[index]}, ${JSON.stringify(textOf(detail, index).trimEnd())}`;
  if (detail.mask[index] !== 1) return `${name}: an observation`;
  const logprob = detail.logprobs[index];
  return `${name}: log-prob ${logprob.toFixed(3)}, probability ${(100 * Math.exp(logprob)).toFixed(1)} %, version ${detail.versions[index]}`;
}

function shade(colour, detail, logprob, ahead) {
  const mix = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(100 * share)}%, transparent)`;
  if (colour === "logprob") return mix("--warn-fill", 0.75 * Math.min(1, -logprob / SURPRISE_NATS));
  if (colour === "version") return mix(`--c${(ahead % 6) + 1}`, 0.3);
  if (colour === "advantage" && detail.advantage) return mix(detail.advantage > 0 ? "--good-fill" : "--bad-fill", 0.15 + 0.45 * Math.min(1, Math.abs(detail.advantage) / 2));
  return "";
}

/** Others of the group, best first, and how the chosen one differs from them. */
function group(state, choose, again) {
  const { detail, siblings } = state;
  if (!siblings.length) return make("p", { class: "hint" }, "It has no others.");
  const rows = [...siblings].sort((one, other) => other.reward - one.reward);
  const other = siblings.find(({ id }) => id === state.other);
  return [make("ul", { class: "samples short" }, rows.map((row) => make("li", { "data-key": row.id }, make("div", { class: "sibling" },
    make("span", { class: `reward ${tone(row)}` }, row.failed ? "failed" : number(row.reward)),
    make("span", { class: "clip" }, row.completion || "(empty)"),
    make("span", { class: "soft of" }, `advantage ${number(row.advantage)}, ${number(row.tokens)} tokens, ${row.finish}`),
    make("button", { type: "button", "aria-pressed": String(row.id === state.other), onclick: () => { state.other = row.id === state.other ? "" : row.id; again(); } }, "compare"),
    make("button", { type: "button", onclick: () => choose(row.id) }, "open"))))),
  other && make("div", { class: "block" }, make("h3", {}, "Difference"), make("p", { class: "hint" },
    "Struck out: only the opened one. Underlined: only the other one."), make("pre", { class: "code diff", tabindex: 0, role: "region", "aria-label": "Difference" }, difference(detail.completion, other.completion)), versus(detail, other))];
}

/** Reward and its parts, advantage and length of two completions, side by side. */
function versus(one, other) {
  const names = [...new Set([...Object.keys(one.parts ?? {}), ...Object.keys(other.parts ?? {})])];
  const rows = [...names.map((name) => [name, one.parts?.[name], other.parts?.[name]]), ["reward", one.reward, other.reward],
    ["advantage", one.advantage, other.advantage], ["tokens", one.tokens, other.tokens], ["log-prob", one.logprob, other.logprob]];
  return table("The two compared", [["value", ([name]) => name], ["opened", ([, value]) => number(value), "number"], ["other", ([, , value]) => number(value), "number"]], rows, "");
}

/** Two texts as one, by words: the longest common subsequence stays, the rest is deleted or inserted. Beyond the words
 *  that are compared one by one nothing counts as common but the end of both. */
export function difference(before, after) {
  const texts = [before, after].map((text) => text.match(/\s+|\w+|[^\s\w]/gu) ?? []);
  const shorter = Math.min(...texts.map(({ length }) => length));
  let [start, end] = [0, 0];
  while (start < shorter && texts[0][start] === texts[1][start]) start += 1;
  while (end < shorter - start && texts[0].at(-1 - end) === texts[1].at(-1 - end)) end += 1;
  const [one, other] = texts.map((words) => words.slice(start, words.length - end).slice(0, MOST_WORDS));
  const [oneRest, otherRest] = texts.map((words) => words.slice(start, words.length - end).slice(MOST_WORDS).join(""));
  return [texts[0].slice(0, start).join(""), changes(one, other),
    oneRest && make("del", {}, oneRest), otherRest && make("ins", {}, otherRest), texts[0].slice(texts[0].length - end).join("")].flat().filter(Boolean);
}

/** Words of two lists in one: as text where both have them, else deleted or inserted. */
function changes(one, other) {
  const best = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i -= 1) {
    for (let j = other.length - 1; j >= 0; j -= 1) best[i][j] = one[i] === other[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
  }
  const found = [];
  for (let i = 0, j = 0; i < one.length || j < other.length;) {
    if (i < one.length && j < other.length && one[i] === other[j]) [found[found.length], i, j] = [one[i], i + 1, j + 1];
    else if (j >= other.length || (i < one.length && best[i + 1][j] >= best[i][j + 1])) found.push(make("del", {}, one[i++]));
    else found.push(make("ins", {}, other[j++]));
  }
  return found;
}
