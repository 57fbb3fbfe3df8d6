// Events of a job, what its services wrote, and messages that nobody could process.

import { change, follow, get } from "./api.js";
import { ask, choice, clock, field, make, number, panel, patch, say, table } from "./dom.js";

const EVERY_MS = 3000;
const EVENTS_SHOWN = 500;
const LINES_SHOWN = 400;
const SERVICES = [["", "all"], ["coordinator", "coordinator"], ["rollout", "rollout"], ["env", "env"], ["reward", "reward"], ["trainer", "trainer"]];
const LEVELS = [["", "all"], ["warning", "warnings and errors"], ["error", "errors"]];

export function showEvents({ content, signal, loop, id, path }) {
  const events = make("div", { class: "log", role: "log", tabindex: 0, "aria-label": "Events, newest first" });
  const lines = make("div", { class: "log", role: "region", tabindex: 0, "aria-label": "Lines of the logs, newest first" });
  const asked = { service: "", level: "" };
  const on = (name) => ({ target }) => { asked[name] = target.value; draw(); };
  let found = [];
  const draw = () => patch(lines, linesOf(found, asked));
  content.replaceChildren(
    panel("Events", events),
    panel("Logs", [make("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      field("Service", choice(SERVICES, "", { onchange: on("service") })), field("Level", choice(LEVELS, "", { onchange: on("level") }))), lines]),
    deadLetters({ signal, loop, path }));
  const log = (row) => {
    events.prepend(row);
    while (events.childElementCount > EVENTS_SHOWN) events.lastElementChild.remove();
  };
  follow(id, (_, event) => log(eventRow(event)), signal).then((ended) => {
    if (ended) log(make("div", { class: "soft" }, "The job is over: no event follows."));
  });
  loop(EVERY_MS, async () => {
    found = (await get(`${path}/logs?tail=${LINES_SHOWN}`, signal)).lines.map(lineOf).sort((one, other) => other.time - one.time);
    draw();
  });
}

export function eventRow(event) {
  return make("div", { class: event.level }, make("time", {}, clock(event.time)), ` ${event.type}: ${event.message}`);
}

/** A line of a log: JSON as the services write it, or whatever else stands there. */
function lineOf({ worker, service, text }) {
  try {
    const { time, level, message } = JSON.parse(text);
    return { service, worker, level: level ?? "info", time: Date.parse(time) / 1000, text: message };
  } catch {
    return { service, worker, level: "info", time: 0, text };
  }
}

function linesOf(found, { service, level }) {
  const wanted = found.filter((line) => (!service || line.service === service)
    && (!level || line.level === "error" || line.level === "critical" || line.level === level)).slice(0, LINES_SHOWN);
  if (!wanted.length) return make("div", { class: "soft" }, "No such line.");
  return wanted.map((line) => make("div", { class: line.level },
    make("time", {}, line.time ? clock(line.time) : ""), ` ${line.worker}: ${line.text}`));
}

function deadLetters({ signal, loop, path }) {
  const list = make("div");
  const act = async (verb, letter, request) => {
    try {
      await request();
      say(`Dead letter ${letter.id}: ${verb}.`);
    } catch (problem) {
      say(`Dead letter ${letter.id}: ${problem.message}`, "error");
    }
  };
  const show = async (letter) => {
    const whole = await get(`${path}/dead-letters/${letter.id}`, signal).catch((problem) => ({ problem: problem.message }));
    await ask(`Dead letter ${letter.id}`, make("pre", { class: "code", tabindex: 0 }, JSON.stringify(whole, null, 2)), "Close");
  };
  const columns = [
    ["id", (row) => String(row.id)], ["time", (row) => clock(row.time)], ["stream", (row) => row.stream],
    ["draw", (row) => row.draw ?? "none"], ["attempts", (row) => number(row.attempts), "number"], ["reason", (row) => row.reason, "wide"],
    ["", (row) => make("div", { class: "actions" },
      make("button", { type: "button", onclick: () => show(row) }, "show"),
      make("button", { type: "button", onclick: () => act("replay is asked for", row, () => change("POST", `${path}/dead-letters/${row.id}/replay`)) }, "replay"),
      make("button", { type: "button", onclick: () => act("forgotten", row, () => change("DELETE", `${path}/dead-letters/${row.id}`)) }, "forget"))],
  ];
  loop(EVERY_MS, async () => {
    const { data } = await get(`${path}/dead-letters?limit=100`, signal);
    patch(list, table("Dead letters", columns, data, "None: every message was processed.", (row) => String(row.id)));
  });
  return panel("Dead letters", [
    make("p", { class: "hint" }, "Messages past their deliveries, or that do not decode. Replaying one asks for its prompt again."), list]);
}
