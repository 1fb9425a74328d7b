"use strict";
// The objects of a sample as a list: the predictions and their outcomes, then the true objects.
const objects = (() => {
  const host = find("objects");
  const GROUPS = {
    Predicted: "The answer has no objects.",
    True: "This image has no objects.",
    Agreed: null, // not mentioned without objects
  };

  function show(sample) {
    host.replaceChildren(...Object.entries(GROUPS).flatMap(([name, none]) => {
      const rows = sample.objects.filter((object) => object.group === name).map(row);
      if (!rows.length && none === null) return [];
      const role = "presentation";
      const title = element("div", "division", `${name} `, element("small", "", String(rows.length)), { role });
      return [title, ...(rows.length ? rows : [element("div", "none", none, { role })])];
    }));
    select(host, host.querySelector(".object"));
  }

  // The words about an object that was changed have a line of their own.
  function row({ owner, key, desc, state, words, mark }) {
    const parts = [
      element("span", "state", { true: "found", removed: "extra" }[state] ?? state),
      element("span", "name", key),
      element("span", "desc", describe(desc), { title: clip(desc ?? "", 300) }),
      element("span", "outcome", words),
    ];
    const properties = { role: "option", tabIndex: -1, ariaSelected: "false", data: { owner } };
    return element("div", `object ${state}${mark ? " changed" : ""}`, ...parts, properties);
  }

  connect(host, ".object", ".object");
  return { show };
})();

// The overlaps: for each prediction its candidates among the true objects, the best first.
const matrix = (() => {
  const host = find("matrix");

  function show(sample) {
    const { rows, gate, top_k: most, rejections } = sample.match;
    const truth = sample.objects.filter(({ group }) => group === "True");
    find("rule").textContent = rows.length && truth.length
      ? `Outlined: the pairs, matched by shape only. Hatched: below the gate of ${gate}. Only the best ${most} of a row `
        + `are candidates. ${countOf(rejections, "overlapping pair")} ${rejections === 1 ? "is" : "are"} below the gate.`
      : "Nothing to compare: there is no valid prediction, or no true object.";
    host.replaceChildren(...(truth.length ? rows.map((k, r) => line(sample, truth, k, r)) : []));
    select(host, host.querySelector(".pair"));
  }

  function line({ objects: all, match }, truth, k, r) {
    const iou = match.iou[r];
    const candidates = truth.map((_, j) => j).filter((j) => iou[j] !== null).sort((a, b) => iou[b] - iou[a]);
    const { key, desc } = all[k];
    const name = element("span", "name", `${clip(key, 24)} `, describe(clip(desc ?? "", 40)), { data: { owner: k } });
    const cells = candidates.map((j) => pair(truth[j], k, iou[j], match.gate));
    return element("div", "overlap", name, ...(cells.length ? cells : [element("span", "none", "no candidate")]), { role: "group" });
  }

  function pair({ key, desc, owner }, k, iou, gate) {
    const styles = `pair${owner === k ? " chosen" : ""}${iou < gate ? " low" : ""}`;
    const properties = {
      role: "option",
      tabIndex: -1,
      ariaSelected: "false",
      title: clip(desc, 300),
      ariaLabel: `${key}, IoU ${iou.toFixed(2)}${owner === k ? ", a pair" : ""}`,
      data: { owner: `${k} ${owner}` },
    };
    const node = element("span", styles, describe(clip(desc, 24)), element("b", "", iou.toFixed(2).replace(/^0/, "")), properties);
    node.style.setProperty("--share", `${Math.round(55 * iou)}%`);
    return node;
  }

  connect(host, ".pair", ".overlap");
  return { show };
})();
