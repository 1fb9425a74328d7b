"use strict";
// Filters, orders and pages through cards, enlarges images, hides low scores, and sorts tables. The
// page can be read without it.
const host = document.querySelector(".cards");
const cards = [...document.querySelectorAll(".card")];
const filters = [...document.querySelectorAll("[data-filter]")];
const perPage = Number(host?.dataset.page ?? cards.length);
let fitting = cards;
let at = 0;

// A filter has a word that a card needs, or "any" or "none" for cards with any word or with none.
function fits(card, { value, dataset }) {
  const words = card.dataset[dataset.filter].split(" ").filter(Boolean);
  if (value === "any" || value === "none") return (value === "any") === words.length > 0;
  return value === "" || words.includes(value);
}

function filter() {
  fitting = cards.filter((card) => filters.every((select) => fits(card, select)));
  const chosen = find("class")?.value ?? "";
  for (const part of document.querySelectorAll("[data-class]")) {
    part.classList.toggle("faint", chosen !== "" && part.dataset.class !== chosen);
  }
  goTo(0);
}

function goTo(page) {
  const last = Math.max(0, Math.ceil(fitting.length / perPage) - 1);
  at = Math.min(last, Math.max(0, page));
  const visible = new Set(fitting.slice(at * perPage, (at + 1) * perPage));
  for (const card of cards) card.hidden = !visible.has(card);
  find("nothing").hidden = fitting.length > 0;
  const counts = `${fitting.length} of ${cards.length}`;
  find("where").title = counts;
  if (find("back")) {
    showPlace(at, last + 1);
    window.scrollTo(0, 0);
  } else find("where").textContent = `${counts} shown`;
}

function order(key) {
  const sign = key === "errors" ? -1 : 1;
  cards.sort((a, b) => sign * (Number(a.dataset[key]) - Number(b.dataset[key])));
  host.append(...cards);
}

function sortBy(column, header) {
  const body = header.closest("table").tBodies[0];
  const falling = header.ariaSort !== "descending";
  for (const other of header.parentNode.children) other.ariaSort = null;
  header.ariaSort = falling ? "descending" : "ascending";
  const value = (row) => row.cells[column].textContent;
  const compare = (a, b) => {
    const difference = Number(value(b)) - Number(value(a));
    return Number.isNaN(difference) ? value(b).localeCompare(value(a)) : difference;
  };
  body.append(...[...body.rows].sort((a, b) => (falling ? 1 : -1) * compare(a, b)));
}

function hideBelow(least) {
  find("least-score").textContent = Number(least).toFixed(2);
  for (const part of document.querySelectorAll("[data-score]")) {
    part.classList.toggle("below", Number(part.dataset.score) < Number(least));
  }
}

function highlight(event) {
  const part = event.target.closest("[data-object]");
  if (!part) return;
  for (const other of part.closest(".card, dialog").querySelectorAll(`[data-object="${part.dataset.object}"]`)) {
    other.classList.toggle("lit", event.type === "mouseover");
  }
}

// Shows a copy of an image, as large as the window allows. A click closes it, as Escape does.
const dialog = element("dialog", "enlarged");
dialog.addEventListener("click", () => dialog.close());

function enlarge(stage, name) {
  const copy = stage.cloneNode(true);
  const { width, height } = stage.querySelector("svg").viewBox.baseVal;
  copy.style.maxWidth = `${(88 * width) / height}vh`;
  copy.querySelector("button").replaceWith(element("button", "", "Close", { type: "button" }));
  dialog.setAttribute("aria-label", name);
  dialog.replaceChildren(copy);
  dialog.showModal();
}

for (const stage of document.querySelectorAll(".card .stage")) {
  const name = stage.closest(".card").querySelector("h3").textContent;
  stage.append(element("button", "", "Enlarge", { type: "button", ariaLabel: `Enlarge ${name}` }));
  stage.addEventListener("click", () => enlarge(stage, name));
}
document.body.append(dialog);
for (const select of filters) select.addEventListener("change", filter);
document.querySelectorAll(".sortable th[scope=col]").forEach((header, column) => {
  header.addEventListener("click", () => sortBy(column, header));
});
find("least")?.addEventListener("input", (event) => hideBelow(event.target.value));
find("order")?.addEventListener("change", (event) => order(event.target.value));
find("back")?.addEventListener("click", () => goTo(at - 1));
find("on")?.addEventListener("click", () => goTo(at + 1));
document.addEventListener("mouseover", highlight);
document.addEventListener("mouseout", highlight);
document.addEventListener("keydown", (event) => {
  if (event.target.matches("select, [type=range]") || event.altKey || event.ctrlKey || event.metaKey) return;
  if (!find("back") || dialog.open) return;
  if (event.key === "ArrowLeft") goTo(at - 1);
  if (event.key === "ArrowRight") goTo(at + 1);
});
if (cards.length) filter();
performance.mark("ready");
