"use strict";
// The overlaps of predicted and true objects as a table. Of a large table only a part is shown: the rows around the
// chosen object.
const matrix = (() => {
  const WHOLE = 40; // up to so many rows and columns, all are shown
  const [ROWS, COLUMNS] = [12, 14]; // of the part that is shown otherwise
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
    find("rule").textContent = compared ? `Outlined: the pairs, matched by shape only. Hatched: below the gate of `
      + `${gate}. Only the best ${top_k} of a row are candidates; other cells are empty. `
      + `${countOf(rejections, "overlapping pair")} ${rejections === 1 ? "is" : "are"} below the gate.`
      : "Nothing to compare: there is no valid prediction, or no true object.";
    draw(large ? part(0, null) : { rows: rows.map((_, r) => r), columns: sample.truth.map((_, j) => j) });
  }

  // Shows the part around another object, if the table is large.
  function follow(owner) {
    if (find("scale").hidden) return;
    const column = owner <= -2 ? -2 - owner : null;
    if (column !== null && column >= sample.truth.length) return; // an object that several answers agree on has no column
    const row = column === null ? sample.match.rows.indexOf(owner) : best(column);
    if (row < 0) return;
    draw(part(row, column));
    const pair = host.querySelector(`td.chosen[data-row="${owner}"]`) ?? host.querySelector(`td[data-row="${owner}"]`);
    if (pair) host.scrollTo(pair.offsetLeft - host.clientWidth / 2, pair.offsetTop - host.clientHeight / 2);
  }

  function best(column) {
    let row = 0;
    sample.match.iou.forEach((values, r) => {
      if ((values[column] ?? -1) > (sample.match.iou[row][column] ?? -1)) row = r;
    });
    return row;
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
    moveTabStop(null, active);
  }

  function top(j) {
    const { desc } = sample.truth[j];
    const node = element("th", "", element("span", "", `${j + 1} `, describe(clip(desc, 40))));
    node.scope = "col";
    node.title = clip(desc, 300);
    node.dataset.owner = data.ownerOfTrue(sample, j);
    return node;
  }

  function line(r, columns) {
    const k = sample.match.rows[r];
    const { key, desc } = sample.objects[k];
    const node = element("th", "", `${clip(key, 24)} `, describe(clip(desc ?? "", 40)));
    node.scope = "row";
    node.title = clip(desc ?? "", 300);
    node.dataset.owner = k;
    return element("tr", "", node, ...columns.map((j) => cell(r, k, j)));
  }

  function cell(r, k, j) {
    const iou = sample.match.iou[r][j];
    const node = element("td", "", iou === null ? "" : iou.toFixed(2).replace(/^0/, ""));
    node.dataset.row = k;
    node.dataset.column = data.ownerOfTrue(sample, j);
    node.tabIndex = -1;
    const chosen = sample.objects[k].of === j;
    node.classList.toggle("chosen", chosen);
    node.classList.toggle("low", iou !== null && iou < sample.match.gate);
    node.classList.toggle("empty", iou === null);
    if (iou !== null) node.style.setProperty("--share", `${Math.round(55 * iou)}%`);
    node.ariaLabel = iou === null ? "not a candidate" : `IoU ${iou.toFixed(2)}${chosen ? ", a pair" : ""}`;
    return node;
  }

  const at = (event) => event.target.closest?.("td[data-row]");
  const owners = (td) => [Number(td.dataset.row), Number(td.dataset.column)];
  const target = (td) => ({ owners: owners(td), token: null, from: "matrix" });
  host.addEventListener("pointerover", (event) => inspector.point(at(event) ? target(at(event)) : null));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => {
    const td = at(event);
    if (!td) return;
    moveTabStop(active, td);
    active = td;
    inspector.choose(target(td));
  });
  host.addEventListener("keydown", (event) => {
    const td = at(event);
    if (!td || event.ctrlKey || event.altKey || event.metaKey) return;
    const row = td.parentNode;
    const next = {
      ArrowLeft: td.previousElementSibling,
      ArrowRight: td.nextElementSibling,
      ArrowUp: row.previousElementSibling?.cells[td.cellIndex],
      ArrowDown: row.nextElementSibling?.cells[td.cellIndex],
      Home: row.cells[1],
      End: row.cells[row.cells.length - 1],
    }[event.key];
    if (!next?.matches("td[data-row]")) return;
    event.preventDefault();
    next.focus();
  });

  return { show, follow, focus: () => active?.focus() };
})();
