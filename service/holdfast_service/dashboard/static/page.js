// Small things of every page: copying, and asking once more. Without scripts, pages work and these do not appear.
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

  for (const button of document.querySelectorAll("[data-copy]")) button.hidden = false;
})();
