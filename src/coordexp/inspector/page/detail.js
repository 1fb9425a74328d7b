"use strict";
// What is known of one token: what it is, how it is trained, and of a coordinate its distribution.
const detail = (() => {
  const LISTED = 12; // coordinates of an object
  const host = find("detail");

  function show(sample, i, owned) {
    const one = read(sample, i);
    const rank = owned.get(one.owner)?.coords.indexOf(i);
    const place = one.coord ? placed(sample, one.owner, rank) : null;
    const [style, name, meaning] = ROLES[one.role];
    const sign = element("span", `token ${style}${one.coord ? " bin" : ""}`, data.text(one.id));
    const parts = [
      element("h3", "", sign, name),
      element("p", "whose", ...ofWhom(sample, one.owner, place), ` ${meaning[0].toUpperCase()}${meaning.slice(1)}.`),
    ];
    if (one.coord && (one.p || one.target !== null)) parts.push(chart.draw(one), caption(one));
    parts.push(list("numbers", one.coord ? coordFacts(one) : textFacts(one)));
    const why = silence(one);
    if (why) parts.push(element("p", "silent", why));
    if (!one.coord) parts.push(...coordinates(sample, one.owner, owned.get(one.owner)?.coords ?? []));
    host.replaceChildren(...parts);
    if (place) picture.guide(sample, place.axis, one.written, one.target, one.p);
    else picture.clear();
  }

  function read(sample, i) {
    const { ids, roles, owner, target } = sample.tokens;
    const { trained } = sample;
    const given = trained?.bins[i] ? distribution.given(trained.bins[i]) : { p: null, known: 0 };
    if (!given.known) given.p = null;
    const soft = data.index.target;
    return {
      ...given,
      sample, i,
      id: ids[i],
      role: roles[i],
      owner: owner[i],
      coord: data.isCoord(ids[i]),
      written: ids[i] - data.index.coord0,
      target: target[i],
      q: soft && target[i] !== null ? distribution.soft(target[i], soft) : null,
      nll: trained?.nll[i],
      mass: trained?.mass[i],
    };
  }

  // Which side of which corner a coordinate is: only of objects with a shape.
  function placed(sample, owner, rank) {
    const { kind, bins } = owner === -1 ? {} : data.about(sample, owner);
    if (!bins || rank === undefined || rank < 0) return null;
    const axis = rank % 2 ? "y" : "x";
    return { axis, name: kind === "bbox_2d" ? `${axis}${rank < 2 ? 1 : 2}` : `${axis} of point ${1 + (rank >> 1)}` };
  }

  function ofWhom(sample, owner, place) {
    if (owner === -1) return ["Of no object."];
    const { key, desc, state } = data.about(sample, owner);
    const name = desc === null ? described(null) : described(clipped(desc, 80));
    return [place ? `${place.name} of ` : "Of ", `${clipped(key, 40)}, `, name, ` (${state}).`];
  }

  function caption({ p, q }) {
    const { sigma, temperature } = data.index.target ?? {};
    const parts = [];
    if (p) parts.push(element("span", "", swatch("given"), "the model"));
    if (q) parts.push(element("span", "", swatch("wanted"), `soft target, sigma ${sigma}`));
    if (q && temperature !== 1) parts.push(element("span", "", `in the loss at temperature ${temperature}`));
    parts.push(element("span", "", "heights by square root"));
    return element("p", "caption", ...parts);
  }

  function swatch(style) {
    const area = { x: 0, y: 2, width: 22, height: 10, class: style };
    const line = { x1: 0, x2: 22, y1: 7, y2: 7, class: style };
    const drawn = style === "given" ? svg("rect", area) : svg("line", line);
    return svg("svg", { viewBox: "0 0 22 14", class: "swatch", "aria-hidden": "true" }, drawn);
  }

  function coordFacts({ role, written, target, p, q, known, nll, mass }) {
    const rows = role === 5 ? [] : [["written bin", written]]; // the model wrote no added one
    if (target !== null) rows.push(["target", +target.toFixed(2)]);
    if (p && target !== null) {
      const at = p[distribution.nearest(target)];
      rows.push(["probability of the target bin", at ? percent(at) : "< 0.05 %"]);
    }
    if (p) rows.push(["expected bin", distribution.expected(p).toFixed(1)]);
    if (p && q) rows.push(["distance to the target (W1)", `${distribution.apart(p, q, known).toFixed(1)} bins`]);
    if (mass != null) rows.push(["probability of any coordinate", percent(mass)]);
    if (nll != null && role === 2) rows.push(["probability of the written bin", percent(Math.exp(-nll))]);
    if (p && known < 0.98) rows.push(["in the chart (bins under 0.05 % are not stored)", percent(known)]);
    return rows;
  }

  function textFacts({ sample, i, id, nll }) {
    const rows = [["token id", id], ["place", `${i + 1} of ${sample.tokens.ids.length}`]];
    if (nll != null) rows.push(["probability", percent(Math.exp(-nll))], ["-log p", nll.toFixed(4)]);
    return rows;
  }

  // Of the token's object: what was written and, where it is trained, what is wanted.
  function coordinates(sample, owner, coords) {
    if (!coords.length) return [];
    const { ids, target } = sample.tokens;
    const rows = coords.slice(0, LISTED).map((i, rank) => {
      const written = ids[i] - data.index.coord0;
      const apart = target[i] === null ? null : +(target[i] - written).toFixed(1);
      const wanted = !apart ? "" : ` \u2192 ${+target[i].toFixed(1)} (${apart > 0 ? "+" : ""}${apart})`;
      return [placed(sample, owner, rank)?.name ?? `${rank + 1}`, `${written}${wanted}`];
    });
    const left = coords.length - rows.length;
    const some = element("small", "", left ? ` ${LISTED} of ${coords.length}` : "");
    return [element("h4", "", "Its coordinates", some), list("numbers places", rows)];
  }

  // Why there is nothing of the training to say.
  function silence({ sample, role, p, nll }) {
    if (!data.isTrained(role)) return null;
    const untold = "What the model thought here is not known: ";
    if (sample.trained === null) return `${untold}this sample was not trained yet, or the run wrote no traces.`;
    if (nll === null) return `${untold}its logits were NaN or infinite here.`;
    return nll === undefined && !p ? "No loss of this run looks at this token." : null;
  }

  return { show, clear: () => host.replaceChildren() };
})();
