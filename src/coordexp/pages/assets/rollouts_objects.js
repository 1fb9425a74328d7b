"use strict";
// The objects of a sample as a list: the predictions with their outcomes and overlaps, then the true objects.
const objects = (() => {
  const host = find("objects");
  const GROUPS = {
    Predicted: "The answer has no objects.",
    True: "This image has no objects.",
    Agreed: null, // not mentioned without objects
  };

  function show(sample) {
    const { gate, top_k: most, rejections } = sample.match;
    find("rule").textContent = `Overlaps are IoU, of shapes only. Outlined: the pairs. Hatched: below the gate of ${gate}. `
      + `Only the best ${most} true objects are candidates; overlapping pairs below the gate: ${rejections}.`;
    host.replaceChildren(...Object.entries(GROUPS).flatMap(([name, none]) => {
      const rows = sample.objects.filter((object) => object.group === name).map((object) => row(object, gate));
      if (!rows.length && none === null) return [];
      const role = "presentation";
      const title = element("div", "division", `${name} `, element("small", "", String(rows.length)), { role });
      return [title, ...(rows.length ? rows : [element("div", "none", none, { role })])];
    }));
    select(host, host.querySelector(".object"));
  }

  // The words about an object that was changed have a line of their own, and so have the overlaps of a prediction.
  function row({ owner, key, desc, state, words, mark, candidates = [] }, gate) {
    const parts = [
      element("span", "state", { true: "found", removed: "extra" }[state] ?? state),
      element("span", "name", key),
      element("span", "desc", describe(desc), { title: clip(desc ?? "", 300) }),
      element("span", "outcome", words),
    ];
    if (candidates.length) parts.push(element("span", "overlaps", ...candidates.map((other) => pair(owner, other, gate))));
    const properties = { role: "option", tabIndex: -1, ariaSelected: "false", data: { owner } };
    return element("div", `object ${state}${mark ? " changed" : ""}`, ...parts, properties);
  }

  function pair(owner, [other, desc, iou], gate) {
    const style = `pair${owner === other ? " chosen" : ""}${iou < gate ? " low" : ""}`;
    const value = element("b", "", iou.toFixed(2).replace(/^0/, ""));
    const node = element("span", style, describe(clip(desc, 24)), value, { data: { owner: `${owner} ${other}` } });
    node.style.setProperty("--share", `${Math.round(55 * iou)}%`);
    return node;
  }

  connect(host, ".object", ".object");
  return { show };
})();
