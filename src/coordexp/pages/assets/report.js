"use strict";
// Shows the values at the step that the reader points at, in all charts at once, and hides and shows groups.
const curves = read("curves");
const slider = document.querySelector(".tools input");
const span = Math.max(1, curves.last - curves.first);
const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => {
  const [drawing, output] = [figure.querySelector("svg"), figure.querySelector("output")];
  const [cross, width] = [drawing.querySelector(".cross"), drawing.viewBox.baseVal.width];
  const lines = curves.charts[figure.dataset.chart];
  return { drawing, output, cross, lines, left: curves.left, inner: width - curves.left - curves.right, width, last: [...output.children] };
});

// The index of the nearest step; of two, the earlier one.
const nearest = (steps, step) => (
  steps.reduce((best, at, k) => (Math.abs(at - step) < Math.abs(steps[best] - step) ? k : best), 0)
);

function format(value) {
  if (value === null) return "-";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(value);
}

function showStep({ output, cross, lines, left, inner }, step) {
  output.replaceChildren(...lines.map((line) => {
    const k = nearest(curves.steps[line.x], step);
    const [mean, low, high] = line.v.map((values) => values[k]);
    const title = low === undefined || low === high ? "" : `${format(low)} to ${format(high)}`;
    return element("span", `of-${line.g}`, element("i", "", line.g), format(mean), { title });
  }));
  const x = left + ((step - curves.first) / span) * inner;
  for (const end of ["x1", "x2"]) cross.setAttribute(end, x);
  cross.removeAttribute("hidden");
}

// Without a step, the last values are shown.
function goTo(step) {
  const whole = step === null ? curves.last : Math.round(Math.min(curves.last, Math.max(curves.first, step)));
  for (const chart of figures) {
    if (step !== null) showStep(chart, whole);
    else chart.output.replaceChildren(...chart.last);
    chart.cross.toggleAttribute("hidden", step === null);
  }
  find("step").textContent = step === null ? "last" : whole.toLocaleString("en-US");
  slider.value = whole;
}

for (const { drawing, left, inner, width } of figures) {
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    goTo(curves.first + ((((event.clientX - box.left) * width) / box.width - left) / inner) * span);
  });
  drawing.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && goTo(null));
}
slider.addEventListener("input", () => goTo(Number(slider.value)));
document.addEventListener("keydown", (event) => event.key === "Escape" && goTo(null));
for (const key of document.querySelectorAll("button.key")) {
  key.addEventListener("click", () => {
    const isOn = key.ariaPressed !== "true";
    key.ariaPressed = String(isOn);
    document.documentElement.style.setProperty(`--show-${key.dataset.group}`, isOn ? "inline" : "none");
  });
}
document.documentElement.classList.add("live");
document.querySelector(".tools").hidden = false;
performance.mark("ready");
