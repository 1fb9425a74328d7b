"""The data of the study (`tools/study.py`): images with complete labels, and regimes that hide some of them.

    STUDY/sources/SOURCE/      images, train.jsonl and val.jsonl, with complete labels; made once for all regimes
    STUDY/REGIME/data/         train.jsonl, train-complete.jsonl, val.jsonl and test.jsonl, which name those images

Settings are chosen on `val.jsonl` and results are reported on `test.jsonl`. Both have complete labels in every
regime. `train.jsonl` has the labels of the regime, `train-complete.jsonl` all of them.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from coordexp.cli.console import bar
from coordexp.data import Record, RecordObject, read_records
from coordexp.demo.scenes import DrawnScene, SceneSettings, write_scenes
from coordexp.errors import UserError
from coordexp.files import write_json, write_whole

THINNING_SEED = 5
SPLITS = ("train", "train-complete", "val", "test")

DIGITS = "digits"
SCAN_SHARES = {"train": 0.7, "val": 0.15, "test": 0.15}
INK = 0.3  # share of the darkest ink from which a pixel belongs to a digit
GAP = 2  # pixels between two digits, at least
ATTEMPTS = 40  # to place a digit; a page may get fewer digits than were drawn for it

Pixels = NDArray[np.float64]
Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Source:
    """Images of a kind. The first half of the held-out ones is for validation, the second half for the test."""

    objects: tuple[int, int]
    side: int
    seed: int
    train: int
    held_out: int


@dataclass(frozen=True)
class Regime:
    """A source of images, and the labels that are missing in training: a share of all objects, or for every image
    the objects of half of the classes."""

    source: str
    missing: float = 0.0
    federated: bool = False

    @property
    def labelled_share(self) -> float:
        """Return which share of the objects has labels, on average."""
        return 0.5 if self.federated else round(1 - self.missing, 6)


SOURCES = {
    "scenes": Source((3, 10), side=128, seed=21, train=3000, held_out=600),
    "few": Source((3, 8), side=128, seed=9, train=600, held_out=240),
    "crowded": Source((15, 40), side=192, seed=22, train=1500, held_out=300),
    DIGITS: Source((12, 40), side=192, seed=23, train=1500, held_out=300),
}
REGIMES = {
    "complete": Regime("scenes"),
    "missing-30": Regime("scenes", missing=0.3),
    "missing-50": Regime("scenes", missing=0.5),
    "missing-70": Regime("scenes", missing=0.7),
    "federated": Regime("scenes", federated=True),
    "crowded": Regime("crowded"),
    "digits": Regime(DIGITS),
    "digits-missing-50": Regime(DIGITS, missing=0.5),
    "few": Regime("few"),
}


def find_complete(name: str) -> str:
    """Return the regime that has the same images and all labels."""
    return next(other for other, regime in REGIMES.items() if regime == Regime(REGIMES[name].source))


def make_data(study: Path, name: str, train: int | None = None, held_out: int | None = None) -> Path:
    """Write the data of a regime and return its folder. Images that another regime has made are used again.

    `train` and `held_out` are for small studies. Raise UserError if the images exist in other numbers."""
    regime = REGIMES[name]
    source = SOURCES[regime.source]
    source = replace(source, train=train or source.train, held_out=held_out or source.held_out)
    images = study / "sources" / regime.source
    if images.exists():
        _check_numbers(images, source, train, held_out)
    else:
        _write_source(images, source)
    folder = study / name / "data"
    folder.mkdir(parents=True, exist_ok=True)
    splits = split_records(images, regime)
    prefix = os.path.relpath(images, folder)
    for split in reversed(SPLITS):  # train.jsonl comes last: with it, the data is complete
        moved = (replace(record, image=f"{prefix}/{record.image}") for record in splits[split])
        write_whole(folder / f"{split}.jsonl", "".join(record.as_json() + "\n" for record in moved))
    return folder


def split_records(images: Path, regime: Regime) -> dict[str, list[Record]]:
    """Return the records of each split. Only those for training lack labels."""
    complete, held_out = (
        [record for _, record in read_records(images / f"{part}.jsonl")] for part in ("train", "val")
    )
    train = complete
    if regime.federated:
        train = annotate_half_of_classes(complete, THINNING_SEED)
    elif regime.missing:
        train = remove_labels(complete, regime.missing, THINNING_SEED)
    half = len(held_out) // 2
    return {"train": train, "train-complete": complete, "val": held_out[:half], "test": held_out[half:]}


def remove_labels(records: Sequence[Record], share: float, seed: int) -> list[Record]:
    """Remove a share of all objects at random. Every image that has objects keeps at least one of them.

    The others stay in their order. Raise UserError if the share leaves less than one object per image."""
    labels = [(i, k) for i, record in enumerate(records) for k in range(len(record.objects))]
    random.Random(seed).shuffle(labels)
    left = [len(record.objects) for record in records]
    removed: list[set[int]] = [set() for _ in records]
    remaining = round(share * len(labels))
    for i, k in labels:
        if remaining and left[i] > 1:
            removed[i].add(k)
            left[i] -= 1
            remaining -= 1
    if remaining:
        raise UserError(
            f"{share:.0%} of {len(labels)} labels cannot be removed: every image keeps one",
            f"at most {1 - sum(map(bool, left)) / len(labels):.0%} can",
        )
    return [
        replace(record, objects=tuple(item for k, item in enumerate(record.objects) if k not in gone))
        for record, gone in zip(records, removed, strict=True)
    ]


def annotate_half_of_classes(records: Sequence[Record], seed: int) -> list[Record]:
    """Keep, in every image, all objects of a random half of the classes, and no others.

    The half is drawn again until it has a class of the image, so that every image with objects keeps one."""
    classes = sorted({item.desc for record in records for item in record.objects})
    size = (len(classes) + 1) // 2
    thinned = []
    for index, record in enumerate(records):
        chooser = random.Random(f"{seed} {index}")
        kept: tuple[RecordObject, ...] = ()
        while record.objects and not kept:
            annotated = set(chooser.sample(classes, size))
            kept = tuple(item for item in record.objects if item.desc in annotated)
        thinned.append(replace(record, objects=kept))
    return thinned


def split_scans(count: int, seed: int) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the scans of each split. No scan is in two of them."""
    order = np.random.default_rng(seed).permutation(count)
    train = round(SCAN_SHARES["train"] * count)
    val = train + round(SCAN_SHARES["val"] * count)
    return {"train": order[:train], "val": order[train:val], "test": order[val:]}


def load_scans() -> tuple[Pixels, NDArray[np.int64]]:
    """Return scikit-learn's scans of handwritten digits, [scans, 8, 8] with ink from 0 to 1, and the digits."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError(
            "the pages of digits are made of scikit-learn's scans, and scikit-learn is not installed",
            "run pip install scikit-learn; nothing but these pages needs it",
        ) from error
    scans = load_digits()
    return scans.images / scans.images.max(), scans.target


def draw_page(
    rng: np.random.Generator, scans: Pixels, digits: NDArray[np.int64], source: Source, path: str
) -> DrawnScene:
    """Return a pale page with digits at random places, two to three times as large as their scans.

    Boxes enclose the ink. They are listed in reading order, by top edge and then by left edge, as in scenes."""
    side = source.side
    ink = np.zeros((side, side))
    boxes: list[tuple[Box, str]] = []
    count = int(rng.integers(source.objects[0], source.objects[1] + 1))
    for _ in range(ATTEMPTS * count):
        if len(boxes) == count:
            break
        number = rng.integers(len(scans))
        patch = _enlarge(scans[number], round(8 * rng.uniform(2, 3)))
        x, y = (int(value) for value in rng.integers(0, side - len(patch) + 1, 2))
        box = _find_ink(patch, x, y)
        if not any(_are_close(box, other) for other, _ in boxes):
            boxes.append((box, str(digits[number])))
            spot = ink[y : y + len(patch), x : x + len(patch)]
            np.maximum(spot, patch, out=spot)
    boxes.sort(key=_reading_order)
    objects = tuple(RecordObject(desc, "bbox_2d", box) for box, desc in boxes)
    return DrawnScene(_print_page(rng, ink), Record(path, side, side, "pixel", objects))


def _write_source(folder: Path, source: Source) -> None:
    """Write the images of a source and their records to a new folder, whole or not at all."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    scans = load_scans() if folder.name == DIGITS else None
    unfinished.mkdir(parents=True)
    with bar(f"drawing {folder.name}", source.train + source.held_out) as advance:
        if scans:
            _write_pages(unfinished, source, *scans, advance)
        else:
            settings = SceneSettings(source.side, source.objects)
            numbers = {"train": source.train, "val": source.held_out}
            write_scenes(unfinished, settings, **numbers, seed=source.seed, advance=advance)
    write_json(unfinished / "source.json", asdict(source))
    unfinished.rename(folder)


def _check_numbers(folder: Path, source: Source, train: int | None, held_out: int | None) -> None:
    made = json.loads((folder / "source.json").read_text())
    for option, number, value in (("--train", made["train"], train), ("--held-out", made["held_out"], held_out)):
        if value is not None and value != number:
            raise UserError(f"{option} {value}: {folder} has {number}", "leave it out, or give another --out")
    if {**made, "train": source.train, "held_out": source.held_out} != json.loads(json.dumps(asdict(source))):
        raise UserError(f"{folder} was made with other settings ({made})", "give another --out")


def _write_pages(
    folder: Path, source: Source, scans: Pixels, digits: NDArray[np.int64], advance: Callable[[], None]
) -> None:
    parts = split_scans(len(scans), source.seed)
    for part in ("train", "val"):
        (folder / "images" / part).mkdir(parents=True)
    splits = ("train",) * source.train
    half = source.held_out // 2
    held_out = ("val",) * half + ("test",) * (source.held_out - half)
    for number, (part, names) in enumerate((("train", splits), ("val", held_out))):
        lines = []
        for index, split in enumerate(names):
            rng = np.random.default_rng([source.seed, number, index])
            chosen = parts[split]
            page = draw_page(rng, scans[chosen], digits[chosen], source, f"images/{part}/{index:07d}.png")
            page.image.save(folder / page.record.image)
            lines.append(page.record.as_json() + "\n")
            advance()
        (folder / f"{part}.jsonl").write_text("".join(lines))


def _enlarge(scan: Pixels, side: int) -> Pixels:
    image = Image.fromarray((scan * 255).astype(np.uint8)).resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.float64) / 255


def _find_ink(patch: Pixels, x: int, y: int) -> Box:
    """Return the box of the ink of a patch at this place: left, top, right, bottom."""
    rows, columns = (np.flatnonzero((patch >= INK * patch.max()).any(axis)) for axis in (1, 0))
    return x + int(columns[0]), y + int(rows[0]), x + int(columns[-1]) + 1, y + int(rows[-1]) + 1


def _are_close(first: Box, second: Box) -> bool:
    return all(
        first[low] < second[high] + GAP and second[low] < first[high] + GAP for low, high in ((0, 2), (1, 3))
    )


def _reading_order(item: tuple[Box, str]) -> tuple[int, int]:
    left, top, _, _ = item[0]
    return top, left


def _print_page(rng: np.random.Generator, ink: Pixels) -> Image.Image:
    """Return the page: dark ink on pale paper, with slight noise."""
    paper, dark = rng.uniform(225, 250), rng.uniform(20, 90)
    page = paper + (dark - paper) * ink + rng.normal(0, 3, ink.shape)
    return Image.fromarray(page.clip(0, 255).astype(np.uint8)).convert("RGB")
