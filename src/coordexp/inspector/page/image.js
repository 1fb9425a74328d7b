"use strict";
// An image with shapes over it, large with names or small without, and the marks of one coordinate along its edges.
const imageView = (() => {
  const MAX_HEIGHT = 400; // pixels of the large image
  const MAX_NAMES = 24; // shapes up to which each has its name; of more, only those that are highlighted
  const toPixels = (bin, side) => (bin / 999) * side;

  function frame(host, entry, sample) {
    host.style.aspectRatio = `${sample.width} / ${sample.height}`;
    const source = data.image(entry);
    const image = element("img");
    image.alt = "";
    if (source !== null) image.src = source;
    const over = svg("svg", { viewBox: `0 0 ${sample.width} ${sample.height}`, preserveAspectRatio: "none" });
    host.replaceChildren(source === null ? element("span", "blank", "no image") : image, over);
    return over;
  }

  function outline(shape, sample) {
    let bins = shape.bins;
    if (shape.form === "bbox_2d") bins = [bins[0], bins[1], bins[2], bins[1], bins[2], bins[3], bins[0], bins[3]];
    const points = [];
    for (let k = 0; k + 1 < bins.length; k += 2) {
      points.push(`${toPixels(bins[k], sample.width).toFixed(2)},${toPixels(bins[k + 1], sample.height).toFixed(2)}`);
    }
    const line = () => svg("polygon", { points: points.join(" ") });
    const halo = line();
    halo.setAttribute("class", "halo");
    return svg("g", { class: `shape ${shape.kind}` }, halo, line(), ...strike(shape, sample));
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
    const tag = element("span", `tag ${shape.kind}`, describe(clip(shape.desc ?? "", 48)));
    if (change(shape)) tag.append(element("b", "", change(shape)));
    tag.dataset.owner = shape.owner;
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
      const group = outline(shape, sample);
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
    numbering(shapes);
    find("remark").hidden = entry.remark === null;
    find("remark").textContent = entry.remark ?? "";
  }

  // Explains the numbers beside names with the first of each kind.
  function numbering(shapes) {
    const moved = shapes.find((shape) => shape.change === "moved");
    const added = shapes.find((shape) => !LEFT_OUT.has(shape.kind) && shape.change !== "moved" && change(shape));
    const parts = [];
    if (added) parts.push(element("b", "", change(added)), ` added as object_${added.number}. `);
    if (moved) parts.push(element("b", "", change(moved)), ` moved from ${moved.key} to object_${moved.number}.`);
    find("numbering").hidden = !parts.length;
    find("numbering").replaceChildren(...parts);
  }

  function small(host, entry, sample) {
    const over = frame(host, entry, sample);
    for (const shape of data.shapes(sample)) over.append(outline(shape, sample));
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
