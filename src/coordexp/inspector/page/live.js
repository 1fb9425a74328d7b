"use strict";
// A page that is served asks now and then whether the run has more to show. A page from disk asks nobody.
(() => {
  const PAUSE = 3000; // milliseconds
  const PATIENCE = 5; // unanswered questions in a row
  if (!data.index.live) return;
  const button = find("news");
  let unanswered = 0;

  async function ask() {
    try {
      const since = encodeURIComponent(data.index.stamp ?? "");
      const answer = await fetch(`changed?since=${since}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const { changed, step } = await answer.json();
      unanswered = 0;
      if (changed) return tell(`New answers, up to step ${step}: show`, false);
    } catch {
      unanswered += 1;
      if (unanswered === PATIENCE) return tell("No longer served: this stays as it is", true);
    }
    return setTimeout(ask, PAUSE);
  }

  function tell(words, over) {
    button.textContent = words;
    button.disabled = over;
    button.hidden = false;
  }

  button.addEventListener("click", () => location.reload());
  setTimeout(ask, PAUSE);
})();
