"""Dumps of a few steps: answers that are partly right, garbage and cut off, by the fake backend."""

from pathlib import Path
from typing import Any

from coordexp.data import TrueObject
from coordexp.train.counters import Ledger
from coordexp.train.dump import Dumps
from coordexp.train.dump_folder import DumpFolder, forget_from
from coordexp.train.encode import CorrectedRollouts, Moment
from tests.scripted import Said, ScriptedBackend, casebook
from tests.unit.correction.conftest import answer, box, entry, poly
from tests.vocabularies import table

SMALL = table("small")
CUP = TrueObject("cup", box(10, 10, 110, 110))
DOG = TrueObject("dog", box(300, 300, 500, 500))
ROOF = TrueObject("roof", poly(600, 600, 800, 600, 700, 700))
NEAR_CUP, NEAR_ROOF = box(12, 8, 111, 108), poly(604, 598, 803, 603, 699, 706)

TRUTH = {"partly.png": (CUP, DOG, ROOF), "garbage.png": (CUP,), "cut.png": (DOG, CUP)}
_FIRST = entry("object_1", "cup", NEAR_CUP)
SCRIPT = {
    "partly.png": Said(
        answer(_FIRST, entry("object_2", "roof", NEAR_ROOF), entry("object_3", "x", box(0, 0, 9, 9)))
    ),
    "garbage.png": Said("I see \x00 a cup", ids=(*SMALL.encode(b"I see "), SMALL.byte_ids[0xFF], 10**6)),
    "cut.png": Said("{" + _FIRST + ', "object_2": {"desc": "dog", "bbox_2d": ["<|coord_3', "length"),
}


def dumping(
    folder: Path, *, every: int = 1, samples: int = 9, script: dict[str, Said] = SCRIPT, **settings: Any
) -> tuple[CorrectedRollouts, Dumps]:
    """Channel B that dumps to `folder/dumps`; the tokenizer comes from `folder/model`."""
    (folder / "model").mkdir(exist_ok=True)
    SMALL.tokenizer.save(str(folder / "model/tokenizer.json"))
    cases = casebook(folder, TRUTH, SMALL, **settings)
    dumps = Dumps(DumpFolder(folder / "dumps", folder / "model"), cases, every, samples)
    backend = ScriptedBackend(script, SMALL)
    encode = CorrectedRollouts(cases, backend, lambda: iter(()), cases.settings, 17, 0, Ledger(), watch=dumps)
    return encode, dumps


def dump_of(folder: Path, **settings: Any) -> Path:
    """One step, in which each of the answers was given."""
    forget_from(folder / "dumps", 0)
    encode, _ = dumping(folder, **settings)
    encode(range(len(TRUTH)), Moment(0, 0))
    return folder / "dumps/step-000000.jsonl"
