"use strict";
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

// What a node stands for: the objects that it belongs to, and the token that it is.
function targetOf(node) {
  const { owner, i } = node.closest?.("[data-owner]")?.dataset ?? {};
  return owner === undefined ? null : { owners: owner.split(" ").map(Number), token: i === undefined ? null : Number(i) };
}

// Connects a host with the highlight: pointing at a part of it shows what it stands for, and a click or the focus
// chooses it. Arrow keys go from one item to the next. Items stand in rows, and one of them is in the tab order.
function connect(host, itemStyle, rowStyle) {
  host.addEventListener("pointerover", (event) => inspector.point(targetOf(event.target)));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("click", ({ target }) => {
    if (!target.closest(itemStyle) && targetOf(target)) inspector.choose(targetOf(target));
  });
  host.addEventListener("focusin", ({ target }) => {
    if (!target.matches(itemStyle)) return;
    select(host, target);
    inspector.choose(targetOf(target));
  });
  host.addEventListener("keydown", (event) => {
    const goal = event.altKey || event.metaKey ? null : nextItem(host, itemStyle, rowStyle, event);
    if (!goal) return;
    event.preventDefault();
    goal.focus();
  });
}

// The item that a key goes to; undefined if it is not a key to move with.
function nextItem(host, itemStyle, rowStyle, { key, ctrlKey, target }) {
  const itemsOf = (part) => (part?.matches(itemStyle) ? [part] : [...(part?.querySelectorAll(itemStyle) ?? [])]);
  const all = itemsOf(host);
  const row = itemsOf(target.closest(rowStyle));
  const beside = (by) => { // at the same place in the row above or below
    const rows = [...new Set(all.map((item) => item.closest(rowStyle)))];
    const items = itemsOf(rows[rows.indexOf(target.closest(rowStyle)) + by]);
    return items[Math.min(row.indexOf(target), items.length - 1)];
  };
  return {
    ArrowLeft: () => all[all.indexOf(target) - 1],
    ArrowRight: () => all[all.indexOf(target) + 1],
    ArrowUp: () => beside(-1),
    ArrowDown: () => beside(1),
    Home: () => (ctrlKey ? all : row)[0],
    End: () => (ctrlKey ? all : row).at(-1),
  }[key]?.();
}

// Makes an item the selected one of its host, which is the one in the tab order.
function select(host, item) {
  for (const [node, isSelected] of [[host.querySelector("[tabindex='0']"), false], [item, true]]) {
    if (node) Object.assign(node, { tabIndex: isSelected ? 0 : -1, ariaSelected: String(isSelected) });
  }
}

// Scrolls a list to one of its parts, unless the part is visible.
function bringIntoView(host, part) {
  const above = part.getBoundingClientRect().top - host.getBoundingClientRect().top;
  if (above < 4 || above > host.clientHeight - 34) host.scrollTop += above - host.clientHeight / 3;
}

const focusIn = (host) => host.querySelector("[tabindex='0'], [aria-current], button")?.focus();

// The style, the name and the meaning of each role of a token, by its number less one.
const ROLES = [
  ["prefix", "kept", "as the model wrote it; not trained"],
  ["coord", "matched coordinate", "trained towards the true position"],
  ["structure", "added JSON", "trained: cross entropy"],
  ["desc", "added description", "trained: cross entropy"],
  ["added", "added coordinate", "trained towards the true position"],
  ["end", "end of turn", "trained: cross entropy"],
  ["cut", "removed", "broken, unfinished, or the closing brace, which is appended again and trained"],
  ["masked", "masked description", "added, but left out of the loss"],
];
// In an answer that a correction policy rebuilt, some roles mean something else.
const REBUILT_ROLES = [
  ["prefix", "context", "an object of the model, or one that several answers agree on; not trained"],
  ROLES[1],
  ["structure", "trained JSON", "trained: cross entropy"],
  ["desc", "trained description", "trained: cross entropy"],
  ROLES[4],
  ROLES[5],
  ["cut", "removed", "the answer from its first change on; what stays of it is written again below"],
  ["masked", "masked description", "left out of the loss"],
];
const [WRITTEN_COORD, ADDED_COORD, END_OF_TURN, CUT] = [2, 5, 6, 7];
const LEFT_OUT = new Set(["duplicate", "removed"]);

// The data of the page: the index at once, samples and images when they are shown, and values derived from both.
const data = (() => {
  const index = read("index");
  const parsed = new Map();
  const readOnce = (id) => {
    if (!parsed.has(id)) parsed.set(id, read(id));
    return parsed.get(id);
  };
  const sample = (k) => readOnce(`sample-${k}`);
  const image = (entry) => (entry.picture === null ? null : readOnce(entry.picture));
  const roles = (sample) => (sample.rebuilt ? REBUILT_ROLES : ROLES);
  const isCoord = (id) => id >= index.coord0 && id < index.coord0 + 1000;
  const isTrained = (role) => role >= WRITTEN_COORD && role <= END_OF_TURN;
  const text = (id) => (isCoord(id) ? String(id - index.coord0) : (index.pieces[id] ?? `#${id}`));

  function countFound(entry) {
    const renamed = entry.renamed ? `, ${entry.renamed} under another name` : "";
    return `${entry.matched} of ${entry.true} found${renamed}`;
  }

  // The coordinates of an object. One of a rebuilt answer may stand in the strip twice: as it was written, which is cut,
  // and as it is trained.
  function coordsOf(sample, owner, isCut) {
    const { ids, roles, owner: owners } = sample.tokens;
    const fits = (id, i) => owners[i] === owner && isCoord(id) && (roles[i] === CUT) === isCut;
    return ids.flatMap((id, i) => (fits(id, i) ? [i] : []));
  }

  // The shapes to draw, the largest first, so that each can be pointed at. Of equal ones, the true shape is below.
  function shapes(sample) {
    const area = ([left, top, right, bottom]) => (right - left) * (bottom - top);
    const drawn = sample.objects.filter((object) => object.bins && object.state !== "invalid").reverse();
    return drawn.map((object) => ({ ...object, box: edges(object.bins) })).sort((a, b) => area(b.box) - area(a.box));
  }

  return { index, sample, image, roles, isCoord, isTrained, text, countFound, coordsOf, shapes };
})();

// Distributions over the 1000 bins of a coordinate: that of the model, and the soft target it is trained towards.
const distribution = (() => {
  const BINS = 1000;
  const nearest = (target) => Math.min(BINS - 1, Math.max(0, Math.floor(target + 0.5)));

  // Expands runs of [first bin, ten-thousandths...]. `known` is their sum: small probabilities were not stored.
  function expand(runs) {
    const p = new Float64Array(BINS);
    for (const [first, ...shares] of runs) shares.forEach((share, k) => { p[first + k] = share / 10000; });
    return { p, known: p.reduce((sum, share) => sum + share, 0) };
  }

  // The Gaussian that the loss uses. It sums to one over the bins within `truncate`.
  function softTarget(target, { sigma, truncate }) {
    const least = Math.abs(nearest(target) - target);
    const q = new Float64Array(BINS).map((_, bin) => {
      const offset = Math.abs(bin - target);
      return truncate !== null && offset > truncate ? 0 : Math.exp((-0.5 * (offset ** 2 - least ** 2)) / sigma ** 2);
    });
    const sum = q.reduce((total, weight) => total + weight, 0);
    return q.map((weight) => weight / sum);
  }

  const expected = (p, known) => p.reduce((total, share, bin) => total + share * bin, 0) / known;

  // The Wasserstein-1 distance in bins, with p scaled to its known part.
  function distance(p, q, known) {
    let difference = 0;
    return p.reduce((total, share, bin) => {
      difference += share / known - q[bin];
      return total + Math.abs(difference);
    }, 0);
  }

  return { nearest, expand, softTarget, expected, distance };
})();
