"""One example of a step, whole, as a line of JSON: enough to see what was done, and to do it again without a
model."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coordexp.config.rollout import RolloutMatching
from coordexp.correction.correct import Correction, correct
from coordexp.correction.serialise import FieldOrder
from coordexp.data import Geometry, TrueObject
from coordexp.rollout.backend import Request, Rollout
from coordexp.vocab.table import VocabularyTable

FORMAT = TRACE_FORMAT = 1
# What correcting an answer reads of the settings.
READ = ("candidate_top_k", "maskiou_gate", "maskiou_resolution", "fp_cost", "fn_cost", "optimal_transport")
_STREAMS = ("ids", "roles", "kinds", "sides", "coord_targets", "weights")


@dataclass(frozen=True)
class Place:
    """Where in a run an example was made."""

    step: int
    micro: int
    rank: int
    record: int


def to_line(
    place: Place,
    request: Request,
    rollout: Rollout,
    truth: tuple[TrueObject, ...],
    correction: Correction,
    *,
    order: FieldOrder,
    settings: RolloutMatching,
) -> str:
    decode = asdict(request.decode) | {"guard": request.decode.guard.model_dump(mode="json")}
    whole = {
        "format": FORMAT,
        "place": asdict(place),
        "picture": asdict(request.picture),
        "decode": decode,
        "seed": request.seed,
        "rollout": asdict(rollout),
        "truth": [{"desc": one.desc, "kind": one.geometry.kind, "bins": one.geometry.bins} for one in truth],
        "order": order,
        "settings": settings.model_dump(mode="json", include=set(READ)),
        "result": described(correction),
    }
    return json.dumps(whole)


def described(correction: Correction) -> dict[str, Any]:
    """A correction as plain JSON values."""
    parsed, match, segment = correction.parsed, correction.match, correction.segment
    return {
        "objects": [
            {
                "key": one.key,
                "desc": one.desc,
                "kind": one.geometry.kind if one.geometry else None,
                "bins": list(one.geometry.bins) if one.geometry else None,
                "at": list(one.coord_indices),
                "reason": one.reason.value if one.reason else None,
            }
            for one in parsed.objects
        ],
        "prefix_tokens": len(parsed.prefix_ids),
        "remainder": parsed.remainder.decode("latin-1"),
        "truncated": parsed.truncated,
        "fallback": parsed.fallback,
        "unread": parsed.unread,
        "pairs": [list(pair) for pair in match.pairs],
        "missed": list(match.missed),
        "extra": list(match.extra),
        "gate_rejections": match.gate_rejections,
        "iou": [_plain(row) for row in match.iou],
        "prompt_length": segment.prompt_length,
        "streams": {name: _plain(getattr(segment, name)) for name in _STREAMS},
    }


def replay(line: str | bytes, table: VocabularyTable) -> list[str]:
    """Corrects the dumped answer again. What differs from the dump, one text each; none when all is the same."""
    whole = json.loads(line)
    if whole["format"] != FORMAT:
        raise ValueError(f"a dump of format {whole['format']}; this version reads {FORMAT}")
    truth = [TrueObject(one["desc"], Geometry(one["kind"], tuple(one["bins"]))) for one in whole["truth"]]
    rollout = whole["rollout"]
    again = correct(
        rollout["prompt_ids"],
        rollout["ids"],
        truth,
        table=table,
        order=whole["order"],
        settings=RolloutMatching.model_validate(whole["settings"]),
    )
    made = described(again)
    if "unread" not in whole["result"]:  # a dump of an earlier release, which did not count these objects
        del made["unread"]
    return list(_differences("result", whole["result"], made))


def _plain(values: np.ndarray) -> list[Any]:
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values.tolist()]


def _differences(where: str, dumped: Any, made: Any) -> Iterator[str]:
    if isinstance(dumped, dict) and isinstance(made, dict):
        for name in sorted({*dumped, *made}):
            yield from _differences(f"{where}.{name}", dumped.get(name), made.get(name))
    elif isinstance(dumped, list) and isinstance(made, list) and len(dumped) == len(made):
        found = (_differences(f"{where}[{k}]", a, b) for k, (a, b) in enumerate(zip(dumped, made, strict=True)))
        yield from itertools.islice(itertools.chain.from_iterable(found), 1)
    elif isinstance(dumped, float) and isinstance(made, float) and math.isclose(dumped, made, abs_tol=1e-4):
        return  # the last digits of a transport plan differ between processors
    elif dumped != made:
        yield f"{where}: {_short(dumped)} in the dump, {_short(made)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
