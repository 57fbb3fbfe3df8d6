// The API as this page uses it. The key stays in the session storage of its tabs: another tab of this page gets it from
// one that is open, no file holds it, nothing sends it by itself, and it is gone with the last tab.

const KEY = "penstock-key";
const SHARE_MS = 250;
const tabs = new BroadcastChannel("penstock-key");
let isChanged = () => {};

tabs.onmessage = ({ data }) => {
  if (data.wanted && key()) tabs.postMessage({ key: key() });
  if (data.key === undefined || data.key === key()) return;
  store(data.key);
  isChanged();
};

/** The first request waits for this, so that a new tab does not ask for a key that another one has. */
const shared = key() ? Promise.resolve() : new Promise((resolve) => {
  tabs.addEventListener("message", () => key() && resolve());
  tabs.postMessage({ wanted: true });
  setTimeout(resolve, SHARE_MS);
});

export class Problem extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keep a key in all tabs of this page; "" forgets it in all of them. */
export function setKey(text) {
  store(text);
  tabs.postMessage({ key: text });
}

export function onKey(listener) {
  isChanged = listener;
}

function store(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

async function send(path, options = {}) {
  await shared;
  const headers = { Accept: "application/json", ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, "the coordinator does not answer");
  }
  if (!reply.ok) {
    const body = await reply.json().catch(() => ({}));
    throw new Problem(reply.status, body.detail ?? body.title ?? `HTTP ${reply.status}`);
  }
  return reply;
}

export async function get(path, signal) {
  return (await send(path, { signal })).json();
}

export async function bytes(path, signal) {
  return (await send(path, { signal, headers: { Accept: "*/*" } })).blob();
}

/** Send `body` (an object as JSON, a text as YAML); returns the reply's JSON, null where it is empty. */
export async function change(method, path, body) {
  const type = typeof body === "string" ? "application/yaml" : "application/json";
  const content = body === undefined ? {} : {
    headers: { "Content-Type": type }, body: typeof body === "string" ? body : JSON.stringify(body),
  };
  const reply = await send(path, { method, ...content });
  return reply.status === 204 ? null : reply.json();
}

/** Save what `path` answers as the file `name`: written as it comes where the browser can, else in one piece. */
export async function download(path, name) {
  const target = window.showSaveFilePicker ? await window.showSaveFilePicker({ suggestedName: name }) : null;
  const reply = await send(path, { headers: { Accept: "*/*" } });
  if (target) return reply.body.pipeTo(await target.createWritable());
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await reply.blob());
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

const WAIT_MS = 1000;

/** Follow the events of a job from the first on, over lost connections, to their end: true, or until `signal` aborts. */
export async function follow(job, onEvent, signal) {
  let last = 0;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": String(last) } : {}) };
      const reply = await send(`/v1/jobs/${encodeURIComponent(job)}/events`, { headers, signal });
      for await (const event of messages(reply.body)) {
        if (event.event === "end" && !event.id) return true;
        if (event.event === "error" && !event.id) break; // its source failed: from `last` on, on another connection
        if (event.id) last = Number(event.id);
        if (event.data) onEvent(last, JSON.parse(event.data));
      }
    } catch (error) {
      if (error.name === "AbortError" || [401, 403, 404].includes(error.status)) return false;
    }
    await new Promise((resolve) => setTimeout(resolve, WAIT_MS));
  }
  return false;
}

/** Server-sent events of a byte stream. EventSource cannot send a key, so this reads them itself. */
async function* messages(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r\n", "\n");
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      yield parse(text.slice(0, end));
      text = text.slice(end + 2);
    }
  }
}

function parse(block) {
  const event = { id: "", event: "", data: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue; // a comment, or a field without a value
    const [name, value] = [line.slice(0, at), line.slice(at + 1).replace(/^ /, "")];
    if (name === "data") event.data += (event.data ? "\n" : "") + value;
    else if (name === "id" || name === "event") event[name] = value;
  }
  return event;
}
