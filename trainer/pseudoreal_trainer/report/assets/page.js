"use strict";
// Draws the charts of the element #data. Everything else of the page is HTML, and needs no script.
(() => {
  let { charts } = JSON.parse(document.getElementById("data").textContent);
  const axisNames = { step: "step", tokens: "tokens", seconds: "seconds of training" };
  let axis = "step";
  // Id of a chart -> its plot, with the data and the look that it has.
  const drawn = new Map();

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const siUnits = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const short = (value) => {
    const unit = siUnits.find(([size]) => Math.abs(value) >= size);
    return unit ? `${+(value / unit[0]).toPrecision(4)}${unit[1]}` : `${+value.toPrecision(4)}`;
  };
  const bytes = (value) => {
    const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let power = 0;
    while (power < 5 && Math.abs(value) >= 1024 ** (power + 1)) power += 1;
    return `${+(value / 1024 ** power).toPrecision(4)} ${names[power]}`;
  };
  const readable = { number: short, bytes, share: (value) => `${+(100 * value).toPrecision(3)}%`, seconds: (value) => `${short(value)} s` };

  // One table for all lines: a line has no point at the places of the others, which uPlot then draws through.
  const tables = (chart) => uPlot.join(chart.lines.map((line) => {
    const points = line.y.map((y, index) => [line.x[axis][index], y]).filter(([x]) => x !== null);
    points.sort((one, other) => one[0] - other[0]);
    const unique = points.filter(([x], index) => index + 1 === points.length || points[index + 1][0] !== x);
    return [unique.map(([x]) => x), unique.map(([, y]) => y)];
  }));

  const marksOf = (kept) => ({
    hooks: {
      drawAxes: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        for (const mark of kept.chart.marks) {
          if (mark.x[axis] === null) continue;
          const x = plot.valToPos(mark.x[axis], "x", true);
          ctx.strokeStyle = variable(`--${mark.kind}`);
          ctx.lineWidth = devicePixelRatio * (mark.kind === "restart" ? 1 : 1.5);
          ctx.setLineDash(mark.kind === "restart" ? [2 * devicePixelRatio, 3 * devicePixelRatio] : [6 * devicePixelRatio, 3 * devicePixelRatio]);
          ctx.beginPath();
          ctx.moveTo(x, bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
        }
        ctx.restore();
      },
    },
  });

  const readoutOf = (kept, element) => (plot) => {
    const { chart } = kept;
    const index = plot.cursor.idx;
    if (index === null || index === undefined) { element.textContent = ""; return; }
    const parts = [`${axisNames[axis]} ${short(plot.data[0][index])}`];
    chart.lines.forEach((line, number) => {
      const values = plot.data[number + 1];
      let at = index;
      while (at > 0 && (values[at] === undefined || values[at] === null)) at -= 1;
      if (values[at] !== undefined && values[at] !== null) parts.push(`${line.label} ${readable[chart.unit](values[at])}`);
    });
    element.textContent = parts.join(" · ");
  };

  const options = (kept, place, readout) => {
    const { chart } = kept;
    const grid = { stroke: variable("--rule"), width: 1 };
    const common = { stroke: variable("--quiet"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    const series = chart.lines.map((line) => {
      const colour = variable(`--c${line.colour % 8}`);
      return {
        label: line.label,
        stroke: colour,
        width: line.points ? 2 : 1.25,
        dash: [undefined, [8, 5], [2, 3], [10, 3, 2, 3]][line.dash],
        spanGaps: true,
        points: { show: line.points || line.y.length === 1, size: 6, fill: colour },
      };
    });
    return {
      width: place.clientWidth,
      height: parseInt(getComputedStyle(place).minHeight, 10),
      legend: { show: false },
      cursor: { sync: { key: "steps" }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      axes: [
        { ...common, values: (_, values) => values.map(short), label: axisNames[axis], labelSize: 20, labelFont: common.font },
        {
          ...common,
          values: (_, values) => values.map((value) => readable[chart.unit](value)),
          size: 74,
          ...(chart.unit === "bytes" && { incrs: Array.from({ length: 53 }, (_, power) => 2 ** power) }),
        },
      ],
      series: [{}, ...series],
      plugins: [marksOf(kept)],
      hooks: { setCursor: [readoutOf(kept, readout)] },
    };
  };

  const place = (id) => document.querySelector(`.plot[data-chart="${id}"]`);
  const readoutAt = (plotPlace) => {
    let readout = plotPlace.nextElementSibling;
    if (!readout || !readout.classList.contains("readout")) {
      readout = document.createElement("p");
      readout.className = "readout";
      plotPlace.after(readout);
    }
    readout.textContent = "";
    return readout;
  };

  // Everything of a chart but its points: where this changes, the plot is made again.
  const lookOf = (chart) => JSON.stringify(chart.lines.map(({ label, colour, dash, points, y }) => [label, colour, dash, points, y.length === 1]));

  // The range that the user has zoomed to; null: all steps are shown.
  const zoomOf = (plot) => {
    const [xs, { min, max }] = [plot.data[0], plot.scales.x];
    return xs.length > 1 && (min > xs[0] || max < xs[xs.length - 1]) ? { min, max } : null;
  };

  const make = (chart, zoom) => {
    const at = place(chart.id);
    at.replaceChildren();
    const kept = { chart, axis, look: lookOf(chart) };
    // `kept`, because a live page gives the plot another chart of the same look.
    kept.plot = new uPlot(options(kept, at, readoutAt(at)), tables(chart), at);
    if (zoom) kept.plot.setScale("x", zoom);
    drawn.set(chart.id, kept);
  };

  const said = () => { document.documentElement.dataset.drawn = `${axis} ${drawn.size}`; };

  const draw = () => {
    for (const chart of charts) {
      const before = drawn.get(chart.id);
      const zoom = before && before.axis === axis ? zoomOf(before.plot) : null;
      if (before) before.plot.destroy();
      make(chart, zoom);
    }
    said();
  };

  // For a live page: draws the charts' new points, and leaves what the user has zoomed to.
  const update = (next) => {
    const ids = new Set(next.map(({ id }) => id));
    for (const [id, { plot }] of drawn) if (!ids.has(id)) { plot.destroy(); drawn.delete(id); }
    charts = next;
    for (const chart of charts) {
      const before = drawn.get(chart.id);
      const zoom = before ? zoomOf(before.plot) : null;
      if (before && before.look === lookOf(chart)) {
        before.chart = chart;
        before.plot.setData(tables(chart), zoom === null);
        if (zoom) before.plot.setScale("x", zoom);
      } else {
        if (before) before.plot.destroy();
        make(chart, zoom);
      }
    }
    form.hidden = charts.length === 0;
    said();
  };
  window.pseudoreal = { update };

  let pending = 0;
  const drawSoon = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); };
  const form = document.querySelector(".axis");
  document.getElementById("undrawn").hidden = true;
  form.hidden = charts.length === 0;
  form.addEventListener("change", (event) => { axis = event.target.value; draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawSoon(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
  matchMedia("print").addEventListener("change", draw);
  draw();
})();
