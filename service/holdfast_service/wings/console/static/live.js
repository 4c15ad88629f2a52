// Keeps a page as it is now: the service's events say when something has happened, and the page is fetched again, at most
// every two seconds. Without events it is fetched every five. Nothing is fetched while nobody looks.
(function () {
  "use strict";
  const GAP_MS = 2000, GAP_MAX_MS = 8000, IDLE_MS = 15000, POLL_MS = 5000;
  const live = () => document.getElementById("live");
  if (!live() || !live().dataset.stream) return;
  let source = null, timer = null, asked = 0, streaming = false, took = 0;

  function refresh() {
    timer = null;
    if (document.hidden) { asked = 0; return; }
    asked = Date.now();
    live().dispatchEvent(new Event("changed"));
    plan(streaming ? IDLE_MS : POLL_MS);
  }
  function plan(wait) {
    if (timer !== null) clearTimeout(timer);
    timer = setTimeout(refresh, wait);
  }
  // A page that takes long to make is asked for less often, so that one viewer does not keep a core busy.
  function happened() { plan(Math.max(Math.min(Math.max(GAP_MS, 20 * took), GAP_MAX_MS) - (Date.now() - asked), 50)); }

  function open() {
    if (!window.EventSource) return;
    source = new EventSource(live().dataset.stream);
    source.addEventListener("open", () => { streaming = true; });
    source.addEventListener("error", () => { streaming = false; if (timer === null) plan(POLL_MS); });
    source.addEventListener("message", happened);
    for (const kind of KINDS) source.addEventListener(kind, happened);
  }
  const KINDS = (live().dataset.kinds || "").split(" ").filter(Boolean);

  // The title comes with the page; the icon, which has the number of alerts on it, is in no part that is swapped.
  document.addEventListener("htmx:after:swap", () => {
    took = Date.now() - asked;
    const icon = document.getElementById("icon"), now = live().dataset.icon;
    if (icon && now && icon.getAttribute("href") !== now) icon.setAttribute("href", now);
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden) happened(); });
  window.addEventListener("pagehide", () => { if (source) source.close(); });
  open();
  plan(POLL_MS);
})();
