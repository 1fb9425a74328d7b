"""The data of a run: opened, checked before a model is loaded, and put in the order in which it is trained on."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from coordexp.config import Settings
from coordexp.config.rules import trains_chat
from coordexp.config.settings import Custom
from coordexp.data import Record, Records, find_wrong_kind, open_data
from coordexp.data.doctor.examine import SMALL, measure_sides, quantile
from coordexp.dumps import CORRECTION_SETTINGS
from coordexp.errors import DataError
from coordexp.evaluate import read_truth
from coordexp.files import find_data_files
from coordexp.logs import say
from coordexp.tasks import ignore
from coordexp.train.evaluation import QuestionSet, evenly_spaced
from coordexp.train.folder import fingerprint
from coordexp.train.mixture import Mixture
from coordexp.train.stream import SampleOrder, StageRecords

EXACT = 1000  # side of the mask IoU canvas on which every box is exact
FIRST_RECORDS = 10  # of each data set, whose kind is checked at the start of a run
MEASURED = 1000  # records whose objects are measured at the start of a run
REQUESTS = {"class_prompt", "expression_prompt", "class_requests", "negatives", "object_order"}  # of `custom`


@dataclass(frozen=True)
class RunData:
    """The records that a run trains on, and those of its evaluation: records with objects, and sets of questions
    by name."""

    train: Records
    held_out: Records | None
    questions: dict[str, QuestionSet]

    @classmethod
    def open(cls, custom: Custom) -> "RunData":
        train = _open_records(*custom.train_sets.values())
        sets, questions = custom.data_sets, dict[str, QuestionSet]()
        val = sets.get("custom.val_jsonl")
        held_out = _open_records(val) if val else None
        for k, (name, data) in enumerate(zip(custom.eval_names, custom.eval_data, strict=True)):
            questions[name] = QuestionSet(_open_records(sets[f"custom.eval_data[{k}].path"]), data.max_new_tokens)
        return cls(train, held_out, questions)

    @property
    def files(self) -> dict[str, Records]:
        """All data, by names for `run.json`."""
        files = {"train": self.train} | ({} if self.held_out is None else {"val": self.held_out})
        return files | {f"eval_data.{name}": data.records for name, data in self.questions.items()}

    def check(self, settings: Settings) -> None:
        """Report what the data means for the run. Raise now, and not at the first evaluation, if the records to
        evaluate on cannot be read."""
        for part in self.train.parts:  # other records are refused when they are trained on
            records = list(_read_first(part, FIRST_RECORDS))
            if wrong := find_wrong_kind("custom.train_data", records, trains_chat(settings)):
                raise DataError(f"{part}: {wrong[0]}", wrong[1])
        if settings.uses_rollouts:
            _note_coarse_canvas(self.train, settings.rollout_matching.maskiou_resolution)
        if self.held_out is not None and settings.training.eval_strategy != "no":
            read_truth(self.held_out)
        for data in self.questions.values() if settings.evaluates_chat else ():
            for index in evenly_spaced(len(data.records), settings.custom.eval_samples):
                data.read(index)

    def find_requests(self, custom: Custom) -> list[str]:
        """Return which kinds of requests the run trains, `classes` and `expression`: those that it draws, and
        those of the first records of each data set."""
        kinds = {"classes"} if custom.class_requests.rate else set[str]()
        for part in self.train.parts:
            for record in _read_first(part, MEASURED):
                kinds |= {kind for kind in ("classes", "expression") if getattr(record, kind, None) is not None}
        return sorted(kinds)


def _open_records(*sets: Sequence[str]) -> Records:
    """Open data sets, each of which is a list of paths and glob patterns."""
    notify = say if os.environ.get("RANK", "0") == "0" else ignore
    return open_data([find_data_files(names) for names in sets], notify)


def _read_first(records: Records, most: int) -> Iterator[Any]:
    """Yield the first records, until one is broken: that is reported, on all ranks, when it is trained on."""
    with suppress(ValueError):
        for index in range(min(most, len(records))):
            yield records.read(index)


def _note_coarse_canvas(records: Records, resolution: int) -> None:
    """Print a note if the median object of the first records is too small for the mask IoU canvas."""
    if resolution >= EXACT:
        return
    measured = [record for record in _read_first(records, MEASURED) if isinstance(record, Record)]
    median = quantile(Counter(side for record in measured for side in measure_sides(record)), 0.5)
    if median is not None and median < SMALL:
        say(
            f"note: the median side of the objects in {records} is {median} bins (of the first "
            f"{MEASURED:,} records), and rollout_matching.maskiou_resolution is {resolution}, which is coarse for "
            f"objects under {SMALL} bins; {EXACT} is exact for boxes, and matching costs about 2.5 times as much"
        )


def make_order(settings: Settings, records: Records, rank: int, ranks: int) -> SampleOrder:
    """Return the order in which a rank takes the records."""
    training, custom = settings.training, settings.custom
    mixture = None
    if len(custom.train_data) > 1:
        mixture = Mixture(custom.shares, tuple(map(len, records.parts)))
    return SampleOrder(
        len(records),
        rank,
        ranks,
        seed=training.data_seed if training.data_seed is not None else training.seed,
        shuffled=training.train_sampling_strategy == "random",
        stages=_find_stages(settings, records),
        mixture=mixture,
    )


def _find_stages(settings: Settings, records: Records) -> list[StageRecords]:
    """Return the stages of the curriculum."""
    stages = []
    for k, stage in enumerate(settings.custom.curriculum):
        fitting = np.flatnonzero(records.object_counts <= stage.objects)
        if not len(fitting):
            raise DataError(
                f"custom.curriculum[{k}]: no record of {records} has at most {stage.objects} objects",
                "raise objects, or remove the stage",
            )
        stages.append(StageRecords(stage.samples, fitting))
    return stages


def describe_identity(settings: Settings, records: Records) -> dict[str, Any]:
    """Return what must be the same after a resume, besides order and sizes."""
    texts = {"prompt", "class_prompt", "expression_prompt"}  # a data set may have its own
    prompts = [data.model_dump(include=texts, exclude_none=True) for data in settings.custom.train_data]
    identity = {
        "data": fingerprint(records)["sha256"],
        "prompt": settings.custom.prompt,
        "object_field_order": settings.custom.object_field_order,
        "channels": sorted(settings.channels),
        "answer_format": settings.custom.answer_format,
        "model.max_pixels": settings.model.max_pixels,
        "model.min_pixels": settings.model.min_pixels,
        "requests": settings.custom.model_dump(mode="json", include=REQUESTS),
        "model.freeze": sorted(settings.model.freeze),
        "prompts": {str(k): own for k, own in enumerate(prompts) if own},
    }
    if "B" in settings.channels:
        rollout = settings.rollout_matching.model_dump(mode="json")
        decoding = ("max_new_tokens", "decoding", "decode_mode", "num_beams", "repeat_terminate")
        names = (*decoding, "rollouts_per_sample", "noise", *CORRECTION_SETTINGS)
        identity |= {"training.seed": settings.training.seed, "stage2.b_ratio": settings.stage2.b_ratio}
        identity["stage2.max_staleness"] = settings.stage2.max_staleness
        identity |= {f"rollout_matching.{name}": rollout[name] for name in names}
    return identity
