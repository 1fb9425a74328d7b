"use strict";
// The sample as a whole: its name and counts, the terms of its loss, and where it comes from.
const head = (() => {
  function show(entry, sample) {
    find("name").replaceChildren(`Step ${entry.step} `, element("small", "", element("bdi", "", entry.image)));
    find("tally").replaceChildren(...tally(entry).map(([words, style]) => element("span", style, words)));
    find("notes").replaceChildren(...sample.notes.map((note) => element("p", "note", note)));
    const { roles } = sample.tokens;
    const [all, trained] = [roles.length, roles.filter(data.isTrained).length].map((n) => n.toLocaleString("en"));
    const prompt = countOf(sample.prompt_tokens, "token");
    find("length").textContent = `${all}, ${trained} of them trained, after a prompt of ${prompt}`;
    find("roles").replaceChildren(...data.roles(sample).map(legend));
    const facts = sample.facts.map(([name, value]) => [name, element("bdi", "", value)]);
    find("about").replaceChildren(element("div", "", ...loss(sample.trained)), origin(facts, sample.others));
  }

  function tally(entry) {
    return [
      [data.countFound(entry), "matched"],
      ...(entry.missed ? [[`${entry.missed} missed`, "missed"]] : []),
      ...(entry.extra ? [[`${entry.extra} extra`, "extra"]] : []),
      ...(entry.invalid ? [[`${entry.invalid} invalid`, "invalid"]] : []),
      ...(entry.truncated ? [["truncated", "invalid"]] : []),
      [entry.loss === null ? "loss not known" : `loss ${entry.loss.toFixed(3)}`, "plain"],
    ];
  }

  function legend([style, name, meaning]) {
    const shape = { coord: "512", added: "512", end: "end" }[style] ?? "abc";
    const sign = element("span", `token ${style}${shape === "512" ? " bin" : ""}`, shape);
    return element("div", "", element("dt", "", sign, name), element("dd", "", meaning));
  }

  function loss(trained) {
    if (trained === null) {
      const reason = "Not known: this sample was not trained yet, or the run wrote no traces.";
      return [element("h3", "", "Loss"), element("p", "no-data", reason)];
    }
    const terms = Object.entries(trained.terms).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const most = Math.max(1e-9, ...terms.map(([, value]) => Math.abs(value)));
    const rows = terms.map(([name, value]) => {
      const bar = element("i", "", { style: `width: ${(100 * Math.abs(value)) / most}%` });
      return [name, element("span", "meter", bar), value === null ? "not a number" : value.toFixed(4)];
    });
    const when = element("small", "", `at step ${trained.step}, of this sample only`);
    const whole = trained.loss === null ? "was not a number" : trained.loss.toFixed(3);
    return [element("h3", "", `Loss ${whole} `, when), list("terms", rows)];
  }

  // The answers that were not chosen are behind a summary.
  function origin(facts, others) {
    const texts = others.map(([number, text]) => [`${number}`, element("pre", "", element("bdi", "", text))]);
    const summary = element("summary", "", `${countOf(others.length, "answer")} not chosen`);
    const details = element("details", "", summary, list("", texts), { id: "others", hidden: !others.length });
    return element("div", "", element("h3", "", "Origin"), list("facts", facts), details);
  }

  return { show };
})();

// A served page asks from time to time whether the run has more to show. A page from disk sends no requests.
(() => {
  const PAUSE = 3000; // milliseconds
  const MAX_FAILURES = 5; // in a row
  if (data.index.stamp === null) return;
  const button = find("news");
  let failures = 0;

  async function ask() {
    const answer = await fetch("stamp", { cache: "no-store" }).catch(() => null);
    const isNew = answer?.ok && (await answer.text()) !== data.index.stamp;
    failures = answer?.ok ? 0 : failures + 1;
    if (!isNew && failures < MAX_FAILURES) return setTimeout(ask, PAUSE);
    button.textContent = isNew ? "New answers: show" : "The server has stopped: this page is not updated any more";
    button.disabled = !isNew;
    button.hidden = false;
  }

  button.addEventListener("click", () => location.reload());
  setTimeout(ask, PAUSE);
})();

// Which sample is shown, and what is highlighted in it: what the reader points at, or else what was chosen last.
const inspector = (() => {
  const { index } = data;
  const REGIONS = { t: "strip", o: "objects" }; // by the key that goes to them
  let list = []; // numbers of samples, filtered and ordered
  let shown = null;
  let sample = null;
  let pointed = null;
  let chosen = null;

  // A filter is a field that samples must have, and an order one by which the largest is first.
  function arrange() {
    const [field, order] = [find("filter").value, find("order").value];
    const { samples } = index;
    list = samples.map((_, k) => k).filter((k) => !field || samples[k][field]);
    const value = (k) => samples[k][order] ?? -Infinity;
    if (order) list.sort((a, b) => value(b) - value(a) || a - b);
  }

  function go(k) {
    if (!list.includes(k)) {
      find("filter").value = "";
      arrange();
    }
    show(k);
  }

  function show(k) {
    const region = Object.values(REGIONS).find((id) => find(id).contains(document.activeElement));
    shown = k;
    find("sample").hidden = k === undefined;
    find("nothing").hidden = k !== undefined;
    showPlace(list.indexOf(k), list.length);
    if (k === undefined) return;
    sample = data.sample(k);
    pointed = null;
    chosen = null;
    head.show(index.samples[k], sample);
    imageView.show(index.samples[k], sample);
    objects.show(sample);
    strip.show(sample);
    detail.clear();
    const token = worst();
    if (sample.tokens.ids.length) choose({ owners: [sample.tokens.owner[token]], token });
    history.replaceState(null, "", `#${encodeURIComponent(index.samples[k].id)}`);
    if (region) focusIn(find(region));
  }

  // The coordinate that was written furthest from its target.
  function worst() {
    const { ids, roles, target } = sample.tokens;
    const error = (i) => (roles[i] === WRITTEN_COORD ? Math.abs(ids[i] - index.coord0 - target[i]) : -1);
    const first = Math.max(0, ids.findIndex(data.isCoord));
    return ids.reduce((most, _, i) => (error(i) > error(most) ? i : most), first);
  }

  function point(target) {
    pointed = target;
    light();
  }

  // An object is shown by its first coordinate. If it has no token in the strip, the chosen token stays.
  function tokenOf({ owners: [owner], token }) {
    if (token !== null || owner === undefined) return token ?? chosen?.token ?? null;
    const copies = [false, true].flatMap((isCut) => data.coordsOf(sample, owner, isCut));
    const first = copies[0] ?? sample.tokens.owner.indexOf(owner);
    return first < 0 ? (chosen?.token ?? null) : first;
  }

  function choose(target) {
    pointed = null; // the choice counts, wherever the mouse rests
    chosen = { ...target, token: tokenOf(target) };
    if (chosen.token !== null) strip.reveal(chosen.token);
    const row = find("objects").querySelector(`[data-owner="${target.owners[0]}"]`);
    if (row) bringIntoView(find("objects"), row);
    light();
  }

  function light() {
    const now = pointed ?? chosen ?? { owners: [], token: null };
    const owners = now.owners.filter((owner) => owner !== -1);
    for (const node of document.querySelectorAll(".lit")) node.classList.remove("lit");
    for (const owner of owners) {
      for (const node of document.querySelectorAll(`[data-owner="${owner}"]`)) node.classList.add("lit");
    }
    find("stage").classList.toggle("dim", owners.length > 0);
    const token = tokenOf(now);
    if (token !== null) detail.show(sample, token);
  }

  const step = (by) => {
    const next = list[list.indexOf(shown) + by];
    if (next !== undefined) show(next);
  };

  // Goes to the sample that the address names: #99.0.12 is a sample, #step=100 the first one at or after that step.
  function follow() {
    const address = new URLSearchParams(`id=${location.hash.slice(1)}`.replace(/^id=step=/, "step="));
    const [id, from] = [address.get("id"), Number(address.get("step"))];
    const later = index.samples.map((entry) => entry.step).filter((at) => at >= from).sort((a, b) => a - b)[0];
    const k = index.samples.findIndex((entry) => (id === null ? entry.step === later : entry.id === id));
    find("astray").hidden = id === "" || (k >= 0 && (id !== null || later === from));
    find("astray").textContent = `${clip(id ?? `step=${from}`, 40)} is not on this page, which holds `
      + `${find("scope").textContent} (see coordexp inspect --samples). This is ${k >= 0 ? "the next" : "another"} sample.`;
    if (k >= 0) go(k);
    else show(shown ?? list[0]);
  }

  function onKey(event) {
    if (event.target.closest("input, select, dialog") || event.altKey || event.ctrlKey || event.metaKey) return;
    const { key } = event;
    if (key === "?") openKeys();
    else if (shown === undefined) return;
    else if (key === "j" || key === "n") step(1);
    else if (key === "k" || key === "p") step(-1);
    else if (key in REGIONS) focusIn(find(REGIONS[key]));
    else if (key === "Escape") clearHighlight();
    else return;
    event.preventDefault();
  }

  function clearHighlight() {
    if (chosen) chosen.owners = [];
    point(null);
  }

  function start() {
    for (const id of ["filter", "order"]) {
      find(id).addEventListener("change", () => {
        arrange();
        show(list[0]);
      });
    }
    find("back").addEventListener("click", () => step(-1));
    find("on").addEventListener("click", () => step(1));
    find("help").addEventListener("click", openKeys);
    document.addEventListener("keydown", onKey);
    window.addEventListener("hashchange", follow);
    connect(find("stage"), "[tabindex]", "svg");
    arrange();
    follow();
    performance.mark("ready");
  }

  return { start, point, choose };
})();

inspector.start();
