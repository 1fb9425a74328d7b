"use strict";
// A person decides about suggestions, and draws what is missed. This is kept in the browser, under the hash of the file of
// suggestions, and saved as decisions.json. Text from data is inserted as text, never as markup.
const index = read("index");
const items = index.items.map(([id, image, desc, score, agreement, ring]) => ({ id, image, desc, score, agreement, ring }));
const wholes = index.images.map(({ id }, image) => ({ id: `image ${id}`, image, desc: "the whole image", score: 1 }));
const known = new Map(index.known);
const key = `coordexp-suggestions-${index.hash}`;
const STATES = { accept: "accepted", reject: "rejected", complete: "complete" };
let decisions = {}; // by the id of a suggestion, or of a whole image
let added = {}; // lists of objects by the id of their image
let matching = items;
let at = 0;
let [corner, box] = [null, null]; // where a box begins that is being drawn, and the one that gets a name
const history = []; // an item, with its decision and all added objects before

// The browser may refuse to keep anything, for example in a private window.
function keep() {
  try {
    localStorage.setItem(key, JSON.stringify(content()));
  } catch {
    warn("This browser does not keep decisions. Save them to a file before you close the page.");
  }
}

function recall() {
  try {
    take(JSON.parse(localStorage.getItem(key)));
  } catch {} // nothing that can be used
}

// What is saved. An image has its name and the number of its labels, by which a command sees that the data changed.
function content() {
  const made = Object.entries(decisions).filter(([id]) => !id.startsWith("image "));
  const notes = index.images.map((image) => [image.id, {
    image: image.name, labels: image.labels.length, complete: `image ${image.id}` in decisions, added: objectsOf(image),
  }]);
  const images = notes.filter(([, { complete, added: { length } }]) => complete || length);
  return { format: 1, suggestions: index.hash, decisions: Object.fromEntries(made), images: Object.fromEntries(images) };
}

// Only what is about suggestions and images of this page's file. Objects replace those that are there.
function take(value) {
  const isNumber = (id) => /^[1-9][0-9]*$/.test(id) && Number(id) <= index.total;
  const made = Object.entries(value.decisions).filter(([id, made]) => isNumber(id) && ["accept", "reject"].includes(made));
  const isBox = (item) => typeof item.desc === "string" && item.bbox_2d.length === 4 && item.bbox_2d.every(Number.isFinite);
  const seen = index.images.map(({ id }) => [id, value.images?.[id]]).filter(([, notes]) => notes);
  Object.assign(added, Object.fromEntries(seen.map(([id, notes]) => [id, notes.added.filter(isBox)])));
  for (const [id, notes] of seen) if (notes.complete === true) made.push([`image ${id}`, "complete"]);
  Object.assign(decisions, Object.fromEntries(made));
  history.length = 0;
}

function warn(text) {
  find("trouble").textContent = text;
  find("trouble").hidden = !text;
}

function filter() {
  const [desc, least, state] = [find("class").value, Number(find("least").value), find("filter").value];
  const current = matching[at];
  const all = find("order").value ? [...items, ...wholes].sort((one, other) => one.image - other.image) : items;
  matching = all.filter((item) => (
    (desc === "" || item.desc === index.classes[Number(desc)])
    && item.score >= least
    && (state === "" || (decisions[item.id] ?? "undecided") === state)
  ));
  goTo(Math.max(0, matching.indexOf(current)));
}

function reorder() {
  filter();
  goTo(Math.max(0, matching.findIndex((item) => !(item.id in decisions))));
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
  const all = Object.values(decisions);
  const [accepted, rejected, complete] = Object.keys(STATES).map((kind) => all.filter((made) => made === kind).length);
  const made = accepted + rejected;
  const drawn = Object.values(added).flat().length;
  find("counts").textContent = `${made} of ${index.total} decided: ${accepted} accepted, ${rejected} rejected`;
  find("looked").textContent = `${drawn} added, ${complete} of ${wholes.length} images complete`;
  find("meter").style.width = `${index.total ? (100 * made) / index.total : 0}%`;
  find("undo").disabled = history.length === 0;
  find("save").disabled = made + drawn + complete === 0;
}

function show(item) {
  const image = index.images[item.image];
  const decision = decisions[item.id];
  leave();
  find("decide").classList.toggle("whole", !item.ring);
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
  const drawn = objectsOf(image).map(({ desc, bbox_2d: edges }) => nameTag("added", edges, image, true, desc));
  const name = item.ring ? [nameTag("suggested", edges(item.ring), image, true, item.desc)] : []; // below: the two may overlap
  stage.replaceChildren(picture(item, image, [0, 0, image.width, image.height]), ...names, ...drawn, ...name);
  find("close-up").replaceChildren(...(item.ring ? [picture(item, image, surroundings(item.ring, image))] : []));
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
    ...objectsOf(image).map(({ desc, bbox_2d: corners }) => shape("added", desc, ringOf(corners))),
    ...(item.ring ? [shape("suggested", item.desc, item.ring)] : []),
  );
}

const shown = () => index.images[matching[at].image];
const objectsOf = (image) => added[image.id] ?? [];
const ringOf = ([left, top, right, bottom]) => [left, top, right, top, right, bottom, left, bottom];

// Drawing: a press and a release on the image are corners of a box, which then gets a name.
function begin() {
  leave();
  find("stage").classList.add("drawing");
}

function leave() {
  [corner, box] = [null, null];
  find("stage").classList.remove("drawing");
  find("stage").querySelector(".drawn")?.remove();
  find("desc").blur(); // at once, so that the next key is one of the page
  find("naming").hidden = true;
}

// The place of a pointer in pixels of the image.
function point({ clientX, clientY }) {
  const { width, height } = shown();
  const stage = find("stage").getBoundingClientRect();
  const round = (share, side) => Math.round(10 * side * Math.min(1, Math.max(0, share))) / 10;
  return [round((clientX - stage.left) / stage.width, width), round((clientY - stage.top) / stage.height, height)];
}

function press(event) {
  if (!find("stage").classList.contains("drawing")) return;
  event.preventDefault();
  find("stage").setPointerCapture(event.pointerId);
  corner = point(event);
}

function drag(event) {
  if (!corner) return;
  const [left, top, right, bottom] = box = edges([...corner, ...point(event)]);
  const { width, height } = shown();
  if (right - left < (2 * width) / 999 || bottom - top < (2 * height) / 999) box = null; // it may be flat in bins
  find("stage").querySelector(".drawn")?.remove();
  if (box) find("stage").firstChild.append(outline("added drawn", ringOf(box)));
}

function release(event) {
  if (!corner) return;
  drag(event);
  corner = null;
  find("naming").hidden = !box;
  find("desc").value = "";
  if (box) find("desc").focus();
}

function add(event) {
  event.preventDefault();
  const desc = find("desc").value.trim();
  const number = known.get(desc) ?? -1; // below 0 for a class without one
  const item = { desc, bbox_2d: box, ...(number >= 0 && Number.isSafeInteger(number) ? { category_id: number } : {}) };
  if (box && desc) replace([...objectsOf(shown()), item]);
}

const remove = () => matching.length && objectsOf(shown()).length && replace(objectsOf(shown()).slice(0, -1));

// Other objects are added to the current image.
function replace(objects) {
  change(matching[at], decisions[matching[at].id], { ...added, [shown().id]: objects });
  goTo(at);
}

function complete() {
  const open = items.filter(({ id, image }) => image === matching[at]?.image && !(id in decisions)).length;
  warn(open ? `${open} suggestions of this image are undecided. Decide about them first.` : "");
  if (!open) decide("complete");
}

function decide(decision) {
  const item = matching[at];
  if (!item || !item.ring !== (decision === "complete")) return;
  change(item, decision, added);
  const isOpen = (other) => !(other.id in decisions);
  const open = matching.findIndex((other, place) => place > at && isOpen(other));
  goTo([open, matching.findIndex(isOpen), at].find((place) => place >= 0));
}

function change(item, ...now) {
  history.push([item, decisions[item.id], added]);
  set(item, ...now);
}

function set(item, decision, objects) {
  if (decision) decisions[item.id] = decision;
  else delete decisions[item.id];
  added = objects;
  keep();
}

function undo() {
  const last = history.pop();
  if (!last) return;
  set(...last);
  if (!matching.includes(last[0])) {
    for (const [id, value] of [["class", ""], ["filter", ""], ["least", 0]]) find(id).value = value;
    if (!last[0].ring) find("order").value = "images";
    filter();
  }
  goTo(matching.indexOf(last[0]));
}

function save() {
  if (find("save").disabled) return;
  const link = document.createElement("a");
  const text = `${JSON.stringify(content(), null, 1)}\n`;
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "decisions.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function loadFile(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const value = JSON.parse(await file.text());
    if (value.suggestions !== index.hash) throw new Error("it has decisions about other suggestions");
    take(value);
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
  d: begin,
  Delete: remove,
  Escape: leave,
  c: complete,
  i: () => { find("order").selectedIndex ^= 1; reorder(); },
  l: () => find("decide").classList.toggle("bare"),
  ArrowLeft: () => goTo(at - 1),
  ArrowRight: () => goTo(at + 1),
  "?": openKeys,
};

document.addEventListener("keydown", (event) => {
  const isTyping = ["SELECT", "INPUT"].includes(event.target.tagName) && event.key !== "Escape";
  if (isTyping || event.altKey || event.ctrlKey || event.metaKey || find("keys").open || !(event.key in KEYS)) return;
  event.preventDefault();
  KEYS[event.key]();
});
for (const [id, action] of Object.entries({
  accept: KEYS.a, reject: KEYS.r, undo, save, back: KEYS.ArrowLeft, on: KEYS.ArrowRight, help: KEYS["?"],
  draw: begin, complete, cancel: leave,
})) find(id).addEventListener("click", action);
for (const [type, action] of Object.entries({ pointerdown: press, pointermove: drag, pointerup: release, pointercancel: leave })) {
  find("stage").addEventListener(type, action);
}
find("naming").addEventListener("submit", add);
find("known").append(...[...known.keys()].map((value) => element("option", "", { value })));
find("order").addEventListener("change", reorder);
for (const id of ["class", "filter"]) find(id).addEventListener("change", filter);
find("least").addEventListener("input", filter);
find("load").addEventListener("change", loadFile);
recall();
reorder();
performance.mark("ready");
