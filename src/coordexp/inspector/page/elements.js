"use strict";
// Helpers that create elements. Text from data is inserted as text, never as markup.
const find = (id) => document.getElementById(id);

function element(name, style = "", ...content) {
  const node = document.createElement(name);
  if (style) node.className = style;
  node.append(...content);
  return node;
}

function svg(name, attributes = {}, ...content) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...content);
  return node;
}

// A description is isolated from the words around it, in case its text runs from right to left.
const describe = (desc) => (desc === null ? element("i", "", "no description") : element("bdi", "", desc));
const clip = (text, most) => {
  const letters = Array.from(text.slice(0, 2 * most));
  return letters.length > most || text.length > 2 * most ? `${letters.slice(0, most).join("")}\u2026` : text;
};
const countOf = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const percent = (share) => {
  if (share > 0.99 && share < 1) return `${(100 * Math.min(share, 0.9999)).toFixed(2)} %`;
  return share < 0.0995 ? `${(100 * share).toFixed(2)} %` : `${(100 * share).toFixed(1)} %`;
};

// A description list from rows of [name, ...content].
const list = (style, rows) => element("dl", style, ...rows.map(([name, ...content]) => (
  element("div", "", element("dt", "", name), element("dd", "", ...content))
)));

// Moves the tab stop within a set of elements: one of them is in the tab order, and arrow keys move between them.
function moveTabStop(from, to) {
  if (from && from !== to) from.tabIndex = -1;
  if (to) to.tabIndex = 0;
}
