"use strict";
// An image with shapes over it, with their names, and the marks of one coordinate along its edges.
const imageView = (() => {
  const MAX_HEIGHT = 400; // pixels of the image
  const MAX_NAMES = 24; // shapes up to which each has its name; of more, only those that are highlighted
  const toPixels = (bin, side) => (bin / 999) * side;

  // Draws an image with all shapes of a sample, and returns the drawing and its shapes.
  function draw(host, entry, sample) {
    host.style.aspectRatio = `${sample.width} / ${sample.height}`;
    const src = data.image(entry);
    const shapes = data.shapes(sample);
    const frame = { viewBox: `0 0 ${sample.width} ${sample.height}`, preserveAspectRatio: "none" };
    const over = svg("svg", frame, ...shapes.map((shape) => drawShape(shape, sample)));
    host.replaceChildren(src === null ? element("span", "blank", "no image") : element("img", "", { alt: "", src }), over);
    return [over, shapes];
  }

  // An outline, with a diagonal if the corrected answer leaves the object out.
  function drawShape(shape, { width, height }) {
    const place = (bin, k) => toPixels(bin, k % 2 ? height : width).toFixed(2);
    const [x1, y1, x2, y2] = shape.box.map(place);
    const ring = shape.kind === "bbox_2d" ? [x1, y1, x2, y1, x2, y2, x1, y2] : shape.bins.map(place);
    const strike = LEFT_OUT.has(shape.state) ? [svg("line", { x1, y1: y2, x2, y2: y1 })] : [];
    const title = `${data.index.kinds[shape.state]}${shape.mark ? ` (${shape.mark})` : ""}: ${clip(shape.desc ?? "", 200)}`;
    return outline(shape.state, ring, svg("title", {}, title), ...strike);
  }

  function name(shape) {
    const mark = shape.mark ? [element("b", "", shape.mark)] : [];
    const desc = describe(clip(shape.desc ?? "", 48));
    const tag = nameTag(shape.state, shape.box, { width: 999, height: 999 }, false, desc, ...mark);
    tag.dataset.owner = shape.owner;
    return tag;
  }

  function show(entry, sample) {
    const host = find("stage");
    host.style.maxWidth = `${Math.round((MAX_HEIGHT * sample.width) / sample.height)}px`;
    const [over, shapes] = draw(host, entry, sample);
    shapes.forEach((shape, k) => { over.children[k].dataset.owner = shape.owner; });
    over.append(svg("g", { id: "guides" }));
    over.setAttribute("role", "img");
    over.setAttribute("aria-label", `${entry.matched} matched, ${entry.missed} missed, ${entry.extra} extra`);
    host.append(...shapes.filter((shape) => shape.state !== "true").map(name));
    host.classList.toggle("many", shapes.length > MAX_NAMES);
    find("remark").hidden = entry.remark === null;
    find("remark").textContent = entry.remark ?? "";
  }

  // Lines where a coordinate was written and where it should be, and along the edge the probability of each bin.
  function guide(sample, axis, written, target, p) {
    const across = axis === "x";
    const [along, depth] = across ? [sample.width, sample.height] : [sample.height, sample.width];
    const parts = [];
    if (p) {
      const top = Math.max(...p);
      const heights = Array.from(p, (share, bin) => `${toPixels(bin, along)},${((share / top) * depth) / 7}`);
      const transform = across ? `translate(0 ${depth}) scale(1 -1)` : "matrix(0 1 1 0 0 0)";
      parts.push(svg("polygon", { class: "likely", points: `0,0 ${heights.join(" ")} ${along},0`, transform }));
    }
    for (const [style, bin] of [["target", target], ["written", written]]) {
      const at = toPixels(bin ?? 0, along);
      const ends = across ? { x1: at, x2: at, y1: 0, y2: depth } : { x1: 0, x2: depth, y1: at, y2: at };
      if (bin !== null) parts.push(svg("line", { class: style, ...ends }));
    }
    find("guides").replaceChildren(...parts);
  }

  return { show, guide, clear: () => find("guides").replaceChildren() };
})();

// Two distributions over bins in one chart: the model's as a filled area, the soft target as a dashed line. It shows the
// neighbourhood of the written bin and the target; the edge of the image has all bins. Heights are square roots, so that
// a sharp peak does not hide the other curve.
const chart = (() => {
  const [WIDTH, LEFT, RIGHT, TOP, BASE] = [460, 36, 8, 34, 156];
  const ROOM = 30; // bins beside the written one and the target
  const TICKS = [1, 0.25, 0.05, 0.01, 0.002];

  function draw({ p, q, written, target }) {
    const from = Math.max(0, Math.floor(Math.min(written, target ?? written) - ROOM));
    const to = Math.min(999, Math.ceil(Math.max(written, target ?? written) + ROOM));
    const shown = Array.from({ length: to - from + 1 }, (_, k) => from + k);
    const most = Math.min(1, 1.08 * Math.max(0.002, ...shown.map((bin) => Math.max(p?.[bin] ?? 0, q?.[bin] ?? 0))));
    const across = (bin) => LEFT + ((bin - from + 0.5) / (to - from + 1)) * (WIDTH - LEFT - RIGHT);
    const up = (share) => BASE - Math.sqrt(share / most) * (BASE - TOP);
    const label = (x, y, text, anchor, style = "") => (
      svg("text", { x: x.toFixed(1), y, "text-anchor": anchor, class: style }, String(text))
    );
    const rows = [0, ...TICKS.filter((tick) => tick <= most && tick > most / 50)].flatMap((share) => [
      svg("line", { class: share ? "grid" : "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: up(share), y2: up(share) }),
      label(LEFT - 6, up(share) + 4, `${+(100 * share).toFixed(1)}%`, "end"),
    ]);
    const pace = [10, 20, 50, 100, 200].find((step) => (to - from) / step <= 8);
    const columns = shown.filter((bin) => bin % pace === 0).flatMap((bin) => [
      label(across(bin), BASE + 14, bin, "middle"),
      svg("line", { class: "axis", x1: across(bin), x2: across(bin), y1: BASE, y2: BASE + 3 }),
    ]);
    const curves = [];
    if (p) {
      const steps = shown.map((bin) => `H${across(bin - 0.5).toFixed(1)}V${up(p[bin]).toFixed(1)}`);
      const [left, right] = [across(from - 0.5).toFixed(1), across(to + 0.5).toFixed(1)];
      curves.push(svg("path", { class: "model", d: `M${left},${BASE}${steps.join("")}H${right}V${BASE}Z` }));
    }
    if (q) {
      const points = shown.map((bin) => `${across(bin).toFixed(1)},${up(q[bin]).toFixed(1)}`);
      curves.push(svg("polyline", { class: "soft-target", points: points.join(" ") }));
    }
    // Each label is on the side that is away from the other mark.
    const mark = (style, bin, y, isLeft) => {
      const x = across(bin);
      const isBefore = x > WIDTH - 80 || (isLeft && x > LEFT + 80);
      const name = `${style} ${+bin.toFixed(1)}`;
      return [
        svg("line", { class: style, x1: x, x2: x, y1: y - 8, y2: BASE }),
        label(isBefore ? x - 5 : x + 5, y, name, isBefore ? "end" : "start", `label ${style}`),
      ];
    };
    const marks = mark("written", written, 11, target !== null && written < target);
    if (target !== null) marks.push(...mark("target", target, 25, target < written));
    const name = `Distribution over bins around ${written}, and the target ${target ?? ""}`;
    const frame = { viewBox: `0 0 ${WIDTH} 176`, role: "img", "aria-label": name, class: "chart" };
    return svg("svg", frame, ...rows, ...columns, ...curves, ...marks);
  }

  return { draw };
})();
