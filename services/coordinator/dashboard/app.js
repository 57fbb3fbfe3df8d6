// Routes of the page, its key, and the loops that keep it live.

import { get, key, setKey } from "./api.js";
import { make } from "./dom.js";
import { showJob } from "./job.js";
import { showJobs } from "./jobs.js";

const page = document.querySelector("#page");
const connection = document.querySelector("#connection");
const dialog = document.querySelector("#ask-key");
let leave = new AbortController();

/** Call `work` now and again every `everyMs` after it has ended, until the page is left. A failure is shown and retried. */
function loopUntil(signal) {
  return async (everyMs, work) => {
    while (!signal.aborted) {
      try {
        if (!document.hidden) await work();
        connection.textContent = "";
      } catch (error) {
        if (signal.aborted || error.name === "AbortError") return;
        connection.textContent = error.message;
        if (error.status === 401) return askKey();
        if (error.status === 404) return page.replaceChildren(make("p", { class: "problem" }, error.message));
      }
      await new Promise((resolve) => setTimeout(resolve, everyMs));
    }
  };
}

function route() {
  leave.abort();
  leave = new AbortController();
  const loop = loopUntil(leave.signal);
  const found = /^#\/jobs\/([^/]+)$/.exec(location.hash);
  if (found) showJob(page, leave.signal, loop, decodeURIComponent(found[1]));
  else showJobs(page, leave.signal, loop);
}

function askKey() {
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("close", () => {
  const field = document.querySelector("#key-text");
  if (dialog.returnValue === "use") setKey(field.value.trim());
  field.value = "";
  route();
});
document.querySelector("#key").addEventListener("click", askKey);
document.querySelector("#key-text").placeholder = key() ? "a key is set; empty removes it" : "";
window.addEventListener("hashchange", route);
get("/v1/version").then((found) => { document.querySelector("#version").textContent = found.version; }).catch(() => {});
route();
