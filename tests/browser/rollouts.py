"""Runs for the tests of the inspector's page: an ordinary one, hostile text, and an answer of 500 objects.

Their answers are scripted. Parsing, matching, correcting and dumping are real, and traces are made up.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coordexp.data import Geometry, TrueObject
from coordexp.pages.rollouts import make_inspector_page
from coordexp.pages.run_folder import read_run
from coordexp.train.encode import StepIndex
from tests.dumped import SMALL, dumping
from tests.scripted import Said
from tests.unit.answers.conftest import answer, box, entry, poly
from tests.unit.pages.run_folders import write_dumped_run

Answers = Mapping[str, Said]  # by the name of the image
HOSTILE = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>'
HOSTILE_NAME = '<img src=x onerror="alert(1)">'  # of a file or a folder
TWISTED = "\u202egnp.exe\u202c \x07\x00\x1b[31m \u0627\u0644\u0639\u0631\u0628\u064a\u0629"
LONG = "\U0001f680\U0001f469\u200d\U0001f4bb" * 400

CUP = TrueObject("red cup", box(96, 430, 300, 730))
PLATE = TrueObject("plate", box(380, 600, 700, 800))
SPOON = TrueObject("spoon", box(742, 470, 800, 852))
LEAF = TrueObject("green leaf", poly(520, 130, 640, 200, 655, 330, 560, 420, 450, 360, 440, 210))
BOTTLE = TrueObject("bottle of water", box(832, 150, 962, 690))
TABLE = (CUP, PLATE, SPOON, LEAF, BOTTLE)


@dataclass(frozen=True)
class RunInspectorPage:
    """The inspector's page of a run folder."""

    folder: Path

    def save(self, path: Path) -> Path:
        path.write_text(make_inspector_page(read_run(self.folder), 200).html)
        return path


def say(*objects: TrueObject, end: str = "stop") -> Said:
    """Return an answer with these objects. One that ended by its `length` stops inside another object."""
    entries = [entry(f"object_{n}", obj.desc, obj.geometry) for n, obj in enumerate(objects, 1)]
    return (
        Said(answer(*entries))
        if end == "stop"
        else Said("{" + ", ".join(entries) + ', "object_9": {"de', "length")
    )


def move(true: TrueObject, by: int) -> TrueObject:
    """Return a prediction that is so many bins beside a true object."""
    bins = tuple(min(999, bin + by) for bin in true.geometry.bins)
    return replace(true, geometry=Geometry(true.geometry.kind, bins))


def write_demo(folder: Path) -> RunInspectorPage:
    """Write one image at five steps and two others, with a broken object, a truncated and a perfect answer. The
    last answer was not trained yet."""
    names = ("table.png", "cut.png", "late.png")
    broken = entry("object_2", "plate", box(380, 600, 700, 800)).replace(', "<|coord_800|>"', "")
    half = Said(
        answer(
            entry("object_1", "cup", box(110, 410, 280, 745)),
            broken,
            entry("object_3", "lid", box(560, 40, 700, 130)),
        )
    )
    seen = say(move(CUP, 8), move(PLATE, 22), move(LEAF, 6), TrueObject("fork", box(690, 500, 725, 830)))
    steps = {
        0: {"table.png": say(TrueObject("thing", box(10, 20, 980, 960)))},
        49: {"table.png": half, "cut.png": say(move(CUP, 3), move(PLATE, 9), end="length")},
        99: {"table.png": seen},
        149: {"table.png": say(*(move(true, 3) for true in TABLE[:4]))},
        199: {"table.png": say(*(move(true, 1) for true in TABLE)), "late.png": say(*TABLE[:4])},
    }
    write_answers(folder, dict.fromkeys(names, TABLE), steps)
    file = folder / "dumps/trained-000199.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    return RunInspectorPage(folder)


def write_hostile(folder: Path) -> RunInspectorPage:
    truth = [TrueObject(HOSTILE, box(100, 100, 400, 400)), TrueObject(LONG, box(600, 300, 980, 700))]
    truth.append(TrueObject(TWISTED, box(0, 0, 90, 60)))
    broken = entry(json.dumps(HOSTILE)[1:-1], "", box(5, 5, 9, 9))
    entries = [
        entry("object_1", HOSTILE, box(110, 90, 390, 410)),
        entry("object_2", TWISTED, box(900, 900, 999, 999)),
    ]
    name = f"{HOSTILE_NAME}.png"
    write_answers(folder / HOSTILE_NAME, {name: truth}, {9: {name: Said(answer(*entries, broken))}})
    (folder / HOSTILE_NAME / name).unlink()
    return RunInspectorPage(folder / HOSTILE_NAME)


def write_huge(folder: Path, objects: int = 500) -> RunInspectorPage:
    """Write an answer with 500 objects to an image with 500: half of them match, and the others are far off."""

    def name(k: int, dx: int) -> TrueObject:
        x, y = k % 25 * 39 + 4, k // 25 * 48 + 4
        return TrueObject(f"bolt {k}", box(x + dx, y, x + dx + 14, y + 40))

    truth = [name(k, 0) for k in range(objects)]
    predicted = [name(k, 0 if k < objects // 2 else 18) for k in range(objects)]
    write_answers(folder, {"huge.png": truth}, {99: {"huge.png": say(*predicted)}})
    return RunInspectorPage(folder)


def write_answers(folder: Path, truth: Mapping[str, Sequence[TrueObject]], steps: Mapping[int, Answers]) -> None:
    """Write a run that was given these answers at these steps, with their traces."""
    write_dumped_run(folder, steps=(), truth=truth)
    for step, script in steps.items():
        encode, _ = dumping(folder, truth=truth, script=script)
        encode([list(truth).index(name) for name in script], StepIndex(step, 0))
        file = folder / f"dumps/step-{step:06}.jsonl"
        traces = [trace(json.loads(line), k, step) for k, line in enumerate(file.read_text().splitlines())]
        (folder / f"dumps/trained-{step:06}.jsonl").write_text("".join(f"{json.dumps(t)}\n" for t in traces))


def trace(dump: dict, example: int, step: int) -> dict:
    """Return a trace whose losses fall with the steps, and whose distributions get narrower."""
    streams, first = dump["result"]["streams"], SMALL.first_coord
    where = [k for k, role in enumerate(streams["roles"]) if role >= 2]
    coords = [k for k in where if first <= streams["ids"][k] < first + 1000]
    loss, width = 5 / (1 + step / 20) + example, 3 + 90 / (1 + step / 10)
    terms = {"coord_reg/soft_ce": 0.7 * loss, "token_ce/desc_ce": 0.2 * loss, "coord_reg/w1": 0.1 * loss}
    bins = {str(k): peaked(streams["ids"][k] - first, width) for k in coords}
    nll = [round(0.2 + k * 37 % 100 / 60, 4) for k in where]
    mass = [0.998 if k in coords else None for k in where]
    numbers = {"where": where, "nll": nll, "mass": mass, "bins": bins}
    return {"format": 1, "example": example, "step": step + 1, "loss": loss, "terms": terms, **numbers}


@functools.cache
def peaked(center: float, width: float) -> list[list[int]]:
    """Return a distribution as a run of the bins that have at least 5/10000."""
    weights = [math.exp(-0.5 * ((bin - center) / width) ** 2) for bin in range(1000)]
    total = sum(weights)
    shares = [round(10000 * weight / total) for weight in weights]
    kept = [bin for bin in range(1000) if shares[bin] >= 5]
    return [[kept[0], *(shares[bin] for bin in range(kept[0], kept[-1] + 1))]]
