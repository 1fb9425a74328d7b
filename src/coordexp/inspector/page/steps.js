"use strict";
// The same image at other steps, side by side: what the model learned to see.
const steps = (() => {
  const MAX_CARDS = 12; // around the current step
  const host = find("steps");

  function show(k) {
    const { samples } = data.index;
    const here = samples[k];
    const alike = (other) => samples[other].record === here.record && samples[other].image === here.image;
    const same = samples.map((_, other) => other).filter(alike);
    same.sort((a, b) => samples[a].step - samples[b].step || a - b);
    const at = same.indexOf(k);
    const first = Math.max(0, Math.min(at - MAX_CARDS / 2, same.length - MAX_CARDS));
    const shown = same.slice(first, first + MAX_CARDS);
    const hidden = same.length - shown.length;
    find("alone").hidden = same.length > 1 && hidden === 0;
    find("alone").textContent = hidden > 0 ? `${shown.length} of ${same.length}, around this step.` : alone(here);
    host.replaceChildren(...(same.length > 1 ? shown.map((other) => card(other, other === k)) : []));
    const current = host.querySelector("[aria-current]");
    if (current) host.scrollLeft = current.offsetLeft - host.clientWidth / 2 + current.offsetWidth / 2;
  }

  function alone(entry) {
    const reason = entry.followed ? "is followed, but was answered only once so far" : "is not followed";
    return `This is the only answer to this image on the page: the image ${reason}.`;
  }

  function card(k, current) {
    const entry = data.index.samples[k];
    const stage = element("span", "stage");
    imageView.small(stage, entry, data.sample(k));
    const counts = `${entry.matched} of ${entry.true} found${entry.extra ? `, ${entry.extra} extra` : ""}`;
    const loss = entry.loss === null ? "no loss" : `loss ${entry.loss.toFixed(3)}`;
    const node = element("button", "step", stage, element("b", "", `step ${entry.step}`));
    node.append(element("span", "", counts), element("span", "", loss));
    node.type = "button";
    if (current) node.setAttribute("aria-current", "true");
    node.addEventListener("click", () => inspector.go(k));
    return node;
  }

  return { show, focus: () => (host.querySelector("[aria-current]") ?? host.querySelector("button"))?.focus() };
})();
