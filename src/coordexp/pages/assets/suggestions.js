"use strict";
// A person decides about one suggestion at a time. Decisions are kept in the browser, under the hash of the file of
// suggestions, and saved as decisions.json. Text from data is inserted as text, never as markup.
const index = read("index");
const items = index.items.map(([id, image, desc, score, agreement, ring]) => ({ id, image, desc, score, agreement, ring }));
const key = `coordexp-suggestions-${index.hash}`;
const STATES = { accept: "accepted", reject: "rejected" };
let decisions = {};
let matching = items;
let at = 0;
const history = []; // pairs of a suggestion and the decision that it had before

// The browser may refuse to keep anything, for example in a private window.
function keep() {
  try {
    localStorage.setItem(key, JSON.stringify(decisions));
  } catch {
    warn("This browser does not keep decisions. Save them to a file before you close the page.");
  }
}

function recall() {
  try {
    return readDecisions(JSON.parse(localStorage.getItem(key) ?? "{}"));
  } catch {
    return {};
  }
}

// Only decisions about suggestions of this page's file.
function readDecisions(value) {
  const known = ([id, decision]) => /^[1-9][0-9]*$/.test(id) && Number(id) <= index.total && decision in STATES;
  return Object.fromEntries(Object.entries(value).filter(known));
}

function warn(text) {
  find("trouble").textContent = text;
  find("trouble").hidden = !text;
}

function filter() {
  const [desc, least, state] = [find("class").value, Number(find("least").value), find("filter").value];
  const current = matching[at];
  matching = items.filter((item) => (
    (desc === "" || item.desc === index.classes[Number(desc)])
    && item.score >= least
    && (state === "" || (decisions[item.id] ?? "undecided") === state)
  ));
  goTo(Math.max(0, matching.indexOf(current)));
}

function goTo(place) {
  at = Math.min(matching.length - 1, Math.max(0, place));
  find("decide").hidden = matching.length === 0;
  find("nothing").hidden = matching.length > 0;
  if (matching.length) show(matching[at]);
  showPlace(at, matching.length);
  count();
}

function count() {
  const made = Object.values(decisions);
  const accepted = made.filter((decision) => decision === "accept").length;
  find("counts").textContent = `${made.length} of ${index.total} decided: ${accepted} accepted, `
    + `${made.length - accepted} rejected`;
  find("meter").style.width = `${index.total ? (100 * made.length) / index.total : 0}%`;
  find("undo").disabled = history.length === 0;
  find("save").disabled = made.length === 0;
}

function show(item) {
  const image = index.images[item.image];
  const decision = decisions[item.id];
  find("name").textContent = item.desc;
  find("score").textContent = item.score.toFixed(3);
  for (const id of ["agreement", "agreement-name"]) find(id).hidden = item.agreement === null;
  find("agreement").textContent = item.agreement === null ? "" : `${Math.round(100 * item.agreement)} % of the answers`;
  find("image").textContent = `${image.name}, ${image.width} x ${image.height}`;
  find("number").textContent = `${item.id} of ${index.total}`;
  find("state").textContent = STATES[decision] ?? "undecided";
  find("state").className = decision ?? "";
  remark(image.remark ?? "");
  draw(item, image);
  const next = matching[at + 1];
  if (next) new Image().src = address(index.images[next.image]) ?? ""; // so that it is there at once
}

function remark(text) {
  find("remark").textContent = text;
  find("remark").hidden = !text;
}

// The address of an image: its file, or a data URL inside the page.
const address = (image) => image.source ?? (image.element ? read(image.element) : null);

function draw(item, image) {
  const stage = find("stage");
  stage.style.aspectRatio = `${image.width}/${image.height}`;
  stage.style.maxWidth = `calc(${getComputedStyle(stage).maxHeight} * ${image.width / image.height})`;
  const names = image.labels.map(([desc, ring]) => nameTag("label", edges(ring), image, false, desc));
  const name = nameTag("suggested", edges(item.ring), image, true, item.desc); // below: the two may overlap
  stage.replaceChildren(picture(item, image, [0, 0, image.width, image.height]), ...names, name);
  find("close-up").replaceChildren(picture(item, image, surroundings(item.ring, image)));
}

// The square around a shape that is three times as large, as far as the image goes.
function surroundings(ring, { width, height }) {
  const [left, top, right, bottom] = edges(ring);
  const side = Math.min(Math.max(3 * Math.max(right - left, bottom - top), 16), Math.max(width, height));
  const begin = (low, high, length) => Math.min(Math.max((low + high - side) / 2, 0), Math.max(length - side, 0));
  return [begin(left, right, width), begin(top, bottom, height), side, side];
}

function picture(item, image, view) {
  const url = address(image);
  const size = { width: image.width, height: image.height, preserveAspectRatio: "none" };
  const pixels = url ? [svg("image", { href: url, ...size })] : [];
  pixels[0]?.addEventListener("error", () => remark(`image not shown: the browser cannot read ${image.name}`));
  const others = items.filter((other) => other.image === item.image && other !== item && decisions[other.id] !== "reject");
  const kind = (other) => (decisions[other.id] === "accept" ? "accepted" : "other");
  const shape = (style, desc, ring) => outline(style, ring, svg("title", {}, desc));
  return svg(
    "svg", { viewBox: view.join(" ") }, ...pixels,
    ...image.labels.map(([desc, ring]) => shape("label", desc, ring)),
    ...others.map((other) => shape(kind(other), other.desc, other.ring)),
    shape("suggested", item.desc, item.ring),
  );
}

function decide(decision) {
  if (!matching.length) return;
  const item = matching[at];
  history.push([item, decisions[item.id]]);
  set(item, decision);
  const isOpen = (other) => !(other.id in decisions);
  const open = matching.findIndex((other, place) => place > at && isOpen(other));
  goTo([open, matching.findIndex(isOpen), at].find((place) => place >= 0));
}

function set(item, decision) {
  if (decision) decisions[item.id] = decision;
  else delete decisions[item.id];
  keep();
}

function undo() {
  const last = history.pop();
  if (!last) return;
  set(...last);
  if (!matching.includes(last[0])) {
    for (const [id, value] of [["class", ""], ["filter", ""], ["least", 0]]) find(id).value = value;
    filter();
  }
  goTo(matching.indexOf(last[0]));
}

function save() {
  if (find("save").disabled) return;
  const content = JSON.stringify({ format: 1, suggestions: index.hash, decisions }, null, 1);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`${content}\n`], { type: "application/json" }));
  link.download = "decisions.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function loadFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const content = JSON.parse(await file.text());
    if (content.suggestions !== index.hash) throw new Error("it has decisions about other suggestions");
    Object.assign(decisions, readDecisions(content.decisions));
    warn("");
    keep();
    filter();
  } catch (error) {
    warn(`${file.name} cannot be loaded: ${error.message}`);
  }
}

const KEYS = {
  a: () => decide("accept"),
  y: () => decide("accept"),
  r: () => decide("reject"),
  n: () => decide("reject"),
  u: undo,
  s: save,
  l: () => find("decide").classList.toggle("bare"),
  ArrowLeft: () => goTo(at - 1),
  ArrowRight: () => goTo(at + 1),
  "?": openKeys,
};

document.addEventListener("keydown", (event) => {
  const isTyping = ["SELECT", "INPUT"].includes(event.target.tagName);
  if (isTyping || event.altKey || event.ctrlKey || event.metaKey || find("keys").open || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const [id, action] of Object.entries({
  accept: KEYS.a, reject: KEYS.r, undo, save, back: KEYS.ArrowLeft, on: KEYS.ArrowRight, help: KEYS["?"],
})) find(id).addEventListener("click", action);
for (const id of ["class", "filter"]) find(id).addEventListener("change", filter);
find("least").addEventListener("input", filter);
find("load").addEventListener("change", loadFile);
decisions = recall();
filter();
goTo(Math.max(0, matching.findIndex((item) => !(item.id in decisions))));
performance.mark("ready");
