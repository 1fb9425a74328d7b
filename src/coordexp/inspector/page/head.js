"use strict";
// The sample as a whole: its name and counts, the terms of its loss, and where it comes from.
const head = (() => {
  function start() {
    find("kinds").append(...Object.entries(KINDS).map(([kind, words]) => {
      const box = element("input");
      box.type = "checkbox";
      box.checked = true;
      box.dataset.kind = kind;
      box.addEventListener("change", () => find("stage").classList.toggle(`hide-${kind}`, !box.checked));
      const label = element("label", "", box, drawKind(kind), words, element("b"));
      label.dataset.of = kind;
      return label;
    }));
  }

  function drawKind(kind) {
    const points = "2,3 34,3 34,15 2,15";
    const lines = [svg("polygon", { class: "halo", points }), svg("polygon", { points })];
    if (LEFT_OUT.has(kind)) lines.push(svg("line", { x1: 2, y1: 15, x2: 34, y2: 3 }));
    const frame = { viewBox: "0 0 36 18", class: "sample", "aria-hidden": "true" };
    return svg("svg", frame, svg("g", { class: `shape ${kind}` }, ...lines));
  }

  function show(entry, sample) {
    find("name").replaceChildren(`Step ${entry.step} `, element("small", "", element("bdi", "", entry.image)));
    find("tally").replaceChildren(...tally(entry).map(([words, style]) => element("span", style, words)));
    find("notes").replaceChildren(...sample.notes.map((note) => element("p", "note", note)));
    const counts = {};
    for (const { kind } of data.shapes(sample)) counts[kind] = (counts[kind] ?? 0) + 1;
    for (const label of find("kinds").children) {
      const count = counts[label.dataset.of] ?? 0;
      label.lastChild.textContent = count;
      label.hidden = !count && !ALWAYS_LISTED.has(label.dataset.of);
    }
    const { roles } = sample.tokens;
    const [all, trained] = [roles.length, roles.filter(data.isTrained).length].map((n) => n.toLocaleString("en"));
    const prompt = countOf(sample.prompt_tokens, "token");
    find("length").textContent = `${all}, ${trained} of them trained, after a prompt of ${prompt}`;
    legend(sample);
    const facts = sample.facts.map(([name, value]) => [name, element("bdi", "", value)]);
    find("about").replaceChildren(element("div", "", ...loss(sample.trained)), origin(facts, sample.choice));
  }

  function tally(entry) {
    const words = [[`${entry.matched} of ${entry.true} found`, "matched"]];
    if (entry.missed) words.push([`${entry.missed} missed`, "missed"]);
    if (entry.extra) words.push([`${entry.extra} extra`, "extra"]);
    if (entry.duplicates) words.push([`${countOf(entry.duplicates, "duplicate")} removed`, "extra"]);
    if (entry.removed) words.push([`${entry.removed} other extra removed`, "extra"]);
    if (entry.agreed) words.push([`${entry.agreed} agreed`, "agreed"]);
    if (entry.moved) words.push([`${entry.moved} moved`, "matched"]);
    if (entry.invalid) words.push([`${entry.invalid} invalid`, "invalid"]);
    if (entry.truncated) words.push(["truncated", "invalid"]);
    if (entry.fallback) words.push(["unreadable: all true objects added", "invalid"]);
    words.push([entry.loss === null ? "loss not known" : `loss ${entry.loss.toFixed(3)}`, "plain"]);
    return words;
  }

  function legend(sample) {
    const counts = {};
    for (const role of sample.tokens.roles) counts[role] = (counts[role] ?? 0) + 1;
    const marks = Object.keys(sample.unlikely).length;
    find("roles").replaceChildren(...Object.entries(data.roles(sample)).map(([role, [style, name, meaning]]) => {
      const shape = { coord: "512", added: "512", end: "end" }[style] ?? "abc";
      const sign = element("span", `token ${style}${shape === "512" ? " bin" : ""}`, shape);
      const count = counts[role] ?? 0;
      const term = element("dt", "", sign, element("b", "", count.toLocaleString("en")), name);
      const row = element("div", count ? "" : "absent", term, element("dd", "", meaning));
      row.dataset.role = role;
      return row;
    }), ...(marks ? [unlikelyRow(marks)] : []));
  }

  function unlikelyRow(count) {
    const sign = element("span", "token unlikely", "abc");
    const term = element("dt", "", sign, element("b", "", count.toLocaleString("en")), "unlikely token");
    return element("div", "", term, element("dd", "", "another one, which would begin a duplicate here, is made less likely"));
  }

  function loss(trained) {
    if (trained === null) {
      const reason = "Not known: this sample was not trained yet, or the run wrote no traces.";
      return [element("h3", "", "Loss"), element("p", "no-data", reason)];
    }
    const terms = Object.entries(trained.terms).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const most = Math.max(1e-9, ...terms.map(([, value]) => Math.abs(value)));
    const rows = terms.map(([name, value]) => {
      const bar = element("i");
      bar.style.width = `${(100 * Math.abs(value)) / most}%`;
      return [name, element("span", "bar", bar), value === null ? "not a number" : value.toFixed(4)];
    });
    const when = element("small", "", `at step ${trained.step}, of this sample only`);
    const whole = trained.loss === null ? "was not a number" : trained.loss.toFixed(3);
    return [element("h3", "", `Loss ${whole} `, when), list("terms", rows)];
  }

  function origin(facts, choice) {
    return element("div", "", element("h3", "", "Origin"), list("facts", facts), ...(choice ? [others(choice)] : []));
  }

  // The answers that were not chosen, behind a summary.
  function others({ count, others: texts }) {
    const title = `The ${countOf(texts.length, "answer")} of ${count} that ${texts.length === 1 ? "was" : "were"} not chosen`;
    const rows = texts.flatMap(([number, text]) => [
      element("h4", "", `Answer ${number}`),
      element("pre", "", element("bdi", "", text)),
    ]);
    const node = element("details", "", element("summary", "", title), ...rows);
    node.id = "others";
    return node;
  }

  return { start, show };
})();
