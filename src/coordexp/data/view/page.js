"use strict";
const PAGE = 12;
const find = (id) => document.getElementById(id);
const cards = [...document.querySelectorAll(".card")];
const words = (card, name) => card.dataset[name].split(" ").filter(Boolean);
let shown = cards;
let at = 0;

function fits(card) {
  const wanted = find("class").value;
  const problem = find("problem").value;
  const problems = words(card, "problems");
  if (wanted && !words(card, "classes").includes(wanted)) return false;
  if (problem === "any") return problems.length > 0;
  if (problem === "none") return problems.length === 0;
  return !problem || problems.includes(problem);
}

function filter() {
  const wanted = find("class").value;
  shown = cards.filter(fits);
  for (const part of document.querySelectorAll("[data-class]")) {
    part.classList.toggle("faint", wanted !== "" && part.dataset.class !== wanted);
  }
  turn(0);
}

function turn(to) {
  const last = Math.max(0, Math.ceil(shown.length / PAGE) - 1);
  at = Math.min(last, Math.max(0, to));
  const visible = new Set(shown.slice(at * PAGE, (at + 1) * PAGE));
  for (const card of cards) card.hidden = !visible.has(card);
  find("nothing").hidden = shown.length > 0;
  find("where").textContent = `${at + 1} of ${last + 1}`;
  find("where").title = `${shown.length} of ${cards.length} records`;
  find("back").disabled = at === 0;
  find("on").disabled = at === last;
  window.scrollTo(0, 0);
}

function light(event) {
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
find("back").addEventListener("click", () => turn(at - 1));
find("on").addEventListener("click", () => turn(at + 1));
document.addEventListener("mouseover", light);
document.addEventListener("mouseout", light);
document.addEventListener("keydown", (event) => {
  if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowLeft") turn(at - 1);
  if (event.key === "ArrowRight") turn(at + 1);
});
filter();
