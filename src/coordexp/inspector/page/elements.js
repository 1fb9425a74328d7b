"use strict";
// Elements, made. Whatever comes from data goes in as text, never as markup.
const find = (id) => document.getElementById(id);

function element(name, style = "", ...content) {
  const made = document.createElement(name);
  if (style) made.className = style;
  made.append(...content);
  return made;
}

function svg(name, attributes = {}, ...content) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...content);
  return made;
}

// A description is isolated from the words around it, whatever direction it is written in.
const described = (desc) => (desc === null ? element("i", "", "no description") : element("bdi", "", desc));
const clipped = (text, most) => {
  const whole = Array.from(text.slice(0, 2 * most));
  return whole.length > most || text.length > 2 * most ? `${whole.slice(0, most).join("")}\u2026` : text;
};
const many = (count, what) => `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
const percent = (share) => {
  if (share > 0.99 && share < 1) return `${(100 * Math.min(share, 0.9999)).toFixed(2)} %`;
  return share < 0.0995 ? `${(100 * share).toFixed(2)} %` : `${(100 * share).toFixed(1)} %`;
};

// Names and what belongs to each: rows of [name, ...parts].
const list = (style, rows) => element("dl", style, ...rows.map(([name, ...parts]) => (
  element("div", "", element("dt", "", name), element("dd", "", ...parts))
)));

// One element of a set is in the tab order, and arrow keys move on from it.
function rove(from, to) {
  if (from && from !== to) from.tabIndex = -1;
  if (to) to.tabIndex = 0;
}
