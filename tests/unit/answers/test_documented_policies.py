"""The examples of docs/correction.md are what the code does."""

import re
from pathlib import Path

import pytest
import yaml

from coordexp.answers.correct import choose_answer, correct
from coordexp.config import RolloutMatching
from coordexp.config.rollout import RolloutChoice
from tests.unit.answers.test_policies import CAT, CUP, DOG, PROMPT, QWEN, TRUTH, box, corrected, write
from tests.vocabularies import encode

PAGE = (Path(__file__).parents[3] / "docs/correction.md").read_text()
OBJECTS = {"cup": CUP, "dog": DOG, "cat": CAT, "cup again": box("cup", 5, 5), "lamp": box("lamp", 800, 400)}
ROWS = re.findall(r"^\| (the defaults|`.*`) \| (cat, .*) \| (.*) \|$", PAGE, re.MULTILINE)


def names(objects):
    by_content = {(thing.desc, thing.geometry): name for name, thing in OBJECTS.items()}
    return ", ".join(by_content[thing.desc, thing.geometry] for thing in objects)


def answer(text):
    return write(*(OBJECTS[name] for name in text.split(", ")))


@pytest.mark.parametrize(("setting", "before", "after"), ROWS, ids=[setting for setting, *_ in ROWS])
def test_a_setting_changes_the_answer_as_documented(setting, before, after):
    policy = {} if setting == "the defaults" else yaml.safe_load("{" + setting.strip("`") + "}")
    correction = corrected(answer(before), TRUTH, **policy)
    if correction.rebuilt is None:
        assert after == f"{before}, dog"
        assert '"object_5": {"desc": "dog"' in QWEN.text_of(correction.segment.ids.tolist())
    else:
        assert names(correction.rebuilt.items) == after


def test_every_setting_has_an_example():
    assert len(ROWS) == 7


@pytest.mark.parametrize("rule", ["best", "union"])
def test_several_answers_are_corrected_as_documented(rule):
    answers = [
        encode(answer(text), QWEN) for text in re.findall(r"^answer [123] +(.*?)(?:  .*)?$", PAGE, re.MULTILINE)
    ]
    (expected,) = re.findall(rf"^{rule} +(.*?)(?:  .*)?$", PAGE, re.MULTILINE)
    settings = RolloutMatching(
        rollouts_per_sample=3,
        decoding={"temperature": 0.7},
        choice=RolloutChoice(rule=rule),
        correction={"insertion": "reading_order"},
    )
    choice = choose_answer(answers, TRUTH, table=QWEN, settings=settings)
    assert (len(answers), choice.index) == (3, 0)
    correction = correct(
        PROMPT, answers[0], TRUTH, table=QWEN, order="desc_first", settings=settings, agreed=choice.agreed
    )
    assert names(correction.rebuilt.items) == expected
