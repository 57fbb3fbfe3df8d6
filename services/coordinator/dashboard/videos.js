// Films of held-out episodes. A <video> cannot send a key, so the page fetches the bytes and plays them from memory.

import { bytes, get } from "./api.js";
import { make } from "./dom.js";

const EVERY_MS = 5000;
const SHOWN = 4;
/** The newest films are loaded at once, the others when they are asked for. */

export function showVideos({ content, signal, loop, path }) {
  const films = make("div", { class: "videos" });
  let [shown, urls] = ["", []];
  const release = () => urls.splice(0).forEach((url) => URL.revokeObjectURL(url));
  signal.addEventListener("abort", release);
  content.replaceChildren(films);
  loop(EVERY_MS, async () => {
    const rows = (await get(`${path}/videos`, signal)).data.reverse();
    const names = rows.map((row) => row.name + row.error).join();
    if (names === shown && films.childElementCount) return; // what plays is left alone
    shown = names;
    release();
    const none = make("p", { class: "hint" }, "None yet: evaluation.videos says how many episodes of each evaluation are filmed.");
    films.replaceChildren(...(rows.length ? rows.map((row, place) => film(row, place < SHOWN, urls, signal)) : [none]));
  });
}

function film(row, isLoaded, urls, signal) {
  const text = `version ${row.version}, reset id ${row.reset_id}: `;
  if (row.error) return make("figure", {}, make("figcaption", { class: "soft" }, `${text}no video: ${row.error}`));
  const caption = make("figcaption", {}, `${text}${row.success ? "solved in " : ""}${row.steps} steps`);
  const player = make("video", { controls: true, loop: true, playsinline: true, hidden: !isLoaded });
  const load = async () => {
    const url = URL.createObjectURL(await bytes(row.href, signal));
    urls.push(url);
    player.src = url;
    player.hidden = false;
  };
  const tell = (problem) => caption.append(` (${problem.message})`);
  const open = make("button", { type: "button", hidden: isLoaded, onclick: () => { open.remove(); load().catch(tell); } }, "show");
  if (isLoaded) load().catch(tell);
  return make("figure", {}, player, caption, open);
}
