"use strict";
// Which sample is shown, and what is highlighted in it: what the reader points at, or else what was chosen last.
const inspector = (() => {
  const { index } = data;
  const FILTERS = {
    all: ["all", () => true],
    misses: ["with misses", (entry) => entry.missed > 0],
    extra: ["with extra", (entry) => entry.extra > 0],
    invalid: ["with invalid", (entry) => entry.invalid > 0],
    truncated: ["truncated", (entry) => entry.truncated],
  };
  const ORDERS = {
    steps: ["by step", null],
    missed: ["most missed", (entry) => entry.missed],
    loss: ["highest loss", (entry) => entry.loss ?? -Infinity],
  };
  let list = []; // numbers of samples, filtered and ordered
  let shown = null;
  let sample = null;
  let byOwner = new Map();
  let pointed = null;
  let chosen = null;

  function arrange() {
    const fits = FILTERS[find("filter").value][1];
    const key = ORDERS[find("order").value][1];
    list = index.samples.map((_, k) => k).filter((k) => fits(index.samples[k]));
    if (key) list.sort((a, b) => key(index.samples[b]) - key(index.samples[a]) || a - b);
  }

  function go(k) {
    if (!list.includes(k)) {
      find("filter").value = "all";
      arrange();
    }
    show(k);
  }

  function show(k) {
    const region = ["strip", "objects", "matrix", "steps"].find((id) => find(id).contains(document.activeElement));
    shown = k;
    find("sample").hidden = k === undefined;
    find("nothing").hidden = k !== undefined;
    where();
    if (k === undefined) return;
    sample = data.sample(k);
    byOwner = data.tokensByOwner(sample);
    pointed = null;
    chosen = null;
    head.show(index.samples[k], sample);
    imageView.large(index.samples[k], sample);
    objects.show(sample);
    matrix.show(sample);
    strip.show(sample);
    steps.show(k);
    detail.clear();
    if (sample.tokens.ids.length) choose(tokenTarget(worst()));
    history.replaceState(null, "", `#${encodeURIComponent(index.samples[k].id)}`);
    if (region) ({ strip, objects, matrix, steps })[region].focus();
  }

  function where() {
    const at = list.indexOf(shown);
    find("where").textContent = `${at + 1} of ${list.length}`;
    find("back").disabled = at <= 0;
    find("on").disabled = at >= list.length - 1;
  }

  const tokenTarget = (i) => ({ owners: [sample.tokens.owner[i]], token: i });

  // The distance from the target in bins: of the written bin, or of the expected bin if the coordinate was added.
  function error(i) {
    const { ids, roles, target } = sample.tokens;
    if (target[i] === null) return -1;
    if (roles[i] === 2) return Math.abs(ids[i] - index.coord0 - target[i]);
    const runs = sample.trained?.bins[i];
    return runs ? Math.abs(distribution.expected(distribution.expand(runs).p) - target[i]) : 0;
  }

  // The coordinate with the largest error.
  function worst() {
    const { ids } = sample.tokens;
    let worstIndex = Math.max(0, ids.findIndex((id) => data.isCoord(id)));
    let most = error(worstIndex);
    ids.forEach((_, i) => {
      const now = error(i);
      if (now > most) [worstIndex, most] = [i, now];
    });
    return worstIndex;
  }

  function point(target) {
    pointed = target;
    light();
  }

  // An object is shown by its first coordinate. If it has no token in the strip, the chosen token stays.
  function tokenOf(target) {
    const tokens = byOwner.get(target.owners[0]);
    return target.token ?? tokens?.coords[0] ?? tokens?.tokens[0] ?? chosen?.token ?? null;
  }

  // A choice that was made in the matrix does not scroll the matrix.
  function choose(target) {
    pointed = null; // the choice counts, wherever the mouse rests
    chosen = { ...target, token: tokenOf(target) };
    if (chosen.token !== null && target.token !== strip.active()) strip.reveal(chosen.token);
    if (!target.from) matrix.follow(target.owners[0]);
    if (!find("objects").contains(document.activeElement)) objects.reveal(target.owners[0]);
    light();
  }

  function light() {
    const now = pointed ?? chosen ?? { owners: [], token: null };
    const owners = new Set(now.owners.filter((owner) => owner !== -1));
    for (const node of document.querySelectorAll(".lit")) node.classList.remove("lit");
    for (const owner of owners) {
      for (const node of document.querySelectorAll(`[data-owner="${owner}"]`)) node.classList.add("lit");
    }
    find("stage").classList.toggle("dim", owners.size > 0);
    strip.light(owners);
    const token = tokenOf(now);
    if (token !== null) detail.show(sample, token, byOwner);
  }

  const step = (by) => {
    const next = list[list.indexOf(shown) + by];
    if (next !== undefined) show(next);
  };

  // The sample that the address names: #99.0.12 is a sample, #step=100 the first one at or after that step.
  function fromAddress() {
    let hash = location.hash.slice(1);
    try {
      hash = decodeURIComponent(hash);
    } catch {
      return -1;
    }
    if (!hash.startsWith("step=")) return index.samples.findIndex((entry) => entry.id === hash);
    const from = Number(hash.slice(5));
    const later = index.samples.map((entry, k) => [entry.step, k]).filter(([at]) => at >= from);
    return later.length ? later.reduce((a, b) => (b[0] < a[0] ? b : a))[1] : -1;
  }

  function follow() {
    const k = fromAddress();
    const address = location.hash.slice(1);
    const there = k >= 0 && (!address.startsWith("step=") || index.samples[k].step === Number(address.slice(5)));
    find("astray").hidden = there || !address;
    find("astray").textContent = `${clip(address, 40)} is not on this page, which holds ${find("scope").textContent}`
      + ` (see coordexp inspect --samples). This is ${k >= 0 ? "the next sample" : "another sample"}.`;
    if (k >= 0) go(k);
    else show(shown ?? list[0]);
  }

  function onKey(event) {
    if (event.target.closest("input, select, dialog") || event.altKey || event.ctrlKey || event.metaKey) return;
    const action = {
      j: () => step(1),
      n: () => step(1),
      k: () => step(-1),
      p: () => step(-1),
      t: strip.focus,
      o: objects.focus,
      m: matrix.focus,
      s: steps.focus,
      "?": () => find("keys").showModal(),
      Escape: clearHighlight,
    }[event.key];
    if (!action || (shown === undefined && event.key !== "?")) return;
    event.preventDefault();
    action();
  }

  function clearHighlight() {
    if (chosen) chosen.owners = [];
    point(null);
  }

  function start() {
    const count = (fits) => index.samples.filter(fits).length;
    for (const [value, [name, fits]] of Object.entries(FILTERS)) {
      find("filter").append(new Option(`${name} (${count(fits)})`, value));
    }
    for (const [value, [name]] of Object.entries(ORDERS)) find("order").append(new Option(name, value));
    find("run").textContent = index.run;
    const held = index.samples.length;
    const part = held < index.total ? `${held.toLocaleString("en")} of ` : "";
    find("scope").textContent = part + countOf(Math.max(held, index.total), "answer");
    if (index.report) {
      find("report").href = index.report;
      find("report").hidden = false;
    }
    listen();
    head.start();
    arrange();
    follow();
    performance.mark("ready");
  }

  function listen() {
    const restart = () => {
      arrange();
      show(list[0]);
    };
    find("filter").addEventListener("change", restart);
    find("order").addEventListener("change", restart);
    find("back").addEventListener("click", () => step(-1));
    find("on").addEventListener("click", () => step(1));
    find("help").addEventListener("click", () => find("keys").showModal());
    document.addEventListener("keydown", onKey);
    window.addEventListener("hashchange", follow);
    const stage = find("stage");
    const target = (event) => {
      const node = event.target.closest("[data-owner]");
      return node && { owners: [Number(node.dataset.owner)], token: null };
    };
    stage.addEventListener("pointerover", (event) => point(target(event)));
    stage.addEventListener("pointerleave", () => point(null));
    stage.addEventListener("click", (event) => target(event) && choose(target(event)));
  }

  return { start, go, point, choose };
})();

inspector.start();
