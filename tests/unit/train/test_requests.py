"""What a training sample asks for: its own request, or one that is drawn for the step."""

import json

import pytest

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.config.rollout import RolloutMatching
from coordexp.config.settings import Custom
from coordexp.data import open_data
from coordexp.train.encode import Encoder, StepIndex, TrainingSet
from coordexp.train.metrics import StepMetrics
from tests.vocabularies import table

DESCS = ("cup", "fork", "plate", "cup")
SMALL = table("small")


class SpelledPrompts:
    """Stands for the prompt builder: the bytes of the question are the tokens."""

    def ids(self, width: int, height: int, image: str = "", question: str | None = None) -> list[int]:
        return list((question or "").encode())


def write(path, records):
    """Write records, each of which is a list of descs and optional keys."""
    lines = []
    for number, (descs, keys) in enumerate(records):
        objects = [{"desc": desc, "bbox_2d": [k, k, k + 50, k + 50]} for k, desc in enumerate(descs)]
        head = {"image": f"{number}.png", "width": 64, "height": 64, "space": "bin"}
        lines.append(json.dumps(head | keys | {"objects": objects}) + "\n")
    path.write_text("".join(lines))
    return path


def make_set(files, **custom):
    settings = Custom(**custom) if "train_data" in custom else Custom(train_jsonl="x", **custom)
    records, answers = open_data([[file] for file in files]), CoordTokenAnswers(SMALL)
    return TrainingSet(records, SpelledPrompts(), answers, RolloutMatching(), settings)


def question(sample):
    return bytes(sample.prompt_ids).decode()


@pytest.mark.scenario("R30.C1", on="pure")
def test_a_sample_has_the_question_and_the_objects_of_its_record(tmp_path):
    asked = {"classes": ["cup", "dog"]}
    samples = make_set([write(tmp_path / "a.jsonl", [(DESCS, {}), (DESCS, asked)])])
    plain, own = samples.read(0, 0), samples.read(1, 0)
    assert (question(plain), plain.question) == ("Detect all objects.", None)
    assert question(own) == own.question == "Detect all objects of these classes: cup, dog."
    assert [true.desc for true in own.truth] == ["cup", "cup"]


def test_a_draw_depends_on_the_step_and_the_record_alone(tmp_path):
    file = write(tmp_path / "a.jsonl", [(DESCS, {})] * 6)
    drawn = {"class_requests": {"rate": 1}, "negatives": {"rate": 0.5}, "object_order": "random"}
    samples, again = make_set([file], **drawn), make_set([file], **drawn)
    questions = [[question(samples.read(k, step)) for k in range(6)] for step in range(5)]
    assert questions == [[question(again.read(k, step)) for k in range(6)] for step in range(5)]
    assert len({text for step in questions for text in step}) >= 8
    assert samples.read(2, 3).truth == again.read(2, 3).truth
    other = make_set([file], **drawn | {"negatives": {"rate": 0.5, "seed": 1}})
    assert questions != [[question(other.read(k, step)) for k in range(6)] for step in range(5)]


def test_absent_classes_come_from_the_data_set_of_the_record(tmp_path):
    files = [
        write(tmp_path / "a.jsonl", [(("cup",), {}), (("fork",), {})]),
        write(tmp_path / "b.jsonl", [("xy", {})]),
    ]
    sets = tuple({"path": str(file)} for file in files)
    samples = make_set(files, train_data=sets, class_requests={"rate": 1}, negatives={"rate": 1})
    questions = {question(samples.read(0, step)) for step in range(30)}
    assert questions == {
        f"Detect all objects of these classes: {names}." for names in ("cup, fork", "fork, cup", "fork")
    }
    assert all("cup" not in question(samples.read(2, step)) for step in range(30))


def test_a_request_for_rollouts_has_the_question_of_its_sample(tmp_path):
    samples = make_set([write(tmp_path / "a.jsonl", [(DESCS, {}), (DESCS, {"expression": "the left cup"})])])
    encoder = Encoder(samples, 0, 0, StepMetrics())
    batch = encoder.prepare_micro_step(StepIndex(4, 0), (0, 1))
    assert [request.question for request in batch.requests] == [None, "Detect the left cup."]
