"""The dumps of a run: training examples written to disk in full, for people, `coordexp replay` and the inspector.

`RUN/dumps` has a file of examples for each dumped step (`step-000100.jsonl`), and beside it the traces of their
training (`trained-000100.jsonl`). The tokenizer is there too, so the folder can be read without the model.

This module owns the format of these files. It imports no torch.
"""

import itertools
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from coordexp.answers.table import VocabularyError, VocabularyTable
from coordexp.config.rollout import RolloutMatching
from coordexp.data import Geometry, TrueObject
from coordexp.errors import DataError
from coordexp.files import BestEffort, append_line, drop_torn_line, write_whole
from coordexp.rollout.backend import Request, Rollout

if TYPE_CHECKING:  # matching needs scipy, and whoever only looks for files should not wait for it
    from coordexp.answers.correct import Choice, Correction
    from coordexp.answers.segment import FieldOrder
    from coordexp.objective.carry import ExampleId

logger = logging.getLogger(__name__)

FOLDER = "dumps"  # in a run folder
TOKENIZER = "tokenizer.json"
FORMAT = TRACE_FORMAT = 1
# What reading a line raises if it is not a dumped example.
NOT_A_DUMP = (ValueError, LookupError, TypeError, AttributeError, OverflowError)
# The settings of rollout_matching that correcting an answer depends on.
CORRECTION_SETTINGS = (
    "candidate_top_k",
    "maskiou_gate",
    "match_classes",
    "maskiou_resolution",
    "fp_cost",
    "fn_cost",
    "optimal_transport",
    "correction",
    "choice",
)
_STREAMS = ("ids", "roles", "kinds", "sides", "coord_targets", "weights")
_STEP_FILE = re.compile(r"step-(\d+)\.jsonl")


def step_file(step: int) -> str:
    return f"step-{step:06d}.jsonl"


def step_files(folder: Path) -> dict[int, Path]:
    """Return the files of examples in one folder, by step."""
    matches = [(_STEP_FILE.fullmatch(file.name), file) for file in folder.glob("step-*.jsonl")]
    return dict(sorted((int(match[1]), file) for match, file in matches if match))


def trace_file(file: str) -> str:
    """Return the name of the file with the traces of a file of examples."""
    return file.replace("step-", "trained-", 1)


def read_table(folder: Path) -> VocabularyTable:
    """Return the vocabulary of the tokenizer in a folder of dumps."""
    try:
        return VocabularyTable.from_folder(folder)
    except VocabularyError as error:  # its fix is meant for training
        raise DataError(error.problem, "copy the tokenizer.json of the run's model there") from error


def remove_from_step(folder: Path, step: int) -> None:
    """Remove the dumps of `step` and later ones, which an interrupted run makes again after its last
    checkpoint. From the files that stay, drop a last line that a crash left torn, because traces may still be
    added to them."""
    for dumped_step, examples in step_files(folder).items():
        for file in (examples, examples.with_name(trace_file(examples.name))):
            if dumped_step >= step:
                file.unlink(missing_ok=True)
            elif drop_torn_line(file):
                logger.warning("%s: its last line was torn by a crash and is dropped", file)


class DumpedSample(Protocol):
    """The part of a training sample that a dump needs: the number of its record, its true objects, and the classes
    that are labelled completely."""

    @property
    def index(self) -> int: ...
    @property
    def truth(self) -> tuple[TrueObject, ...]: ...
    @property
    def complete(self) -> tuple[str, ...]: ...


class DumpedAnswers(Protocol):
    """A training sample with its requests and rollouts."""

    @property
    def sample(self) -> DumpedSample: ...
    @property
    def requests(self) -> tuple[Request, ...]: ...
    @property
    def rollouts(self) -> tuple[Rollout, ...]: ...


def _describe_objects(objects: Sequence[TrueObject]) -> list[dict[str, Any]]:
    return [{"desc": true.desc, "kind": true.geometry.kind, "bins": true.geometry.bins} for true in objects]


def _read_objects(objects: Sequence[Mapping[str, Any]]) -> list[TrueObject]:
    return [TrueObject(true["desc"], Geometry(true["kind"], tuple(true["bins"]))) for true in objects]


def describe_correction(correction: "Correction") -> dict[str, Any]:
    """Return a correction as plain JSON values."""
    parsed, match, segment = correction.parsed, correction.match, correction.segment
    result = {
        "objects": [
            {
                "key": prediction.key,
                "desc": prediction.desc,
                "kind": prediction.geometry.kind if prediction.geometry else None,
                "bins": list(prediction.geometry.bins) if prediction.geometry else None,
                "at": list(prediction.coord_indices),
                "reason": prediction.reason.value if prediction.reason else None,
            }
            for prediction in parsed.objects
        ],
        "prefix_tokens": len(parsed.prefix_ids),
        "remainder": parsed.remainder.decode("latin-1"),
        "truncated": parsed.truncated,
        "fallback": parsed.fallback,
        "unread": parsed.unread,
        "pairs": [list(pair) for pair in match.pairs],
        "missed": list(match.missed),
        "extra": list(match.false_positives),
        "gate_rejections": match.gate_rejections,
        "iou": [_to_json_values(row) for row in match.iou],
        "prompt_length": segment.prompt_length,
        "streams": {name: _to_json_values(getattr(segment, name)) for name in _STREAMS},
    }
    if rebuilt := correction.rebuilt:
        result["rebuilt"] = {
            "items": [[item.predicted, item.true] for item in rebuilt.items],
            "duplicates": list(rebuilt.duplicates),
            "removed_extras": list(rebuilt.removed_extras),
            "moved": list(rebuilt.moved),
            "own_tokens": rebuilt.own_tokens,
        }
    return result


def replay(line: str | bytes, table: VocabularyTable) -> list[str]:
    """Correct a dumped answer again, and return one text per difference from the dump."""
    dumped = json.loads(line)
    if dumped["format"] != FORMAT:
        raise ValueError(f"a dump of format {dumped['format']}; this version reads {FORMAT}")
    rollout, agreed = dumped["rollout"], dumped.get("choice", {}).get("agreed")
    from coordexp.answers.correct import correct

    correction = correct(
        rollout["prompt_ids"],
        rollout["ids"],
        _read_objects(dumped["truth"]),
        table=table,
        order=dumped["order"],
        settings=RolloutMatching.model_validate(dumped["settings"]),
        agreed=None if agreed is None else _read_objects(agreed),
        complete=dumped.get("complete", ()),
    )
    return list(_differences("result", dumped["result"], describe_correction(correction)))


def _to_json_values(values: np.ndarray) -> list[Any]:
    return [None if isinstance(value, float) and math.isnan(value) else value for value in values.tolist()]


def _differences(where: str, dumped: Any, now: Any) -> Iterator[str]:
    """Yield a text for each value that differs; for a list, only the first one."""
    if isinstance(dumped, dict) and isinstance(now, dict):
        for name in sorted({*dumped, *now}):
            yield from _differences(f"{where}.{name}", dumped.get(name), now.get(name))
    elif isinstance(dumped, list) and isinstance(now, list) and len(dumped) == len(now):
        texts = (_differences(f"{where}[{k}]", a, b) for k, (a, b) in enumerate(zip(dumped, now, strict=True)))
        yield from itertools.islice(itertools.chain.from_iterable(texts), 1)
    elif isinstance(dumped, float) and isinstance(now, float) and math.isclose(dumped, now, abs_tol=1e-4):
        return  # the last digits of a transport plan differ between processors
    elif dumped != now:
        yield f"{where}: {_shorten(dumped)} in the dump, {_shorten(now)} now"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass
class DumpFolder:
    """`RUN/dumps` while a run writes to it. Files are named by their path inside it. `model` is the folder of
    the model whose tokenizer is copied. If the disk is full, lines are lost and the run continues. That is
    reported once."""

    path: Path
    model: Path
    _counts: dict[str, int] = field(default_factory=dict)
    _writes: BestEffort = field(default_factory=lambda: BestEffort("dumps", logger.warning))

    def count(self, file: str) -> int:
        """Return how many lines this process has added to a file."""
        return self._counts.get(file, 0)

    def add(self, file: str, line: str) -> int | None:
        """Add a line, and return its number, from 0. Return None if it could not be written."""
        if not self._writes.attempt(partial(self._write, self.path / file, line)):
            return None
        number = self.count(file)
        self._counts[file] = number + 1
        return number

    def _write(self, path: Path, line: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not (self.path / TOKENIZER).is_file():
            write_whole(self.path / TOKENIZER, (self.model / TOKENIZER).read_bytes())
        append_line(path, line)


@dataclass
class DumpWriter:
    """Writes the dumps of rank 0. In every window of `every` steps, the first step with rollouts is dumped, at
    most `samples` examples of it. (With two channels, a given step may have no rollouts.)"""

    folder: DumpFolder
    order: "FieldOrder"
    settings: RolloutMatching
    every: int
    samples: int
    _step: int = -1  # the latest one that was chosen
    _lines: dict["ExampleId", tuple[str, int]] = field(default_factory=dict)

    def add(self, id: "ExampleId", answered: DumpedAnswers, choice: "Choice", correction: "Correction") -> None:
        """Dump the example if its step was chosen and has room."""
        if id.step // self.every != self._step // self.every:
            self._step = id.step
        file = step_file(id.step)
        if id.step != self._step or self.folder.count(file) >= self.samples:
            return
        number = self.folder.add(file, self._to_line(id, answered, choice, correction))
        if number is not None:
            self._lines[id] = file, number

    def _to_line(
        self, id: "ExampleId", answered: DumpedAnswers, choice: "Choice", correction: "Correction"
    ) -> str:
        """Return an example as a line of JSON: enough to see what was done, and to do it again without a model.
        Its place has the number of the record in the data file, from 0, instead of its number within the
        micro-step. If there were several rollouts, `choice` says how one was chosen, and `seed` is that of the
        first request, which identifies the sample."""
        request, rollout = answered.requests[choice.index], answered.rollouts[choice.index]
        decode = asdict(request.decode) | {"guard": request.decode.guard.model_dump(mode="json")}
        example: dict[str, Any] = {
            "format": FORMAT,
            "place": {"step": id.step, "micro": id.micro, "rank": id.rank, "record": answered.sample.index},
            "picture": {name: getattr(request.image, name) for name in ("path", "width", "height")},
            "decode": decode,
            "seed": request.seed,
            "rollout": asdict(rollout),
            "truth": _describe_objects(answered.sample.truth),
            "order": self.order,
            "settings": self.settings.model_dump(mode="json", include=set(CORRECTION_SETTINGS)),
            "result": describe_correction(correction),
        }
        if answered.sample.complete:
            example["complete"] = answered.sample.complete
        if request.question:
            example["question"] = request.question
        if len(answered.rollouts) > 1:
            example["choice"] = {
                "index": choice.index,
                "seed": answered.requests[0].seed,
                "texts": [rollout.text for rollout in answered.rollouts],
                "agreed": None if choice.agreed is None else _describe_objects(choice.agreed),
            }
        return json.dumps(example)

    def find(self, id: "ExampleId") -> tuple[str, int] | None:
        """Return the file of an example that this process has dumped, and its line, from 0. One that waited in the
        carry buffer while the run was interrupted was dumped by another process, and gets no trace."""
        return self._lines.get(id)

    def add_trace(self, id: "ExampleId", place: tuple[str, int], step: int, values: Mapping[str, Any]) -> None:
        """Add what was measured when a dumped example was trained on. `place` is what `find` returns for it, and
        `step` is the optimizer step, numbered from 1, as in the log."""
        file, number = place
        trace = {"format": TRACE_FORMAT, "example": number, "step": step, **values}
        self.folder.add(trace_file(file), json.dumps(trace, allow_nan=False))
        self._lines.pop(id, None)
