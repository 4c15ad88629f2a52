// Events as they happen: the stream goes on behind the newest one of the page, and after every break where it broke.
(function () {
  "use strict";
  const list = document.getElementById("events");
  if (!list || !list.dataset.stream || !window.EventSource) return;
  const SHOWN_MAX = 500;
  const state = document.getElementById("stream");
  const pause = document.getElementById("pause");
  const waiting = [];
  let paused = false;

  function say(text, level) {
    state.hidden = false;
    state.textContent = text;
    state.className = `badge ${level}`;
  }

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  function plain(value) {
    if (Array.isArray(value)) return value.map(plain).join("; ") || "none";
    if (value === null || typeof value !== "object") return String(value);
    return Object.entries(value).map(([name, inner]) => `${name.replaceAll("_", " ")} ${plain(inner)}`).join(", ") || "none";
  }

  function line(event) {
    const item = element("li", undefined, `${event.level} fresh`);
    item.dataset.id = event.id;
    const time = element("time", new Date(event.at).toLocaleTimeString([], { hour12: false }));
    time.dateTime = time.title = event.at;
    item.append(time, " ", element("span", event.kind, `badge s-${event.level}`), " ", element("span", event.text, "text"));
    if (event.run) {
      const link = element("a", event.step === null ? event.run : `${event.run}@${event.step}`);
      const there = event.kind.startsWith("checkpoint-") && event.kind !== "checkpoint-removed" && event.step !== null;
      link.href = `/runs/${encodeURIComponent(event.run)}${there ? `/checkpoints/${event.step}` : ""}`;
      item.append(" ", link);
    }
    if (Object.keys(event.detail).length) {
      const more = element("details");
      const facts = element("dl", undefined, "facts");
      for (const [name, value] of Object.entries(event.detail)) facts.append(element("dt", name.replaceAll("_", " ")), element("dd", plain(value)));
      more.append(element("summary", "more"), facts);
      item.append(more);
    }
    return item;
  }

  function show(event) {
    if (list.dataset.level && event.level !== list.dataset.level) return;
    document.getElementById("none")?.remove();
    if (list.querySelector(`[data-id="${Number(event.id)}"]`)) return;
    const item = line(event);
    list.prepend(item);
    setTimeout(() => item.classList.remove("fresh"), 3000);
    while (list.children.length > SHOWN_MAX) list.lastElementChild.remove();
  }

  function take(message) {
    const event = JSON.parse(message.data);
    if (paused) waiting.push(event);
    else show(event);
    if (paused) pause.textContent = `Resume (${waiting.length} new)`;
  }

  const source = new EventSource(list.dataset.stream);
  source.addEventListener("open", () => say("live", "s-done"));
  source.addEventListener("error", () => say(source.readyState === EventSource.CLOSED ? "not live: load the page again" : "connecting …", "s-warning"));
  source.addEventListener("message", take);
  for (const kind of list.dataset.kinds.split(" ")) source.addEventListener(kind, take);
  source.addEventListener("gap", () => {
    list.prepend(element("li", "Some events in between are no longer stored.", "warning"));
  });
  window.addEventListener("pagehide", () => source.close());

  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Resume" : "Pause";
    while (!paused && waiting.length) show(waiting.shift());
  });
})();
