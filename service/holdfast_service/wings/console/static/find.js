// The palette: Ctrl-K or ⌘K opens it anywhere. It asks the API while one types; without scripts the form leads to /find.
(function () {
  "use strict";
  const field = document.querySelector("[data-find]");
  if (!field || !window.HTMLDialogElement) return;
  const WAIT_MS = 120;
  const form = field.form;
  let asked = 0;
  let chosen = -1;
  let timer = null;

  const dialog = document.createElement("dialog");
  dialog.className = "palette";
  dialog.setAttribute("aria-label", "Find");
  const box = document.createElement("input");
  Object.assign(box, { type: "search", autocomplete: "off", spellcheck: false, maxLength: 256, placeholder: "Run, RUN@STEP, step or label" });
  for (const [name, value] of Object.entries({
    role: "combobox", "aria-expanded": "false", "aria-controls": "palette-hits", "aria-autocomplete": "list", "aria-label": "Find a run, RUN@STEP, a step or a label",
  })) box.setAttribute(name, value);
  const list = document.createElement("ul");
  list.id = "palette-hits";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Found");
  const said = document.createElement("p");
  said.className = "quiet";
  said.setAttribute("role", "status");
  dialog.append(box, list, said);
  document.body.append(dialog);

  const address = (hit) => `/runs/${encodeURIComponent(hit.run)}${hit.step === null ? "" : `/checkpoints/${hit.step}`}`;

  function choose(number) {
    const items = [...list.children];
    chosen = items.length ? (number + items.length) % items.length : -1;
    items.forEach((item, at) => item.setAttribute("aria-selected", String(at === chosen)));
    if (chosen < 0) return box.removeAttribute("aria-activedescendant");
    box.setAttribute("aria-activedescendant", items[chosen].id);
    items[chosen].scrollIntoView({ block: "nearest" });
  }

  function show(found) {
    list.replaceChildren(...found.items.map((hit, at) => {
      const item = document.createElement("li");
      item.id = `palette-hit-${at}`;
      item.setAttribute("role", "option");
      item.dataset.href = address(hit);
      item.textContent = hit.step === null ? hit.run : `${hit.run}@${hit.step}`;
      item.title = item.textContent;
      const kind = document.createElement("span");
      kind.className = hit.label ? "badge s-label" : "badge";
      kind.textContent = kind.title = hit.label || hit.kind;
      item.append(" ", kind);
      return item;
    }));
    box.setAttribute("aria-expanded", String(found.items.length > 0));
    said.textContent = found.items.length ? (found.more ? "There is more: type more of the name." : "") : "Nothing found.";
    choose(0);
  }

  async function ask() {
    const number = ++asked;
    const text = box.value.trim();
    if (!text) { list.replaceChildren(); said.textContent = "Type a part of a run’s name, a step, or a label."; choose(-1); return; }
    try {
      const answer = await fetch(`/v1/search?limit=20&q=${encodeURIComponent(text)}`, { headers: { Accept: "application/json" } });
      const found = await answer.json();
      if (number !== asked) return; // a later question is on its way
      if (answer.ok) show(found);
      else said.textContent = found.detail || "The service does not answer.";
    } catch {
      if (number === asked) said.textContent = "The service does not answer.";
    }
  }

  function open() {
    if (dialog.open) return;
    box.value = field.value;
    list.replaceChildren();
    dialog.showModal();
    box.select();
    ask();
  }

  box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(ask, WAIT_MS); });
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      choose(chosen + (event.key === "ArrowDown" ? 1 : -1));
    } else if (event.key === "Enter") {
      event.preventDefault();
      const item = list.children[chosen];
      if (item) location.assign(item.dataset.href);
      else if (box.value.trim()) { field.value = box.value; form.requestSubmit(); }
    }
  });
  list.addEventListener("click", (event) => {
    const item = event.target.closest("li");
    if (item) location.assign(item.dataset.href);
  });
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && !event.shiftKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      open();
    }
  });
  const keys = matchMedia("(min-width: 641px)").matches; // a phone has none
  if (keys) field.placeholder = /Mac/.test(navigator.platform) ? "Find … ⌘K" : "Find … Ctrl K";
})();
