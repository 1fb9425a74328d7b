"""Turn a dumped example into what the page shows: shapes, the token strip, the match matrix, the trace, and words.

The strip has the kept prefix, then the tokens that were cut off, in their original place, then the appended tokens
and the end of the turn. So token i of the answer is token i of the strip, and what follows the prefix in the
target stands behind the cut. If a policy rebuilt the answer, the prefix ends at the first change: the rest of the
answer is the cut, and behind it stands the rest of the rebuilt answer.

A rebuilt answer is a new sequence of objects, its items. An owner is the number by which the page links tokens,
shapes and rows: the index of a predicted object, -2 - j of the true object j, and behind the true objects those
that were added because several answers agree on them. A true object that was matched has the owner of its
prediction.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from coordexp.answers.entries import Reason
from coordexp.answers.parse import entry_indices, entry_spans, parse_rollout
from coordexp.answers.segment import Role
from coordexp.answers.table import VocabularyTable

CUT, MASKED_DESC = 7, 8  # roles that only the page has, numbered after those of `Role`
NOBODY = -1
LEAST_IOU = 0.005  # of a pair that is shown
SHOWN_SETTINGS = ("mode", "temperature", "top_p", "top_k", "num_beams", "max_new_tokens")  # of decoding
MAX_TEXT = 4000  # characters of an answer that was not chosen
MAX_NAME = 40  # characters of the name of another object
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
LABELS = {"missed": "missed, added", "agreed": "agreed, added", "removed": "extra, removed"}
ENDED = {
    "stop": "by the model itself",
    "length": "at the token limit",
    "repeat": "by the repeat guard, because it repeated itself",
}


class DumpedAnswer:
    """A dumped example, with what follows from it. `valid` are the indices of the valid objects of the answer:
    matches and items number them. A `rebuilt` answer has other objects than the rollout: `owners` are those of its
    items, in their order, and `changes` has a word for each predicted object that was left out or moved."""

    def __init__(self, dump: Mapping[str, Any]) -> None:
        self.dump = dump
        self.result: Mapping[str, Any] = dump["result"]
        self.truth: Sequence[Mapping[str, Any]] = dump["truth"]
        self.objects: Sequence[Mapping[str, Any]] = self.result["objects"]
        self.valid = [k for k, obj in enumerate(self.objects) if obj["reason"] is None]
        self.pairs = {self.valid[i]: (j, self.result["iou"][i][j]) for i, j in self.result["pairs"]}
        self.matched: dict[int, int] = {j: k for k, (j, _) in self.pairs.items()}
        self.rebuilt: Mapping[str, Any] | None = self.result.get("rebuilt")
        self.owners: list[int] = []
        self.changes: dict[int, str] = {}
        if self.rebuilt is not None:
            self.owners = list(self._number_owners(self.rebuilt["items"]))
            for name, word in (("duplicates", "duplicate"), ("removed_extras", "removed"), ("moved", "moved")):
                self.changes |= {self.valid[i]: word for i in self.rebuilt[name]}
        self.kept: int = self.rebuilt["own_tokens"] if self.rebuilt else self.result["prefix_tokens"]

    def _number_owners(self, items: Sequence[tuple[int | None, int | None]]) -> Iterator[int]:
        agreed = len(self.truth)
        for predicted, true in items:
            if predicted is not None:
                yield self.valid[predicted]
            elif true is not None:
                yield -2 - true
            else:
                yield -2 - agreed
                agreed += 1

    def owner_of_true(self, j: int) -> int:
        return self.matched.get(j, -2 - j)

    def number(self, owner: int) -> int | None:
        """Return the number of an object in the rebuilt answer, or None if it was left out."""
        return self.owners.index(owner) + 1 if owner in self.owners else None

    @property
    def agreed_numbers(self) -> list[int]:
        """The numbers of the objects that were added because several answers agree on them."""
        return [number for number, owner in enumerate(self.owners, 1) if owner <= -2 - len(self.truth)]

    @property
    def unused(self) -> int:
        """How many objects of the answer are not used: those with a reason, and those in text that is not read."""
        return len(self.objects) - len(self.valid) + int(self.result["unread"])


def summarise_sample(dump: Mapping[str, Any], trained: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the entry of the index: what samples are filtered and ordered by, and what other steps show."""
    answer = DumpedAnswer(dump)
    return {
        "step": dump["place"]["step"] + 1,
        "true": len(answer.truth),
        "matched": len(answer.pairs),
        "renamed": sum(answer.objects[k]["desc"] != answer.truth[j]["desc"] for k, (j, _) in answer.pairs.items()),
        "missed": len(answer.result["missed"]),
        "extra": len(answer.result["extra"]),
        "invalid": answer.unused,
        "truncated": bool(dump["rollout"]["finish_reason"] == "length" or answer.result["truncated"]),
        "loss": trained["loss"] if trained else None,
    }


def show_sample(
    dump: Mapping[str, Any], trained: Mapping[str, Any] | None, table: VocabularyTable, *, desc_is_masked: bool
) -> dict[str, Any]:
    """Return the JSON element of a sample."""
    answer = DumpedAnswer(dump)
    result, settings, strip = answer.result, dump["settings"], Strip(answer, table)
    tokens = strip.tokens(desc_is_masked=desc_is_masked)
    taught = {owner for owner, target in zip(tokens["owner"], tokens["target"], strict=True) if target is not None}
    objects = [*_show_predicted(answer, taught), *_show_truth(answer), *_show_agreed(answer, table)]
    return {
        "width": dump["picture"]["width"],
        "height": dump["picture"]["height"],
        "facts": _list_facts(answer),
        "notes": _list_notes(answer),
        "objects": objects,
        "rebuilt": answer.rebuilt is not None,
        "others": [
            (k + 1, text[:MAX_TEXT])
            for k, text in enumerate(dump["choice"]["texts"] if "choice" in dump else ())
            if k != dump["choice"]["index"]
        ],
        "match": {
            "gate": settings["maskiou_gate"],
            "top_k": settings["candidate_top_k"],
            "rejections": result["gate_rejections"],
        },
        "prompt_tokens": result["prompt_length"],
        "tokens": tokens,
        "lines": strip.lines({obj["owner"]: obj["state"] for obj in reversed(objects)}),
        "trained": _show_trace(trained, strip) if trained else None,
    }


class Strip:
    """The tokens of a dumped answer and of its target, in the order of the strip. `owner` has the object that each
    token belongs to, and `breaks` the indices at which lines begin."""

    def __init__(self, answer: DumpedAnswer, table: VocabularyTable) -> None:
        self.answer = answer
        self.prompt: int = answer.result["prompt_length"]
        self.prefix = answer.kept
        self.ids: list[int] = answer.dump["rollout"]["ids"]
        self.streams: dict[str, list[Any]] = {
            name: values[self.prompt :] for name, values in answer.result["streams"].items()
        }
        self.cut = len(self.ids) - self.prefix
        self.owner, self.breaks = self._find_owners(table)

    def of_target(self, position: int) -> int:
        """Return the index in the strip of a position in the target, counted from the answer's first token."""
        return position if position < self.prefix else position + self.cut

    def tokens(self, *, desc_is_masked: bool) -> dict[str, Any]:
        targets = self._insert_cut(self.streams["coord_targets"], None)
        roles = self._insert_cut(self.streams["roles"], CUT)
        if desc_is_masked:
            roles = [MASKED_DESC if role == Role.tail_desc else role for role in roles]
        return {
            "ids": [*self.ids, *self.streams["ids"][self.prefix :]],
            "roles": roles,
            "owner": self.owner,
            "target": [value if value is None else round(value, 2) for value in targets],
        }

    def lines(self, states: Mapping[int, str]) -> list[tuple[int, int, int, str]]:
        """Return the lines of the strip: the first token, the end, the owner of the first object in it, and what
        became of that object. The opening brace stays with the first object. `states` are by owner."""
        lines = []
        for first, end in itertools.pairwise([0, *(index for index in self.breaks if index > 2), len(self.owner)]):
            at = next((k for k in range(first, end) if self.owner[k] != NOBODY), first)
            owner = self.owner[at]
            lines.append((first, end, owner, "" if owner == NOBODY else self._label(at, owner, states[owner])))
        return lines

    def _label(self, at: int, owner: int, state: str) -> str:
        """Return what became of the object whose tokens in a line begin here. The end of an object that begins
        before the first change has no label of its own."""
        if self.answer.rebuilt is not None and self.prefix <= at < self.prefix + self.cut:
            if at == self.prefix and self.owner[at - 1 : at] == [owner]:
                return ""
            if state in ("matched", "extra"):
                return "moved below" if self.answer.changes.get(owner) == "moved" else "rewritten below"
        iou = self.answer.pairs[owner][1] if owner in self.answer.pairs else None
        return LABELS.get(state, state) + ("" if iou is None else f" {iou:.2f}")

    def _insert_cut(self, values: Sequence[Any], filling: Any) -> list[Any]:
        return [*values[: self.prefix], *[filling] * self.cut, *values[self.prefix :]]

    def _find_owners(self, table: VocabularyTable) -> tuple[list[int], list[int]]:
        """Return the object that each token belongs to, and the indices at which lines begin: at entries, at the
        cut and at the tail. A missed object j has the owner -2 - j."""
        owner = [NOBODY] * (self.cut + len(self.streams["ids"]))
        breaks = {0, self.prefix, self.prefix + self.cut}
        for k, (start, end) in enumerate(entry_spans(self.ids, table)):
            owner[start:end] = [k] * (end - start)
            breaks.add(start)
        ranges = self._rebuilt_ranges(table) if self.answer.rebuilt else self._appended_ranges(table)
        for start, end, entry_owner in ranges:
            for position in range(max(start, self.prefix), end):
                owner[self.of_target(position)] = entry_owner
            if start >= self.prefix:
                breaks.add(self.of_target(start))
        return owner, sorted(index for index in breaks if index < len(owner))

    def _appended_ranges(self, table: VocabularyTable) -> Iterator[tuple[int, int, int]]:
        """Yield the range of tokens and the owner of each object of a target to which the missed ones were
        appended."""
        missed, spans = self.answer.result["missed"], entry_spans(self.streams["ids"][:-1], table)
        kept = len(spans) - len(missed)
        for k, (start, end) in enumerate(spans):
            if k == kept:  # the comma before the first appended entry belongs to it
                roles = self.streams["roles"]
                start = next(p for p in range(self.prefix, end) if roles[p] != Role.masked_prefix)
            yield start, end, k if k < kept else -2 - missed[k - kept]

    def _rebuilt_ranges(self, table: VocabularyTable) -> Iterator[tuple[int, int, int]]:
        """Yield the range of tokens and the owner of each object of a rebuilt answer. As in training, a token
        belongs to the object in which it ends."""
        indices = np.array(entry_indices(self.streams["ids"][:-1], table))
        for k, owner in enumerate(self.answer.owners):
            start, end = np.searchsorted(indices, (k, k + 1)).tolist()
            yield start, end, owner


def _show_predicted(answer: DumpedAnswer, taught: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the objects of the answer. `taught` are the owners of supervised coordinates."""
    for k, obj in enumerate(answer.objects):
        change, number, key = answer.changes.get(k), answer.number(k), obj["key"] or "cut off"
        if obj["reason"]:
            state, words, mark = "invalid", REASONS[Reason(obj["reason"])], ""
        elif change == "duplicate":
            state, words, mark = "duplicate", "repeats another object: removed", "duplicate"
        elif change == "removed":
            state, words, mark = "removed", "matches no true object: removed", "removed"
        else:
            state = "matched" if k in answer.pairs else "extra"
            words = _describe_pair(answer, k) if k in answer.pairs else _describe_extra(answer, k, taught)
            mark = f"{key.removeprefix('object_')} → {number}" if change == "moved" else ""
            if change == "moved":
                words += f", moved: {key} → object_{number}"
            elif number is not None and key != f"object_{number}":
                words += f", now object_{number}"
        shown = _show_object(obj, k, "Predicted", state, key, words, mark)
        yield shown | {"candidates": [] if obj["reason"] else _list_candidates(answer, k)}


def _describe_pair(answer: DumpedAnswer, k: int) -> str:
    """Return which true object a predicted one was matched with, its name if it has another, and their overlap."""
    true, iou = answer.pairs[k]
    desc = answer.truth[true]["desc"]
    words = f"true {true + 1}"
    if desc != answer.objects[k]["desc"]:
        replaces = answer.rebuilt and answer.dump["settings"]["correction"]["supervise"] == "matched_with_desc"
        words += f", {'whose name replaces it:' if replaces else 'which is called'} {desc[:MAX_NAME]}"
    return words if iou is None else f"{words}, IoU {iou:.2f}"


def _describe_extra(answer: DumpedAnswer, k: int, taught: set[int]) -> str:
    """Return what an extra is, and whether it is kept or taught because other answers have it too."""
    removes_extras = answer.dump["settings"]["correction"]["extras"] == "remove"
    is_agreed = answer.number(k) is not None and (removes_extras or k in taught)
    return f"matches no true object{', but other answers have it' if is_agreed else ''}"


def _list_candidates(answer: DumpedAnswer, k: int) -> list[tuple[int, str, float]]:
    """Return the owner and the name of each true object that a prediction was compared with, and their IoU. The
    best is first."""
    row = answer.result["iou"][answer.valid.index(k)]
    candidates = [
        (answer.owner_of_true(j), answer.truth[j]["desc"], round(iou, 4))
        for j, iou in enumerate(row)
        if iou is not None and iou >= LEAST_IOU
    ]
    return sorted(candidates, key=itemgetter(2), reverse=True)


def _show_truth(answer: DumpedAnswer) -> Iterator[dict[str, Any]]:
    """Yield the true objects. A missed one has a number in a rebuilt answer."""
    for j, true in enumerate(answer.truth):
        number, mark = answer.number(-2 - j), ""
        if j in answer.matched:
            state, words = "true", f"by {answer.objects[answer.matched[j]]['key']}"
        elif number is None:
            state, words = "missed", "added to the target"
        else:
            state, words, mark = "missed", f"added as object_{number}", f"→ {number}"
        yield _show_object(true, answer.owner_of_true(j), "True", state, f"true {j + 1}", words, mark)


def _show_agreed(answer: DumpedAnswer, table: VocabularyTable) -> Iterator[dict[str, Any]]:
    """Yield the objects that were added because several answers agree on them, as they stand in the rebuilt
    answer."""
    numbers, streams = answer.agreed_numbers, answer.result["streams"]
    objects = parse_rollout(streams["ids"][answer.result["prompt_length"] :], table).objects if numbers else ()
    for n, number in enumerate(numbers):
        added = objects[number - 1]
        obj: dict[str, Any] = {"desc": added.desc, "kind": None, "bins": None}
        if added.geometry is not None:
            obj |= {"kind": added.geometry.kind, "bins": list(added.geometry.bins)}
        owner, words = -2 - len(answer.truth) - n, f"several answers have it: added as object_{number}"
        yield _show_object(obj, owner, "Agreed", "agreed", f"agreed {n + 1}", words, f"→ {number}")


def _show_object(
    obj: Mapping[str, Any], owner: int, group: str, state: str, key: str, words: str, mark: str
) -> dict[str, Any]:
    """Return an object as the list, the image and the details show it. `state` is what became of it, `words` say
    it in the list, and `mark` stands behind its name in the image if a policy changed something."""
    shape = {name: obj[name] for name in ("desc", "kind", "bins")}
    return shape | {"owner": owner, "group": group, "state": state, "key": key, "words": words, "mark": mark}


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


def _list_facts(answer: DumpedAnswer) -> list[list[str]]:
    """Return rows of a name and a value that say how the answer was made."""
    dump = answer.dump
    rollout, place = dump["rollout"], dump["place"]
    facts = {
        "answered by": f"the weights after {place['step']:,} update{'' if place['step'] == 1 else 's'}",
        "decoding": ", ".join(
            f"{name} {dump['decode'][name]}" for name in SHOWN_SETTINGS if name in dump["decode"]
        ),
        "chosen": _describe_choice(dump),
        "seed": str(dump["seed"]),
        "ended": str(ENDED.get(rollout["finish_reason"], rollout["finish_reason"])),
        "answer": f"{len(rollout['ids']):,} tokens, {answer.kept:,} of them kept",
        "prompt": f"{answer.result['prompt_length']:,} tokens",
        "question": str(dump.get("question", "")),
        "place": f"record {place['record']}, micro-step {place['micro']}, rank {place['rank']}",
    }
    return [[name, value] for name, value in facts.items() if value]


def _describe_choice(dump: Mapping[str, Any]) -> str:
    """Return in words which answer was chosen and what several agree on, or nothing if there was only one."""
    choice = dump.get("choice")
    if choice is None:
        return ""
    words = f"answer {choice['index'] + 1} of {len(choice['texts'])}, the one with the highest F1"
    if choice["agreed"] is None:
        return words
    votes = dump["settings"]["choice"]["votes"]
    return f"{words}; objects without a label in at least {votes} answers: {len(choice['agreed']):,}"


def _list_notes(answer: DumpedAnswer) -> list[str]:
    """Return sentences about what is unusual. Counts of missed and extra objects are shown elsewhere."""
    result, notes = answer.result, []
    if result["fallback"]:
        notes.append("Nothing in the answer can be continued: all of it is removed, and the target starts over.")
    elif result["truncated"]:
        notes.append("The answer stops before it is closed: everything after its last complete object is cut off.")
    elif any(obj["reason"] in (Reason.syntax, Reason.placeholder) for obj in answer.objects):
        cut = len(answer.dump["rollout"]["ids"]) - result["prefix_tokens"]
        notes.append(f"The answer cannot be read to its end: its last {cut:,} tokens are cut off.")
    if answer.unused:
        end = ", and the corrected answer leaves them out" if answer.rebuilt else ""  # otherwise they stay in it
        notes.append(f"Objects of the answer that cannot be used and are not matched{end}: {answer.unused:,}.")
    if unread := result.get("unread"):
        notes.append(f"Objects in text that is not read, counted by their keys: {unread:,}.")
    return notes
