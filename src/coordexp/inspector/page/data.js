"use strict";
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
const KINDS = {
  true: "true shape of a match",
  matched: "matched",
  missed: "missed",
  extra: "extra",
};

const data = (() => {
  const CACHED = 24; // parsed samples; the row of other steps needs half of them
  const read = (id) => JSON.parse(find(id).textContent);
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

  function state(object) {
    if (object.reason !== null) return "invalid";
    return object.of === null ? "extra" : "matched";
  }

  const ownerOfTrue = (sample, j) => sample.truth[j].by ?? -2 - j;
  const isCoord = (id) => id >= index.coord0 && id < index.coord0 + 1000;
  const isTrained = (role) => role >= 2 && role <= 6;

  // The object that an owner stands for, with its key and its state.
  function describeOwner(sample, owner) {
    if (owner <= -2) return { ...sample.truth[-2 - owner], key: `true ${-1 - owner}`, iou: null, state: "missed" };
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
    for (const shape of all) shape.box = box(shape.bins);
    return all.sort((a, b) => area(b.box) - area(a.box));
  }

  function box(bins) {
    const ends = [Infinity, Infinity, -Infinity, -Infinity];
    bins.forEach((bin, k) => {
      ends[k % 2] = Math.min(ends[k % 2], bin);
      ends[2 + (k % 2)] = Math.max(ends[2 + (k % 2)], bin);
    });
    return ends;
  }
  const area = (ends) => (ends[2] - ends[0]) * (ends[3] - ends[1]);

  // For each owner, the indices of its tokens and of its coordinates.
  function tokensByOwner(sample) {
    const byOwner = new Map();
    sample.tokens.owner.forEach((owner, i) => {
      if (!byOwner.has(owner)) byOwner.set(owner, { tokens: [], coords: [] });
      byOwner.get(owner).tokens.push(i);
      if (isCoord(sample.tokens.ids[i])) byOwner.get(owner).coords.push(i);
    });
    byOwner.delete(-1);
    return byOwner;
  }

  const text = (id) => (isCoord(id) ? String(id - index.coord0) : (index.pieces[id] ?? `#${id}`));

  return { index, sample, image, state, ownerOfTrue, isCoord, isTrained, describeOwner, shapes, tokensByOwner, text };
})();
