"use strict";
// Draws the charts of the element #data. Everything else of the page is HTML, and needs no script.
(() => {
  const { charts } = JSON.parse(document.getElementById("data").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const axisNames = { step: "step", tokens: "tokens", seconds: "seconds of training" };
  let axis = "step";
  let drawn = [];

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

  const marksOf = (chart) => ({
    hooks: {
      drawAxes: (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.beginPath();
        ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
        ctx.clip();
        for (const mark of chart.marks) {
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

  const readoutOf = (chart, element) => (plot) => {
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

  const options = (chart, place, readout) => {
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
      plugins: [marksOf(chart)],
      hooks: { setCursor: [readoutOf(chart, readout)] },
    };
  };

  const draw = () => {
    drawn.forEach((plot) => plot.destroy());
    drawn = plots.map((place) => {
      const chart = charts[Number(place.dataset.chart)];
      place.replaceChildren();
      let readout = place.nextElementSibling;
      if (!readout.classList.contains("readout")) {
        readout = document.createElement("p");
        readout.className = "readout";
        place.after(readout);
      }
      readout.textContent = "";
      return new uPlot(options(chart, place, readout), tables(chart), place);
    });
    document.documentElement.dataset.drawn = `${axis} ${drawn.length}`;
  };

  let pending = 0;
  const drawSoon = () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(draw); };
  const form = document.querySelector(".axis");
  document.getElementById("undrawn").hidden = true;
  form.hidden = plots.length === 0;
  form.addEventListener("change", (event) => { axis = event.target.value; draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; drawSoon(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
  matchMedia("print").addEventListener("change", draw);
  draw();
})();
