// What became of the feedback of an online job.

import { make, number } from "./dom.js";

const STAGES = ["received", "matched", "admitted", "trained", "rejected", "quarantined", "expired", "retracted"];

/** Bars by status, the whole first; `counts` is the reply of GET …/feedback. */
export function funnel(counts) {
  const byStatus = counts.by_status ?? {};
  const total = Object.values(byStatus).reduce((sum, count) => sum + count, 0);
  if (!total) return make("p", { class: "hint" }, "None yet: POST /feedback.");
  const rows = STAGES.filter((stage) => byStatus[stage]).map((stage) => {
    const bar = make("div", { class: "bar" });
    bar.style.width = `${(100 * byStatus[stage]) / total}%`;
    return make("tr", {},
      make("td", {}, stage), make("td", { class: "number" }, number(byStatus[stage])), make("td", { class: "wide" }, bar));
  });
  return make("table", {}, make("caption", { class: "soft" }, `${number(total)} items`), make("tbody", {}, rows));
}
