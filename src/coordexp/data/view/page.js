"use strict";
const PAGE = 12;
const find = (id) => document.getElementById(id);
const cards = [...document.querySelectorAll(".card")];
const words = (card, name) => card.dataset[name].split(" ").filter(Boolean);
let shown = cards;
let at = 0;

function fits(card) {
  const chosen = find("class").value;
  const problem = find("problem").value;
  const problems = words(card, "problems");
  if (chosen && !words(card, "classes").includes(chosen)) return false;
  if (problem === "any") return problems.length > 0;
  if (problem === "none") return problems.length === 0;
  return !problem || problems.includes(problem);
}

function filter() {
  const chosen = find("class").value;
  shown = cards.filter(fits);
  for (const part of document.querySelectorAll("[data-class]")) {
    part.classList.toggle("faint", chosen !== "" && part.dataset.class !== chosen);
  }
  goTo(0);
}

function goTo(page) {
  const last = Math.max(0, Math.ceil(shown.length / PAGE) - 1);
  at = Math.min(last, Math.max(0, page));
  const visible = new Set(shown.slice(at * PAGE, (at + 1) * PAGE));
  for (const card of cards) card.hidden = !visible.has(card);
  find("nothing").hidden = shown.length > 0;
  find("where").textContent = `${at + 1} of ${last + 1}`;
  find("where").title = `${shown.length} of ${cards.length} records`;
  find("back").disabled = at === 0;
  find("on").disabled = at === last;
  window.scrollTo(0, 0);
}

function highlight(event) {
  const part = event.target.closest("[data-object]");
  const on = event.type === "mouseover";
  if (!part) return;
  const card = part.closest(".card");
  for (const other of card.querySelectorAll(`[data-object="${part.dataset.object}"]`)) {
    other.classList.toggle("lit", on);
  }
}

find("class").addEventListener("change", filter);
find("problem").addEventListener("change", filter);
find("tags").addEventListener("change", (event) => document.body.classList.toggle("no-tags", !event.target.checked));
find("back").addEventListener("click", () => goTo(at - 1));
find("on").addEventListener("click", () => goTo(at + 1));
document.addEventListener("mouseover", highlight);
document.addEventListener("mouseout", highlight);
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowLeft") goTo(at - 1);
  if (event.key === "ArrowRight") goTo(at + 1);
});
filter();
