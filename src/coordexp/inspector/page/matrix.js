"use strict";
// Overlaps of predicted and true objects as a table. A large one is shown in part: the rows around the chosen object.
const matrix = (() => {
  const WHOLE = 40; // rows and columns up to which all are shown
  const [ROWS, COLUMNS] = [12, 14]; // of a part
  const host = find("matrix");
  let sample = null;
  let active = null;

  function show(next) {
    sample = next;
    const { rows, gate, top_k, rejections } = sample.match;
    const large = rows.length > WHOLE || sample.truth.length > WHOLE;
    find("scale").hidden = !large;
    find("scale").textContent = `${rows.length} by ${sample.truth.length} is too large to read. Shown: the rows `
      + "around the chosen object, and the columns that overlap them most.";
    const compared = rows.length > 0 && sample.truth.length > 0;
    find("rule").textContent = compared ? `Outlined: the pairs, by shape alone. Hatched: under the gate of `
      + `${gate}. Only the best ${top_k} of a row are candidates; other cells are empty. `
      + `${many(rejections, "overlapping pair")} ${rejections === 1 ? "is" : "are"} under the gate.`
      : "Nothing to compare: no predicted object is valid, or none is true.";
    draw(large ? part(0, null) : { rows: rows.map((_, r) => r), columns: sample.truth.map((_, j) => j) });
  }

  // Only of a large one: another object was chosen.
  function follow(owner) {
    if (find("scale").hidden) return;
    const column = owner <= -2 ? -2 - owner : null;
    const row = column === null ? sample.match.rows.indexOf(owner) : best(column);
    if (row < 0) return;
    draw(part(row, column));
    const pair = host.querySelector(`td.chosen[data-row="${owner}"]`) ?? host.querySelector(`td[data-row="${owner}"]`);
    if (pair) host.scrollTo(pair.offsetLeft - host.clientWidth / 2, pair.offsetTop - host.clientHeight / 2);
  }

  function best(column) {
    let found = 0;
    sample.match.iou.forEach((row, r) => {
      if ((row[column] ?? -1) > (sample.match.iou[found][column] ?? -1)) found = r;
    });
    return found;
  }

  function part(row, column) {
    const { iou } = sample.match;
    const first = Math.max(0, Math.min(row - ROWS / 2, iou.length - ROWS));
    const rows = Array.from({ length: Math.min(ROWS, iou.length) }, (_, k) => first + k);
    const most = sample.truth.map((_, j) => Math.max(-1, ...rows.map((r) => iou[r][j] ?? -1)));
    if (column !== null) most[column] = 2;
    const order = most.map((_, j) => j).sort((a, b) => most[b] - most[a]);
    return { rows, columns: order.slice(0, COLUMNS).sort((a, b) => a - b) };
  }

  function draw({ rows, columns }) {
    active = null;
    if (!rows.length || !columns.length) return host.replaceChildren();
    const table = element("table");
    table.setAttribute("role", "grid");
    table.setAttribute("aria-label", "Overlap of predicted and true objects");
    const titles = element("tr", "", element("td"), ...columns.map(top));
    table.append(titles, ...rows.map((r) => line(r, columns)));
    host.replaceChildren(table);
    active = table.querySelector("td[data-row]");
    rove(null, active);
  }

  function top(j) {
    const { desc } = sample.truth[j];
    const made = element("th", "", element("span", "", `${j + 1} `, described(clipped(desc, 40))));
    made.scope = "col";
    made.title = clipped(desc, 300);
    made.dataset.owner = data.ownerOfTrue(sample, j);
    return made;
  }

  function line(r, columns) {
    const k = sample.match.rows[r];
    const { key, desc } = sample.objects[k];
    const made = element("th", "", `${clipped(key, 24)} `, described(clipped(desc ?? "", 40)));
    made.scope = "row";
    made.title = clipped(desc ?? "", 300);
    made.dataset.owner = k;
    return element("tr", "", made, ...columns.map((j) => cell(r, k, j)));
  }

  function cell(r, k, j) {
    const iou = sample.match.iou[r][j];
    const made = element("td", "", iou === null ? "" : iou.toFixed(2).replace(/^0/, ""));
    made.dataset.row = k;
    made.dataset.column = data.ownerOfTrue(sample, j);
    made.tabIndex = -1;
    const chosen = sample.objects[k].of === j;
    made.classList.toggle("chosen", chosen);
    made.classList.toggle("low", iou !== null && iou < sample.match.gate);
    made.classList.toggle("empty", iou === null);
    if (iou !== null) made.style.setProperty("--share", `${Math.round(55 * iou)}%`);
    made.ariaLabel = iou === null ? "not a candidate" : `IoU ${iou.toFixed(2)}${chosen ? ", a pair" : ""}`;
    return made;
  }

  const at = (event) => event.target.closest?.("td[data-row]");
  const owners = (one) => [Number(one.dataset.row), Number(one.dataset.column)];
  const target = (one) => ({ owners: owners(one), token: null, from: "matrix" });
  host.addEventListener("pointerover", (event) => inspector.point(at(event) ? target(at(event)) : null));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => {
    const one = at(event);
    if (!one) return;
    rove(active, one);
    active = one;
    inspector.choose(target(one));
  });
  host.addEventListener("keydown", (event) => {
    const one = at(event);
    if (!one || event.ctrlKey || event.altKey || event.metaKey) return;
    const row = one.parentNode;
    const next = {
      ArrowLeft: one.previousElementSibling,
      ArrowRight: one.nextElementSibling,
      ArrowUp: row.previousElementSibling?.cells[one.cellIndex],
      ArrowDown: row.nextElementSibling?.cells[one.cellIndex],
      Home: row.cells[1],
      End: row.cells[row.cells.length - 1],
    }[event.key];
    if (!next?.matches("td[data-row]")) return;
    event.preventDefault();
    next.focus();
  });

  return { show, follow, focus: () => active?.focus() };
})();
