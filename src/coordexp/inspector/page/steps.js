"use strict";
// The same picture at other steps, side by side: what the model learned to see.
const steps = (() => {
  const MOST = 12; // around the current one
  const host = find("steps");

  function show(k) {
    const { samples } = data.index;
    const here = samples[k];
    const alike = (other) => samples[other].record === here.record && samples[other].image === here.image;
    const same = samples.map((_, other) => other).filter(alike);
    same.sort((a, b) => samples[a].step - samples[b].step || a - b);
    const at = same.indexOf(k);
    const first = Math.max(0, Math.min(at - MOST / 2, same.length - MOST));
    const shown = same.slice(first, first + MOST);
    const left = same.length - shown.length;
    find("alone").hidden = same.length > 1 && left === 0;
    find("alone").textContent = left > 0 ? `${shown.length} of ${same.length}, around this one.` : alone(here);
    host.replaceChildren(...(same.length > 1 ? shown.map((other) => card(other, other === k)) : []));
    const current = host.querySelector("[aria-current]");
    if (current) host.scrollLeft = current.offsetLeft - host.clientWidth / 2 + current.offsetWidth / 2;
  }

  function alone(entry) {
    const why = entry.followed ? "is followed, and was answered once so far" : "is not among those that are followed";
    return `This is the only answer to this picture on the page: it ${why}.`;
  }

  function card(k, current) {
    const entry = data.index.samples[k];
    const stage = element("span", "stage");
    picture.small(stage, entry, data.sample(k));
    const counts = `${entry.matched} of ${entry.true} found${entry.extra ? `, ${entry.extra} extra` : ""}`;
    const loss = entry.loss === null ? "no loss" : `loss ${entry.loss.toFixed(3)}`;
    const made = element("button", "step", stage, element("b", "", `step ${entry.step}`));
    made.append(element("span", "", counts), element("span", "", loss));
    made.type = "button";
    if (current) made.setAttribute("aria-current", "true");
    made.addEventListener("click", () => inspector.go(k));
    return made;
  }

  return { show, focus: () => (host.querySelector("[aria-current]") ?? host.querySelector("button"))?.focus() };
})();
