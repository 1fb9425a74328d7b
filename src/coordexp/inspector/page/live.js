"use strict";
// A served page asks from time to time whether the run has more to show. A page from disk sends no requests.
(() => {
  const PAUSE = 3000; // milliseconds
  const MAX_FAILURES = 5; // in a row
  if (!data.index.live) return;
  const button = find("news");
  let failures = 0;

  async function ask() {
    try {
      const since = encodeURIComponent(data.index.stamp ?? "");
      const answer = await fetch(`changed?since=${since}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const { changed, step } = await answer.json();
      failures = 0;
      if (changed) return announce(`New answers, up to step ${step}: show`, false);
    } catch {
      failures += 1;
      if (failures === MAX_FAILURES) return announce("The server has stopped: this page is not updated any more", true);
    }
    return setTimeout(ask, PAUSE);
  }

  function announce(words, isOver) {
    button.textContent = words;
    button.disabled = isOver;
    button.hidden = false;
  }

  button.addEventListener("click", () => location.reload());
  setTimeout(ask, PAUSE);
})();
