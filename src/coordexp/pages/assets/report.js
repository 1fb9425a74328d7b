"use strict";
// Shows the values at the step that the reader points at, in all charts at once, and hides and shows groups.
(() => {
  const data = JSON.parse(document.getElementById("curves").textContent);
  const root = document.documentElement;
  const slider = document.querySelector(".tools input[type=range]");
  const stepLabel = document.getElementById("step");
  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => {
    const pictures = [...figure.querySelectorAll("svg")], output = figure.querySelector("output");
    const phases = figure.classList.contains("stack") ? figure.parentElement : null;
    const cells = phases ? new Map([...phases.querySelectorAll("[data-phase]")].map((c) => [c.dataset.phase, c])) : null;
    return { pictures, output, cells, width: pictures[0].viewBox.baseVal.width,
      crosses: pictures.map((picture) => picture.querySelector(".cross")),
      series: data.charts[figure.dataset.chart] || [], last: output && output.innerHTML,
      lasts: cells && new Map([...cells].map(([name, cell]) => [name, cell.textContent])) };
  });
  root.classList.add("live");
  document.querySelector(".tools").hidden = false;

  const span = Math.max(1, data.last - data.first);
  const across = (chart, step) => data.left + (step - data.first) / span * (chart.width - data.left - data.right);

  // The index of the nearest step; of two, the earlier one.
  const nearest = (steps, step) => (
    steps.reduce((best, at, k) => (Math.abs(at - step) < Math.abs(steps[best] - step) ? k : best), 0)
  );

  function format(value) {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(value);
  }

  function showStep(chart, step) {
    const parts = [];
    for (const line of chart.series) {
      const k = nearest(data.steps[line.x], step), [mean, low, high] = line.v.map((values) => values[k]);
      if (chart.cells) {
        const cell = chart.cells.get(line.g);
        if (cell) cell.textContent = format(mean);
        continue;
      }
      const span = document.createElement("span"), letter = document.createElement("i");
      span.className = "of-" + line.g;
      letter.textContent = line.g;
      span.append(letter, format(mean));
      if (low !== undefined && low !== high) span.title = `${format(low)} to ${format(high)}`;
      parts.push(span);
    }
    if (chart.output) chart.output.replaceChildren(...parts);
    const x = across(chart, step);
    for (const cross of chart.crosses) {
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.removeAttribute("hidden");
    }
  }

  function showLast(chart) {
    if (chart.output) chart.output.innerHTML = chart.last;
    if (chart.cells) for (const [name, cell] of chart.cells) cell.textContent = chart.lasts.get(name);
    for (const cross of chart.crosses) cross.setAttribute("hidden", "");
  }

  let requested = null, waiting = false;
  function goTo(step) {
    requested = step;
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      if (requested === null) {
        figures.forEach(showLast);
        stepLabel.textContent = "last";
        slider.value = data.last;
        return;
      }
      const whole = Math.round(Math.min(data.last, Math.max(data.first, requested)));
      figures.forEach((chart) => showStep(chart, whole));
      stepLabel.textContent = whole.toLocaleString("en-US");
      slider.value = whole;
    });
  }

  for (const chart of figures) for (const picture of chart.pictures) {
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect();
      const x = (event.clientX - box.left) * chart.width / box.width;
      goTo(data.first + (x - data.left) / (chart.width - data.left - data.right) * span);
    });
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") goTo(null); });
  }
  slider.addEventListener("input", () => goTo(Number(slider.value)));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") goTo(null); });
  const switches = [[".smooth", "plainly", false, ".chart .raw"], [".scale", "logarithmic", true, ".chart.log"]];
  for (const [name, mode, when, needed] of switches) {
    const label = document.querySelector(name), box = label.querySelector("input");
    label.hidden = !document.querySelector(needed);
    const apply = () => root.classList.toggle(mode, box.checked === when);
    box.addEventListener("change", apply);
    apply();
  }
  for (const key of document.querySelectorAll("button.key")) {
    key.addEventListener("click", () => {
      const on = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", String(on));
      root.style.setProperty("--show-" + key.dataset.group, on ? "inline" : "none");
    });
  }
  performance.mark("ready");
})();
