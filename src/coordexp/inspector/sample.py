"""From a dumped example to what the page shows of it: shapes, the token strip, the match matrix, the trace.

The strip is the kept prefix, then what was cut off in the place where it stood, then what was appended and the end
of the turn. So token i of the answer is token i of the strip, and what follows the prefix in the target stands
behind the cut.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coordexp.correction import Reason, Role
from coordexp.correction.spans import entry_spans
from coordexp.inspector.words import REASONS, count_invalid, facts, is_cut, notes
from coordexp.vocab import VocabularyTable

CUT, MASKED_DESC = 7, 8  # roles of the page alone, behind those of `Role`
NOBODY = -1


def summary(whole: Mapping[str, Any], trained: Mapping[str, Any] | None) -> dict[str, Any]:
    """What the list of samples needs: counts, and what filters and orders go by."""
    place, result, rollout = whole["place"], whole["result"], whole["rollout"]
    return {
        "step": place["step"] + 1,
        "record": place["record"],
        "true": len(whole["truth"]),
        "matched": len(result["pairs"]),
        "missed": len(result["missed"]),
        "extra": len(result["extra"]),
        "invalid": count_invalid(result),
        "tokens": len(rollout["ids"]),
        "truncated": is_cut(whole),
        "fallback": result["fallback"],
        "finish": rollout["finish_reason"],
        "loss": trained["loss"] if trained else None,
    }


def shown(
    whole: Mapping[str, Any], trained: Mapping[str, Any] | None, table: VocabularyTable, *, desc_is_masked: bool
) -> dict[str, Any]:
    """The sample as its JSON element has it."""
    result = whole["result"]
    strip = Strip(whole)
    return {
        "width": whole["picture"]["width"],
        "height": whole["picture"]["height"],
        "facts": facts(whole),
        "notes": notes(whole),
        "truth": _truth(whole),
        "objects": _objects(whole),
        "match": {
            "rows": [k for k, one in enumerate(result["objects"]) if one["reason"] is None],
            "iou": [[None if value is None else round(value, 6) for value in row] for row in result["iou"]],
            "gate": whole["settings"]["maskiou_gate"],
            "top_k": whole["settings"]["candidate_top_k"],
            "rejections": result["gate_rejections"],
        },
        "prompt_tokens": result["prompt_length"],
        "tokens": strip.tokens(table, desc_is_masked=desc_is_masked),
        "trained": _trained(trained, strip) if trained else None,
    }


class Strip:
    """Where the tokens of a dumped answer and of its target stand in the strip."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        result = whole["result"]
        self.missed: list[int] = result["missed"]
        self.prompt: int = result["prompt_length"]
        self.prefix: int = result["prefix_tokens"]
        self.answer: list[int] = whole["rollout"]["ids"]
        self.streams: dict[str, list[Any]] = {
            name: values[self.prompt :] for name, values in result["streams"].items()
        }
        self.cut = len(self.answer) - self.prefix

    def of_target(self, position: int) -> int:
        """Of a position in the target, counted from the answer's first token."""
        return position if position < self.prefix else position + self.cut

    def tokens(self, table: VocabularyTable, *, desc_is_masked: bool) -> dict[str, Any]:
        own = {name: self._with_cut(values, None) for name, values in self.streams.items()}
        roles = self._with_cut(self.streams["roles"], CUT)
        if desc_is_masked:
            roles = [MASKED_DESC if role == Role.tail_desc else role for role in roles]
        owner, breaks = self._entries(table)
        return {
            "ids": [*self.answer, *self.streams["ids"][self.prefix :]],
            "roles": roles,
            "owner": owner,
            "target": [value if value is None else round(value, 2) for value in own["coord_targets"]],
            "breaks": sorted(breaks),
        }

    def _with_cut(self, values: Sequence[Any], filling: Any) -> list[Any]:
        return [*values[: self.prefix], *[filling] * self.cut, *values[self.prefix :]]

    def _entries(self, table: VocabularyTable) -> tuple[list[int], set[int]]:
        """Whose each token is, and where lines begin: at entries, at the cut and at the tail."""
        target = self.streams["ids"][:-1]
        owner = [NOBODY] * (self.cut + len(target) + 1)
        breaks = {0, self.prefix, self.prefix + self.cut} if self.cut else {0, self.prefix}
        for k, (start, end) in enumerate(entry_spans(self.answer, table)):
            owner[start:end] = [k] * (end - start)
            breaks.add(start)
        written = entry_spans(target, table)
        kept = len(written) - len(self.missed)
        for k, (start, end) in enumerate(written):
            if k == kept:
                own = (p for p in range(self.prefix, end) if self.streams["roles"][p] != Role.masked_prefix)
                start = next(own)  # the comma before it is there for it
            whose = k if k < kept else -2 - self.missed[k - kept]
            for position in range(max(start, self.prefix), end):
                owner[self.of_target(position)] = whose
            if start >= self.prefix:
                breaks.add(self.of_target(start))
        return owner, {each for each in breaks if each < len(owner)}


def _truth(whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`by` is the object, of all that were written, which was matched."""
    valid = [k for k, one in enumerate(whole["result"]["objects"]) if one["reason"] is None]
    by = {j: valid[i] for i, j in whole["result"]["pairs"]}
    return [dict(one) | {"by": by.get(j)} for j, one in enumerate(whole["truth"])]


def _objects(whole: Mapping[str, Any]) -> list[dict[str, Any]]:
    result = whole["result"]
    valid = [k for k, one in enumerate(result["objects"]) if one["reason"] is None]
    of = {valid[i]: (j, result["iou"][i][j]) for i, j in result["pairs"]}
    found = []
    for k, one in enumerate(result["objects"]):
        true, iou = of.get(k, (None, None))
        found.append(
            {name: one[name] for name in ("desc", "kind", "bins", "reason")}
            | {"key": one["key"] or "cut off"}  # what is not read to its end has no key
            | {"of": true, "iou": None if iou is None else round(iou, 6)}
            | {"words": REASONS[Reason(one["reason"])] if one["reason"] else None}
        )
    return found


def _trained(trained: Mapping[str, Any], strip: Strip) -> dict[str, Any]:
    """What the model said of each supervised token when the sample was trained, by places in the strip."""
    places = [strip.of_target(position - strip.prompt) for position in trained["where"]]
    by_place = dict(zip(trained["where"], places, strict=True))
    return {
        **{name: trained[name] for name in ("step", "loss", "terms")},
        **{name: dict(zip(places, trained[name], strict=True)) for name in ("nll", "mass")},
        "bins": {by_place[int(position)]: runs for position, runs in trained["bins"].items()},
    }
