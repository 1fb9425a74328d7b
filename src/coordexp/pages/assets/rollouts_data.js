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

// Moves the tab stop within a set of elements: one of them is in the tab order, and arrow keys move between them.
function moveTabStop(from, to) {
  if (from && from !== to) from.tabIndex = -1;
  if (to) to.tabIndex = 0;
}

// Connects the elements that `at` finds with the highlight: pointing at one shows it, focusing one chooses it, and a key
// goes to the one that `step` returns.
function connect(host, { at, target, choose, step, go = (node) => node.focus() }) {
  host.addEventListener("pointerover", (event) => inspector.point(target(event)));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => at(event) && choose(at(event)));
  host.addEventListener("keydown", (event) => {
    const next = at(event) && !event.altKey && !event.metaKey ? step(event) : null;
    if (next === null || next === undefined) return;
    event.preventDefault();
    go(next);
  });
}

// The data of the page: the index at once, samples when they are requested, and values derived from both.
const ROLES = {
  1: ["prefix", "kept", "as the model wrote it; not trained"],
  2: ["coord", "matched coordinate", "trained towards the true position"],
  3: ["structure", "added JSON", "trained: cross entropy"],
  4: ["desc", "added description", "trained: cross entropy"],
  5: ["added", "added coordinate", "trained towards the true position"],
  6: ["end", "end of turn", "trained: cross entropy"],
  7: ["cut", "removed", "broken, unfinished, or the closing brace, which is appended again and trained"],
  8: ["masked", "masked description", "added, but left out of the loss"],
};
// In an answer that a correction policy rebuilt, some roles mean something else.
const REBUILT_ROLES = {
  ...ROLES,
  1: ["prefix", "context", "an object of the model, or one that several answers agree on; not trained"],
  3: ["structure", "trained JSON", "trained: cross entropy"],
  4: ["desc", "trained description", "trained: cross entropy"],
  7: ["cut", "removed", "the answer from its first change on; what stays of it is written again below"],
  8: ["masked", "masked description", "left out of the loss"],
};
const KINDS = {
  true: "true shape of a match",
  matched: "matched",
  missed: "missed",
  extra: "extra",
  duplicate: "duplicate, removed",
  removed: "extra, removed",
  agreed: "agreed, added",
};
const ALWAYS_LISTED = new Set(["true", "matched", "missed", "extra"]); // other kinds only if the sample has them
const LEFT_OUT = new Set(["duplicate", "removed"]);

const data = (() => {
  const CACHED = 24; // parsed samples; the row of other steps needs half of them
  const index = read("index");
  const parsed = new Map();

  function sample(k) {
    const value = parsed.get(k) ?? read(`sample-${k}`);
    parsed.delete(k); // so that it becomes the newest of the cache
    parsed.set(k, value);
    if (parsed.size > CACHED) parsed.delete(parsed.keys().next().value);
    return value;
  }

  const images = new Map();
  function image(entry) {
    if (entry.picture === null) return null;
    if (!images.has(entry.picture)) images.set(entry.picture, read(entry.picture));
    return images.get(entry.picture);
  }

  function countFound(entry) {
    const renamed = entry.renamed ? `, ${entry.renamed} under another name` : "";
    return `${entry.matched} of ${entry.true} found${renamed}`;
  }

  function state(object) {
    if (object.reason !== null) return "invalid";
    if (LEFT_OUT.has(object.change)) return object.change;
    return object.of === null ? "extra" : "matched";
  }

  const roles = (sample) => (sample.rebuilt ? REBUILT_ROLES : ROLES);
  const ownerOfTrue = (sample, j) => sample.truth[j].by ?? -2 - j;
  const ownerOfAgreed = (sample, n) => -2 - sample.truth.length - n;
  const isCoord = (id) => id >= index.coord0 && id < index.coord0 + 1000;
  const isTrained = (role) => role >= 2 && role <= 6;

  // The object that an owner stands for, with its key and its state.
  function describeOwner(sample, owner) {
    const added = -2 - owner;
    const n = added - sample.truth.length;
    if (n >= 0) return { ...sample.agreed[n], key: `agreed ${n + 1}`, iou: null, state: "agreed" };
    if (added >= 0) return { ...sample.truth[added], key: `true ${added + 1}`, iou: null, state: "missed" };
    return { ...sample.objects[owner], state: state(sample.objects[owner]) };
  }

  // The shapes to draw, the largest first, so that each can be pointed at.
  function shapes(sample) {
    const all = [];
    sample.truth.forEach((object, j) => {
      const kind = object.by === null ? "missed" : "true";
      all.push({ ...object, form: object.kind, owner: ownerOfTrue(sample, j), kind });
    });
    sample.objects.forEach((object, owner) => {
      if (object.reason !== null || !object.bins) return;
      all.push({ ...object, form: object.kind, owner, kind: state(object) });
    });
    sample.agreed.forEach((object, n) => {
      if (object.bins) all.push({ ...object, form: object.kind, owner: ownerOfAgreed(sample, n), kind: "agreed" });
    });
    for (const shape of all) shape.box = edges(shape.bins);
    return all.sort((a, b) => area(b.box) - area(a.box));
  }

  const area = (ends) => (ends[2] - ends[0]) * (ends[3] - ends[1]);

  // For each owner, the indices of its tokens and of its coordinates. An object of a rebuilt answer may stand in the
  // strip twice: as it was written, which is cut, and as it is trained.
  function tokensByOwner(sample) {
    const byOwner = new Map();
    sample.tokens.owner.forEach((owner, i) => {
      if (!byOwner.has(owner)) byOwner.set(owner, { tokens: [], trained: [], cut: [] });
      const of = byOwner.get(owner);
      of.tokens.push(i);
      if (isCoord(sample.tokens.ids[i])) (sample.tokens.roles[i] === 7 ? of.cut : of.trained).push(i);
    });
    byOwner.delete(-1);
    for (const of of byOwner.values()) of.coords = of.trained.length ? of.trained : of.cut;
    return byOwner;
  }

  // The coordinates of an object in the copy of it that a token belongs to.
  function coordsAround(sample, i, byOwner) {
    const of = byOwner.get(sample.tokens.owner[i]);
    if (!of) return [];
    return sample.tokens.roles[i] === 7 ? of.cut : of.coords;
  }

  const text = (id) => (isCoord(id) ? String(id - index.coord0) : (index.pieces[id] ?? `#${id}`));

  return {
    index, sample, image, countFound, state, roles, ownerOfTrue, ownerOfAgreed, isCoord, isTrained, describeOwner,
    shapes, tokensByOwner, coordsAround, text,
  };
})();

// Distributions over the 1000 bins of a coordinate: that of the model, and the soft target it is trained towards.
const distribution = (() => {
  const BINS = 1000;
  const nearest = (target) => Math.min(BINS - 1, Math.max(0, Math.floor(target + 0.5)));

  // Expands runs of [first bin, ten-thousandths...]. `known` is their sum: small probabilities were not stored.
  function expand(runs) {
    const p = new Float64Array(BINS);
    let known = 0;
    for (const [first, ...shares] of runs) {
      shares.forEach((share, k) => {
        p[first + k] = share / 10000;
        known += share / 10000;
      });
    }
    return { p, known };
  }

  // The Gaussian that the loss uses. It sums to one over the bins within `truncate`.
  function softTarget(target, { sigma, truncate }) {
    const q = new Float64Array(BINS);
    const least = Math.abs(nearest(target) - target);
    let sum = 0;
    for (let bin = 0; bin < BINS; bin += 1) {
      const offset = Math.abs(bin - target);
      if (truncate !== null && offset > truncate) continue;
      q[bin] = Math.exp((-0.5 * (offset ** 2 - least ** 2)) / sigma ** 2);
      sum += q[bin];
    }
    return q.map((value) => value / sum);
  }

  function expected(p) {
    const sum = p.reduce((total, share) => total + share, 0);
    return sum ? p.reduce((total, share, bin) => total + share * bin, 0) / sum : null;
  }

  // The Wasserstein-1 distance in bins, with p scaled to its known part.
  function distance(p, q, known) {
    let difference = 0;
    let total = 0;
    for (let bin = 0; bin < BINS; bin += 1) {
      difference += p[bin] / known - q[bin];
      total += Math.abs(difference);
    }
    return total;
  }

  // The bins between which 99 % of p lies.
  function body(p, known) {
    let low = 0;
    let high = BINS - 1;
    for (let sum = p[low]; sum < 0.005 * known; sum += p[low]) low += 1;
    for (let sum = p[high]; sum < 0.005 * known; sum += p[high]) high -= 1;
    return [low, high];
  }

  return { nearest, expand, softTarget, expected, distance, body };
})();
