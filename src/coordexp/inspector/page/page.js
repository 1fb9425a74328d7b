"use strict";
// Which sample is shown, and what is lit in it: the one that is pointed at, or else the one that was chosen.
const inspector = (() => {
  const { index } = data;
  const FILTERS = {
    all: ["all", () => true],
    misses: ["with misses", (one) => one.missed > 0],
    extra: ["with extra", (one) => one.extra > 0],
    invalid: ["with invalid", (one) => one.invalid > 0],
    truncated: ["truncated", (one) => one.truncated],
  };
  const ORDERS = {
    steps: ["by step", null],
    missed: ["most missed", (one) => one.missed],
    loss: ["highest loss", (one) => one.loss ?? -Infinity],
  };
  let list = []; // numbers of samples, filtered and ordered
  let shown = null;
  let sample = null;
  let owned = new Map();
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
    owned = data.owned(sample);
    pointed = null;
    chosen = null;
    head.show(index.samples[k], sample);
    picture.large(index.samples[k], sample);
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

  // In bins, from the target: a coordinate that the model wrote, or what it expected where one was added.
  function far(i) {
    const { ids, roles, target } = sample.tokens;
    if (target[i] === null) return -1;
    if (roles[i] === 2) return Math.abs(ids[i] - index.coord0 - target[i]);
    const runs = sample.trained?.bins[i];
    return runs ? Math.abs(distribution.expected(distribution.given(runs).p) - target[i]) : 0;
  }

  // The coordinate that the model was furthest from.
  function worst() {
    const { ids } = sample.tokens;
    let found = Math.max(0, ids.findIndex((id) => data.isCoord(id)));
    let most = far(found);
    ids.forEach((_, i) => {
      const now = far(i);
      if (now > most) [found, most] = [i, now];
    });
    return found;
  }

  function point(target) {
    pointed = target;
    light();
  }

  // An object is shown by its first coordinate; one that left no token in the strip changes nothing.
  function tokenOf(target) {
    const tokens = owned.get(target.owners[0]);
    return target.token ?? tokens?.coords[0] ?? tokens?.tokens[0] ?? chosen?.token ?? null;
  }

  // A cell of the matrix leaves the matrix as it is.
  function choose(target) {
    pointed = null; // what was chosen counts, wherever the mouse rests
    chosen = { ...target, token: tokenOf(target) };
    if (chosen.token !== null && target.token !== strip.active()) strip.reveal(chosen.token);
    if (!target.from) matrix.follow(target.owners[0]);
    if (!find("objects").contains(document.activeElement)) objects.reveal(target.owners[0]);
    light();
  }

  function light() {
    const now = pointed ?? chosen ?? { owners: [], token: null };
    const owners = new Set(now.owners.filter((owner) => owner !== -1));
    for (const one of document.querySelectorAll(".lit")) one.classList.remove("lit");
    for (const owner of owners) {
      for (const one of document.querySelectorAll(`[data-owner="${owner}"]`)) one.classList.add("lit");
    }
    find("stage").classList.toggle("dim", owners.size > 0);
    strip.light(owners);
    const token = tokenOf(now);
    if (token !== null) detail.show(sample, token, owned);
  }

  const step = (by) => {
    const next = list[list.indexOf(shown) + by];
    if (next !== undefined) show(next);
  };

  // #99.0.12 is a sample, #step=100 the first one at or after that step.
  function addressed() {
    let hash = location.hash.slice(1);
    try {
      hash = decodeURIComponent(hash);
    } catch {
      return -1;
    }
    if (!hash.startsWith("step=")) return index.samples.findIndex((one) => one.id === hash);
    const from = Number(hash.slice(5));
    const later = index.samples.map((one, k) => [one.step, k]).filter(([at]) => at >= from);
    return later.length ? later.reduce((a, b) => (b[0] < a[0] ? b : a))[1] : -1;
  }

  function follow() {
    const k = addressed();
    const asked = location.hash.slice(1);
    const there = k >= 0 && (!asked.startsWith("step=") || index.samples[k].step === Number(asked.slice(5)));
    find("astray").hidden = there || !asked;
    find("astray").textContent = `${clipped(asked, 40)} is not on this page, which holds ${find("scope").textContent}`
      + ` (coordexp inspect --samples): this is ${k >= 0 ? "the next one" : "another one"}.`;
    if (k >= 0) go(k);
    else show(shown ?? list[0]);
  }

  function keyed(event) {
    if (event.target.closest("input, select, dialog") || event.altKey || event.ctrlKey || event.metaKey) return;
    const done = {
      j: () => step(1),
      n: () => step(1),
      k: () => step(-1),
      p: () => step(-1),
      t: strip.focus,
      o: objects.focus,
      m: matrix.focus,
      s: steps.focus,
      "?": () => find("keys").showModal(),
      Escape: quiet,
    }[event.key];
    if (!done || (shown === undefined && event.key !== "?")) return;
    event.preventDefault();
    done();
  }

  function quiet() {
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
    find("scope").textContent = part + many(Math.max(held, index.total), "answer");
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
    const afresh = () => {
      arrange();
      show(list[0]);
    };
    find("filter").addEventListener("change", afresh);
    find("order").addEventListener("change", afresh);
    find("back").addEventListener("click", () => step(-1));
    find("on").addEventListener("click", () => step(1));
    find("help").addEventListener("click", () => find("keys").showModal());
    document.addEventListener("keydown", keyed);
    window.addEventListener("hashchange", follow);
    const stage = find("stage");
    const target = (event) => {
      const one = event.target.closest("[data-owner]");
      return one && { owners: [Number(one.dataset.owner)], token: null };
    };
    stage.addEventListener("pointerover", (event) => point(target(event)));
    stage.addEventListener("pointerleave", () => point(null));
    stage.addEventListener("click", (event) => target(event) && choose(target(event)));
  }

  return { start, go, point, choose };
})();

inspector.start();
