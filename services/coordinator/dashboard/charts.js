// Time series as charts with a common cursor, and sparklines.

/* global uPlot */
import { make, number } from "./dom.js";

const HEIGHT = 190;
const FEW_POINTS = 40;
const COLOURS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const AXIS_PX_PER_LETTER = 7;
const UPDATES = [1, 2, 5].flatMap((digit) => [0, 1, 2, 3, 4, 5, 6].map((power) => digit * 10 ** power)).sort((one, other) => one - other);
const cursors = uPlot.sync("updates");

/** Curves that are shown of a job before anything else is asked for: title, metrics, and a sentence that explains them. */
export const OVERVIEW = [
  { title: "Reward", names: ["reward/mean", "eval/greedy", "eval/mean", "eval/return"],
    note: "Mean of what was sampled, and of the evaluations." },
  { title: "Success", names: ["success/rate", "eval/success"],
    note: "Share of episodes that solved their task: of those that were trained, and of held-out ones." },
  { title: "Groups without signal", names: ["groups/no_signal", "groups/count"],
    note: "All completions of such a group got the same reward: nothing is learnt from it." },
  { title: "Numerics: sampler against trainer", names: ["mismatch/kl"],
    note: "The same weights on the same tokens, computed twice. Anything but nearly 0 says that the engine computes something else. An update whose tokens all come from older versions has no point." },
  { title: "Staleness: older policy against newest", names: ["lag/kl"],
    note: "Tokens of older versions under the newest one. It grows with max_lag and the learning rate, and is no error." },
  { title: "Policy lag (versions)", names: ["lag/mean", "lag/max"], note: "Between the trained version and the one that sampled." },
  { title: "Distance from the reference", names: ["policy/kl_ref"], note: "KL to the reference model, per token." },
  { title: "Entropy", names: ["policy/entropy"], note: "Near 0 the policy always says the same." },
  { title: "Clipped tokens (share)", names: ["policy/clip_high", "policy/clip_low"], note: "Whose ratio left the trust region." },
  { title: "Loss", names: ["loss/policy", "loss/value"], note: "Of the policy and of the critic. It need not fall." },
  { title: "Gradient norm", names: ["optimizer/grad_norm", "policy/grad_norm"], note: "Before clipping." },
  { title: "Episode length (actions)", names: ["episode/length", "eval/length"], note: "Mean of trained and of held-out episodes." },
  { title: "Completion length (tokens)", names: ["length/mean", "length/quantile_p90"], note: "Mean, and the longest tenth." },
  { title: "Tokens per second", names: ["tokens_per_s/generated", "tokens_per_s/trained"], note: "Generated, and trained." },
];

const NOTES = {
  ...Object.fromEntries(OVERVIEW.flatMap(({ title, note, names }) => names.map((name) => [name, `${title}. ${note}`]))),
  "mismatch/logprob": "Numerics. Mean difference of log-probs, sampler against trainer, on tokens of the trained version.",
  "lag/logprob": "Staleness. Mean difference of log-probs between the versions that sampled and the trained one.",
  "lag/share": "Share of groups by how many versions behind the trained one they were sampled.",
  dropped_length: "Dropped groups by the mean length of their completions, in tokens, up to the next power of two.",
};

/** A sentence about a metric, or about what several of them have in common; "" where its name says all. */
export function noteOf(name) {
  return NOTES[name] ?? "";
}

/** A colour of the style sheet as the canvas needs it. */
function inked(name) {
  const probe = make("span", { style: { color: `var(${name})` }, hidden: true });
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

/** Exponentially weighted mean without the bias of its beginning; `weight` in [0, 1) is what the past counts. */
export function smoothed(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

/** Texts of ticks that are `step` apart, with all digits of the step: two of them never read the same. */
export function ticks(values, step) {
  const known = values.filter((value) => value !== null);
  const largest = Math.max(0, ...known.map(Math.abs));
  const power = largest >= 1e6 || (largest && largest < 1e-3) ? Math.floor(Math.log10(largest)) : 0;
  let digits = 0;
  while (digits < 9 && Math.abs((step / 10 ** power) * 10 ** digits - Math.round((step / 10 ** power) * 10 ** digits)) > 1e-6) digits += 1;
  return values.map((value) => {
    if (value === null) return "";
    return value === 0 || !power ? value.toFixed(value === 0 && power ? 0 : digits) : `${(value / 10 ** power).toFixed(digits)}e${power}`;
  });
}

/** Texts of the ticks of a logarithmic axis; those that are null have no room. */
export function decades(values) {
  return values.map((value) => (value === null ? "" : String(Number(value.toPrecision(3)))));
}

/** Where a linear axis begins and ends; what is 0 throughout lies at the foot of an axis to 1. */
function span(low, high) {
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true);
}

const isKnown = (value) => value !== null && value !== undefined;

export class Chart {
  /** `look` has `smooth` (a weight), `log`, and `byTime` (steps are minutes); it may change between drawings. */
  constructor(title, note, look = {}) {
    this.look = look;
    this.title = title;
    this.place = make("div", { class: "plot" });
    this.element = make("figure", { class: "panel chart", "data-keep": "", "data-key": `chart ${title}` },
      make("figcaption", {}, make("h3", {}, title), note && make("p", { class: "hint" }, note)), this.place);
    this.plot = null;
    this.shown = "";
  }

  /** Draw series, each `{label, steps, values}`; false where none has a value. */
  draw(series) {
    const found = series.filter(({ values }) => values?.some(isKnown));
    this.element.hidden = !found.length;
    if (!found.length) return false;
    const [steps, ...columns] = aligned(found);
    const smooth = this.look.smooth ?? 0;
    const shownColumns = smooth ? [...columns, ...columns.map((column) => smoothed(column, smooth))] : columns;
    const data = [steps, ...shownColumns.map((column) => this.look.log ? column.map((y) => (y > 0 ? y : null)) : column)];
    const width = Math.max(200, this.place.clientWidth);
    const shown = JSON.stringify([found.map(({ label }) => label), smooth > 0, this.look.log, this.look.byTime, getComputedStyle(document.body).color]);
    if (this.plot && this.shown === shown) {
      if (this.plot.width !== width) this.plot.setSize({ width, height: HEIGHT });
      this.refill(data);
    } else {
      this.plot?.destroy();
      this.shown = shown;
      this.plot = this.create(found.map(({ label }) => label), data, width, smooth > 0);
    }
    const { plot } = this;
    queueMicrotask(() => { // behind the plot's own, which empties the legend
      if ((plot.cursor.idx ?? null) !== null || plot !== this.plot) return;
      plot.setLegend({ idxs: data.map((column) => column.findLastIndex(isKnown)) }, false); // each curve's newest value
    });
    this.describe(found);
    return true;
  }

  /** New values under the axis as it is: a part that was zoomed into stays in sight. */
  refill(data) {
    const { plot } = this;
    const { min, max } = plot.scales.x;
    const isZoomed = min > plot.data[0][0] || max < plot.data[0].at(-1);
    if (!isZoomed) return plot.setData(data);
    plot.batch(() => {
      plot.setData(data, false);
      plot.setScale("x", { min, max });
    });
  }

  /** What the picture shows, for those who do not see it. */
  describe(found) {
    const text = found.map(({ label, steps, values }) => {
      const at = values.findLastIndex(isKnown);
      return `${label} ${number(values[at], 4)} at ${this.look.byTime ? `${(steps[at] ?? 0).toFixed(1)} minutes` : `update ${steps[at]}`}`;
    });
    const canvas = this.plot.root.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${this.title}, by ${this.look.byTime ? "time" : "policy update"}. Newest: ${text.join("; ")}`);
  }

  create(labels, data, width, isSmooth) {
    const [ink, grid] = [inked("--soft"), inked("--grid")];
    const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    const points = (shown) => ({ show: (plot, index) => shown && plot.data[index].filter((y) => y !== null).length < FEW_POINTS, size: 4 });
    const line = (label, index, isFaint) => ({
      label, stroke: inked(COLOURS[index % COLOURS.length]), width: isFaint ? 1 : 1.75, alpha: isFaint ? 0.3 : 1,
      ...(isFaint ? { class: "faint" } : {}), spanGaps: true, points: points(!isFaint), value: (plot, value, _, at) => {
        const isOld = isKnown(value) && (plot.cursor.idx ?? null) === null && at < plot.data[0].length - 1;
        return number(value, 4) + (isOld ? ` (at ${number(plot.data[0][at], 1)})` : "");
      },
    });
    const lines = labels.map((label, index) => line(label, index, isSmooth));
    if (isSmooth) lines.push(...labels.map((label, index) => line(label, index, false)));
    const y = {
      ...axis, values: (_, splits, __, ___, step) => ticks(splits, step),
      size: (_, values) => 18 + AXIS_PX_PER_LETTER * Math.max(3, ...(values ?? []).map((text) => text.length)),
    };
    const options = {
      width, height: HEIGHT, cursor: { sync: { key: cursors.key }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: this.look.log ? { distr: 3 } : { range: (_, low, high) => span(low, high) } },
      axes: [this.look.byTime ? axis : { ...axis, incrs: UPDATES }, this.look.log ? { ...y, values: (_, splits) => decades(splits) } : y],
      series: [{ label: this.look.byTime ? "minutes" : "update", value: (_, value) => number(value, 1) }, ...lines],
    };
    return new uPlot(options, data, this.place);
  }
}

/** One column of steps and one of values for each series. */
function aligned(series) {
  if (series.every(({ steps }) => steps === series[0].steps)) return [series[0].steps, ...series.map(({ values }) => values)];
  return uPlot.join(series.map(({ steps, values }) => [steps, values]));
}

/** A small curve of `values` without axes, or nothing for fewer than two. */
export function sparkline(values, label) {
  const known = values.filter(isKnown);
  if (known.length < 2) return null;
  const [width, height] = [96, 24];
  const low = Math.min(...known), span = Math.max(...known) - low || 1;
  const points = known.map((value, index) =>
    `${((width - 4) * index / (known.length - 1) + 2).toFixed(1)},${(height - 3 - (height - 6) * (value - low) / span).toFixed(1)}`);
  const svg = document.querySelector("#spark").content.firstElementChild.cloneNode(true);
  svg.setAttribute("aria-label", label);
  svg.firstElementChild.setAttribute("points", points.join(" "));
  return svg;
}
