// The run's plots: what became of each save, and measurements below it, all over steps. The page is there before the saves
// are: they are fetched, and fetched again when the page says that they have changed.
(function () {
  "use strict";
  const plots = document.getElementById("plots");
  if (!window.uPlot) return;
  if (!plots) { // the first save is still to come
    document.addEventListener("htmx:after:swap", () => { if (document.getElementById("plots")) location.reload(); });
    return;
  }
  const run = plots.dataset.run, pointed = document.getElementById("pointed");
  let saves = [], lanes, marks, metrics, all, steps = [];
  // Saves by step: a step that was saved again after a resume has several. `held` are the bytes of all up to it.
  function take(found) {
    ({ lanes, marks, metrics, all } = found);
    const { metrics: measured, ...columns } = found.saves;
    const rows = (of, index) => Object.fromEntries(Object.entries(of).map(([name, values]) => [name, values[index]]));
    saves = (columns.step || []).map((_, index) => ({ ...rows(columns, index), metrics: rows(measured, index) }));
    saves.sort((a, b) => a.step - b.step || a.at - b.at);
    steps = saves.map((save) => save.step);
    let stored = found.held;
    for (const save of saves) {
      if (lanes.indexOf(save.outcome) < 6) stored += save.bytes || 0;
      save.held = stored;
    }
  }
  function resting() {
    const dashed = marks.length ? ` Dashed: ${marks.map((one) => `${one.what} ${one.step}`).join(", ")}.` : "";
    return `${saves.length} ${saves.length === 1 ? "save" : "saves"}${all ? "" : ", the newest"}. Point at one for details; click to open it.${dashed}`;
  }
  let charts = [];
  let zoomed = null; // [from, to] in steps, null for everything

  const COLOURS = {
    pinned: "--pinned", verified: "--fine", committed: "--committed", unhealthy: "--warning", abandoned: "--gone", damaged: "--error",
    removed: "--gone", dropped: "--dropped", aborted: "--error", "under way": "--accent",
  };
  // light-dark() is only resolved where it is used as a colour, so a hidden element is asked.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  function colour(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }

  function seconds(value) {
    if (value === null || value === undefined) return "";
    if (value === 0) return "0";
    if (Math.abs(value) < 0.001) return `${+(value * 1e6).toPrecision(3)} µs`;
    if (Math.abs(value) < 1) return `${+(value * 1e3).toPrecision(3)} ms`;
    if (Math.abs(value) < 120) return `${+value.toPrecision(3)} s`;
    return `${+(value / 60).toPrecision(3)} min`;
  }
  function bytes(value) {
    if (value === null || value === undefined) return "";
    let unit = 0;
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    while (Math.abs(value) >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
    return `${+value.toPrecision(3)} ${units[unit]}`;
  }

  function everything() {
    const from = steps[0], to = steps[steps.length - 1];
    const room = Math.max((to - from) * 0.03, 1);
    return [from - room, to + room];
  }
  function zoom(range) {
    zoomed = range;
    const [min, max] = range || everything();
    for (const chart of charts) chart.setScale("x", { min, max });
  }

  function tell(index) {
    if (index === null || index === undefined) { pointed.textContent = resting(); return; }
    const save = saves[index];
    const parts = [`step ${save.step}`, save.outcome, new Date(save.at * 1000).toLocaleString()];
    if (save.why) parts.push(save.why);
    if (save.stall !== null) parts.push(`stall ${seconds(save.stall)}`);
    if (save.durable !== null) parts.push(`durable after ${seconds(save.durable)}`);
    if (save.rate !== null) parts.push(`${bytes(save.rate)}/s`);
    if (save.bytes !== null) parts.push(bytes(save.bytes));
    for (const [name, value] of Object.entries(save.metrics)) {
      if (value !== null) parts.push(`${name} ${typeof value === "number" ? +value.toPrecision(4) : value}`);
    }
    pointed.textContent = parts.join(" · ");
  }
  function openSave(index) {
    const save = saves[index];
    if (save && !["removed", "dropped", "aborted", "under way"].includes(save.outcome)) {
      location.href = `${run}/checkpoints/${save.step}`;
    }
  }

  // Round steps, at distances of 1, 2 or 5 and zeros; large ones in thousands.
  const ROUND = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11].flatMap((zeros) => [1, 2, 5].map((one) => one * 10 ** zeros));
  const short = (value) => (value >= 1e6 ? `${+(value / 1e6).toPrecision(6)}M` : value >= 1e4 ? `${+(value / 1e3).toPrecision(6)}k` : `${value}`);
  const stepAxis = () => axis({ values: (_, ticks) => ticks.map(short), space: 60, incrs: ROUND, size: 30 });
  // Where training was resumed, and where NaN began.
  function mark(chart) {
    const pen = chart.ctx, { left, top, width, height } = chart.bbox;
    for (const one of marks) {
      const x = chart.valToPos(one.step, "x", true);
      if (x < left || x > left + width) continue;
      pen.save();
      pen.strokeStyle = colour(one.what === "resumed from" ? "--pinned" : "--error");
      pen.lineWidth = Math.max(1, window.devicePixelRatio || 1);
      pen.setLineDash([4, 4]);
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, top + height);
      pen.stroke();
      pen.restore();
    }
  }

  const axis = (more) => ({
    stroke: colour("--quiet"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1, size: 4 }, ...more,
  });
  function options(element, height, more) {
    const [min, max] = zoomed || everything();
    return {
      width: element.clientWidth, height, legend: { show: false },
      cursor: { sync: { key: "saves" }, drag: { x: true, y: false }, focus: { prox: 24 }, points: { size: 9 } },
      hooks: {
        draw: [mark],
        setCursor: [(chart) => tell(chart.cursor.left >= 0 ? chart.cursor.idx : null)],
        setSelect: [(chart) => {
          if (chart.select.width > 4) zoom([chart.posToVal(chart.select.left, "x"), chart.posToVal(chart.select.left + chart.select.width, "x")]);
        }],
      },
      ...more,
      scales: { x: { time: false, min, max }, ...more.scales },
    };
  }

  function drawLanes() {
    const element = document.getElementById("lanes");
    const shown = lanes.filter((lane) => saves.some((save) => save.outcome === lane));
    const rows = shown.length;
    const data = [steps, ...shown.map((lane, row) => saves.map((save) => (save.outcome === lane ? rows - row : null)))];
    const series = shown.map((lane) => ({
      label: lane, stroke: colour(COLOURS[lane]), paths: () => null,
      points: { show: true, size: 9, fill: colour(COLOURS[lane]), stroke: colour(COLOURS[lane]), width: 1 },
    }));
    const chart = new uPlot(options(element, Math.max(70 + rows * 30, 130), {
      series: [{}, ...series],
      scales: { y: { range: [0.4, rows + 0.6] } },
      axes: [stepAxis(), axis({ size: 82, splits: () => shown.map((_, row) => rows - row), values: () => shown, grid: { stroke: colour("--line"), width: 1, dash: [2, 4] } })],
    }), data, element);
    chart.over.addEventListener("click", () => { if (chart.select.width <= 4) openSave(chart.cursor.idx); });
    chart.over.addEventListener("dblclick", () => zoom(null));
    charts.push(chart);
  }

  function drawMeasure(id, names, say) {
    const element = document.getElementById(id);
    if (!saves.some((save) => save[names[0]] !== null)) {
      const none = document.createElement("p");
      none.className = "nodata";
      none.textContent = "Not measured for these saves.";
      element.append(none);
      return;
    }
    const data = [steps, ...names.map((name) => saves.map((save) => save[name]))];
    const series = names.map((name, row) => ({
      label: name, stroke: colour(row ? "--gone" : "--accent"), width: row ? 1.5 : 1.75, spanGaps: true, dash: row ? [6, 4] : undefined,
      points: { show: row === 0 && saves.length < 200, size: 5, fill: colour("--accent") },
    }));
    const chart = new uPlot(options(element, 150, {
      series: [{}, ...series],
      scales: { y: { range: (_, low, high) => [0, Math.max(high || 0, 1e-9) * 1.12] } },
      axes: [stepAxis(), axis({ size: 64, values: (_, ticks) => ticks.map(say) })],
    }), data, element);
    chart.over.addEventListener("dblclick", () => zoom(null));
    charts.push(chart);
  }

  // A metric of the checkpoints, on a scale of its own; the lowest and the highest are marked.
  function drawMetric(element) {
    const name = element.dataset.metric;
    const values = saves.map((save) => (typeof save.metrics[name] === "number" ? save.metrics[name] : null)); // else NaN or infinite
    const good = (save) => save.outcome === "pinned" || save.outcome === "verified" || save.outcome === "committed";
    const marked = [element.dataset.low, element.dataset.high].map((step) => (
      values.map((value, index) => (String(saves[index].step) === step && good(saves[index]) ? value : null))));
    const extreme = (label, token) => ({
      label, stroke: colour(token), paths: () => null, points: { show: true, size: 10, width: 2, stroke: colour(token), fill: colour("--panel") },
    });
    const digits = (value) => (value === null || value === undefined ? "" : `${+value.toPrecision(3)}`);
    const chart = new uPlot(options(element, 150, {
      series: [{}, { label: name, stroke: colour("--accent"), width: 1.75, spanGaps: true, points: { show: saves.length < 200, size: 5, fill: colour("--accent") } },
        extreme("lowest", "--fine"), extreme("highest", "--pinned")],
      scales: { y: { range: (_, low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.12; return [low - room, high + room]; } } },
      axes: [stepAxis(), axis({ size: 64, values: (_, ticks) => ticks.map(digits) })],
    }), [steps, values, ...marked], element);
    chart.over.addEventListener("click", () => { if (chart.select.width <= 4) openSave(chart.cursor.idx); });
    chart.over.addEventListener("dblclick", () => zoom(null));
    charts.push(chart);
  }

  // One figure for each metric, with links to its lowest and its highest value.
  function figures() {
    const charts = document.querySelector("#measured .charts"), made = [...charts.querySelectorAll("[data-metric]")];
    document.getElementById("measured").hidden = !metrics.length;
    if (made.map((one) => one.dataset.metric).join("\n") !== metrics.map((one) => one.name).join("\n")) {
      charts.replaceChildren(...metrics.map(({ name }) => {
        const figure = document.createElement("figure"), caption = document.createElement("figcaption"), chart = document.createElement("div");
        figure.className = "panel";
        chart.className = "chart";
        chart.dataset.metric = name;
        chart.role = "img";
        chart.ariaLabel = `${name} of each checkpoint; the lowest and the highest of healthy ones are marked`;
        figure.append(caption, chart);
        return figure;
      }));
    }
    const link = (step) => Object.assign(document.createElement("a"), { href: `${run}/checkpoints/${step}`, textContent: `step ${step}` });
    charts.querySelectorAll("[data-metric]").forEach((chart, index) => {
      const { name, low, low_step, high, high_step } = metrics[index];
      const unit = document.createElement("span");
      unit.className = "unit";
      unit.append(`lowest ${+low.toPrecision(4)} at `, link(low_step), `, highest ${+high.toPrecision(4)} at `, link(high_step));
      chart.previousSibling.replaceChildren(`${name} `, unit);
      chart.dataset.low = low_step;
      chart.dataset.high = high_step;
    });
  }

  function draw() {
    if (!saves.length) return;
    for (const chart of charts) chart.destroy();
    for (const none of document.querySelectorAll(".chart .nodata")) none.remove();
    charts = [];
    // What is folded has no width; it is drawn when it is opened.
    const open = (id) => document.getElementById(id).closest("details").open;
    if (open("lanes")) drawLanes();
    if (open("stall")) {
      drawMeasure("stall", ["stall"], seconds);
      drawMeasure("durable", ["durable"], seconds);
      document.getElementById("limit-legend").hidden = !saves.some((one) => one.limit !== null);
      drawMeasure("rate", ["rate", "limit"], (value) => `${bytes(value)}/s`);
      drawMeasure("bytes", ["bytes"], bytes);
      drawMeasure("held", ["held"], bytes);
    }
    if (document.getElementById("measured").open) for (const element of document.querySelectorAll("[data-metric]")) drawMetric(element);
    tell(null);
  }

  let loaded = "", last = 0, later = null;
  async function load() {
    later = null;
    loaded = plots.dataset.as;
    const begun = performance.now();
    try {
      const answer = await fetch(plots.dataset.saves, { headers: { Accept: "application/json" } });
      if (!answer.ok) throw new Error(answer.statusText);
      take(await answer.json());
    } catch {
      pointed.textContent = "The saves could not be fetched. Reload the page.";
      return;
    }
    last = performance.now() - begun;
    figures();
    draw();
  }
  // As the page does, what takes long is fetched less often, so that one viewer does not keep a core busy.
  document.addEventListener("htmx:after:swap", () => {
    if (plots.dataset.as !== loaded && later === null) later = setTimeout(load, Math.min(20 * last, 8000));
  });
  for (const fold of plots.querySelectorAll("details.fold")) fold.addEventListener("toggle", draw);

  const MOVES = {
    in: ([from, to]) => [from + (to - from) / 4, to - (to - from) / 4],
    out: ([from, to]) => [from - (to - from) / 2, to + (to - from) / 2],
    earlier: ([from, to]) => [from - (to - from) / 3, to - (to - from) / 3],
    later: ([from, to]) => [from + (to - from) / 3, to + (to - from) / 3],
    all: () => null,
  };
  document.querySelector("[data-chart-tools]").hidden = false;
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => zoom(MOVES[button.dataset.zoom](zoomed || everything())));
  }
  let resized;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 120); });
  document.addEventListener("theme", draw);
  load();
})();
