"use strict";
// The tokens of an answer, a line for each object. Lines are gathered in chunks, and only those near the window have
// elements; the others keep their height. One token is in the tab order, and its chunk is never emptied.
const strip = (() => {
  const SIZE = 120; // tokens of a chunk, about
  const host = find("strip");
  const near = new IntersectionObserver(
    (seen) => seen.forEach((one) => (one.isIntersecting ? fill : empty)(chunks[one.target.dataset.chunk])),
    { root: host, rootMargin: "400px 0px" },
  );
  let sample = null;
  let lines = []; // [first token, behind the last]
  let chunks = []; // {from, to, lines, box, height}
  let active = 0;
  let lit = new Set();

  function show(next) {
    sample = next;
    lines = cutIntoLines(sample.tokens);
    chunks = gather(lines);
    active = 0;
    lit = new Set();
    near.disconnect();
    host.replaceChildren(...chunks.map((chunk) => chunk.box));
    host.scrollTop = 0;
    const width = Math.max(200, host.clientWidth - 130);
    for (const chunk of chunks) {
      chunk.height = guess(chunk, width);
      chunk.box.style.height = `${chunk.height}px`;
      near.observe(chunk.box);
    }
  }

  // A new line at every break; an opening brace of its own stays with the first object.
  function cutIntoLines({ ids, breaks }) {
    const starts = breaks.filter((at) => at > 2 && at < ids.length);
    const ends = [0, ...starts, ids.length];
    return ends.slice(1).flatMap((to, k) => {
      const parts = [];
      for (let from = ends[k]; from < to; from += 2 * SIZE) parts.push([from, Math.min(to, from + 2 * SIZE)]);
      return parts;
    });
  }

  function gather(all) {
    const found = [];
    for (const line of all) {
      const last = found.at(-1);
      if (last && line[1] - last.from <= SIZE) {
        last.to = line[1];
        last.lines.push(line);
      } else {
        found.push({ from: line[0], to: line[1], lines: [line], box: element("div", "chunk"), height: 0 });
        found.at(-1).box.dataset.chunk = found.length - 1;
        found.at(-1).box.role = "presentation";
      }
    }
    return found;
  }

  function guess(chunk, width) {
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

  // What became of the object of this line.
  function margin(from, to) {
    const { owner } = sample.tokens;
    let at = from;
    while (at < to && owner[at] === -1) at += 1;
    if (at === to) return element("span", "margin");
    const { state, iou } = data.about(sample, owner[at]);
    const overlap = iou === null ? "" : ` ${iou.toFixed(2)}`;
    const words = state === "missed" ? "missed, added" : `${state}${overlap}`;
    const made = element("span", `margin ${state}`, words);
    made.dataset.owner = owner[at];
    made.ariaHidden = "true";
    made.classList.toggle("lit", lit.has(owner[at]));
    return made;
  }

  function token(i) {
    const { ids, roles, owner } = sample.tokens;
    const [style, name] = ROLES[roles[i]];
    const coord = data.isCoord(ids[i]);
    const made = element("span", `token ${style}${coord ? " bin" : ""}`, data.text(ids[i]));
    made.dataset.i = i;
    made.dataset.owner = owner[i];
    made.role = "option";
    made.tabIndex = i === active ? 0 : -1;
    made.ariaSelected = String(i === active);
    made.ariaLabel = `${made.textContent.trim() || "space"}, ${name}`;
    made.ariaPosInSet = i + 1;
    made.ariaSetSize = ids.length;
    const nll = sample.trained?.nll[i];
    if (nll != null) made.style.setProperty("--heat", `${Math.round(Math.min(1, nll / 5) * 55)}%`);
    made.classList.toggle("lit", lit.has(owner[i]));
    return made;
  }

  const made = (i) => host.querySelector(`[data-i="${i}"]`);

  // Makes the token the one in the tab order and brings it into the strip's window.
  function reveal(i, focus = false) {
    const before = made(active);
    active = i;
    const chunk = chunks.find((one) => holds(one, i));
    fill(chunk);
    const now = made(i);
    if (before && before !== now) before.ariaSelected = "false";
    rove(before, now);
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
    const one = event.target.closest?.(".margin[data-owner]");
    return one && { owners: [Number(one.dataset.owner)], token: null };
  };
  host.addEventListener("pointerover", (event) => {
    const one = at(event);
    inspector.point(one ? target(Number(one.dataset.i)) : beside(event));
  });
  host.addEventListener("click", (event) => beside(event) && inspector.choose(beside(event)));
  host.addEventListener("pointerleave", () => inspector.point(null));
  host.addEventListener("focusin", (event) => {
    const one = at(event);
    if (!one) return;
    reveal(Number(one.dataset.i));
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
