"""The request of a record: what it asks for, what is drawn for it in training, and the order of its objects."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.config.settings import ClassRequests, Custom, Negatives
from coordexp.data import Questions, Record, RecordObject, draw_request, order_objects, parse_record


def record(*descs, **request):
    objects = tuple(RecordObject(desc, "bbox_2d", (k, 10 - k, k + 5.0, 20.0)) for k, desc in enumerate(descs))
    return Record("a.png", 64, 64, "pixel", objects, **request)


def draw(made, seed=0, lists=None, negatives=None, others=()):
    pool = others or [record("dog"), record("horse", "cow")]
    return draw_request(
        made,
        random.Random(seed),
        ClassRequests(**lists or {}),
        Negatives(**negatives or {}),
        lambda chooser: chooser.choice(pool),
    )


QUESTIONS = Questions.of(Custom())


def test_a_record_asks_for_its_classes_its_expression_or_with_its_own_prompt():
    assert QUESTIONS.ask(record("cup")) == "Detect all objects."
    cups = record("cup", classes=("cup", "fork"))
    assert QUESTIONS.ask(cups) == "Detect all objects of these classes: cup, fork."
    assert QUESTIONS.ask(record("cup", expression="the left cup")) == "Detect the left cup."
    assert QUESTIONS.ask(replace(cups, prompt="Any {classes}?")) == "Any cup, fork?"
    assert QUESTIONS.ask(record("cup", prompt="Where is it?")) == "Where is it?"


def test_fields_are_replaced_once_and_words_for_the_order_come_from_the_setting():
    questions = Questions.of(Custom(prompt="List them {order}.", object_order="left_to_right"))
    assert questions.of_run == "List them from left to right."
    assert QUESTIONS.ask(record(classes=("{classes}", "{order}"))).endswith(": {classes}, {order}.")


def test_only_objects_of_the_classes_are_the_answer():
    asked = record("cup", "fork", "cup", classes=("cup", "plate"))
    assert [true.desc for true in asked.true_objects()] == ["cup", "cup"]
    assert record("fork", classes=("cup",)).true_objects() == ()


def test_a_request_survives_writing_and_reading():
    made = record("cup", classes=("cup",), prompt="{classes}?", exhaustive=("cup", "fork"), image_id=3)
    assert parse_record(made.as_json()) == made
    described = record("cup", expression="the left one")
    assert parse_record(described.as_json()) == described


def test_without_settings_nothing_is_drawn():
    for made in (record("cup"), record("cup", classes=("cup",)), record()):
        assert draw(made) is made


@given(seed=st.integers(0, 10_000), present=st.lists(st.sampled_from("abcd"), max_size=4))
def test_absent_classes_are_absent_and_present_ones_are_present(seed, present):
    made = record(*present)
    drawn = draw(made, seed, {"rate": 1}, {"rate": 1}, [record("a", "e"), record("f")])
    assert drawn.objects == made.objects
    asked = drawn.classes
    if not present:
        assert asked is None
        return
    assert len(set(asked)) == len(asked)
    assert set(asked) <= {*present, "a", "e", "f"}
    assert set(asked) - set(present), "at least one absent class"


def test_no_class_is_drawn_that_the_record_leaves_unlabelled():
    made = record("cup", classes=("cup",), exhaustive=("cup", "fork"))
    drawn = {draw(made, seed, negatives={"rate": 1}).classes for seed in range(50)}
    assert drawn == {("cup", "fork"), ("fork", "cup"), ("fork",)}
    only_cups = replace(made, exhaustive=("cup",))
    assert draw(only_cups, negatives={"rate": 1}).classes == ("cup",)


def test_the_shares_are_those_of_the_settings():
    made = record("cup", classes=("cup",))
    drawn = [draw(made, seed, negatives={"rate": 0.5, "alone": 0.2, "most": 2}).classes for seed in range(4000)]
    with_absent = [asked for asked in drawn if asked != ("cup",)]
    assert len(with_absent) / len(drawn) == pytest.approx(0.5, abs=0.03)
    assert sum("cup" not in asked for asked in with_absent) / len(with_absent) == pytest.approx(0.2, abs=0.03)
    assert {len(set(asked) - {"cup"}) for asked in with_absent} == {1, 2}


def test_a_record_with_a_question_of_its_own_gets_no_list():
    for made in (record("cup", prompt="Where?"), record("cup", expression="the cup")):
        assert draw(made, lists={"rate": 1}, negatives={"rate": 1}) is made


@pytest.mark.parametrize(
    ("order", "expected"),
    [("file", "abc"), ("reading", "cba"), ("left_to_right", "abc"), ("large_first", "cba")],
)
def test_objects_are_ordered(order, expected):
    ordered = order_objects(record("a", "b", "c"), order, random.Random(0))
    assert "".join(item.desc for item in ordered.objects) == expected


def test_objects_follow_the_classes_that_are_asked_for_and_else_the_file():
    made = record("b", "a", "c", "a", classes=("a", "x", "b"))
    ordered = order_objects(made, "asked", random.Random(0))
    assert ordered.asked_objects == (made.objects[1], made.objects[3], made.objects[0])
    without_list = record("b", "a")
    assert order_objects(without_list, "asked", random.Random(0)) is without_list


def test_a_random_order_differs_between_draws_and_repeats_with_its_seed():
    made = record(*"abcdef")
    orders = {tuple(order_objects(made, "random", random.Random(seed)).objects) for seed in range(20)}
    assert len(orders) > 10
    assert order_objects(made, "random", random.Random(3)) == order_objects(made, "random", random.Random(3))
