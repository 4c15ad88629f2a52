// The heat map, a plot by nature, may be scrolled in its box, and so may a field with a long text. Plots draw into canvases. A
// RUN@STEP or an address that is longer than its line breaks where it must.
() => {
  const found = [], ARROW = 18; // px that Chromium keeps for a choice's arrow
  const say = (what, e) => found.push(`${what}: ${e.tagName.toLowerCase()}.${e.className} ${(e.textContent || e.outerHTML || "").trim().replace(/\s+/g, " ").slice(0, 80)}`);
  const wide = document.documentElement;
  if (wide.scrollWidth > wide.clientWidth) found.push(`the page is ${wide.scrollWidth} wide, the window ${wide.clientWidth}`);
  const hidden = (e) => !e.checkVisibility({ visibilityProperty: true }) || e.closest(".sr, .skip, canvas, svg, .uplot, .heat-box, select, textarea");
  const clips = (overflow) => overflow !== "visible";
  const clipped = (e) => { // by what is around it, which is looked at itself
    for (let around = e.parentElement; around && around !== document.body; around = around.parentElement) {
      if (clips(getComputedStyle(around).overflowX)) return true;
    }
    return false;
  };
  for (const e of document.body.querySelectorAll("*")) {
    if (hidden(e)) continue;
    const style = getComputedStyle(e);
    if (style.clipPath !== "none" || style.position === "fixed") continue;
    const x = e.tagName !== "INPUT" && clips(style.overflowX) && e.clientWidth && e.scrollWidth > e.clientWidth + 1;
    const y = clips(style.overflowY) && e.clientHeight && e.scrollHeight > e.clientHeight + 1 && style.overflowY === "hidden";
    const copy = e.cloneNode(true);
    copy.querySelectorAll(".sr").forEach((one) => one.remove());
    const whole = copy.textContent.trim().replace(/\s+/g, " "), titled = e.closest("[title]");
    const dots = style.textOverflow === "ellipsis" && titled && titled.title.trim().includes(whole);
    if ((x && !dots) || y) say("cut off", e);
    if (e.tagName === "INPUT" && e.value && e.scrollWidth > e.clientWidth + 1 && e.type !== "hidden" && e.value.length < 20) say("a field is too narrow", e);
    if (e.tagName === "INPUT" || !e.parentElement) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.right > innerWidth + 1 || box.left < -1) && !x && !clipped(e)) say("out of the window", e);
  }
  const away = (e) => e && (getComputedStyle(e).clipPath !== "none" || away(e.parentElement)); // heads of tables that are cards
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    if (!node.parentElement || hidden(node.parentElement) || node.parentElement.closest(".code, code, pre, script")) continue;
    for (const number of node.data.matchAll(/(?<!:\/\/\S*)(?<![\w\u202f.\-@])\d[\d.,\u202f]*(?:\s?(?:[kMGT]?B|ms|s|%))?(?![\w\-])/g)) {
      if (number[0].length > 24) continue;
      range.setStart(node, number.index);
      range.setEnd(node, number.index + number[0].trimEnd().length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width > 1).map((r) => Math.round(r.top / 4)));
      if (lines.size > 1 && !away(node.parentElement)) say(`a broken number ${number[0]}`, node.parentElement);
    }
    for (const word of node.data.matchAll(/(?<![\w.\-@/:'=|(])[A-Za-z]{2,14}(?![\w.\-@/:'=|)])/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const lines = new Set([...range.getClientRects()].filter((r) => r.width > 1).map((r) => Math.round(r.top / 4)));
      if (lines.size > 1 && !away(node.parentElement)) say(`a broken word ${word[0]}`, node.parentElement);
    }
  }
  const pen = document.createElement("canvas").getContext("2d");
  for (const e of document.body.querySelectorAll("select")) {
    if (!e.checkVisibility({ visibilityProperty: true }) || !e.selectedOptions.length) continue;
    const style = getComputedStyle(e);
    pen.font = style.font;
    const room = e.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - ARROW;
    if (pen.measureText(e.selectedOptions[0].label).width > room + 1) say("a choice is cut off", e);
  }
  return [...new Set(found)];
}
