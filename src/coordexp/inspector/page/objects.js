"use strict";
// The objects of a sample as a list: what was predicted and what became of it, then what is true.
const objects = (() => {
  const host = find("objects");
  let active = null;

  function show(sample) {
    const predicted = sample.objects.map((one, k) => row(k, one.key, one.desc, data.state(one), saying(sample, one)));
    const truth = sample.truth.map((one, j) => {
      const by = one.by === null ? "added to the target" : `by ${clipped(sample.objects[one.by].key, 40)}`;
      return row(data.ownerOfTrue(sample, j), `true ${j + 1}`, one.desc, one.by === null ? "missed" : "true", by);
    });
    host.replaceChildren(
      ...group("Predicted", predicted, "The answer holds no object."),
      ...group("True", truth, "There is nothing to find in this picture."),
    );
    active = host.querySelector("[role=option]");
    rove(null, active);
  }

  function saying(sample, one) {
    if (one.reason !== null) return one.words ?? one.reason;
    if (one.of === null) return "fits none";
    const iou = one.iou === null ? "" : `, IoU ${one.iou.toFixed(2)}`;
    const wanted = sample.truth[one.of].desc;
    const other = wanted === one.desc ? "" : `, which is called ${clipped(wanted, 40)}`;
    return `true ${one.of + 1}${other}${iou}`;
  }

  function group(name, rows, none) {
    const title = element("div", "group", `${name} `, element("small", "", String(rows.length)));
    title.role = "presentation";
    const nothing = element("div", "none", none);
    nothing.role = "presentation";
    return [title, ...(rows.length ? rows : [nothing])];
  }

  function row(owner, key, desc, state, words) {
    const label = element("span", "desc", described(desc));
    label.title = clipped(desc ?? "", 300);
    const word = state === "true" ? "found" : state;
    const said = element("span", "saying", words);
    const made = element("div", `object ${state}`, element("span", "state", word), element("span", "name", key));
    made.append(label, said);
    made.dataset.owner = owner;
    made.role = "option";
    made.tabIndex = -1;
    made.ariaSelected = "false";
    return made;
  }

  function choose(one) {
    if (active) active.ariaSelected = "false";
    rove(active, one);
    active = one;
    one.ariaSelected = "true";
    inspector.choose({ owners: [Number(one.dataset.owner)], token: null });
  }

  // Into the window of the list, without moving the page.
  function reveal(owner) {
    const one = host.querySelector(`[data-owner="${owner}"]`);
    if (!one) return;
    const above = one.offsetTop - host.scrollTop;
    if (above < 0 || above > host.clientHeight - one.offsetHeight) host.scrollTop += above - host.clientHeight / 3;
  }

  function step(key) {
    const rows = [...host.querySelectorAll("[role=option]")];
    const here = rows.indexOf(active);
    const next = { ArrowUp: here - 1, ArrowDown: here + 1, Home: 0, End: rows.length - 1 }[key];
    return next === undefined ? null : rows[Math.min(rows.length - 1, Math.max(0, next))];
  }

  const at = (event) => event.target.closest?.("[role=option]");
  host.addEventListener("pointerover", (event) => {
    const one = at(event);
    inspector.point(one ? { owners: [Number(one.dataset.owner)], token: null } : null);
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
