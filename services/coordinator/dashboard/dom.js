// Elements from values. Text only ever becomes a text node: what a model wrote can never become markup.

/** An element; `attributes` with `on…` functions are listeners, `children` are elements or text. */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.replace(/^on/, ""), value);
    else if (value === true) element.setAttribute(key, "");
    else element.setAttribute(key, String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** A table: `columns` are [heading, row => cell content, class]. */
export function table(columns, rows, empty) {
  if (!rows.length) return make("p", { class: "hint" }, empty);
  const head = columns.map(([heading, , kind]) => make("th", { class: kind, scope: "col" }, heading));
  const body = rows.map((row) =>
    make("tr", {}, columns.map(([, cell, kind]) => make("td", { class: kind }, cell(row) ?? ""))),
  );
  return make("table", {}, make("thead", {}, make("tr", {}, head)), make("tbody", {}, body));
}

export function panel(title, content, kind = "") {
  return make("section", { class: `panel ${kind}` }, make("h2", {}, title), content);
}

export function phase(name) {
  return make("span", { class: `phase ${name}` }, name);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(digits);
}

export function age(seconds) {
  if (seconds < 90) return `${Math.max(0, seconds).toFixed(0)} s`;
  return seconds < 5400 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString();
}
