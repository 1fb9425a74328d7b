"use strict";
// Filters and orders the cards, hides kinds of outlines, and sorts the table of classes. The page can be read without it.
const cards = [...document.querySelectorAll(".card")];
const buttons = [...document.querySelectorAll("[data-filter]")];

function show(flag) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.filter === flag));
  for (const card of cards) card.hidden = flag !== "" && !card.dataset.flags.split(" ").includes(flag);
  const shown = cards.filter((card) => !card.hidden).length;
  document.getElementById("count").textContent = `${shown} of ${cards.length} shown`;
}

function order(key) {
  const sign = key === "errors" ? -1 : 1;
  cards.sort((a, b) => sign * (Number(a.dataset[key]) - Number(b.dataset[key])));
  document.getElementById("cards").append(...cards);
}

function sortBy(column, header) {
  const body = header.closest("table").tBodies[0];
  const falling = header.dataset.sorted !== "falling";
  for (const other of header.parentNode.children) delete other.dataset.sorted;
  header.dataset.sorted = falling ? "falling" : "rising";
  const value = (row) => row.cells[column].textContent;
  const compare = (a, b) => {
    const difference = Number(value(b)) - Number(value(a));
    return Number.isNaN(difference) ? value(b).localeCompare(value(a)) : difference;
  };
  body.append(...[...body.rows].sort((a, b) => (falling ? 1 : -1) * compare(a, b)));
}

for (const button of buttons) button.addEventListener("click", () => show(button.dataset.filter));
for (const box of document.querySelectorAll("[data-kind]")) {
  box.addEventListener("change", () => document.body.classList.toggle(`hide-${box.dataset.kind}`, !box.checked));
}
document.querySelectorAll(".sortable th").forEach((header, column) => {
  header.addEventListener("click", () => sortBy(column, header));
});
if (cards.length) {
  document.getElementById("order").addEventListener("change", (event) => order(event.target.value));
  show("");
}
