"""Turn a dumped example into what the page shows: shapes, the token strip, the match matrix, the trace, and words.

The strip has the kept prefix, then the tokens that were cut off, in their original place, then the appended tokens
and the end of the turn. So token i of the answer is token i of the strip, and what follows the prefix in the
target stands behind the cut. If a policy rebuilt the answer, the prefix ends at the first change: the rest of the
answer is the cut, and behind it stands the rest of the rebuilt answer.

A rebuilt answer is a new sequence of objects, its items. An owner is the number by which the page links tokens,
shapes and rows: the index of a predicted object, -2 - j of the true object j, and behind the true objects those
that were added because several answers agree on them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordexp.answers.entries import Reason
from coordexp.answers.parse import entry_indices, entry_spans, parse_rollout
from coordexp.answers.segment import Role
from coordexp.answers.table import VocabularyTable

CUT, MASKED_DESC = 7, 8  # roles that only the page has, numbered after those of `Role`
NOBODY = -1
MAX_TEXT = 4000  # characters of an answer that was not chosen
REASONS = {
    Reason.truncated: "the answer ends inside it",
    Reason.syntax: "not JSON here: it is cut off, and so is everything after it",
    Reason.placeholder: "contains an image or video token, which no training sequence may have: cut off",
    Reason.bad_key: "its key is not object_N",
    Reason.repeated_key: "its key was written before",
    Reason.not_a_mapping: "not a mapping with desc and a geometry",
    Reason.unexpected_key: "has a field besides desc, bbox_2d and poly",
    Reason.repeated_field: "a field is written twice",
    Reason.missing_desc: "desc is missing, or is not a text",
    Reason.empty_desc: "desc is empty",
    Reason.missing_geometry: "has neither bbox_2d nor poly",
    Reason.two_geometries: "has both bbox_2d and poly",
    Reason.bad_geometry: "its geometry is not a flat list of coordinates",
    Reason.wrong_count: "a box needs four coordinates, a polygon an even number of at least six",
    Reason.degenerate: "inverted, or without area",
    Reason.stray_coord: "has a coordinate token outside its geometry",
    Reason.ambiguous: "a coordinate is spelled in ordinary tokens, so there is no single token to train",
}
ENDED = {
    "stop": "by the model itself",
    "length": "at the token limit",
    "repeat": "by the repeat guard, because it repeated itself",
}


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


def summarise_sample(dump: Mapping[str, Any], trained: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry of the index: counts, and the values that samples are filtered and ordered by."""
    place, result, rollout = dump["place"], dump["result"], dump["rollout"]
    rebuilt = read_rebuilt(dump)
    changes = Counter(rebuilt.changes.values() if rebuilt else ())
    return {
        "step": place["step"] + 1,
        "record": place["record"],
        "true": len(dump["truth"]),
        "matched": len(result["pairs"]),
        "renamed": _count_renamed(dump),
        "missed": len(result["missed"]),
        "extra": len(result["extra"]),
        "invalid": count_invalid(result),
        "tokens": len(rollout["ids"]),
        "truncated": bool(rollout["finish_reason"] == "length" or result["truncated"]),
        "fallback": result["fallback"],
        "finish": rollout["finish_reason"],
        "loss": trained["loss"] if trained else None,
        "duplicates": changes["duplicate"],
        "removed": changes["removed"],
        "moved": changes["moved"],
        "agreed": sum(owner <= -2 - len(dump["truth"]) for owner in rebuilt.owners) if rebuilt else 0,
    }


def _count_renamed(dump: Mapping[str, Any]) -> int:
    """Return how many matched objects have another name than the true object."""
    result = dump["result"]
    valid = valid_indices(result)
    return sum(result["objects"][valid[i]]["desc"] != dump["truth"][j]["desc"] for i, j in result["pairs"])


def show_sample(
    dump: Mapping[str, Any], trained: Mapping[str, Any] | None, table: VocabularyTable, *, desc_is_masked: bool
) -> dict[str, Any]:
    """Return the JSON element of a sample."""
    result, rebuilt = dump["result"], read_rebuilt(dump)
    strip = Strip(dump, rebuilt)
    tokens = strip.tokens(table, desc_is_masked=desc_is_masked)
    taught = {owner for owner, target in zip(tokens["owner"], tokens["target"], strict=True) if target is not None}
    return {
        "width": dump["picture"]["width"],
        "height": dump["picture"]["height"],
        "facts": list_facts(dump),
        "notes": list_notes(dump),
        "truth": _show_truth(dump, rebuilt),
        "objects": _show_objects(dump, rebuilt, taught),
        "agreed": show_agreed(dump, rebuilt, table) if rebuilt else [],
        "rebuilt": {"own": rebuilt.own_tokens, "replaces_desc": rebuilt.replaces_desc} if rebuilt else None,
        "choice": show_choice(dump),
        "match": {
            "rows": valid_indices(result),
            "iou": [[None if value is None else round(value, 6) for value in row] for row in result["iou"]],
            "gate": dump["settings"]["maskiou_gate"],
            "top_k": dump["settings"]["candidate_top_k"],
            "rejections": result["gate_rejections"],
        },
        "prompt_tokens": result["prompt_length"],
        "tokens": tokens,
        "unlikely": strip.unlikely(),
        "trained": _show_trace(trained, strip) if trained else None,
    }


class Strip:
    """The tokens of a dumped answer and of its target, in the order of the strip."""

    def __init__(self, dump: Mapping[str, Any], rebuilt: RebuiltAnswer | None) -> None:
        result = dump["result"]
        self.rebuilt = rebuilt
        self.missed: list[int] = result["missed"]
        self.prompt: int = result["prompt_length"]
        self.prefix: int = rebuilt.own_tokens if rebuilt else result["prefix_tokens"]
        self.answer: list[int] = dump["rollout"]["ids"]
        self.streams: dict[str, list[Any]] = {
            name: values[self.prompt :] for name, values in result["streams"].items()
        }
        self.cut = len(self.answer) - self.prefix

    def of_target(self, position: int) -> int:
        """Return the index in the strip of a position in the target, counted from the answer's first token."""
        return position if position < self.prefix else position + self.cut

    def tokens(self, table: VocabularyTable, *, desc_is_masked: bool) -> dict[str, Any]:
        targets = self._insert_cut(self.streams["coord_targets"], None)
        roles = self._insert_cut(self.streams["roles"], CUT)
        if desc_is_masked:
            roles = [MASKED_DESC if role == Role.tail_desc else role for role in roles]
        owner, breaks = self._find_owners(table)
        return {
            "ids": [*self.answer, *self.streams["ids"][self.prefix :]],
            "roles": roles,
            "owner": owner,
            "target": [value if value is None else round(value, 2) for value in targets],
            "breaks": sorted(breaks),
        }

    def unlikely(self) -> dict[int, int]:
        """Return, by index in the strip, the tokens that should be unlikely there."""
        marks = self.rebuilt.unlikely if self.rebuilt else {}
        return {self.of_target(position - self.prompt): id for position, id in marks.items()}

    def _insert_cut(self, values: Sequence[Any], filling: Any) -> list[Any]:
        return [*values[: self.prefix], *[filling] * self.cut, *values[self.prefix :]]

    def _find_owners(self, table: VocabularyTable) -> tuple[list[int], set[int]]:
        """Return the object that each token belongs to, and the indices at which lines begin: at entries, at the
        cut and at the tail. A missed object j has the owner -2 - j."""
        length = len(self.streams["ids"])
        owner = [NOBODY] * (self.cut + length)
        breaks = {0, self.prefix, self.prefix + self.cut} if self.cut else {0, self.prefix}
        for k, (start, end) in enumerate(entry_spans(self.answer, table)):
            owner[start:end] = [k] * (end - start)
            breaks.add(start)
        ranges = self._appended_ranges(table) if self.rebuilt is None else self._rebuilt_ranges(table)
        for start, end, entry_owner in ranges:
            for position in range(max(start, self.prefix), end):
                owner[self.of_target(position)] = entry_owner
            if start >= self.prefix:
                breaks.add(self.of_target(start))
        return owner, {index for index in breaks if index < len(owner)}

    def _appended_ranges(self, table: VocabularyTable) -> Iterator[tuple[int, int, int]]:
        """Yield the range of tokens and the owner of each object of a target to which the missed ones were
        appended."""
        spans = entry_spans(self.streams["ids"][:-1], table)
        kept = len(spans) - len(self.missed)
        for k, (start, end) in enumerate(spans):
            if k == kept:  # the comma before the first appended entry belongs to it
                roles = self.streams["roles"]
                start = next(p for p in range(self.prefix, end) if roles[p] != Role.masked_prefix)
            yield start, end, k if k < kept else -2 - self.missed[k - kept]

    def _rebuilt_ranges(self, table: VocabularyTable) -> Iterator[tuple[int, int, int]]:
        """Yield the range of tokens and the owner of each object of a rebuilt answer. As in training, a token
        belongs to the object in which it ends."""
        assert self.rebuilt is not None
        indices = np.array(entry_indices(self.streams["ids"][:-1], table))
        for k, owner in enumerate(self.rebuilt.owners):
            start, end = np.searchsorted(indices, (k, k + 1)).tolist()
            yield start, end, owner


def _show_truth(dump: Mapping[str, Any], rebuilt: RebuiltAnswer | None) -> list[dict[str, Any]]:
    """Return the true objects. `by` is the index of the matched object in the answer, and `number` is the number
    that a missed object got in a rebuilt answer."""
    valid = valid_indices(dump["result"])
    by = {j: valid[i] for i, j in dump["result"]["pairs"]}
    return [
        dict(true) | {"by": by.get(j), "number": rebuilt.number(-2 - j) if rebuilt else None}
        for j, true in enumerate(dump["truth"])
    ]


def _show_objects(
    dump: Mapping[str, Any], rebuilt: RebuiltAnswer | None, taught: set[int]
) -> list[dict[str, Any]]:
    """Return the objects of the answer. `of` is the index of the matched true object. For a rebuilt answer,
    `change` says what was done, `number` is the new number, and `agreed` is True of an extra that is kept or
    taught because other answers have it too. `taught` are the owners of supervised coordinates."""
    result = dump["result"]
    valid = valid_indices(result)
    pairs = {valid[i]: (j, result["iou"][i][j]) for i, j in result["pairs"]}
    removes_extras = rebuilt is not None and dump["settings"]["correction"]["extras"] == "remove"
    objects = []
    for k, obj in enumerate(result["objects"]):
        true, iou = pairs.get(k, (None, None))
        number = rebuilt.number(k) if rebuilt else None
        is_kept_extra = number is not None and true is None
        objects.append(
            {name: obj[name] for name in ("desc", "kind", "bins", "reason")}
            | {"key": obj["key"] or "cut off"}  # an object that is not read to its end has no key
            | {"of": true, "iou": None if iou is None else round(iou, 6)}
            | {"words": REASONS[Reason(obj["reason"])] if obj["reason"] else None}
            | {"number": number, "change": rebuilt.changes.get(k) if rebuilt else None}
            | {"agreed": is_kept_extra and (removes_extras or k in taught)}
        )
    return objects


def _show_trace(trained: Mapping[str, Any], strip: Strip) -> dict[str, Any]:
    """Return the trace of training, with the model's numbers for each supervised token by its index in the
    strip."""
    indices = [strip.of_target(position - strip.prompt) for position in trained["where"]]
    by_position = dict(zip(trained["where"], indices, strict=True))
    return {
        **{name: trained[name] for name in ("step", "loss", "terms")},
        **{name: dict(zip(indices, trained[name], strict=True)) for name in ("nll", "mass")},
        "bins": {by_position[int(position)]: runs for position, runs in trained["bins"].items()},
    }


def count_invalid(result: Mapping[str, Any]) -> int:
    """Return how many objects of the answer are not used: those with a reason, and those in text that is not
    read."""
    return sum(obj["reason"] is not None for obj in result["objects"]) + int(result["unread"])


def list_facts(dump: Mapping[str, Any]) -> list[list[str]]:
    """Return rows of a name and a value that say how the answer was made."""
    rollout, place, rebuilt = dump["rollout"], dump["place"], read_rebuilt(dump)
    kept = rebuilt.own_tokens if rebuilt else dump["result"]["prefix_tokens"]
    choice = describe_choice(dump)
    return [
        ["answered by", f"the weights after {place['step']:,} update{'' if place['step'] == 1 else 's'}"],
        ["decoding", describe_decoding(dump["decode"])],
        *([["chosen", choice]] if choice else []),
        ["seed", str(dump["seed"])],
        ["ended", str(ENDED.get(rollout["finish_reason"], rollout["finish_reason"]))],
        ["answer", f"{len(rollout['ids']):,} tokens, {kept:,} of them kept"],
        ["prompt", f"{dump['result']['prompt_length']:,} tokens"],
        *([["question", str(dump["question"])]] if "question" in dump else []),
        ["place", f"record {place['record']}, micro-step {place['micro']}, rank {place['rank']}"],
    ]


def describe_decoding(decode: Mapping[str, Any]) -> str:
    words = {
        "greedy": "greedy",
        "sampling": f"sampled at temperature {decode['temperature']:g}",
        "beam": f"best of {decode['num_beams']} beams",
    }.get(decode["mode"], str(decode["mode"]))
    if decode["mode"] == "sampling":
        words += f", top_p {decode['top_p']:g}" if decode["top_p"] < 1 else ""
        words += f", top_k {decode['top_k']}" if decode["top_k"] > 0 else ""
    return f"{words}, at most {decode['max_new_tokens']:,} tokens"


def list_notes(dump: Mapping[str, Any]) -> list[str]:
    """Return sentences about what is unusual. Counts of missed and extra objects are shown elsewhere."""
    result = dump["result"]
    cut = len(dump["rollout"]["ids"]) - result["prefix_tokens"]
    notes = []
    if result["fallback"]:
        notes.append("Nothing in the answer can be continued: all of it is removed, and the target starts over.")
    elif result["truncated"]:
        notes.append("The answer stops before it is closed: everything after its last complete object is cut off.")
    elif any(obj["reason"] in (Reason.syntax, Reason.placeholder) for obj in result["objects"]):
        notes.append(f"The answer cannot be read to its end: its last {cut:,} tokens are cut off.")
    invalid = count_invalid(result)
    is_rebuilt = result.get("rebuilt") is not None  # otherwise they stay in the answer
    if invalid:
        noun, verb, it = ("One object", "is", "it") if invalid == 1 else (f"{invalid:,} objects", "are", "them")
        end = f", and the corrected answer leaves {it} out" if is_rebuilt else ""
        notes.append(f"{noun} of the answer cannot be used and {verb} not matched{end}.")
    if unread := result.get("unread"):
        notes.append(f"Objects in text that is not read, counted by their keys: {unread:,}.")
    return notes


def show_agreed(dump: Mapping[str, Any], rebuilt: RebuiltAnswer, table: VocabularyTable) -> list[dict[str, Any]]:
    """Return the objects that were added because several answers agree on them, in the order of their owners, as
    they stand in the rebuilt answer."""
    first = -2 - len(dump["truth"])
    numbers = [number for number, owner in enumerate(rebuilt.owners, 1) if owner <= first]
    ids = dump["result"]["streams"]["ids"][dump["result"]["prompt_length"] :]
    objects = parse_rollout(ids, table).objects if numbers else ()
    shown = []
    for number in numbers:
        desc, geometry = objects[number - 1].desc, objects[number - 1].geometry
        shape = (geometry.kind, list(geometry.bins)) if geometry else (None, None)
        shown.append({"desc": desc, "kind": shape[0], "bins": shape[1], "number": number})
    return shown


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
