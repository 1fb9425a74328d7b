"use strict";
// The tokens of an answer, one line per object. One token is selected.
const strip = (() => {
  const host = find("strip");
  const AT_ONCE = 30; // lines whose tokens are written before the page is shown; the others follow soon after
  let sample = null;
  let unwritten = new Set(); // lines

  function show(next) {
    sample = next;
    const lines = sample.lines.map(line);
    unwritten = new Set(lines);
    host.replaceChildren(...lines);
    host.scrollTop = 0;
    lines.slice(0, AT_ONCE).forEach(write);
    if (unwritten.size) setTimeout(writeSome, 10, unwritten);
  }

  function writeSome(lines) {
    if (lines !== unwritten) return; // another sample is shown
    [...lines].slice(0, AT_ONCE).forEach(write);
    if (lines.size) setTimeout(writeSome, 10, lines);
  }

  // A line of tokens, and in its margin what became of its object.
  function line([from, to, owner, label]) {
    const { state } = sample.objects.find((object) => object.owner === owner) ?? {};
    const margin = element("span", "margin", label);
    if (state) Object.assign(margin, { className: `margin ${state}`, ariaHidden: "true" }).dataset.owner = owner;
    const words = element("div", "words", { role: "presentation" });
    return element("div", "line", margin, words, { role: "presentation", data: { from, to } });
  }

  function write(line) {
    if (!unwritten.delete(line)) return;
    const [margin, words] = line.children;
    for (let i = +line.dataset.from; i < +line.dataset.to; i += 1) words.append(token(i));
    if (margin.matches(".lit")) for (const node of words.children) node.classList.add("lit");
  }

  function token(i) {
    const { ids, roles, owner } = sample.tokens;
    const [style, name] = data.roles(sample)[roles[i] - 1];
    const text = data.text(ids[i]);
    const node = element("span", `token ${style}${data.isCoord(ids[i]) ? " bin" : ""}`, text, {
      role: "option",
      tabIndex: -1,
      ariaSelected: "false",
      ariaPosInSet: i + 1,
      ariaSetSize: ids.length,
      ariaLabel: `${text.trim() || "space"}, ${name}`,
      data: { i, owner: owner[i] },
    });
    const nll = sample.trained?.nll[i];
    if (nll != null) node.style.setProperty("--heat", `${Math.round(Math.min(1, nll / 5) * 55)}%`);
    return node;
  }

  function reveal(i) {
    write([...unwritten].find(({ dataset }) => +dataset.from <= i && i < +dataset.to));
    const token = host.querySelector(`[data-i="${i}"]`);
    select(host, token);
    bringIntoView(host, token);
  }

  connect(host, "[data-i]", ".line");
  return { show, reveal };
})();

// The details of a token: what it is, how it is trained, and the distribution of a coordinate.
const detail = (() => {
  const host = find("detail");

  function show(sample, i) {
    const token = readToken(sample, i);
    const object = sample.objects.find(({ owner }) => owner === token.owner);
    const place = token.coord && object ? locate(sample, i, object) : null;
    const [style, name, meaning] = data.roles(sample)[token.role - 1];
    const sign = element("span", `token ${style}${token.coord ? " bin" : ""}`, data.text(token.id));
    const parts = [
      element("h3", "", sign, name),
      element("p", "owner", ...describeOwner(object, place), ` ${meaning[0].toUpperCase()}${meaning.slice(1)}.`),
    ];
    if (token.coord && (token.p || token.target !== null)) parts.push(chart.draw(token), caption(token));
    parts.push(list("numbers", token.coord ? coordFacts(token) : textFacts(token)));
    const reason = whyNoNumbers(sample, token);
    if (reason) parts.push(element("p", "no-data", reason));
    host.replaceChildren(...parts);
    if (place) imageView.guide(sample, place.axis, token.written, token.target, token.p);
    else imageView.clear();
  }

  function readToken(sample, i) {
    const { ids, roles, owner, target } = sample.tokens;
    const { trained } = sample;
    const model = trained?.bins[i] ? distribution.expand(trained.bins[i]) : { p: null, known: 0 };
    const soft = data.index.target;
    return {
      p: model.known ? model.p : null,
      known: model.known,
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
  function locate(sample, i, { kind, bins, owner }) {
    const rank = data.coordsOf(sample, owner, sample.tokens.roles[i] === CUT).indexOf(i);
    if (!bins || rank < 0) return null;
    const axis = rank % 2 ? "y" : "x";
    return { axis, name: kind === "bbox_2d" ? `${axis}${rank < 2 ? 1 : 2}` : `${axis} of point ${1 + (rank >> 1)}` };
  }

  function describeOwner(object, place) {
    if (!object) return ["Part of no object."];
    const { key, desc, state } = object;
    const name = describe(desc === null ? null : clip(desc, 80));
    return [place ? `${place.name} of ` : "Part of ", `${clip(key, 40)}, `, name, ` (${data.index.kinds[state] ?? state}).`];
  }

  function caption({ q }) {
    const { sigma, temperature } = data.index.target ?? {};
    const target = q ? ` Dashed: the soft target, sigma ${sigma}` : "";
    const heat = q && temperature !== 1 ? `, in the loss at temperature ${temperature}` : "";
    return element("p", "caption", `Filled: the model.${target}${heat}${q ? "." : ""} Heights are square roots.`);
  }

  function coordFacts({ role, written, target, p, q, known, nll, mass }) {
    const rows = role === ADDED_COORD ? [] : [["written bin", written]]; // the model did not write an added coordinate
    if (target !== null) rows.push(["target", +target.toFixed(2)]);
    if (p && target !== null) {
      const at = p[distribution.nearest(target)];
      rows.push(["probability of the target bin", at ? percent(at) : "< 0.05 %"]);
    }
    if (p) rows.push(["expected bin", distribution.expected(p, known).toFixed(1)]);
    if (p && q) rows.push(["distance to the target (W1)", `${distribution.distance(p, q, known).toFixed(1)} bins`]);
    if (mass != null) rows.push(["probability of any coordinate", percent(mass)]);
    if (nll != null && role === WRITTEN_COORD) rows.push(["probability of the written bin", percent(Math.exp(-nll))]);
    if (p && known < 0.98) rows.push(["in the chart (bins under 0.05 % are not stored)", percent(known)]);
    return rows;
  }

  function textFacts({ id, nll }) {
    return [["token id", id], ...(nll != null ? [["probability", percent(Math.exp(-nll))], ["-log p", nll.toFixed(4)]] : [])];
  }

  // The reason why there are no numbers from training; null if there are some, or if there should be none.
  function whyNoNumbers(sample, { role, p, nll }) {
    if (!data.isTrained(role)) return null;
    const unknown = "The model's probabilities are not known here: ";
    if (sample.trained === null) return `${unknown}this sample was not trained yet, or the run wrote no traces.`;
    if (nll === null) return `${unknown}its logits were NaN or infinite.`;
    return nll === undefined && !p ? "No loss of this run uses this token." : null;
  }

  return { show, clear: () => host.replaceChildren() };
})();
