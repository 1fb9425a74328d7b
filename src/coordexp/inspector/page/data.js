"use strict";
// What the page holds: the index at once, samples when they are asked for, and what follows from both.
const ROLES = {
  1: ["prefix", "kept", "as the model wrote it; not trained"],
  2: ["coord", "matched coordinate", "trained towards the true place"],
  3: ["structure", "added JSON", "trained: cross entropy"],
  4: ["desc", "added description", "trained: cross entropy"],
  5: ["added", "added coordinate", "trained towards the true place"],
  6: ["end", "end of turn", "trained: cross entropy"],
  7: ["cut", "removed", "broken, unfinished, or the closing brace, which is written again as trained"],
  8: ["masked", "masked description", "added, left out of the loss"],
};
const KINDS = {
  true: "true shape of a match",
  matched: "matched",
  missed: "missed",
  extra: "extra",
};

const data = (() => {
  const KEPT = 24; // parsed samples; a row of other steps is half of it
  const read = (id) => JSON.parse(find(id).textContent);
  const index = read("index");
  const parsed = new Map();

  function sample(k) {
    const found = parsed.get(k) ?? read(`sample-${k}`);
    parsed.delete(k);
    parsed.set(k, found);
    if (parsed.size > KEPT) parsed.delete(parsed.keys().next().value);
    return found;
  }

  const pictures = new Map();
  function picture(entry) {
    if (entry.picture === null) return null;
    if (!pictures.has(entry.picture)) pictures.set(entry.picture, read(entry.picture));
    return pictures.get(entry.picture);
  }

  function state(object) {
    if (object.reason !== null) return "invalid";
    return object.of === null ? "extra" : "matched";
  }

  const ownerOfTrue = (sample, j) => sample.truth[j].by ?? -2 - j;
  const isCoord = (id) => id >= index.coord0 && id < index.coord0 + 1000;
  const isTrained = (role) => role >= 2 && role <= 6;

  // Of an owner: what it is called and how it came out.
  function about(sample, owner) {
    if (owner <= -2) return { ...sample.truth[-2 - owner], key: `true ${-1 - owner}`, iou: null, state: "missed" };
    return { ...sample.objects[owner], state: state(sample.objects[owner]) };
  }

  // Shapes to draw, the largest first, so that each can be pointed at.
  function shapes(sample) {
    const found = [];
    sample.truth.forEach((one, j) => {
      const kind = one.by === null ? "missed" : "true";
      found.push({ ...one, form: one.kind, owner: ownerOfTrue(sample, j), kind });
    });
    sample.objects.forEach((one, owner) => {
      if (one.reason === null && one.bins) found.push({ ...one, form: one.kind, owner, kind: state(one) });
    });
    for (const one of found) one.box = box(one.bins);
    return found.sort((a, b) => area(b.box) - area(a.box));
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

  // For each owner its tokens and, among them, its coordinates.
  function owned(sample) {
    const found = new Map();
    sample.tokens.owner.forEach((owner, i) => {
      if (!found.has(owner)) found.set(owner, { tokens: [], coords: [] });
      found.get(owner).tokens.push(i);
      if (isCoord(sample.tokens.ids[i])) found.get(owner).coords.push(i);
    });
    found.delete(-1);
    return found;
  }

  const text = (id) => (isCoord(id) ? String(id - index.coord0) : (index.pieces[id] ?? `#${id}`));

  return { index, sample, picture, state, ownerOfTrue, isCoord, isTrained, about, shapes, owned, text };
})();
