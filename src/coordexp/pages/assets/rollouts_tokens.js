"use strict";
// The tokens of an answer, one line per object. One token is in the tab order.
const strip = (() => {
  const MAX_LINE = 240; // tokens; what belongs to no object can be longer
  const host = find("strip");
  let sample = null;
  let lines = []; // [first token, end]
  let active = 0;

  function show(next) {
    sample = next;
    lines = splitLines(sample.tokens);
    active = 0;
    host.replaceChildren(...lines.map(line));
    host.scrollTop = 0;
  }

  // Begins a new line at every break. The opening brace stays with the first object.
  function splitLines({ ids, breaks }) {
    const ends = [0, ...breaks.filter((at) => at > 2 && at < ids.length), ids.length];
    return ends.slice(1).flatMap((to, k) => {
      const parts = [];
      for (let from = ends[k]; from < to; from += MAX_LINE) parts.push([from, Math.min(to, from + MAX_LINE)]);
      return parts;
    });
  }

  function line([from, to]) {
    const words = element("div", "words", { role: "presentation" });
    for (let i = from; i < to; i += 1) words.append(token(i));
    return element("div", "line", margin(from, to), words, { role: "presentation" });
  }

  // The outcome of the object on this line.
  function margin(from, to) {
    const owner = sample.tokens.owner.slice(from, to).find((one) => one !== -1);
    if (owner === undefined) return element("span", "margin");
    const object = data.describeOwner(sample, owner);
    const at = sample.tokens.owner.indexOf(owner, from);
    return element("span", `margin ${object.state}`, outcome(object, at), { ariaHidden: "true", data: { owner } });
  }

  // The end of an object that stands before the first change is not labelled again.
  function outcome({ state, iou, change, number }, at) {
    if (sample.rebuilt && sample.tokens.roles[at] === 7) {
      if (at === sample.rebuilt.own && sample.tokens.owner[at - 1] === sample.tokens.owner[at]) return "";
      if (change === "moved") return "moved below";
      if (number !== null) return "rewritten below";
    }
    if (state === "missed" || state === "agreed") return `${state}, added`;
    if (state === "removed") return "extra, removed";
    return `${state}${iou === null ? "" : ` ${iou.toFixed(2)}`}`;
  }

  function token(i) {
    const { ids, roles, owner } = sample.tokens;
    const [style, name] = data.roles(sample)[roles[i]];
    const text = data.text(ids[i]);
    const node = element("span", `token ${style}${data.isCoord(ids[i]) ? " bin" : ""}`, text, {
      role: "option",
      tabIndex: i === active ? 0 : -1,
      ariaSelected: String(i === active),
      ariaPosInSet: i + 1,
      ariaSetSize: ids.length,
      ariaLabel: `${text.trim() || "space"}, ${name}`,
      data: { i, owner: owner[i] },
    });
    if (sample.unlikely[i] !== undefined) {
      node.classList.add("unlikely");
      node.title = `should be unlikely here: ${data.text(sample.unlikely[i])}`;
      node.ariaLabel += `, ${node.title}`;
    }
    const nll = sample.trained?.nll[i];
    if (nll != null) node.style.setProperty("--heat", `${Math.round(Math.min(1, nll / 5) * 55)}%`);
    return node;
  }

  const tokenNode = (i) => host.querySelector(`[data-i="${i}"]`);

  // Moves the tab stop to a token and scrolls the strip to it.
  function reveal(i, focus = false) {
    const [before, now] = [tokenNode(active), tokenNode(i)];
    active = i;
    before.ariaSelected = "false";
    moveTabStop(before, now);
    now.ariaSelected = "true";
    const top = now.getBoundingClientRect().top - host.getBoundingClientRect().top;
    if (top < 4 || top > host.clientHeight - 34) host.scrollTop += top - host.clientHeight / 3;
    if (focus) {
      now.focus({ preventScroll: true });
      now.scrollIntoView({ block: "nearest" });
    }
  }

  function step({ key, ctrlKey: whole }) {
    const last = sample.tokens.ids.length - 1;
    const at = lines.findIndex(([from, to]) => from <= active && active < to);
    const [from, to] = lines[at];
    if (key === "ArrowLeft") return Math.max(0, active - 1);
    if (key === "ArrowRight") return Math.min(last, active + 1);
    if (key === "Home") return whole ? 0 : from;
    if (key === "End") return whole ? last : to - 1;
    if (key !== "ArrowUp" && key !== "ArrowDown") return null;
    const next = lines[at + (key === "ArrowUp" ? -1 : 1)];
    return next ? Math.min(next[0] + active - from, next[1] - 1) : active;
  }

  const at = (event) => event.target.closest?.("[data-i]");
  const target = (i) => ({ owners: [sample.tokens.owner[i]], token: i });
  const beside = (event) => {
    const margin = event.target.closest?.(".margin[data-owner]");
    return margin && { owners: [Number(margin.dataset.owner)], token: null };
  };
  host.addEventListener("click", (event) => beside(event) && inspector.choose(beside(event)));
  connect(host, {
    at,
    target: (event) => (at(event) ? target(Number(at(event).dataset.i)) : beside(event)),
    choose: (token) => {
      reveal(Number(token.dataset.i));
      inspector.choose(target(active));
    },
    step,
    go: (i) => reveal(i, true),
  });

  return { show, reveal, focus: () => reveal(active, true), active: () => active };
})();

// The details of a token: what it is, how it is trained, and the distribution of a coordinate.
const detail = (() => {
  const MAX_LISTED = 12; // coordinates of an object
  const host = find("detail");

  function show(sample, i, byOwner) {
    const token = read(sample, i);
    const coords = data.coordsAround(sample, i, byOwner);
    const rank = coords.indexOf(i);
    const place = token.coord ? locate(sample, token.owner, rank) : null;
    const [style, name, meaning] = data.roles(sample)[token.role];
    const sign = element("span", `token ${style}${token.coord ? " bin" : ""}`, data.text(token.id));
    const parts = [
      element("h3", "", sign, name),
      element("p", "owner", ...describeOwner(sample, token.owner, place), ` ${meaning[0].toUpperCase()}${meaning.slice(1)}.`),
    ];
    if (token.coord && (token.p || token.target !== null)) parts.push(chart.draw(token), caption(token));
    const unlikely = sample.unlikely[i];
    const mark = unlikely === undefined ? [] : [["should be unlikely here", element("code", "", data.text(unlikely))]];
    parts.push(list("numbers", [...(token.coord ? coordFacts(token) : textFacts(token)), ...mark]));
    const reason = whyNoNumbers(token);
    if (reason) parts.push(element("p", "no-data", reason));
    if (!token.coord) parts.push(...coordinates(sample, token.owner, coords));
    host.replaceChildren(...parts);
    if (place) imageView.guide(sample, place.axis, token.written, token.target, token.p);
    else imageView.clear();
  }

  function read(sample, i) {
    const { ids, roles, owner, target } = sample.tokens;
    const { trained } = sample;
    const model = trained?.bins[i] ? distribution.expand(trained.bins[i]) : { p: null, known: 0 };
    if (!model.known) model.p = null;
    const soft = data.index.target;
    return {
      ...model,
      sample, i,
      id: ids[i],
      role: roles[i],
      owner: owner[i],
      coord: data.isCoord(ids[i]),
      written: ids[i] - data.index.coord0,
      target: target[i],
      q: soft && target[i] !== null ? distribution.softTarget(target[i], soft) : null,
      nll: trained?.nll[i],
      mass: trained?.mass[i],
    };
  }

  // Which coordinate of its shape a token is; null if the object has no shape.
  function locate(sample, owner, rank) {
    const { kind, bins } = owner === -1 ? {} : data.describeOwner(sample, owner);
    if (!bins || rank < 0) return null;
    const axis = rank % 2 ? "y" : "x";
    return { axis, name: kind === "bbox_2d" ? `${axis}${rank < 2 ? 1 : 2}` : `${axis} of point ${1 + (rank >> 1)}` };
  }

  function describeOwner(sample, owner, place) {
    if (owner === -1) return ["Part of no object."];
    const { key, desc, state } = data.describeOwner(sample, owner);
    const name = desc === null ? describe(null) : describe(clip(desc, 80));
    return [place ? `${place.name} of ` : "Part of ", `${clip(key, 40)}, `, name, ` (${KINDS[state] ?? state}).`];
  }

  function caption({ p, q }) {
    const { sigma, temperature } = data.index.target ?? {};
    const parts = [];
    if (p) parts.push(element("span", "", swatch("model"), "the model"));
    if (q) parts.push(element("span", "", swatch("soft-target"), `soft target, sigma ${sigma}`));
    if (q && temperature !== 1) parts.push(element("span", "", `in the loss at temperature ${temperature}`));
    parts.push(element("span", "", "heights are square roots"));
    return element("p", "caption", ...parts);
  }

  function swatch(style) {
    const area = { x: 0, y: 2, width: 22, height: 10, class: style };
    const line = { x1: 0, x2: 22, y1: 7, y2: 7, class: style };
    const drawn = style === "model" ? svg("rect", area) : svg("line", line);
    return svg("svg", { viewBox: "0 0 22 14", "aria-hidden": "true" }, drawn);
  }

  function coordFacts({ role, written, target, p, q, known, nll, mass }) {
    const rows = role === 5 ? [] : [["written bin", written]]; // the model did not write an added coordinate
    if (target !== null) rows.push(["target", +target.toFixed(2)]);
    if (p && target !== null) {
      const at = p[distribution.nearest(target)];
      rows.push(["probability of the target bin", at ? percent(at) : "< 0.05 %"]);
    }
    if (p) rows.push(["expected bin", distribution.expected(p).toFixed(1)]);
    if (p && q) rows.push(["distance to the target (W1)", `${distribution.distance(p, q, known).toFixed(1)} bins`]);
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

  // The coordinates of the token's object: the written bins and, if they are trained, their targets.
  function coordinates(sample, owner, coords) {
    if (!coords.length) return [];
    const { ids, target } = sample.tokens;
    const rows = coords.slice(0, MAX_LISTED).map((i, rank) => {
      const written = ids[i] - data.index.coord0;
      const offset = target[i] === null ? null : +(target[i] - written).toFixed(1);
      const aim = !offset ? "" : ` \u2192 ${+target[i].toFixed(1)} (${offset > 0 ? "+" : ""}${offset})`;
      return [locate(sample, owner, rank)?.name ?? `${rank + 1}`, `${written}${aim}`];
    });
    const hidden = coords.length - rows.length;
    const part = element("small", "", hidden ? ` ${MAX_LISTED} of ${coords.length}` : "");
    return [element("h4", "", "Its coordinates", part), list("numbers places", rows)];
  }

  // The reason why there are no numbers from training; null if there are some, or if there should be none.
  function whyNoNumbers({ sample, role, p, nll }) {
    if (!data.isTrained(role)) return null;
    const unknown = "The model's probabilities are not known here: ";
    if (sample.trained === null) return `${unknown}this sample was not trained yet, or the run wrote no traces.`;
    if (nll === null) return `${unknown}its logits were NaN or infinite.`;
    return nll === undefined && !p ? "No loss of this run uses this token." : null;
  }

  return { show, clear: () => host.replaceChildren() };
})();
