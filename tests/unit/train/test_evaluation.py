"""How evaluation asks for answers. The backend is scripted and remembers its calls."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.config.rollout import Decoding, RepeatTerminate, RolloutMatching
from coordexp.data import TrueObject
from coordexp.evaluate import read_predictions, read_truth
from coordexp.rollout.backend import Decode
from coordexp.train.evaluation import AnswerEvaluation, Asking, _gather_lines, evenly_spaced
from coordexp.train.stopping import Stopped
from tests.scripted import QUESTIONS, Said, ScriptedBackend, write_training_set
from tests.unit.answers.conftest import box
from tests.vocabularies import table

SMALL = table("small")
GUARD = RepeatTerminate(enabled=True, min_new_tokens=5, max_object_keys=9)


@pytest.mark.scenario("R34.C1", on="fake")
@pytest.mark.parametrize("guard", [GUARD, RepeatTerminate(), GUARD.model_copy(update={"enabled": False})])
def test_evaluation_decodes_greedily_with_the_limit_and_the_guard_of_the_settings(tmp_path, guard):
    cases = write_training_set(tmp_path, {"a.png": (TrueObject("cup", box(1, 1, 9, 9)),)}, SMALL)
    backend = ScriptedBackend({"a.png": Said("{}", "repeat")}, SMALL)
    cfg = RolloutMatching(max_new_tokens=77, decoding=Decoding(temperature=0.7), repeat_terminate=guard)
    answers = CoordTokenAnswers(SMALL)
    asking = Asking(tmp_path)
    AnswerEvaluation(cases.records, QUESTIONS, backend, lambda: iter(()), answers, cfg, asking)(step=4)
    ((request,),) = backend.calls
    assert request.decode == Decode(77, "greedy", guard=guard)
    assert backend.synced[0][1] == 4


NAMES = [f"{k}.png" for k in range(5)]
CORNERS = ["<|coord_1|>", "<|coord_1|>", "<|coord_9|>", "<|coord_9|>"]


def evaluation(tmp_path, **named):
    cases = write_training_set(tmp_path, {name: (TrueObject("cup", box(1, 1, 9, 9)),) for name in NAMES}, SMALL)
    backend = ScriptedBackend({name: Said("{}") for name in NAMES}, SMALL)
    cfg = RolloutMatching(max_new_tokens=77)
    return backend, AnswerEvaluation(
        cases.records,
        QUESTIONS,
        backend,
        lambda: iter(()),
        CoordTokenAnswers(SMALL),
        cfg,
        Asking(tmp_path, **named),
    )


def asked(backend):
    return [[int(request.image.path.split("/")[-1][0]) for request in call] for call in backend.calls]


def test_images_are_asked_for_in_calls_and_progress_is_told_after_each(tmp_path):
    progress = []
    backend, evaluate = evaluation(tmp_path, progress=lambda *numbers: progress.append(numbers))
    evaluate(step=1)
    assert asked(backend) == [[0, 1], [2, 3], [4]]
    assert progress == [(0, 5), (2, 5), (4, 5), (5, 5)]


def test_an_evaluation_is_abandoned_between_two_calls_and_leaves_nothing(tmp_path):
    answers = iter((False, False, True))
    backend, evaluate = evaluation(tmp_path, is_stopping=lambda: next(answers))
    with pytest.raises(Stopped):
        evaluate(step=1)
    assert asked(backend) == [[0, 1], [2, 3]]
    assert not (tmp_path / "evaluations").exists()


def test_a_part_of_the_records_is_evaluated_and_written(tmp_path):
    backend, evaluate = evaluation(tmp_path, samples=3)
    evaluate(step=1)
    assert asked(backend) == [[0, 1], [3]]
    lines = (tmp_path / "evaluations/step-1.answers.jsonl").read_text().splitlines()
    assert [json.loads(line)["image_id"] for line in lines] == [1, 2, 4]


@pytest.mark.parametrize(
    ("count", "most", "chosen"),
    [
        (5, None, [0, 1, 2, 3, 4]),
        (5, 9, [0, 1, 2, 3, 4]),
        (10, 4, [0, 2, 5, 7]),
        (7, 1, [0]),
    ],
)
def test_records_are_chosen_evenly_over_the_file(count, most, chosen):
    assert evenly_spaced(count, most) == chosen


def test_some_images_are_shown_evenly_spaced_except_those_that_cannot_be_read(tmp_path):
    shown = []
    _, evaluate = evaluation(tmp_path)
    for name in NAMES[:-1]:
        Image.new("RGB", (64, 48)).save(tmp_path / name)
    (tmp_path / NAMES[2]).write_bytes(b"not an image")
    replace(evaluate, show=shown.extend, pictures=3)(step=1)
    assert [(image.size, report.comparison.record.image) for image, report, _ in shown] == [
        ((64, 48), NAMES[0]),
        ((64, 48), NAMES[1]),
        ((64, 48), NAMES[3]),
    ]


def test_predictions_of_a_part_are_numbered_by_the_classes_of_all_records(tmp_path):
    """`coordexp evaluate` can then compare them with the whole file."""
    names = dict(zip(NAMES, ("zebra", "ant", "cow", "bee", "dog"), strict=True))
    cases = write_training_set(
        tmp_path, {name: (TrueObject(desc, box(1, 1, 9, 9)),) for name, desc in names.items()}, SMALL
    )
    said = {
        name: Said(json.dumps({"object_1": {"desc": desc, "bbox_2d": CORNERS}})) for name, desc in names.items()
    }
    backend = ScriptedBackend(said, SMALL)
    cfg, answers = RolloutMatching(max_new_tokens=77), CoordTokenAnswers(SMALL)
    asking = Asking(tmp_path, samples=2)
    AnswerEvaluation(cases.records, QUESTIONS, backend, lambda: iter(()), answers, cfg, asking)(step=1)
    written = read_predictions(tmp_path / "evaluations/step-1.json", read_truth(cases.records))
    assert sum(len(answer.valid) for answer in written) == 2


def test_a_line_of_an_answer_may_have_any_other_line_break():
    lines = ["a\u2028b", "c\x85d", "e\x0bf"]
    assert _gather_lines(lines, 3) == lines
