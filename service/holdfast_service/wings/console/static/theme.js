// Colours and the height of rows, as the viewer chose them: set before the first paint, so nothing flashes.
(function () {
  "use strict";
  const root = document.documentElement;
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const keep = (name, value) => { root.dataset[name] = value; try { localStorage.setItem(name, value); } catch { /* only for this page then */ } };
  for (const [name, known] of [["theme", ["light", "dark"]], ["density", ["compact", "roomy"]]]) {
    let chosen = null;
    try { chosen = localStorage.getItem(name); } catch { /* a browser that keeps nothing */ }
    if (known.includes(chosen)) root.dataset[name] = chosen;
  }

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const otherDensity = () => (root.dataset.density === "roomy" ? "compact" : "roomy");

  document.addEventListener("DOMContentLoaded", () => {
    const theme = document.querySelector("[data-theme-toggle]"), density = document.querySelector("[data-density-toggle]");
    const say = () => {
      theme.textContent = `Switch to ${isDark() ? "light" : "dark"} colours`;
      density.textContent = `Switch to ${otherDensity()} rows`;
    };
    theme.hidden = density.hidden = false;
    say();
    theme.addEventListener("click", () => {
      keep("theme", isDark() ? "light" : "dark");
      say();
      document.dispatchEvent(new Event("theme"));
    });
    density.addEventListener("click", () => { keep("density", otherDensity()); say(); });
    system.addEventListener("change", () => { say(); document.dispatchEvent(new Event("theme")); });
  });
})();
