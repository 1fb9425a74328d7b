"""Where each entry of an answer stands among its tokens, for people who look at one.

Comes in: a rollout's ids. Goes out: a range of tokens for each of the objects that `parse_rollout` finds in them.
Kept apart from it because training does not need to know.
"""

from collections.abc import Sequence

import numpy as np

from coordexp.correction.json_text import expect, read_pair
from coordexp.correction.parse import LOST, look_up, parse_rollout, readable
from coordexp.vocab.table import VocabularyTable


def entry_spans(ids: Sequence[int], table: VocabularyTable) -> tuple[tuple[int, int], ...]:
    """[start, end) for each: from the token with the first quote of its key to behind the one with the end of its
    value. A token with the end of one entry and the beginning of the next belongs to both. A last object that is
    cut off goes to the end of what can be read; where nothing of it was written, it has no token."""
    parts, _ = look_up(ids, table)
    text, _ = readable("".join(parts))
    ends = np.cumsum([len(part) for part in parts])

    def token(position: int) -> int:
        return int(np.searchsorted(ends, position, side="right"))

    reasons = [found.reason for found in parse_rollout(ids, table).objects]
    spans = _in_text(text, sum(reason not in LOST for reason in reasons), any(r in LOST for r in reasons))
    return tuple((token(start), token(end - 1) + 1 if end > start else token(start)) for start, end in spans)


def _in_text(text: str, whole: int, lost: bool) -> list[tuple[int, int]]:
    """Of so many entries that are known to be sound, and of what is cut off behind them."""
    spans: list[tuple[int, int]] = []
    position = text.find("{") + 1
    for _ in range(whole):
        key, value = read_pair(text, position if not spans else expect(text, position, ",") + 1)
        spans.append((key.start, value.end))
        position = value.end
    if lost:
        spans.append((len(text) - len(text[position:].lstrip(" \t\n\r,")), len(text)))
    return spans
