// Small things of every page: copying, asking once more, and reading a file into a field. Without scripts, pages work and these do not appear.
(function () {
  "use strict";

  async function copy(button) {
    const text = document.getElementById(button.dataset.copy).textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      window.getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button);
    const asked = event.target.closest("[data-confirm]");
    if (asked && !window.confirm(asked.dataset.confirm)) event.preventDefault();
  });

  document.addEventListener("change", async (event) => {
    const chosen = event.target.closest("[data-into]");
    if (chosen && chosen.files.length) document.getElementById(chosen.dataset.into).value = await chosen.files[0].text();
  });

  // Ages grow while nobody fetches the page again. The same words as the service has.
  function age(seconds) {
    if (seconds >= 172800) return `${Math.round(seconds / 86400)} d ago`;
    if (seconds >= 7200) return `${Math.round(seconds / 3600)} h ago`;
    return seconds >= 120 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds)} s ago`;
  }
  setInterval(() => {
    if (document.hidden) return;
    for (const time of document.querySelectorAll("time[title]")) {
      const passed = (Date.now() - Date.parse(time.dateTime)) / 1000;
      if (passed < 0 || !time.textContent.endsWith(" ago")) continue;
      const text = age(passed);
      if (time.textContent !== text) time.textContent = text;
    }
  }, 1000);

  // A menu of the header closes when one goes on elsewhere.
  const shut = (inside) => {
    for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(inside)) menu.open = false;
  };
  document.addEventListener("click", (event) => shut(event.target));
  document.addEventListener("keydown", (event) => {
    const menu = event.key === "Escape" && event.target.closest && event.target.closest(".menu[open]");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });

  // What a phone would have to scroll past is folded there; a page that is fetched again does not fold it.
  const wide = window.matchMedia("(min-width: 641px)").matches;
  for (const fold of document.querySelectorAll("[data-fold]")) fold.open = wide;

  const unhide = () => {
    for (const hidden of document.querySelectorAll("[data-copy], [data-scripted]")) hidden.hidden = false;
  };
  document.addEventListener("htmx:after:swap", unhide);
  unhide();
})();
