// A metric of several runs on one axis of steps.
(function () {
  "use strict";
  const island = document.getElementById("drawn");
  const element = document.getElementById("overlay");
  if (!island || !element || !window.uPlot) return;
  const { runs } = JSON.parse(island.textContent);
  const pointed = document.getElementById("pointed");
  const resting = pointed.textContent;
  const data = uPlot.join(runs.map((run) => [run.steps, run.values]));
  const probe = document.createElement("span");
  document.body.append(probe);
  let chart = null;

  function colour(name) {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  }
  function ink(number) {
    probe.className = `swatch p${number}`;
    const found = getComputedStyle(probe).backgroundColor;
    probe.className = "";
    return found;
  }
  const short = (value) => (value === null || value === undefined ? "" : `${+value.toPrecision(4)}`);
  function tell(index) {
    if (index === null || index === undefined) { pointed.textContent = resting; return; }
    const values = runs.map((run, number) => [run.run, data[number + 1][index]]).filter(([, value]) => value !== null && value !== undefined);
    pointed.textContent = [`step ${data[0][index]}`, ...values.map(([run, value]) => `${run} ${short(value)}`)].join(" · ");
  }
  function draw() {
    if (chart) chart.destroy();
    probe.hidden = false;
    const axis = (more) => ({ stroke: colour("--quiet"), font: "11px system-ui, sans-serif", grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1, size: 4 }, ...more });
    const series = runs.map((run, number) => ({ label: run.run, stroke: ink(number), width: 1.75, spanGaps: true, points: { show: run.steps.length < 100, size: 5, fill: ink(number) } }));
    chart = new uPlot({
      width: element.clientWidth, height: 340, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_, low, high) => { const room = (high - low || Math.abs(high) || 1) * 0.08; return [low - room, high + room]; } } },
      cursor: { drag: { x: true, y: false }, points: { size: 8 } },
      hooks: { setCursor: [(one) => tell(one.cursor.left >= 0 ? one.cursor.idx : null)] },
      series: [{}, ...series],
      axes: [axis({ values: (_, marks) => marks.map(String) }), axis({ size: 64, values: (_, marks) => marks.map(short) })],
    }, data, element);
    probe.hidden = true;
  }
  let resized;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(draw, 120); });
  document.addEventListener("theme", draw);
  draw();
})();
