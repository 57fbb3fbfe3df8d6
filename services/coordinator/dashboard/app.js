// Routes of the page, its key, its titles, and the loops that keep it live.

import { get, key, onKey, setKey } from "./api.js";
import { showDeployment } from "./deployment.js";
import { make } from "./dom.js";
import { showJob } from "./job.js";
import { showSubmission } from "./jobfile.js";
import { showJobs } from "./jobs.js";
import { showComparison } from "./metrics.js";

const page = document.querySelector("#page");
const connection = document.querySelector("#connection");
const dialog = document.querySelector("#ask-key");
const keyText = document.querySelector("#key-text");
const BUSY_SHARE = 4;
let leave = new AbortController();

const ROUTES = [
  [/^#\/jobs\/([^/?]+)(?:\/([a-z]+))?(?:\/([^/?]+))?/, (here, [, job, tab, item]) =>
    showJob(here, decodeURIComponent(job), tab ?? "overview", item && decodeURIComponent(item))],
  [/^#\/compare\?jobs=([^&]+)/, (here, [, jobs]) => showComparison(here, decodeURIComponent(jobs).split(","))],
  [/^#\/submit(?:\?from=([^&]+))?/, (here, [, from]) => showSubmission(here, from && decodeURIComponent(from))],
  [/^#\/deployment(?:\/([a-z]+))?/, (here, [, tab]) => showDeployment(here, tab ?? "keys")],
  [/^(?:#\/\?(.*))?/, (here, [, asked]) => showJobs(here, asked)],
];

/** Call `work` now and again every `everyMs` after it has ended, until the page is left. A failure is shown and retried.
 *  What takes long is asked for less often, so that looking at a job costs the coordinator a bounded share. */
function loopUntil(signal) {
  return async (everyMs, work) => {
    while (!signal.aborted) {
      const begun = performance.now();
      try {
        if (!document.hidden) await work();
        connection.textContent = "";
      } catch (error) {
        if (signal.aborted || error.name === "AbortError") return;
        connection.textContent = error.message;
        if (error.status === 401) return askKey();
        if (error.status === 404) return page.replaceChildren(make("p", { class: "problem" }, error.message));
        if (!("status" in error)) reportError(error); // a defect of this page: seen in the console, and not the end
      }
      const wait = Math.max(everyMs, BUSY_SHARE * (performance.now() - begun));
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  };
}

function route() {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave;
  const here = { page, signal, loop: loopUntil(signal), title: (text) => { document.title = `${text} · Penstock`; } };
  const [pattern, show] = ROUTES.find(([pattern]) => pattern.test(location.hash));
  const section = /^#\/(submit|deployment)/.exec(location.hash)?.[1] ?? "";
  for (const link of document.querySelectorAll("#main-nav a")) {
    if (link.hash === `#/${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  show(here, pattern.exec(location.hash));
}

function askKey() {
  keyText.placeholder = key() ? "a key is set; empty removes it" : "";
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("close", () => {
  if (dialog.returnValue === "use") setKey(keyText.value.trim());
  keyText.value = "";
  dialog.returnValue = "";
  route();
});
document.querySelector("#key").addEventListener("click", askKey);
document.querySelector("#key-cancel").addEventListener("click", () => dialog.close(""));
document.querySelector(".skip").addEventListener("click", (click) => {
  click.preventDefault(); // the address names the view, not a place in it
  page.focus();
});
onKey(() => {
  if (dialog.open) dialog.close("");
  else route();
});
/** Focus the tab of the view that is shown, once it is there. */
function focusTab({ signal }) {
  const observer = new MutationObserver(() => look());
  const look = () => {
    const tab = page.querySelector(".tabs a[aria-current]");
    if (!tab) return;
    observer.disconnect();
    if (document.activeElement === page) tab.focus();
  };
  signal.addEventListener("abort", () => observer.disconnect());
  observer.observe(page, { childList: true, subtree: true });
  look();
}

window.addEventListener("hashchange", () => {
  const wasTab = Boolean(document.activeElement?.closest(".tabs"));
  route();
  window.scrollTo(0, 0);
  if (document.activeElement !== document.body) return;
  page.focus(); // what had the focus is gone: go on from the new view, not from the top of the page
  if (wasTab) focusTab(leave);
});
get("/v1/version").then((found) => { document.querySelector("#version").textContent = found.version; }).catch(() => {});
route();
