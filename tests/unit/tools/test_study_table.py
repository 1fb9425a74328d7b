"""The tables of the study, from answers that the tests invent."""

import json

import pytest
import yaml
from study_data import make_data
from study_table import count_tokens, write_tables

from coordexp.data import RecordFile
from coordexp.evaluate import AnswerObject, ImageAnswer, read_truth, write_predictions


@pytest.fixture
def study(tmp_path):
    make_data(tmp_path, "missing-50", train=4, held_out=40)
    return tmp_path


def answer(study, folder, every: int, *, wrong_desc: bool = False, split: str = "test", step: int | None = None):
    """Write answers that have every `every`-th true object of each image."""
    truth = read_truth(RecordFile(study / f"missing-50/data/{split}.jsonl"))
    answers = []
    for image_id, record in truth:
        objects = [
            AnswerObject("ghost" if wrong_desc else item.desc, "bbox_2d", record.in_bins(item), 0.5, None)
            for item in record.objects[::every]
        ]
        answers.append(ImageAnswer(image_id, record.image, "{}", "stop", 10, tuple(objects)))
    file = folder / (f"{split}/preds.json" if step is None else f"evaluations/step-{step}.json")
    write_predictions(file, answers, truth)
    if step is None:
        (folder / split / "report.json").write_text("{}")


def add_run(study, name: str, seed: int, every: int, tokens: int = 0, **other) -> None:
    folder = study / f"missing-50/steps-100/{name}-{seed}"
    answer(study, folder, every, **other)
    lines = [{"step": 50, "eval_f1_50": 0.25 * (seed + 1)}, {"step": 100, "eval_f1_50": 0.5}]
    lines += [{"step": 1, "rollout/tokens": tokens}, {"step": 2, "rollout/tokens": tokens}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_rows(text: str) -> list[dict[str, str]]:
    """Return the rows of all tables of a Markdown text, by their heads."""
    rows, head = [], None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            head = None
        elif head is None:
            head = ["name", *cells[1:]]
        elif set(cells) != {"---"}:
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def test_the_table_has_means_differences_and_generated_tokens(study):
    for seed in range(3):
        add_run(study, "continued", seed, every=2)
        add_run(study, "in-order", seed, every=1 if seed else 2, tokens=500)
    rows = read_rows(write_tables(study, "missing-50", "test", None))
    results = {row["name"]: row for row in rows if "seeds" in row}
    assert list(results) == ["continued", "in-order"]
    assert results["continued"]["precision"] == "1.000 ± 0.000" and results["continued"]["recall"].startswith(
        "0.5"
    )
    assert results["continued"]["generated tokens"] == "0"
    assert results["in-order"]["generated tokens"] == "1,000"
    assert results["in-order"]["seeds"] == "0, 1, 2"
    (difference,) = [row for row in rows if "seeds" not in row]
    value, interval = difference["recall"].split(" [")
    gained = (1 - float(results["continued"]["recall"].split()[0])) * 2 / 3
    assert float(value) == pytest.approx(gained, abs=2e-3)
    over_images, with_seeds = interval.strip("]").split("; ")
    assert 0 < float(over_images.split(" to ")[0]) < gained
    assert float(with_seeds.split(" to ")[0]) < float(over_images.split(" to ")[0])


def test_only_seeds_that_both_have_are_compared(study):
    add_run(study, "continued", 0, every=1)
    add_run(study, "continued", 1, every=2)
    add_run(study, "stage2", 1, every=2)
    (difference,) = [
        row for row in read_rows(write_tables(study, "missing-50", "test", [100])) if "seeds" not in row
    ]
    assert difference["F1@0.5"] == "+0.000 [+0.000 to +0.000]"


def test_class_accuracy_is_the_share_of_found_objects_with_the_right_name(study):
    add_run(study, "continued", 0, every=1)
    add_run(study, "stage2", 0, every=1, wrong_desc=True)
    rows = {
        row["name"]: row for row in read_rows(write_tables(study, "missing-50", "test", None)) if "seeds" in row
    }
    assert rows["continued"]["class accuracy"] == "1.000" and rows["stage2"]["class accuracy"] == "0.000"
    assert rows["stage2"]["recall, any class"] == "1.000"


def test_all_tokens_count_that_were_generated_and_no_others(study):
    lines = {
        "best-of-4": [{"step": 1, "rollout/tokens": 10, "rollout/unused_tokens": 30}],
        "grpo": [{"step": 1, "generated_tokens": 40}, {"step": 2, "generated_tokens": 90}],
        "noise": [{"step": 1, "rollout/tokens": 10}],
    }
    for name, logged in lines.items():
        (folder := study / name).mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in logged))
        noise = {"rollout_matching": {"noise": {"enabled": name == "noise"}}}
        (folder / "resolved.yaml").write_text(yaml.safe_dump(noise))
    assert [count_tokens(study / name) for name in lines] == [40, 90, 0]
