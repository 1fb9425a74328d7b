"use strict";
// The objects of a sample as a list: the predictions and their outcomes, then the true objects.
const objects = (() => {
  const host = find("objects");
  let active = null;

  function show(sample) {
    const predicted = sample.objects.map((object, k) => (
      row(k, object.key, object.desc, data.state(object), outcome(sample, object))
    ));
    const truth = sample.truth.map((object, j) => {
      const isMissed = object.by === null;
      const words = isMissed ? "added to the target" : `by ${clip(sample.objects[object.by].key, 40)}`;
      return row(data.ownerOfTrue(sample, j), `true ${j + 1}`, object.desc, isMissed ? "missed" : "true", words);
    });
    host.replaceChildren(
      ...group("Predicted", predicted, "The answer has no objects."),
      ...group("True", truth, "This image has no objects."),
    );
    active = host.querySelector("[role=option]");
    moveTabStop(null, active);
  }

  function outcome(sample, object) {
    if (object.reason !== null) return object.words ?? object.reason;
    if (object.of === null) return "matches no true object";
    const iou = object.iou === null ? "" : `, IoU ${object.iou.toFixed(2)}`;
    const trueDesc = sample.truth[object.of].desc;
    const other = trueDesc === object.desc ? "" : `, which is called ${clip(trueDesc, 40)}`;
    return `true ${object.of + 1}${other}${iou}`;
  }

  function group(name, rows, none) {
    const title = element("div", "group", `${name} `, element("small", "", String(rows.length)));
    title.role = "presentation";
    const nothing = element("div", "none", none);
    nothing.role = "presentation";
    return [title, ...(rows.length ? rows : [nothing])];
  }

  function row(owner, key, desc, state, words) {
    const label = element("span", "desc", describe(desc));
    label.title = clip(desc ?? "", 300);
    const word = state === "true" ? "found" : state;
    const outcomeNode = element("span", "outcome", words);
    const node = element("div", `object ${state}`, element("span", "state", word), element("span", "name", key));
    node.append(label, outcomeNode);
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
