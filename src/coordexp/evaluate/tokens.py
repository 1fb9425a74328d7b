"""From generated tokens to an answer that can be measured: strict parse, and a score for every object.

The score is the probability of an object's words: of its description and of the structure before it, so of the
choice to go on at all. Coordinates are left out: how probable one bin of a soft distribution is says how soft the
training targets were, and on the demo model ranking with them was no better.
"""

import bisect
import itertools
import json
import math
from collections.abc import Sequence

from coordexp.correction import PredictedObject, parse_rollout
from coordexp.evaluate.answer import Answer, AnswerObject
from coordexp.rollout.backend import Rollout
from coordexp.vocab import VocabularyTable


def answer_of(image_id: int, image: str, rollout: Rollout, table: VocabularyTable) -> Answer:
    parsed = parse_rollout(rollout.ids, table)
    objects = [
        AnswerObject.of(found, _score(found, rollout.logprobs, window) if found.valid else None)
        for found, window in zip(parsed.objects, _windows(rollout.ids, parsed.objects, table), strict=True)
    ]
    return Answer(image_id, image, rollout.text, rollout.finish_reason, len(rollout.ids), tuple(objects))


def _windows(ids: Sequence[int], objects: Sequence[PredictedObject], table: VocabularyTable) -> list[range]:
    """The tokens of each object, valid or not: from the one before its key, which says that there is one more, up
    to where the next object's begin."""
    symbols = [table.symbols[id] if id < len(table.symbols) else "" for id in ids]
    text, ends = "".join(symbols), list(itertools.accumulate(map(len, symbols)))
    starts, at = [], 0
    for found in objects:
        key = text.find(json.dumps(found.key, ensure_ascii=False).encode().decode("latin-1"), at)
        at = key if key >= 0 else at  # a key written with escapes: the window of the object before it is shared
        starts.append(max(0, bisect.bisect_right(ends, at) - 1))
        at += 1
    return [range(*pair) for pair in itertools.pairwise([*starts, len(ids)])]


def _score(found: PredictedObject, logprobs: Sequence[float], window: range) -> float:
    coords = set(found.coord_indices)
    return math.exp(sum(logprobs[k] for k in window if k not in coords))
