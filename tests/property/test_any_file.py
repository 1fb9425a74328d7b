"""Whatever is in the files that a command reads, it succeeds or ends with one clear message: no other exception,
no hang, no growth, and nothing unescaped on its pages. Imports open no file outside the folders they were given,
and no command shows the content of one.

Each example damages one or two files of a valid set: values of every kind in any place, and bytes. To run more of
them: COORDEXP_FUZZ_EXAMPLES=20000 pytest tests/property/test_any_file.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given

from coordexp.data import read_records
from coordexp.detect.suggestions import write_suggestions
from coordexp.evaluate import write_predictions
from coordexp.evaluate.predictions import write_samples
from tests import hostile
from tests.hostile import Case, Outcome, attempt, bounded_memory, fuzzing, write_outside
from tests.unit.config.trees import stage1, stage2
from tests.unit.data.packed import write_tsv, write_webdataset
from tests.unit.data.sources import annotation, coco, write_image
from tests.unit.data.test_labelstudio import region, task
from tests.unit.detect.test_suggestions import suggestion
from tests.unit.evaluate.scenes import crowd
from tests.unit.pages.run_folders import (
    lines,
    manifest,
    settings,
    write_data,
    write_dumped_run,
    write_evaluation,
    write_run,
)

pytestmark = pytest.mark.timeout(0)  # a longer run takes hours; every command has a limit of its own


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    write_outside(folder)
    return folder


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


IMPORT = "data import {} --out {{new}}/train.jsonl --outside {} --geometry {}"
RING = [[4, 4, 20, 4, 20, 20, 4, 20], [30, 30, 40, 30, 40, 40]]
RLE = {"size": [48, 64], "counts": [0, 10, 3000, 62]}


def import_case(folder: Path, kind: str) -> Case:
    """Return a valid source of one format, with two images."""
    for name in ("a", "b"):
        write_image(folder / f"images/{name}.png")
    images = [{"id": k, "file_name": f"{name}.png", "width": 64, "height": 48} for k, name in ((1, "a"), (2, "b"))]
    annotations = [annotation(), annotation(2, segmentation=RING), annotation(3, image_id=2, segmentation=RLE)]
    where = "{folder}/source.json --images {folder}/images --missing keep"
    match kind:
        case "coco":
            write(folder, source_json=coco(annotations, images))
        case "lvis":
            url = {"coco_url": "http://images/train2017/a.png", "neg_category_ids": [2]}
            more = {"not_exhaustive_category_ids": [1]} | url
            classes = [{"id": k, "name": name, "frequency": "c"} for k, name in ((1, "cat"), (2, "dog"))]
            write_image(folder / "images/train2017/a.png")
            write(folder, source_json=coco([annotation()], [images[0] | more], classes))
        case "labelstudio":
            polygon = region("polygonlabels", points=[[0, 0], [50, 50], [0, 90]])
            write(folder, source_json=[task(region(), polygon), task(region(), data={"image": "b.png"})])
            where = where.replace(" --missing keep", "")
        case "labelme":
            part = {"label": "cat", "group_id": 1}
            shapes = [part | {"points": [[1, 1], [9, 9]], "shape_type": "rectangle"}]
            shapes += [part | {"points": [[1, 1], [9, 1], [9, 9]], "shape_type": "polygon"}]
            shapes += [{"label": "dog", "points": [[20, 20], [25, 20]], "shape_type": "circle"}]
            head = {"imagePath": "../images/a.png", "imageWidth": 64, "imageHeight": 48, "imageData": None}
            write(folder, labels__a_json=head | {"shapes": shapes})
            where = "{folder}/labels --images {folder}/images --missing keep"
        case "yolo":
            write(folder, labels__a_txt="0 0.5 0.5 0.25 0.5\n1 0.25 0.25 0.5 0.25 0.5 0.75\n")
            write(folder, data_yaml=yaml.safe_dump({"names": {0: "cat", 1: "dog"}}))
            where = "{folder}/labels --images {folder}/images"
    rules = [("clip", "auto"), ("refuse", "poly"), ("drop", "box")]
    if kind == "labelstudio":
        commands = [f"data import labelstudio {where} --out {{new}}/train.jsonl"]
    else:
        commands = [f"{IMPORT.format(kind, *rule)} {where}" for rule in rules]
    if kind in ("coco", "lvis"):
        commands += [f"{commands[0]} --multipart split --crowd keep --tolerance 2 --ask classes"]
    damaged = {"labelme": ["labels/a.json"], "yolo": ["labels/a.txt", "data.yaml"]}.get(kind, ["source.json"])
    return Case(folder, commands, damaged)


def check_import(outcome: Outcome) -> None:
    target = outcome.written / "train.jsonl"
    assert [path.name for path in outcome.written.iterdir()] == ["train.jsonl"] * (outcome.exit_code == 0)
    if outcome.exit_code == 0:
        for _, record in read_records(target):
            record.true_objects()
    assert not [name for name in outcome.opened if name.startswith(str(outcome.outside))]


def packed_case(folder: Path, kind: str) -> Case:
    """Return a valid packed data set, with three images."""
    label = {"bbox": [8, 6, 16, 12], "category": "cat", "segmentation": RING}
    rows = [
        {"objects": {"bbox": [[8, 6, 16, 12]], "category": ["cat"]}},
        {"annotations": [label, label | {"iscrowd": 1}]},
    ]
    rows += [{"boxes": [{"bbox": [8, 6, 24, 18], "phrase": "red cup"}], "image_id": 4, "width": 64, "height": 48}]
    if kind == "tsv":
        write_tsv(folder, rows)
        damaged = ["toy.annotations.tsv", "toy.images.tsv"]
    else:
        write_webdataset(folder / "s.tar", dict(zip("abc", [*rows[:2], RECORDS[0]], strict=True)))
        damaged = ["s.tar"]
    return Case(folder, [f"data import {kind} {{folder}}/{damaged[0]} --boxes xyxy --out {{new}}/out"], damaged)


def check_packed(outcome: Outcome) -> None:
    files = list((outcome.written / "out").glob("*.records.jsonl"))
    assert len(files) == (1 if outcome.exit_code == 0 else 0)
    for _, record in (entry for file in files for entry in read_records(file)):
        record.true_objects()
    assert not [name for name in outcome.opened if name.startswith(str(outcome.outside))]


RECORDS = [
    {"image": "images/a.png", "width": 64, "height": 48, "space": "pixel", "image_id": 4, "exhaustive": ["cat"],
     "objects": [{"desc": "cat", "bbox_2d": [1, 2, 30, 40]}, {"desc": "dog", "poly": [1, 1, 20, 2, 9, 30]}]},
    {"image": "images/b.png", "width": 64, "height": 48, "space": "norm1000", "classes": ["cat"], "objects":
     [{"desc": "cat", "bbox_2d": [1, 2, 300, 400], "category_id": 3}], "prompt": "Find every {classes}."},
    {"image": "images/c.png", "width": 64, "height": 48, "space": "bin", "objects": [], "expression": "a thing"},
]  # fmt: skip
CHAT = {"image": "images/a.png", "width": 64, "height": 48, "question": "How many?", "answer": "3"}


def to_lines(items: list[dict[str, object]]) -> str:
    return "".join(json.dumps(item) + "\n" for item in items)


def record_case(folder: Path) -> Case:
    for name in ("a", "b", "c"):
        write_image(folder / f"images/{name}.png")
    write(folder, train_jsonl=to_lines([*RECORDS, CHAT]), plain_jsonl=to_lines(RECORDS))
    item = suggestion(image="images/a.png", image_id=4, labels=2)
    file = write_suggestions(folder / "suggestions.jsonl", [item])
    added = [{"desc": "cat", "bbox_2d": [1, 2, 30, 40.5], "category_id": 3}]
    notes = {"4": {"image": item.image, "labels": 2, "complete": True, "added": added}}
    said = {"format": 1, "suggestions": file.sha256, "decisions": {"1": "accept"}, "images": notes}
    write(folder, decisions_json=json.dumps(said))
    commands = [
        "data doctor {folder}/train.jsonl --images decode",
        "data doctor {folder}/train.jsonl --json",
        "data clean {folder}/train.jsonl --out {folder}/clean.jsonl",
        "data view {folder}/train.jsonl --out {new}/view.html",
        "data view {folder}/plain.jsonl --problems --out {new}/view.html",
        "data split {folder}/plain.jsonl --val 0.5",
        "data export coco {folder}/plain.jsonl --out {new}/coco.json",
        "data export yolo {folder}/plain.jsonl --out {new}/yolo",
        "data export labelstudio {folder}/plain.jsonl --out {new}/tasks.json",
        "data complete -d {folder}/plain.jsonl -s {folder}/suggestions.jsonl --out {folder}/more.jsonl "
        "--accept-above 0.5 --decisions {folder}/decisions.json",
    ]
    return Case(folder, commands, ["train.jsonl", "plain.jsonl", "suggestions.jsonl", "decisions.json"])


def prediction_case(folder: Path) -> Case:
    truth, answers = crowd(2, images=3)
    write(folder, val_jsonl="".join(f"{record.as_json()}\n" for _, record in truth))
    write_predictions(folder / "preds.json", answers, truth)
    write_samples(folder / "preds.json", [replace(answer, sample=1) for answer in answers])
    (folder / "results.json").write_bytes((folder / "preds.json").read_bytes())
    both = "--out {new}/r.json --page {new}/page.html"
    commands = [
        f"evaluate --data {{folder}}/val.jsonl --preds {{folder}}/preds.json {both}",
        f"evaluate --data {{folder}}/val.jsonl --preds {{folder}}/results.json {both}",
        "data suggest --data {folder}/val.jsonl --preds {folder}/preds.json --samples 1 --out {new}/some",
        "data suggest --data {folder}/val.jsonl --preds {folder}/preds.json --out {new}/some --new-classes",
    ]
    names = ["preds.json", "preds.answers.jsonl", "results.json", "preds.samples.jsonl", "val.jsonl"]
    return Case(folder, commands, names)


def check_reports(outcome: Outcome) -> None:
    for file in outcome.written.rglob("*.json"):
        json.loads(file.read_text())


def run_case(folder: Path) -> Case:
    """Return a run with metrics, dumps and an evaluation, and a second one to compare it with."""
    write_dumped_run(folder / "one", steps=(0,))
    truth, answers = crowd(2, images=3)
    data = write_data(folder / "val.jsonl", truth)
    for name, seed in (("one", 1), ("two", 2)):
        tree = settings(seed, output_dir=f"runs/{name}", learning_rate=seed)
        write_run(folder / name, lines(4), tree, [manifest(data=data)])
        write_evaluation(folder / name, 4, truth, answers)
    trace = {"format": 1, "example": 0, "step": 1, "loss": 0.5, "terms": {"a": 0.5}, "where": [], "nll": []}
    (folder / "one/dumps/trained-000000.jsonl").write_text(to_lines([trace | {"mass": [], "bins": {}}]))
    commands = [
        "report {folder}/one --out {new}/report.html",
        "report {folder}/one {folder}/two --out {new}/report.html --resamples 100 --data {folder}/val.jsonl",
        "inspect {folder}/one --out {new}/inspect.html",
        "replay {folder}/one/dumps",
        "verify {folder}/one",
    ]
    files = ["metrics.jsonl", "run.json", "resolved.yaml", "evaluations/step-4.json"]
    files += ["evaluations/step-4.answers.jsonl", "dumps/step-000000.jsonl", "dumps/trained-000000.jsonl"]
    return Case(folder, commands, [f"one/{name}" for name in files])


def config_case(folder: Path) -> Case:
    write(folder, stage1_yaml=yaml.safe_dump(stage1()), stage2_yaml=yaml.safe_dump(stage2()))
    write(folder, run_yaml="extends: [stage2.yaml]\n" + yaml.safe_dump({"training": {"seed": 3}}))
    commands = [f"check --config {{folder}}/{name}.yaml" for name in ("stage1", "stage2", "run")]
    return Case(folder, commands, ["stage1.yaml", "stage2.yaml", "run.yaml"])


def check_nothing(outcome: Outcome) -> None:
    """What holds for every command is all there is to check."""


# The makers of the valid files, checks of the outcome, and the number of examples in CI.
TARGETS: dict[str, tuple[Callable[[Path], Case], Callable[[Outcome], None], int]] = {
    **{
        kind: (partial(import_case, kind=kind), check_import, 15)
        for kind in ("coco", "lvis", "labelstudio", "labelme", "yolo")
    },
    **{kind: (partial(packed_case, kind=kind), check_packed, 15) for kind in ("webdataset", "tsv")},
    "records": (record_case, check_nothing, 60),
    "predictions": (prediction_case, check_reports, 30),
    "runs": (run_case, check_nothing, 40),
    "configs": (config_case, check_nothing, 30),
}


@pytest.mark.parametrize("target", TARGETS)
def test_any_file_is_read_or_refused(tmp_path, base, target):
    make, check, examples = TARGETS[target]
    case = make(tmp_path)
    for command in case.commands:
        with attempt(case, base, command, {}) as outcome:
            assert outcome.exit_code in ((1, 2) if is_refused_as_it_is(command) else (0,)), outcome.output

    @fuzzing(examples)
    @given(case.examples())
    def read(example):
        with attempt(case, base, *example) as outcome:
            check(outcome)
            assert outcome.exit_code == 0 or outcome.names_its_files, outcome.output

    with bounded_memory():
        read()


def is_refused_as_it_is(command: str) -> bool:
    """Return True for the command that refuses even the valid files: the run has no checkpoint."""
    return command.startswith("verify")


def test_the_check_of_memory_sees_growth_below_an_earlier_peak(monkeypatch):
    monkeypatch.setattr(hostile, "MOST_MEGABYTES", 100)
    allocate = bytearray(b"x").__mul__
    assert len(allocate(400 * 2**20)) > 0  # the earlier peak
    with bounded_memory():
        allocate(20 * 2**20)
    with pytest.raises(AssertionError, match="the process grew by"), bounded_memory():
        allocate(200 * 2**20)
