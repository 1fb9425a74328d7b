"""Dumps of a few steps. The scripted answers are partly right, garbage, and cut off."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordexp.data import TrueObject
from coordexp.dumps import DumpFolder, DumpWriter, remove_from_step
from coordexp.train.encode import StepIndex
from tests.scripted import Said, ScriptedBackend, write_training_set
from tests.steps import RolloutStep
from tests.unit.answers.conftest import answer, box, entry, poly
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
    folder: Path,
    *,
    every: int = 1,
    samples: int = 9,
    truth: Mapping[str, Sequence[TrueObject]] = TRUTH,
    script: Mapping[str, Said | Sequence[Said]] = SCRIPT,
    **settings: Any,
) -> tuple[RolloutStep, DumpWriter]:
    """Return a step of channel B that dumps to `folder/dumps`, and its writer. The tokenizer is in
    `folder/model`."""
    (folder / "model").mkdir(exist_ok=True)
    SMALL.tokenizer.save(str(folder / "model/tokenizer.json"))
    training_set = write_training_set(folder, truth, SMALL, **settings)
    dumps = dump_writer(folder, training_set.settings, every, samples)
    backend = ScriptedBackend(script, SMALL)
    return RolloutStep(training_set, backend, training_set.settings, watch=dumps.add), dumps


def dump_writer(folder: Path, settings: Any, every: int = 1, samples: int = 9) -> DumpWriter:
    """Return a writer that has not written yet, as that of a new process."""
    return DumpWriter(DumpFolder(folder / "dumps", folder / "model"), "desc_first", settings, every, samples)


def dump_of(folder: Path, **settings: Any) -> Path:
    """Return the dump of one step in which each of the scripted answers is given."""
    remove_from_step(folder / "dumps", 0)
    step, _ = dumping(folder, **settings)
    step(range(len(TRUTH)), StepIndex(0, 0))
    return folder / "dumps/step-000000.jsonl"
