"""The data of the study (`tools/study.py`): drawn scenes with complete labels, and files that lack some of them.

    STUDY/scenes/                    images; train.jsonl, val.jsonl and test.jsonl with complete labels
    STUDY/scenes/REGIME-SEED.jsonl   train.jsonl without some of its labels
    STUDY/base/LESSON/scenes/        other images, for the model that all starts are trained from

Settings are chosen on `val.jsonl` and results are reported on `test.jsonl`, in every regime.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from coordexp.cli.console import bar
from coordexp.data.thin import By, thin
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.errors import UserError
from coordexp.files import write_json, write_whole
from coordexp.tasks import ignore

SCENES = SceneSettings(side=128, objects=(3, 10))
SCENES_SEED = 21
COMPLETE, THINNED = "train.jsonl", "thinned.jsonl"


@dataclass(frozen=True)
class Size:
    """How large a study is. Half of the held-out images are for validation, the other half for the test."""

    train: int
    held_out: int
    start_steps: int
    steps: int  # of every arm, unless its settings say otherwise
    lesson_scale: float = 1.0  # of the images and steps of the base


@dataclass(frozen=True)
class Regime:
    """The share of labels that `coordexp data thin` removes, and how it chooses them."""

    missing: float = 0.0
    by: By = "object"

    @property
    def labelled_share(self) -> float:
        return round(1 - self.missing, 6)


@dataclass(frozen=True)
class Lesson:
    """A part of the training of the base: scenes of its own, without half of their labels, and a demo config."""

    objects: tuple[int, int]
    side: int
    images: int
    steps: int
    seed: int
    config: str


SIZES = {
    "small": Size(train=1000, held_out=400, start_steps=250, steps=60),
    "full": Size(train=3000, held_out=600, start_steps=700, steps=200),
    "trial": Size(train=24, held_out=8, start_steps=2, steps=2, lesson_scale=1e-3),
}
REGIMES = {
    "missing-50": Regime(0.5),
    "complete": Regime(),
    "missing-30": Regime(0.3),
    "missing-70": Regime(0.7),
    "by-size": Regime(0.5, "size"),
    "federated": Regime(0.5, "class"),
}
# With random weights, a model learns to use the image from scenes with one object, but hardly from others. They
# are complete: an image always keeps one label.
LESSONS = {
    "one": Lesson((1, 1), 64, images=8000, steps=600, seed=31, config="scenes-cpu.yaml"),
    "few": Lesson((1, 4), 64, images=20_000, steps=4000, seed=32, config="scenes-cpu.yaml"),
    "many": Lesson((3, 12), 128, images=12_000, steps=1500, seed=33, config="scenes-dense-cpu.yaml"),
}


def make_scenes(folder: Path, size: Size) -> None:
    """Draw the scenes of a study, whole or not at all. Raise UserError if they exist in another size."""
    if folder.exists():
        made = json.loads((folder / "size.json").read_text())
        if (made["train"], made["held_out"]) != (size.train, size.held_out):
            problem = f"{folder} has {made['train']} training and {made['held_out']} held-out images"
            raise UserError(problem, "give the same --size as before, or another --out")
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    draw(unfinished, SCENES, size.train, size.held_out, SCENES_SEED)
    held_out = (unfinished / "val.jsonl").read_text().splitlines(keepends=True)
    half = len(held_out) // 2
    for name, lines in (("val", held_out[:half]), ("test", held_out[half:])):
        (unfinished / f"{name}.jsonl").write_text("".join(lines))
    write_json(unfinished / "size.json", asdict(size))
    unfinished.rename(folder)


def thin_labels(scenes: Path, regime: str, seed: int) -> Path:
    """Return the training labels of a regime and a seed, and write them if they are not there."""
    settings, target = REGIMES[regime], scenes / f"{regime}-{seed}.jsonl"
    if not settings.missing:
        return scenes / COMPLETE
    if not target.exists():
        thin(scenes / COMPLETE, target, settings.missing, settings.by, seed, ignore)
    return target


def make_lesson(folder: Path, lesson: Lesson, scale: float) -> None:
    """Draw the scenes of a lesson and remove half of their labels, whole or not at all."""
    if folder.exists():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    settings = SceneSettings(lesson.side, lesson.objects)
    draw(unfinished, settings, max(16, round(scale * lesson.images)), 1, lesson.seed)
    if lesson.objects == (1, 1):
        write_whole(unfinished / THINNED, (unfinished / COMPLETE).read_text())
    else:
        thin(unfinished / COMPLETE, unfinished / THINNED, 0.5, "object", lesson.seed, ignore)
    unfinished.rename(folder)


def draw(folder: Path, settings: SceneSettings, train: int, val: int, seed: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with bar(f"drawing {folder}", train + val) as advance:
        write_scenes(folder, settings, train=train, val=val, seed=seed, advance=advance)
