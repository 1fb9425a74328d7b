"use strict";
// The tokens of an answer, token line per object. Lines are grouped into chunks. Only chunks near the visible part have
// elements; the others keep their height. One token is in the tab order, and its chunk always has elements.
const strip = (() => {
  const SIZE = 120; // approximate number of tokens in a chunk
  const host = find("strip");
  const near = new IntersectionObserver(
    (entries) => entries.forEach((entry) => (entry.isIntersecting ? fill : empty)(chunks[entry.target.dataset.chunk])),
    { root: host, rootMargin: "400px 0px" },
  );
  let sample = null;
  let lines = []; // [first token, end]
  let chunks = []; // {from, to, lines, box, height}
  let active = 0;
  let lit = new Set();

  function show(next) {
    sample = next;
    lines = splitLines(sample.tokens);
    chunks = groupLines(lines);
    active = 0;
    lit = new Set();
    near.disconnect();
    host.replaceChildren(...chunks.map((chunk) => chunk.box));
    host.scrollTop = 0;
    const width = Math.max(200, host.clientWidth - 130);
    for (const chunk of chunks) {
      chunk.height = estimateHeight(chunk, width);
      chunk.box.style.height = `${chunk.height}px`;
      near.observe(chunk.box);
    }
  }

  // Begins a new line at every break. The opening brace stays with the first object.
  function splitLines({ ids, breaks }) {
    const starts = breaks.filter((at) => at > 2 && at < ids.length);
    const ends = [0, ...starts, ids.length];
    return ends.slice(1).flatMap((to, k) => {
      const parts = [];
      for (let from = ends[k]; from < to; from += 2 * SIZE) parts.push([from, Math.min(to, from + 2 * SIZE)]);
      return parts;
    });
  }

  function groupLines(all) {
    const groups = [];
    for (const line of all) {
      const last = groups.at(-1);
      if (last && line[1] - last.from <= SIZE) {
        last.to = line[1];
        last.lines.push(line);
      } else {
        groups.push({ from: line[0], to: line[1], lines: [line], box: element("div", "chunk"), height: 0 });
        groups.at(-1).box.dataset.chunk = groups.length - 1;
        groups.at(-1).box.role = "presentation";
      }
    }
    return groups;
  }

  function estimateHeight(chunk, width) {
    let rows = 0;
    for (const [from, to] of chunk.lines) {
      let letters = 0;
      for (let i = from; i < to; i += 1) letters += data.text(sample.tokens.ids[i]).length + 1;
      rows += Math.max(1, Math.ceil((letters * 8) / width));
    }
    return rows * 25;
  }

  function fill(chunk) {
    if (chunk.box.firstChild) return;
    chunk.box.append(...chunk.lines.map(line));
    chunk.box.style.height = "";
  }

  function empty(chunk) {
    if (!chunk.box.firstChild || holds(chunk, active)) return;
    chunk.height = chunk.box.offsetHeight;
    chunk.box.style.height = `${chunk.height}px`;
    chunk.box.replaceChildren();
  }

  const holds = (chunk, i) => chunk.from <= i && i < chunk.to;

  function line([from, to]) {
    const row = element("div", "line");
    row.role = "presentation";
    const words = element("div", "words");
    words.role = "presentation";
    for (let i = from; i < to; i += 1) words.append(token(i));
    row.append(margin(from, to), words);
    return row;
  }

  // The outcome of the object on this line.
  function margin(from, to) {
    const { owner } = sample.tokens;
    let at = from;
    while (at < to && owner[at] === -1) at += 1;
    if (at === to) return element("span", "margin");
    const object = data.describeOwner(sample, owner[at]);
    const node = element("span", `margin ${object.state}`, outcome(object, at));
    node.dataset.owner = owner[at];
    node.ariaHidden = "true";
    node.classList.toggle("lit", lit.has(owner[at]));
    return node;
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
    const coord = data.isCoord(ids[i]);
    const node = element("span", `token ${style}${coord ? " bin" : ""}`, data.text(ids[i]));
    node.dataset.i = i;
    node.dataset.owner = owner[i];
    node.role = "option";
    node.tabIndex = i === active ? 0 : -1;
    node.ariaSelected = String(i === active);
    node.ariaLabel = `${node.textContent.trim() || "space"}, ${name}`;
    if (sample.unlikely[i] !== undefined) {
      node.classList.add("unlikely");
      node.title = `should be unlikely here: ${data.text(sample.unlikely[i])}`;
      node.ariaLabel += `, ${node.title}`;
    }
    node.ariaPosInSet = i + 1;
    node.ariaSetSize = ids.length;
    const nll = sample.trained?.nll[i];
    if (nll != null) node.style.setProperty("--heat", `${Math.round(Math.min(1, nll / 5) * 55)}%`);
    node.classList.toggle("lit", lit.has(owner[i]));
    return node;
  }

  const tokenNode = (i) => host.querySelector(`[data-i="${i}"]`);

  // Moves the tab stop to a token and scrolls the strip to it.
  function reveal(i, focus = false) {
    const before = tokenNode(active);
    active = i;
    const chunk = chunks.find((candidate) => holds(candidate, i));
    fill(chunk);
    const now = tokenNode(i);
    if (before && before !== now) before.ariaSelected = "false";
    moveTabStop(before, now);
    now.ariaSelected = "true";
    const top = now.getBoundingClientRect().top - host.getBoundingClientRect().top;
    if (top < 4 || top > host.clientHeight - 34) host.scrollTop += top - host.clientHeight / 3;
    if (focus) {
      now.focus({ preventScroll: true });
      now.scrollIntoView({ block: "nearest" });
    }
  }

  function step(key, whole) {
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

  function light(owners) {
    lit = owners;
  }

  const at = (event) => event.target.closest?.("[data-i]");
  const target = (i) => ({ owners: [sample.tokens.owner[i]], token: i });
  const beside = (event) => {
    const margin = event.target.closest?.(".margin[data-owner]");
    return margin && { owners: [Number(margin.dataset.owner)], token: null };
  };
  host.addEventListener("pointerover", (event) => {
    const token = at(event);
    inspector.point(token ? target(Number(token.dataset.i)) : beside(event));
  });
  host.addEventListener("click", (event) => beside(event) && inspector.choose(beside(event)));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => {
    const token = at(event);
    if (!token) return;
    reveal(Number(token.dataset.i));
    inspector.choose(target(active));
  });
  host.addEventListener("keydown", (event) => {
    if (!at(event) || event.altKey || event.metaKey) return;
    const next = step(event.key, event.ctrlKey);
    if (next === null) return;
    event.preventDefault();
    reveal(next, true);
  });

  return { show, light, reveal, focus: () => reveal(active, true), active: () => active };
})();
