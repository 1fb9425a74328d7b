"""`coordexp evaluate` as users see it."""

import json
import re
import subprocess
import sys

import pytest

from coordexp.evaluate import evaluate, write_predictions
from tests.command import run
from tests.unit.evaluate.scenes import BOX, FAR, answer, crowd, prediction, record


def show(folder, *more, code=0):
    return run("evaluate", "--data", folder / "val.jsonl", "--preds", folder / "preds.json", *more, code=code)


def write(folder, truth, answers):
    (folder / "val.jsonl").write_text("".join(f"{line.as_json()}\n" for _, line in truth))
    write_predictions(folder / "preds.json", answers, truth)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, *crowd(2))
    return tmp_path


def test_the_table_shows_the_numbers_of_the_report(folder):
    result = show(folder)
    truth, answers = crowd(2)
    metrics = evaluate(truth, answers).metrics()
    rows = {line[:16].strip(): line[16:].split() for line in result.stdout.splitlines()}
    assert rows["IoU 0.50"][0] == f"{metrics['f1_50']:.3f}"
    assert rows["IoU 0.50"][3] == f"{metrics['f1_50_any_class']:.3f}"
    assert re.search(r"^boxes +(\S+)", result.stdout, re.M)[1] == f"{metrics['ap']:.3f}"
    assert f"{100 * metrics['duplicates']:.1f} %" in result.stdout


def test_the_json_has_every_number_with_its_counts(folder):
    show(folder, "--out", folder / "new/report.json")
    report = json.loads((folder / "new/report.json").read_text())
    truth, answers = crowd(2)
    assert report["numbers"] == evaluate(truth, answers).metrics()
    rate = report["behaviour"]["duplicates"]
    assert rate["rate"] == rate["count"] / rate["of"]
    assert len(report["thresholds"]) == 10
    assert set(report["classes"]) == {"cat", "cup", "dog"}
    assert report["curve"][-1]["f1"] == report["numbers"]["f1_50"]


def test_a_page_is_written_without_a_single_image_on_disk(folder):
    show(folder, "--page", folder / "page.html", "--images", 3)
    assert (folder / "page.html").read_text().count("<article") == 3


def test_images_without_an_answer_are_refused(tmp_path):
    truth = [(1, record(("cat", BOX))), (2, record(("cat", FAR))), (3, record(("dog", FAR)))]
    write(tmp_path, truth, [answer(prediction("cat", BOX))])
    assert "(2, 3)" in show(tmp_path, code=1).output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("coordexp.config, coordexp.cli", "{'torch', 'transformers', 'vllm', 'hotcoco', 'numpy', 'PIL'}"),
        ("coordexp.pages.report", "{'torch', 'transformers', 'hotcoco', 'scipy', 'PIL'}"),
        ("coordexp.objective", "{'torch', 'transformers'}"),
        ("coordexp; coordexp.Detector, coordexp.Detections", "{'torch', 'PIL', 'transformers', 'httpx'}"),
        (
            "coordexp.data.doctor, coordexp.data.importers, coordexp.data.images, coordexp.pages.records, "
            "coordexp.pages.live, coordexp.pages.evaluation, coordexp.doctor, coordexp.servers.protocol, "
            "coordexp.servers.pool",
            "{'torch', 'transformers'}",
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(module, heavy):
    code = f"import sys; import {module}; loaded = {heavy} & set(sys.modules); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)
