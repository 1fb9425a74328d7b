"use strict";
// Two distributions over bins in one chart: the model's as a filled area, the soft target as a dashed line. The upper
// part shows the neighbourhood of both, the lower part all bins. Heights are square roots, so that a sharp peak does
// not hide the other curve.
const chart = (() => {
  const [WIDTH, LEFT, RIGHT] = [460, 36, 8];
  const [TOP, BASE] = [34, 156]; // of the neighbourhood
  const [LOW, FLOOR] = [184, 208]; // of the overview
  const TICKS = [1, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002];

  function draw(token) {
    const [from, to] = range(token);
    const across = (bin) => LEFT + ((bin - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
    const wide = (bin) => LEFT + ((bin + 0.5) / distribution.BINS) * (WIDTH - LEFT - RIGHT);
    const most = highest(token, from, to);
    const up = (share) => BASE - Math.sqrt(share / most) * (BASE - TOP);
    const top = highest(token, 0, distribution.BINS - 1);
    const less = (share) => FLOOR - Math.sqrt(share / top) * (FLOOR - LOW);
    return svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} 226`, role: "img", "aria-label": describeChart(token), class: "chart" },
      ...grid(across, up, from, to, most),
      ...curves(token, across, up, BASE, from, to),
      ...marks(token, across),
      svg("rect", { class: "window", ...window_(wide, from, to) }),
      ...curves(token, wide, less, FLOOR, 0, distribution.BINS - 1),
      svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: FLOOR, y2: FLOOR }),
      ...[0, 250, 500, 750, 999].map((bin) => label(wide(bin), FLOOR + 13, bin, bin === 999 ? "end" : "middle")),
      label(LEFT - 6, FLOOR, "all", "end"),
    );
  }

  const describeChart = ({ written, target }) => `Distribution over bins around ${written}, and the target ${target ?? ""}`;

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

  function curves({ p, q }, across, up, base, from, to) {
    const parts = [];
    const [first, last] = [Math.ceil(from), Math.floor(to)];
    if (p) {
      const steps = [`M${across(first - 0.5).toFixed(1)},${base}`];
      for (let bin = first; bin <= last; bin += 1) {
        if (bin > first && p[bin] === p[bin - 1]) continue;
        steps.push(`H${across(bin - 0.5).toFixed(1)}V${up(p[bin]).toFixed(1)}`);
      }
      steps.push(`H${across(last + 0.5).toFixed(1)}V${base}Z`);
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
      parts.push(svg("line", { class: share ? "rule" : "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
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

  function window_(wide, from, to) {
    const [x, end] = [wide(Math.max(0, from)), wide(Math.min(999, to))];
    return { x, y: LOW - 4, width: Math.max(3, end - x), height: FLOOR - LOW + 4 };
  }

  const label = (x, y, text, anchor) => svg("text", { x: x.toFixed(1), y, "text-anchor": anchor }, String(text));

  return { draw };
})();
