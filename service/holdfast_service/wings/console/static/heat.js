// Health by layer as a heat map: layers from top to bottom, steps from left to right.
(function () {
  "use strict";
  const island = document.getElementById("layers");
  const canvas = document.getElementById("heat");
  if (!island || !canvas) return;
  const { health, run, first } = JSON.parse(island.textContent);
  const names = Object.keys(health.layers);
  const choice = document.getElementById("what");
  const told = document.getElementById("cell");
  const LABELS = 190, TOP = 22, ROW = 18;
  let width = 12;

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function colour(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }

  // Values span decades, so their logarithm has the colour; what is 0 has the faintest one.
  function scale(what) {
    const logs = names.flatMap((name) => health.layers[name]).filter((cell) => cell && cell[what] > 0).map((cell) => Math.log(cell[what]));
    const low = Math.min(...logs), high = Math.max(...logs);
    return (value) => (value === null ? null : value <= 0 ? 0 : high > low ? (Math.log(value) - low) / (high - low) : 0.5);
  }

  function draw() {
    const what = choice.value;
    const of = scale(what);
    const ratio = window.devicePixelRatio || 1;
    const room = canvas.parentElement.clientWidth - LABELS;
    width = Math.max(8, Math.min(48, Math.floor(room / health.steps.length)));
    const wide = LABELS + width * health.steps.length, high = TOP + ROW * names.length + 2;
    canvas.width = wide * ratio;
    canvas.height = high * ratio;
    canvas.style.width = `${wide}px`;
    canvas.style.height = `${high}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const text = colour("--quiet"), red = colour("--error"), nothing = colour("--raised"), blue = colour("--accent");
    pen.fillStyle = text;
    const every = Math.ceil(56 / width);
    pen.textAlign = "left";
    health.steps.forEach((step, column) => { if (column % every === 0) pen.fillText(String(step), LABELS + column * width, TOP / 2); });
    names.forEach((name, row) => {
      const y = TOP + row * ROW;
      pen.fillStyle = text;
      pen.textAlign = "right";
      pen.fillText(name.length > 28 ? `…${name.slice(-27)}` : name, LABELS - 8, y + ROW / 2);
      health.layers[name].forEach((cell, column) => {
        const value = cell ? of(cell[what]) : null;
        pen.globalAlpha = 1;
        pen.fillStyle = cell && cell.nonfinite ? red : value === null ? nothing : blue;
        if (value !== null && !(cell && cell.nonfinite)) pen.globalAlpha = 0.12 + 0.88 * value;
        pen.fillRect(LABELS + column * width, y, width - 1, ROW - 1);
      });
      pen.globalAlpha = 1;
    });
    const row = names.indexOf(first.layer), column = health.steps.indexOf(first.step);
    if (row >= 0 && column >= 0) {
      pen.strokeStyle = colour("--text");
      pen.lineWidth = 2;
      pen.strokeRect(LABELS + column * width - 1, TOP + row * ROW - 1, width + 1, ROW + 1);
    }
  }

  function at(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LABELS) / width);
    const row = Math.floor((event.clientY - box.top - TOP) / ROW);
    return names[row] !== undefined && health.steps[column] !== undefined ? { name: names[row], column } : null;
  }
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (!found) return;
    const cell = health.layers[found.name][found.column];
    const parts = [found.name, `step ${health.steps[found.column]}`];
    if (!cell) parts.push("nothing is known");
    else {
      if (cell.nonfinite) parts.push(`${cell.nonfinite} not finite`);
      if (cell.change !== null) parts.push(`changed by ${+(100 * cell.change).toPrecision(3)} %`);
      if (cell.rms !== null) parts.push(`RMS ${+cell.rms.toPrecision(4)}`);
    }
    told.textContent = parts.join(" · ");
  });
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    if (found) location.href = `${run}/checkpoints/${health.steps[found.column]}/tensors?q=${encodeURIComponent(found.name)}`;
  });
  choice.addEventListener("change", draw);
  document.querySelector("[data-heat-choice]").hidden = false;
  window.addEventListener("resize", draw);
  document.addEventListener("theme", draw);
  draw();
  const opened = names.indexOf(first.layer); // where NaN began
  if (opened >= 0) canvas.parentElement.scrollTop = TOP + opened * ROW - canvas.parentElement.clientHeight / 2;
})();
