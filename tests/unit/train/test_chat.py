"""Chat records in training: their samples and examples, on both channels, and prompts of data sets."""

import json
from fractions import Fraction

import pytest

from coordexp.answers.formats import CoordTokenAnswers
from coordexp.answers.segment import Role
from coordexp.config.rollout import NoiseAnswers, RolloutMatching
from coordexp.config.settings import Custom
from coordexp.data import DataError, open_data
from coordexp.rollout.backend import Rollout
from coordexp.train.encode import Encoder, StepIndex, TrainingSet
from coordexp.train.evaluation import is_right
from coordexp.train.metrics import StepMetrics
from tests.scripted import Said
from tests.unit.train.test_requests import SpelledPrompts
from tests.unit.train.test_rollout_source import FakeStarter, Learner, check_resume
from tests.vocabularies import table

SMALL = table("small")
CHAT = {"image": "c.png", "width": 64, "height": 64, "question": "How many?", "answer": "3"}
ALONE = {"question": "Why?", "answer": "because"}


class Prompts(SpelledPrompts):
    def text_ids(self, question: str) -> list[int]:
        return list(question.encode())


def detection(number: int) -> dict:
    objects = [{"desc": "cup", "bbox_2d": [1, 1, 500, 500]}]
    return {"image": f"{number}.png", "width": 64, "height": 64, "space": "bin", "objects": objects}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_set(*files, trains_chat=True, rollouts=None, **custom):
    sets = custom.pop("train_data", ({"path": "x"},) * len(files))
    settings = Custom(train_data=sets, **custom)
    records = open_data([[file] for file in files])
    rollouts = rollouts or RolloutMatching()
    answers = CoordTokenAnswers(SMALL, settings=rollouts)
    return TrainingSet(records, Prompts(), answers, rollouts, settings, trains_chat)


def question(sample):
    return bytes(sample.prompt_ids).decode()


def make_encoder(samples, b_ratio=1, max_staleness=0):
    return Encoder(samples, 17, 0, StepMetrics(), Fraction(b_ratio), max_staleness=max_staleness)


def test_both_kinds_of_records_are_read_from_one_file(tmp_path):
    samples = make_set(write(tmp_path / "a.jsonl", detection(0), CHAT, ALONE))
    first, about_image, alone = (samples.read(k, 0) for k in range(3))
    assert [true.desc for true in first.truth] == ["cup"]
    assert about_image.image.path.endswith("c.png") and about_image.image.size == (64, 64)
    assert alone.image is None
    assert bytes(alone.segment.ids[: alone.segment.prompt_length].tolist()) == b"Why?"
    assert SMALL.bytes_of(alone.segment.ids[alone.segment.prompt_length : -1]) == b"because"
    assert samples.measure_truth(2) == len(alone.segment)


def test_a_chat_record_is_refused_if_no_loss_trains_on_it(tmp_path):
    samples = make_set(write(tmp_path / "a.jsonl", detection(0), ALONE), trains_chat=False)
    with pytest.raises(DataError, match=r"a\.jsonl, record 2: "):
        samples.read(1, 0)


def test_the_images_of_the_canary_are_those_of_records_with_objects(tmp_path):
    files = [write(tmp_path / "a.jsonl", ALONE, CHAT), write(tmp_path / "b.jsonl", *map(detection, range(5)))]
    images = make_set(*files).find_images(4)
    assert [image.path.rsplit("/", 1)[1] for image in images] == ["0.png", "1.png", "2.png", "3.png"]
    assert make_set(files[0]).find_images(4) == []


def test_each_data_set_asks_with_its_own_prompt(tmp_path):
    files = [
        write(tmp_path / f"{name}.jsonl", detection(0), detection(1) | {"classes": ["cup"]}) for name in "abc"
    ]
    sets = (
        {"path": "a", "prompt": "Find all.", "class_prompt": "Only {classes}!"},
        {"path": "b"},
        {"path": "c", "prompt": "Detect everything."},
    )
    samples = make_set(*files, train_data=sets, prompt="Detect everything.")
    read = [samples.read(k, 0) for k in range(6)]
    assert [question(sample) for sample in read] == [
        *("Find all.", "Only cup!"),
        *("Detect everything.", "Detect all objects of these classes: cup."),
        *("Detect everything.", "Detect all objects of these classes: cup."),
    ]
    # Without a question of its own, a request for a rollout asks with the prompt of the run.
    assert [sample.question for sample in read[::2]] == ["Find all.", None, None]
    assert [sample.data_set for sample in read] == [0, 0, 1, 1, 2, 2]


def test_no_rollout_is_asked_for_a_chat_record_and_it_is_on_channel_a_in_every_step(tmp_path):
    settings = RolloutMatching(rollouts_per_sample=2)
    samples = make_set(write(tmp_path / "a.jsonl", ALONE, detection(0), CHAT, detection(1)), rollouts=settings)
    encoder = make_encoder(samples)
    batch = encoder.prepare_micro_step(StepIndex(0, 0), (0, 1, 2, 3))
    names = [request.image.path.rsplit("/", 1)[1] for request in batch.requests]
    assert names == ["0.png", "0.png", "1.png", "1.png"]
    rollouts = [
        Rollout.of(SMALL, sample.prompt_ids, (), (), "stop", 0) for sample in batch.asked for _ in range(2)
    ]
    examples = encoder.encode(batch, rollouts)
    assert [example.channel for example in examples] == ["A", "B", "A", "B"]
    assert [Role.answer in example.segment.roles for example in examples] == [True, False, True, False]
    assert [example.id.index for example in examples] == [0, 1, 2, 3]
    assert encoder.metrics.report(1)["rollout/answers"] == 2
    truth = make_encoder(samples, b_ratio=0)
    of_truth = truth.encode(truth.prepare_micro_step(StepIndex(0, 0), (0, 1, 2, 3)), ())
    assert [example.channel for example in of_truth] == ["A"] * 4
    for k in (0, 2):
        assert (of_truth[k].segment.ids == examples[k].segment.ids).all()


def test_seeds_of_rollouts_do_not_depend_on_whether_other_records_are_questions(tmp_path):
    mixed = make_set(write(tmp_path / "a.jsonl", ALONE, detection(0), CHAT, detection(1)))
    plain = make_set(write(tmp_path / "b.jsonl", *map(detection, (8, 0, 9, 1))))
    seeds = [
        {request.image.path.rsplit("/", 1)[1]: request.seed for request in batch.requests}
        for batch in (make_encoder(each).prepare_micro_step(StepIndex(2, 1), range(4)) for each in (mixed, plain))
    ]
    assert seeds[0] == {name: seeds[1][name] for name in ("0.png", "1.png")}


def test_answers_with_mistakes_are_made_for_records_with_objects_alone(tmp_path):
    settings = RolloutMatching(noise=NoiseAnswers(enabled=True))
    encoder = make_encoder(make_set(write(tmp_path / "a.jsonl", ALONE, detection(0), CHAT), rollouts=settings))
    batch = encoder.prepare_micro_step(StepIndex(0, 0), (0, 1, 2))
    rollouts = encoder.make_noisy_rollouts([batch])
    assert len(rollouts) == 1
    assert [example.channel for example in encoder.encode(batch, rollouts)] == ["A", "B", "A"]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_run_with_questions_and_rollouts_ahead_is_resumed_exactly(tmp_path, after):
    write(tmp_path / "a.jsonl", *map(detection, range(5)))
    write(tmp_path / "b.jsonl", ALONE, CHAT, ALONE | {"answer": "never"})

    def learner():
        script = {f"{k}.png": Said("{}") for k in range(5)}
        backend = FakeStarter(script, SMALL, prompt_ids=tuple(b"Detect all objects."))
        training_set = make_set(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
        return Learner(tmp_path, 1, room=220, training_set=training_set, backend=backend)

    examples = [example for rows, _ in check_resume(learner, tmp_path, after) for row in rows for example in row]
    assert {channel for _, channel, _ in examples} == {"A", "B"}
    assert None in {image for image, *_ in examples}


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("3", "3", True),
        (" Red\n", "red", True),
        ("two  words", "Two words", True),
        ("3.", "3", False),
        ("", "3", False),
        ("STRASSE", "straße", True),
    ],
)
def test_an_answer_is_compared_without_case_and_amount_of_white_space(answer, expected, right):
    assert is_right(answer, expected) is right
