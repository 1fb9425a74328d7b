"""Show what a correction policy did with a dumped answer, and how the answer was chosen among several.

A rebuilt answer is a new sequence of objects, its items. An owner is the number by which the page links tokens,
shapes and rows: the index of a predicted object, -2 - j of the true object j, and behind the true objects those
that were added because several answers agree on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordexp.correction import ParsedRollout, parse_rollout
from coordexp.vocab import VocabularyTable

MAX_TEXT = 4000  # characters of an answer that was not chosen


@dataclass(frozen=True)
class RebuiltAnswer:
    """The changes of a rebuilt answer. `owners` are those of its items, in their order. `changes` has a word for
    each predicted object that was left out or moved: duplicate, removed (an extra) or moved."""

    owners: tuple[int, ...]
    changes: Mapping[int, str]
    own_tokens: int
    unlikely: Mapping[int, int]  # by position in the streams: the token that should be unlikely there
    replaces_desc: bool

    def number(self, owner: int) -> int | None:
        """Return the number of an object in the rebuilt answer, or None if it was left out."""
        return self.owners.index(owner) + 1 if owner in self.owners else None

    def count(self, change: str) -> int:
        return list(self.changes.values()).count(change)


def read_rebuilt(dump: Mapping[str, Any]) -> RebuiltAnswer | None:
    """Return None for an answer that was kept as it is, with the missed objects appended."""
    result = dump["result"]
    rebuilt = result.get("rebuilt")
    if rebuilt is None:
        return None
    valid = valid_indices(result)
    words = {"duplicates": "duplicate", "removed_extras": "removed", "moved": "moved"}
    return RebuiltAnswer(
        owners=_number_owners(rebuilt["items"], valid, len(dump["truth"])),
        changes={valid[i]: word for name, word in words.items() for i in rebuilt[name]},
        own_tokens=rebuilt["own_tokens"],
        unlikely={int(at): id for at, id in rebuilt["unlikely"].items()},
        replaces_desc=dump["settings"]["correction"]["supervise"] == "matched_with_desc",
    )


def valid_indices(result: Mapping[str, Any]) -> list[int]:
    """Return which objects of the answer are valid. Matches and items number them."""
    return [k for k, obj in enumerate(result["objects"]) if obj["reason"] is None]


def _number_owners(
    items: Sequence[tuple[int | None, int | None]], valid: Sequence[int], true_count: int
) -> tuple[int, ...]:
    owners, agreed = [], true_count
    for predicted, true in items:
        if predicted is not None:
            owners.append(valid[predicted])
        elif true is not None:
            owners.append(-2 - true)
        else:
            owners.append(-2 - agreed)
            agreed += 1
    return tuple(owners)


def show_agreed(dump: Mapping[str, Any], rebuilt: RebuiltAnswer, table: VocabularyTable) -> list[dict[str, Any]]:
    """Return the objects that were added because several answers agree on them, in the order of their owners, as
    they stand in the rebuilt answer."""
    first = -2 - len(dump["truth"])
    numbers = [number for number, owner in enumerate(rebuilt.owners, 1) if owner <= first]
    objects = _parse_target(dump["result"], table).objects if numbers else ()
    shown = []
    for number in numbers:
        desc, geometry = objects[number - 1].desc, objects[number - 1].geometry
        shape = (geometry.kind, list(geometry.bins)) if geometry else (None, None)
        shown.append({"desc": desc, "kind": shape[0], "bins": shape[1], "number": number})
    return shown


def _parse_target(result: Mapping[str, Any], table: VocabularyTable) -> ParsedRollout:
    return parse_rollout(result["streams"]["ids"][result["prompt_length"] :], table)


def show_choice(dump: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how many answers there were and the numbers and texts of those that were not chosen. Return None if
    there was only one."""
    choice = dump.get("choice")
    if choice is None:
        return None
    texts = choice["texts"]
    others = [[k + 1, _shorten(text)] for k, text in enumerate(texts) if k != choice["index"]]
    return {"count": len(texts), "others": others}


def _shorten(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} ... (the dump has all {len(text):,} characters)"


def describe_choice(dump: Mapping[str, Any]) -> str | None:
    """Return in words which answer was chosen and what several agree on, or None if there was only one."""
    choice = dump.get("choice")
    if choice is None:
        return None
    words = f"answer {choice['index'] + 1} of {len(choice['texts'])}, the one with the highest F1"
    if choice["agreed"] is None:
        return words
    count, votes = len(choice["agreed"]), dump["settings"]["choice"]["votes"]
    noun = "object without a label is" if count == 1 else "objects without a label are"
    return f"{words}; {count:,} {noun} in at least {votes} answers"
