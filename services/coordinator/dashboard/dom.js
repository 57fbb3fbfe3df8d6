// Elements from values, and changes of what stands on the page. Text only ever becomes a text node: what a model wrote
// can never become markup.

const HANDLERS = ["onclick", "onchange", "oninput", "onsubmit", "onkeydown", "ontoggle"];

/** An element; `attributes` with `on…` functions are its handlers, `children` are elements or text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element[key] = value;
    else if (key === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(key, "");
    else element.setAttribute(key, String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Give `place` these children, and keep every element that is there already: with its focus, its text, its state.
 *  Elements with the same `data-key` are the same; those with `data-keep` belong to somebody else and stay as they are. */
export function patch(place, ...children) {
  const fresh = document.createDocumentFragment();
  fresh.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  patchChildren(place, fresh);
}

function patchChildren(old, fresh) {
  const wanted = new Set([...fresh.children].map((child) => child.dataset.key).filter(Boolean));
  const known = new Map();
  for (const child of [...old.children]) {
    const { key } = child.dataset;
    if (key && wanted.has(key)) known.set(key, child);
    else if (key) child.remove();
  }
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset?.key;
    const match = key ? known.get(key) : place && !place.dataset?.key && isLike(place, child) ? place : undefined;
    if (!match || !isLike(match, child)) {
      old.insertBefore(child, place);
      continue;
    }
    if (match === place) place = place.nextSibling;
    else old.insertBefore(match, place);
    patchNode(match, child);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function isLike(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName;
}

function patchNode(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.dataset.keep !== undefined) return;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "style") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (name !== "style" && name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (old.style && old.style.cssText !== fresh.style.cssText) old.style.cssText = fresh.style.cssText;
  for (const handler of HANDLERS) old[handler] = fresh[handler];
  patchChildren(old, fresh);
}

/** A table named `name`: `columns` are [heading, row => cell content, class]; `keyOf` names a row that has controls. */
export function table(name, columns, rows, empty, keyOf = null) {
  if (!rows.length) return make("p", { class: "hint" }, empty);
  const head = columns.map(([heading, , kind]) =>
    make("th", { class: kind, scope: "col" }, heading || make("span", { class: "unseen" }, "more")));
  const body = rows.map((row) => make("tr", { "data-key": keyOf?.(row) }, columns.map(([heading, cell, kind]) =>
    make("td", { class: kind, "data-label": heading }, cell(row) ?? ""))));
  return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name },
    make("table", { "aria-label": name }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)));
}

export function panel(title, content, kind = "") {
  return make("section", { class: `panel ${kind}` }, make("h2", {}, title), content);
}

/** A field with its label; `control` is an input, a select or a text area. */
export function field(label, control, kind = "") {
  return make("label", { class: `field ${kind}` }, make("span", {}, label), control);
}

export function choice(options, chosen, attributes = {}) {
  return make("select", attributes, options.map(([value, text]) =>
    make("option", { value, selected: value === chosen }, text)));
}

const MARKS = {
  running: "●", pending: "○", pausing: "◐", paused: "Ⅱ", cancelling: "◐", succeeded: "✓", failed: "✕", cancelled: "⊘",
};

/** A phase by mark, word and colour: none of them alone has to tell it. */
export function phase(name) {
  return make("span", { class: `phase ${name}` }, make("span", { "aria-hidden": "true" }, MARKS[name] ?? "·"), ` ${name}`);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? value.toFixed(digits) : value.toExponential(2);
}

export function bytes(count) {
  const power = count > 0 ? Math.min(4, Math.floor(Math.log10(count) / 3)) : 0;
  return `${(count / 1000 ** power).toFixed(power && count / 1000 ** power < 100 ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

export function age(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

export function clock(unixSeconds) {
  const then = new Date(unixSeconds * 1000);
  const isToday = then.toDateString() === new Date().toDateString();
  return isToday ? then.toLocaleTimeString() : then.toLocaleString();
}

/** Say something below the page for some seconds. */
export function say(text, kind = "") {
  const note = make("div", { class: `note ${kind}` }, text);
  document.querySelector("#notes").append(note);
  setTimeout(() => note.remove(), kind === "error" ? 12000 : 5000);
}

/** Ask in a dialog: `content` are further elements; resolves to the form's values, or null where it was left. */
export function ask(title, content, verb, kind = "primary") {
  const form = make("form", { method: "dialog" }, make("h2", { id: "ask-title" }, title), content,
    make("menu", {},
      make("button", { type: "button", onclick: () => box.close("") }, "Not now"),
      make("button", { class: kind, value: "yes" }, verb)));
  const box = make("dialog", { "aria-labelledby": "ask-title" }, form);
  document.body.append(box);
  box.showModal();
  return new Promise((resolve) => box.addEventListener("close", () => {
    resolve(box.returnValue === "yes" ? Object.fromEntries(new FormData(form)) : null);
    box.remove();
  }));
}
