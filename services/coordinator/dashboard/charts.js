// Time series of a job: each chart asks for its own few metrics and is redrawn in place.

/* global uPlot */
import { make } from "./dom.js";

export const CHARTS = [
  { title: "Reward", names: ["reward/mean", "eval/greedy", "eval/mean"] },
  { title: "Policy lag (versions)", names: ["lag/mean", "lag/max"] },
  { title: "Loss", names: ["loss/policy", "loss/value"] },
  { title: "Sampler against trainer", names: ["mismatch/kl", "policy/kl_ref"] },
  { title: "Entropy and clipping", names: ["policy/entropy", "policy/clip_high", "policy/clip_low"] },
  { title: "Completion length (tokens)", names: ["length/mean", "length/quantile_p90"] },
  { title: "Tokens per second", names: ["tokens_per_s/generated", "tokens_per_s/trained"] },
];
const COLOURS = ["#3b82c4", "#d9822b", "#3f9e63"];
const HEIGHT = 170;
const FEW_POINTS = 40;

export class Chart {
  constructor(title, names) {
    this.names = names;
    this.place = make("div", { class: "chart" });
    this.element = make("section", { class: "panel", hidden: true }, make("h2", {}, title), this.place);
    this.plot = null;
    this.shown = "";
  }

  /** Draw the series that exist; a chart without any stays hidden. */
  draw(columns) {
    const names = this.names.filter((name) => columns.series[name]?.some((value) => value !== null));
    this.element.hidden = !names.length;
    if (!names.length) return;
    const data = [columns.steps, ...names.map((name) => columns.series[name])];
    const width = Math.max(200, this.place.clientWidth);
    if (this.plot && this.shown === names.join()) {
      this.plot.setSize({ width, height: HEIGHT });
      this.plot.setData(data);
    } else {
      this.create(names, data, width);
    }
    if (this.plot.cursor.idx === null) this.plot.setLegend({ idx: columns.steps.length - 1 }, false);
  }

  create(names, data, width) {
    this.plot?.destroy();
    this.shown = names.join();
    const ink = getComputedStyle(document.body).color;
    const axis = { stroke: ink, grid: { stroke: "#8884", width: 1 }, ticks: { stroke: "#8884", width: 1 } };
    const series = names.map((name, index) => ({
      label: name, stroke: COLOURS[index % COLOURS.length], width: 1.5, spanGaps: true,
      value: (_, value) => (value === null || value === undefined ? "–" : value.toPrecision(4)),
      points: { show: (plot, index) => plot.data[index].filter((value) => value !== null).length < FEW_POINTS, size: 4 },
    }));
    const options = {
      width, height: HEIGHT, scales: { x: { time: false } }, axes: [axis, { ...axis, size: 56 }],
      series: [{ label: "update" }, ...series],
    };
    this.plot = new uPlot(options, data, this.place);
  }
}
