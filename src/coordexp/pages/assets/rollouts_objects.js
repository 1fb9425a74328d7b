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
    const role = "presentation";
    const title = element("div", "division", `${name} `, element("small", "", String(rows.length)), { role });
    return [title, ...(rows.length ? rows : [element("div", "none", none, { role })])];
  }

  // The words about an object that was changed have a line of their own.
  function row(owner, key, desc, state, words, isChanged = false) {
    const parts = [
      element("span", "state", { true: "found", removed: "extra" }[state] ?? state),
      element("span", "name", key),
      element("span", "desc", describe(desc), { title: clip(desc ?? "", 300) }),
      element("span", "outcome", words),
    ];
    const properties = { role: "option", tabIndex: -1, ariaSelected: "false", data: { owner } };
    return element("div", `object ${state}${isChanged ? " changed" : ""}`, ...parts, properties);
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

  function step({ key, ctrlKey }) {
    const rows = [...host.querySelectorAll("[role=option]")];
    const here = rows.indexOf(active);
    const next = { ArrowUp: here - 1, ArrowDown: here + 1, Home: 0, End: rows.length - 1 }[key];
    return next === undefined || ctrlKey ? null : rows[Math.min(rows.length - 1, Math.max(0, next))];
  }

  const at = (event) => event.target.closest?.("[role=option]");
  const target = (event) => at(event) && { owners: [Number(at(event).dataset.owner)], token: null };
  connect(host, { at, target, choose, step });

  return { show, reveal, focus: () => active?.focus() };
})();

// The overlaps of predicted and true objects as a table. Of a large one only the row of the chosen object is shown, with
// its candidates.
const matrix = (() => {
  const WHOLE = 40; // up to so many rows and columns, all are shown
  const host = find("matrix");
  let sample = null;
  let active = null;

  function show(next) {
    sample = next;
    const { rows, gate, top_k, rejections } = sample.match;
    find("scale").hidden = Math.max(rows.length, sample.truth.length) <= WHOLE;
    find("scale").textContent = `${rows.length} by ${sample.truth.length} is too large to read. Shown: the candidates of `
      + "the chosen object.";
    const compared = rows.length > 0 && sample.truth.length > 0;
    find("rule").textContent = compared ? `Outlined: the pairs, matched by shape only. Hatched: below the gate of `
      + `${gate}. Only the best ${top_k} of a row are candidates; other cells are empty. `
      + `${countOf(rejections, "overlapping pair")} ${rejections === 1 ? "is" : "are"} below the gate.`
      : "Nothing to compare: there is no valid prediction, or no true object.";
    if (find("scale").hidden) draw({ rows: [...rows.keys()], columns: [...sample.truth.keys()] });
    else host.replaceChildren();
  }

  // Shows the row of another object, if the table is large: its own, or that of the best prediction for a true object.
  function follow(owner) {
    const { rows, iou } = sample.match;
    const column = -2 - owner;
    const hasRow = owner >= 0 || (column >= 0 && column < sample.truth.length); // an object that is agreed on has none
    if (find("scale").hidden || !rows.length || !hasRow) return;
    const overlap = (row) => iou[row][column] ?? -1;
    const row = owner >= 0 ? rows.indexOf(owner) : [...rows.keys()].reduce((a, b) => (overlap(b) > overlap(a) ? b : a));
    if (row >= 0) draw({ rows: [row], columns: [...sample.truth.keys()].filter((j) => iou[row][j] !== null) });
  }

  function draw({ rows, columns }) {
    active = null;
    if (!rows.length || !columns.length) return host.replaceChildren();
    const titles = element("tr", "", element("td"), ...columns.map(top));
    const properties = { role: "grid", ariaLabel: "Overlap of predicted and true objects" };
    const table = element("table", "", titles, ...rows.map((r) => line(r, columns)), properties);
    host.replaceChildren(table);
    active = table.querySelector("td[data-row]");
    moveTabStop(null, active);
  }

  function top(j) {
    const { desc } = sample.truth[j];
    const name = element("span", "", `${j + 1} `, describe(clip(desc, 40)));
    return element("th", "", name, { scope: "col", title: clip(desc, 300), data: { owner: data.ownerOfTrue(sample, j) } });
  }

  function line(r, columns) {
    const k = sample.match.rows[r];
    const { key, desc } = sample.objects[k];
    const properties = { scope: "row", title: clip(desc ?? "", 300), data: { owner: k } };
    const node = element("th", "", `${clip(key, 24)} `, describe(clip(desc ?? "", 40)), properties);
    return element("tr", "", node, ...columns.map((j) => cell(r, k, j)));
  }

  function cell(r, k, j) {
    const iou = sample.match.iou[r][j];
    const isPair = sample.objects[k].of === j;
    const node = element("td", isPair ? "chosen" : "", iou === null ? "" : iou.toFixed(2).replace(/^0/, ""), {
      tabIndex: -1,
      ariaLabel: iou === null ? "not a candidate" : `IoU ${iou.toFixed(2)}${isPair ? ", a pair" : ""}`,
      data: { row: k, column: data.ownerOfTrue(sample, j) },
    });
    node.classList.toggle("low", iou !== null && iou < sample.match.gate);
    if (iou !== null) node.style.setProperty("--share", `${Math.round(55 * iou)}%`);
    return node;
  }

  const at = (event) => event.target.closest?.("td[data-row]");
  const pair = (td) => ({ owners: [Number(td.dataset.row), Number(td.dataset.column)], token: null, from: "matrix" });

  function choose(td) {
    moveTabStop(active, td);
    active = td;
    inspector.choose(pair(td));
  }

  function step(event) {
    const td = at(event);
    const row = td.parentNode;
    const next = {
      ArrowLeft: td.previousElementSibling,
      ArrowRight: td.nextElementSibling,
      ArrowUp: row.previousElementSibling?.cells[td.cellIndex],
      ArrowDown: row.nextElementSibling?.cells[td.cellIndex],
      Home: row.cells[1],
      End: row.cells[row.cells.length - 1],
    }[event.key];
    return next?.matches("td[data-row]") && !event.ctrlKey ? next : null;
  }

  connect(host, { at, target: (event) => at(event) && pair(at(event)), choose, step });

  return { show, follow, focus: () => active?.focus() };
})();
