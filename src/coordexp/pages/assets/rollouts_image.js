"use strict";
// An image with shapes over it, large with names or small without, and the marks of one coordinate along its edges.
const imageView = (() => {
  const MAX_HEIGHT = 400; // pixels of the large image
  const MAX_NAMES = 24; // shapes up to which each has its name; of more, only those that are highlighted
  const toPixels = (bin, side) => (bin / 999) * side;

  function frame(host, entry, sample) {
    host.style.aspectRatio = `${sample.width} / ${sample.height}`;
    const src = data.image(entry);
    const over = svg("svg", { viewBox: `0 0 ${sample.width} ${sample.height}`, preserveAspectRatio: "none" });
    host.replaceChildren(src === null ? element("span", "blank", "no image") : element("img", "", { alt: "", src }), over);
    return over;
  }

  function draw(shape, sample) {
    let bins = shape.bins;
    if (shape.form === "bbox_2d") bins = [bins[0], bins[1], bins[2], bins[1], bins[2], bins[3], bins[0], bins[3]];
    const ring = bins.map((bin, k) => toPixels(bin, k % 2 ? sample.height : sample.width).toFixed(2));
    return outline(shape.kind, ring, ...strike(shape, sample));
  }

  // A diagonal through a shape that the corrected answer leaves out.
  function strike(shape, sample) {
    if (!LEFT_OUT.has(shape.kind)) return [];
    const [x1, y1, x2, y2] = shape.box.map((bin, k) => toPixels(bin, k % 2 ? sample.height : sample.width));
    return [svg("line", { x1, y1: y2, x2, y2: y1 })];
  }

  // What a correction policy did with an object, with its numbers in the answer and in the corrected one.
  function change({ kind, key, change, number }) {
    if (LEFT_OUT.has(kind)) return kind;
    if (change === "moved") return `${key.replace("object_", "")} \u2192 ${number}`;
    return (kind === "missed" || kind === "agreed") && number !== null ? `\u2192 ${number}` : "";
  }

  // The name stands above its shape, or inside it where there is no room above.
  function name(shape, height) {
    const tag = element("span", `tag ${shape.kind}`, describe(clip(shape.desc ?? "", 48)), { data: { owner: shape.owner } });
    if (change(shape)) tag.append(element("b", "", change(shape)));
    const [left, top, right] = shape.box.map((bin) => (100 * bin) / 999);
    if (left > 55) tag.style.right = `${Math.max(0, 100 - right)}%`;
    else tag.style.left = `${left}%`;
    tag.style.maxWidth = `${left > 55 ? Math.max(20, right) : 100 - left}%`;
    tag.style.top = `${top}%`;
    tag.classList.toggle("inside", (top / 100) * height < 18);
    return tag;
  }

  function large(entry, sample) {
    const host = find("stage");
    const over = frame(host, entry, sample);
    host.style.maxWidth = `${Math.round((MAX_HEIGHT * sample.width) / sample.height)}px`;
    const shapes = data.shapes(sample);
    host.classList.toggle("many", shapes.length > MAX_NAMES);
    for (const shape of shapes) {
      const group = draw(shape, sample);
      group.dataset.owner = shape.owner;
      const moved = shape.change === "moved" ? `, moved: ${change(shape)}` : "";
      group.prepend(svg("title", {}, `${KINDS[shape.kind]}${moved}: ${clip(shape.desc ?? "", 200)}`));
      over.append(group);
    }
    over.append(svg("g", { id: "guides" }));
    const height = host.clientHeight;
    host.append(...shapes.filter((shape) => shape.kind !== "true").map((shape) => name(shape, height)));
    over.setAttribute("role", "img");
    over.setAttribute("aria-label", `${entry.matched} matched, ${entry.missed} missed, ${entry.extra} extra`);
    find("remark").hidden = entry.remark === null;
    find("remark").textContent = entry.remark ?? "";
  }

  function small(host, entry, sample) {
    const over = frame(host, entry, sample);
    for (const shape of data.shapes(sample)) over.append(draw(shape, sample));
  }

  // Lines where a coordinate was written and where it should be, and along the edge the probability of each bin.
  function guide(sample, axis, written, target, p) {
    const across = axis === "x";
    const [along, depth] = across ? [sample.width, sample.height] : [sample.height, sample.width];
    const parts = [];
    if (p) {
      const top = Math.max(...p);
      const points = [`0,0`];
      p.forEach((share, bin) => points.push(`${toPixels(bin, along)},${((share / top) * depth) / 7}`));
      points.push(`${along},0`);
      const transform = across ? `translate(0 ${depth}) scale(1 -1)` : "matrix(0 1 1 0 0 0)";
      parts.push(svg("polygon", { class: "likely", points: points.join(" "), transform }));
    }
    const rule = (bin, style) => {
      const at = toPixels(bin, along);
      const ends = across ? { x1: at, x2: at, y1: 0, y2: depth } : { x1: 0, x2: depth, y1: at, y2: at };
      return svg("line", { class: style, ...ends });
    };
    if (target !== null) parts.push(rule(target, "target"));
    parts.push(rule(written, "written"));
    find("guides").replaceChildren(...parts);
  }

  return { large, small, guide, clear: () => find("guides")?.replaceChildren() };
})();

// Two distributions over bins in one chart: the model's as a filled area, the soft target as a dashed line. It shows the
// neighbourhood of both; the edge of the image has all bins. Heights are square roots, so that a sharp peak does not hide
// the other curve.
const chart = (() => {
  const [WIDTH, LEFT, RIGHT, TOP, BASE] = [460, 36, 8, 34, 156];
  const TICKS = [1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002];

  function draw(token) {
    const [from, to] = range(token);
    const across = (bin) => LEFT + ((bin - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
    const most = highest(token, from, to);
    const up = (share) => BASE - Math.sqrt(share / most) * (BASE - TOP);
    const name = `Distribution over bins around ${token.written}, and the target ${token.target ?? ""}`;
    return svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} 176`, role: "img", "aria-label": name, class: "chart" },
      ...grid(across, up, from, to, most),
      ...curves(token, across, up, Math.ceil(from), Math.floor(to)),
      ...marks(token, across),
    );
  }

  // The neighbourhood contains nearly all of both distributions, and the written bin.
  function range({ p, q, known, written, target }) {
    const ends = [written, written];
    const stretch = (low, high) => {
      ends[0] = Math.min(ends[0], low);
      ends[1] = Math.max(ends[1], high);
    };
    if (p) stretch(...distribution.body(p, known));
    if (q) stretch(...distribution.body(q, 1));
    if (target !== null) stretch(target, target);
    const room = Math.max(4, 0.06 * (ends[1] - ends[0]));
    return [Math.max(-0.5, Math.floor(ends[0] - room) - 0.5), Math.min(999.5, Math.ceil(ends[1] + room) + 0.5)];
  }

  function highest({ p, q }, from, to) {
    let most = 0.002;
    for (let bin = Math.ceil(from); bin <= to; bin += 1) most = Math.max(most, p?.[bin] ?? 0, q?.[bin] ?? 0);
    return Math.min(1, most * 1.08);
  }

  function curves({ p, q }, across, up, first, last) {
    const parts = [];
    if (p) {
      const steps = [`M${across(first - 0.5).toFixed(1)},${BASE}`];
      for (let bin = first; bin <= last; bin += 1) {
        if (bin > first && p[bin] === p[bin - 1]) continue;
        steps.push(`H${across(bin - 0.5).toFixed(1)}V${up(p[bin]).toFixed(1)}`);
      }
      steps.push(`H${across(last + 0.5).toFixed(1)}V${BASE}Z`);
      parts.push(svg("path", { class: "model", d: steps.join("") }));
    }
    if (q) {
      const points = [];
      for (let bin = first; bin <= last; bin += 1) points.push(`${across(bin).toFixed(1)},${up(q[bin]).toFixed(1)}`);
      parts.push(svg("polyline", { class: "soft-target", points: points.join(" ") }));
    }
    return parts;
  }

  function grid(across, up, from, to, most) {
    const parts = [];
    let last = Infinity;
    for (const share of [...TICKS.filter((tick) => tick <= most), 0]) {
      const y = up(share);
      if (Math.abs(y - last) < 16 && share !== 0) continue;
      if (share === 0 && last !== Infinity && Math.abs(y - last) < 12) parts.splice(-1);
      last = y;
      parts.push(svg("line", { class: share ? "grid" : "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
      parts.push(label(LEFT - 6, y + 4, `${+(100 * share).toFixed(1)}%`, "end"));
    }
    const pace = [1, 2, 5, 10, 20, 50, 100, 200].find((step) => (to - from) / step <= 8);
    for (let bin = Math.ceil(from / pace) * pace; bin <= to; bin += pace) {
      parts.push(label(across(bin), BASE + 14, bin, "middle"));
      parts.push(svg("line", { class: "axis", x1: across(bin), x2: across(bin), y1: BASE, y2: BASE + 3 }));
    }
    return parts;
  }

  // Each label is on the side that is away from the other mark.
  function marks({ written, target }, across) {
    const mark = (bin, style, y, text, left) => {
      const x = across(bin);
      const before = x > WIDTH - 80 || (left && x > LEFT + 80);
      const name = label(before ? x - 5 : x + 5, y, text, before ? "end" : "start");
      name.setAttribute("class", `label ${style}`);
      return [svg("line", { class: style, x1: x, x2: x, y1: y - 8, y2: BASE }), name];
    };
    const targetMark = target === null ? [] : mark(target, "target", 25, `target ${+target.toFixed(1)}`, target < written);
    return [...targetMark, ...mark(written, "written", 11, `written ${written}`, !(target < written))];
  }

  const label = (x, y, text, anchor) => svg("text", { x: x.toFixed(1), y, "text-anchor": anchor }, String(text));

  return { draw };
})();

// The same image at other steps, side by side: what the model learned to see.
const steps = (() => {
  const MAX_CARDS = 12; // around the current step
  const host = find("steps");

  function show(k) {
    const { samples } = data.index;
    const here = samples[k];
    const alike = (other) => samples[other].record === here.record && samples[other].image === here.image;
    const same = samples.map((_, other) => other).filter(alike);
    same.sort((a, b) => samples[a].step - samples[b].step || a - b);
    const at = same.indexOf(k);
    const first = Math.max(0, Math.min(at - MAX_CARDS / 2, same.length - MAX_CARDS));
    const shown = same.slice(first, first + MAX_CARDS);
    const hidden = same.length - shown.length;
    find("alone").hidden = same.length > 1 && hidden === 0;
    find("alone").textContent = hidden > 0 ? `${shown.length} of ${same.length}, around this step.` : alone(here);
    host.replaceChildren(...(same.length > 1 ? shown.map((other) => card(other, other === k)) : []));
    const current = host.querySelector("[aria-current]");
    if (current) host.scrollLeft = current.offsetLeft - host.clientWidth / 2 + current.offsetWidth / 2;
  }

  function alone(entry) {
    const reason = entry.followed ? "is followed, but was answered only once so far" : "is not followed";
    return `This is the only answer to this image on the page: the image ${reason}.`;
  }

  function card(k, current) {
    const entry = data.index.samples[k];
    const stage = element("span", "stage");
    imageView.small(stage, entry, data.sample(k));
    const counts = `${data.countFound(entry)}${entry.extra ? `, ${entry.extra} extra` : ""}`;
    const loss = entry.loss === null ? "no loss" : `loss ${entry.loss.toFixed(3)}`;
    const words = [element("b", "", `step ${entry.step}`), element("span", "", counts), element("span", "", loss)];
    const onclick = () => inspector.go(k);
    return element("button", "step", stage, ...words, { type: "button", ariaCurrent: current ? "true" : null, onclick });
  }

  return { show, focus: () => (host.querySelector("[aria-current]") ?? host.querySelector("button"))?.focus() };
})();
