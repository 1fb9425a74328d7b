"use strict";
// The objects of a sample as a list: the predictions and their outcomes, then the true objects.
const objects = (() => {
  const host = find("objects");
  let active = null;

  function show(sample) {
    const predicted = sample.objects.map((object, k) => (
      row(k, object.key, object.desc, data.state(object), outcome(sample, object), Boolean(object.change))
    ));
    const truth = sample.truth.map((object, j) => {
      const isMissed = object.by === null;
      const added = object.number === null ? "added to the target" : `added as object_${object.number}`;
      const words = isMissed ? added : `by ${clip(sample.objects[object.by].key, 40)}`;
      return row(data.ownerOfTrue(sample, j), `true ${j + 1}`, object.desc, isMissed ? "missed" : "true", words);
    });
    const agreed = sample.agreed.map((object, n) => {
      const words = `several answers have it: added as object_${object.number}`;
      return row(data.ownerOfAgreed(sample, n), `agreed ${n + 1}`, object.desc, "agreed", words, true);
    });
    host.replaceChildren(
      ...group("Predicted", predicted, "The answer has no objects."),
      ...group("True", truth, "This image has no objects."),
      ...(agreed.length ? group("Agreed", agreed, "") : []),
    );
    active = host.querySelector("[role=option]");
    moveTabStop(null, active);
  }

  function outcome(sample, object) {
    if (object.reason !== null) return object.words ?? object.reason;
    if (object.change === "duplicate") return "repeats another object: removed";
    if (object.change === "removed") return "matches no true object: removed";
    const number = object.number === null ? "" : renumber(object);
    if (object.of === null) return `matches no true object${object.agreed ? ", but other answers have it" : ""}${number}`;
    const iou = object.iou === null ? "" : `, IoU ${object.iou.toFixed(2)}`;
    const trueDesc = sample.truth[object.of].desc;
    const isCalled = sample.rebuilt?.replaces_desc ? "whose name replaces it:" : "which is called";
    const other = trueDesc === object.desc ? "" : `, ${isCalled} ${clip(trueDesc, 40)}`;
    return `true ${object.of + 1}${other}${iou}${number}`;
  }

  // The new number of an object that was moved, or that others were removed or added before.
  function renumber({ key, change, number }) {
    if (change === "moved") return `, moved: ${clip(key, 40)} \u2192 object_${number}`;
    return key === `object_${number}` ? "" : `, now object_${number}`;
  }

  function group(name, rows, none) {
    const title = element("div", "group", `${name} `, element("small", "", String(rows.length)));
    title.role = "presentation";
    const nothing = element("div", "none", none);
    nothing.role = "presentation";
    return [title, ...(rows.length ? rows : [nothing])];
  }

  // The words about an object that was changed have a line of their own.
  function row(owner, key, desc, state, words, isChanged = false) {
    const label = element("span", "desc", describe(desc));
    label.title = clip(desc ?? "", 300);
    const word = { true: "found", removed: "extra" }[state] ?? state;
    const outcomeNode = element("span", "outcome", words);
    const node = element("div", `object ${state}`, element("span", "state", word), element("span", "name", key));
    node.append(label, outcomeNode);
    node.classList.toggle("changed", isChanged);
    node.dataset.owner = owner;
    node.role = "option";
    node.tabIndex = -1;
    node.ariaSelected = "false";
    return node;
  }

  function choose(option) {
    if (active) active.ariaSelected = "false";
    moveTabStop(active, option);
    active = option;
    option.ariaSelected = "true";
    inspector.choose({ owners: [Number(option.dataset.owner)], token: null });
  }

  // Scrolls the list to an object, without moving the page.
  function reveal(owner) {
    const option = host.querySelector(`[data-owner="${owner}"]`);
    if (!option) return;
    const above = option.offsetTop - host.scrollTop;
    if (above < 0 || above > host.clientHeight - option.offsetHeight) host.scrollTop += above - host.clientHeight / 3;
  }

  function step(key) {
    const rows = [...host.querySelectorAll("[role=option]")];
    const here = rows.indexOf(active);
    const next = { ArrowUp: here - 1, ArrowDown: here + 1, Home: 0, End: rows.length - 1 }[key];
    return next === undefined ? null : rows[Math.min(rows.length - 1, Math.max(0, next))];
  }

  const at = (event) => event.target.closest?.("[role=option]");
  host.addEventListener("pointerover", (event) => {
    const option = at(event);
    inspector.point(option ? { owners: [Number(option.dataset.owner)], token: null } : null);
  });
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => at(event) && choose(at(event)));
  host.addEventListener("keydown", (event) => {
    const next = event.ctrlKey || event.altKey || event.metaKey ? null : step(event.key);
    if (!next) return;
    event.preventDefault();
    next.focus();
  });

  return { show, reveal, focus: () => active?.focus() };
})();
