// Where Tab stops: what is focusable and shown. Of radio buttons of one name there is one stop.
() => {
  const root = document.querySelector("dialog[open]") || document;
  const all = [...root.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")];
  const radios = new Set();
  window.stops = all.filter((e) => {
    if (e.tabIndex < 0 || e.disabled || e.type === "hidden" || !e.checkVisibility({ visibilityProperty: true })) return false;
    if (e.type !== "radio") return true;
    const name = `${e.getAttribute("form") || ""} ${e.name}`;
    return e.checked || (!document.querySelector(`input[type=radio][name="${e.name}"]:checked`) && !radios.has(name) && radios.add(name));
  });
  window.unseen = [];
  window.reached = new Set();
  // Not counted: a script that follows a mouse shows no ring. Tab comes round to it again.
  (document.querySelector("dialog[open] input") || document.querySelector(".skip") || document.body).focus();
  document.addEventListener("focusin", ({ target }) => {
    window.reached.add(target);
    const style = getComputedStyle(target), box = target.getBoundingClientRect();
    const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
    const inView = box.bottom > 0 && box.right > 0 && box.top < innerHeight && box.left < innerWidth;
    if (!ring || box.width < 6 || box.height < 6 || !inView || style.clipPath !== "none") {
      window.unseen.push(`${target.outerHTML.slice(0, 160)} ring ${ring} ${Math.round(box.width)}x${Math.round(box.height)} in view ${inView}`);
    }
  });
  return window.stops.length;
}
