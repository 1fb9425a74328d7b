"use strict";
// Helpers that create elements. Text from data is inserted as text, never as markup.
const find = (id) => document.getElementById(id);
const read = (id) => JSON.parse(find(id).textContent);

// Content is text and nodes. Its last part may be an object of properties; `data` are data attributes.
function element(name, style = "", ...content) {
  const node = document.createElement(name);
  if (style) node.className = style;
  if (content.at(-1)?.constructor === Object) {
    const { data: attributes, ...properties } = content.pop();
    Object.assign(node, properties);
    Object.assign(node.dataset, attributes);
  }
  node.append(...content);
  return node;
}

function svg(name, attributes = {}, ...content) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...content);
  return node;
}

// An outline over an image, with a halo. The ring has x and y by turns.
function outline(kind, ring, ...content) {
  const points = ring.map((value, k) => `${value}${k % 2 ? " " : ","}`).join("");
  const lines = ["halo", ""].map((style) => svg("polygon", { class: style, points }));
  return svg("g", { class: `shape ${kind}` }, ...lines, ...content);
}

// The smallest and the largest x and y of a ring: left, top, right, bottom.
function edges(ring) {
  const [xs, ys] = [0, 1].map((axis) => ring.filter((_, k) => k % 2 === axis));
  return [Math.min(...xs), Math.min(...ys), Math.max(...xs), Math.max(...ys)];
}

// The name of a shape with these edges, above or below it. In the right half of the image it ends where the shape ends.
function nameTag(kind, [left, top, right, bottom], { width, height }, isBelow, ...content) {
  const node = element("span", `tag ${kind}`, ...content);
  if (left > 0.55 * width) node.style.right = `${Math.max(0, 100 - (100 * right) / width)}%`;
  else node.style.left = `${Math.max(0, (100 * left) / width)}%`;
  node.style.top = isBelow ? `min(100% - 17px, ${(100 * bottom) / height}%)` : `max(0px, ${(100 * top) / height}% - 16px)`;
  return node;
}

// The dialog with the keys of a page.
const openKeys = () => find("keys").showModal();

// Says which of some things is shown, and whether there is one before and behind it.
function showPlace(at, count) {
  find("where").textContent = `${count && at + 1} of ${count}`;
  find("back").disabled = at <= 0;
  find("on").disabled = at >= count - 1;
}

for (const box of document.querySelectorAll("[data-kind]")) {
  box.addEventListener("change", () => document.body.classList.toggle(`hide-${box.dataset.kind}`, !box.checked));
}
