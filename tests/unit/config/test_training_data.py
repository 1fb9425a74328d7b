"""The settings that name the training data: files, patterns, lists and mixtures."""

import pytest

from tests.unit.config.trees import load, only_problem, stage2


def custom(**changes):
    return load(stage2(**{f"custom__{name}": value for name, value in changes.items()})).settings.custom


def mixture(*weights, **changes):
    sets = [{"path": f"{k}.jsonl", "weight": weight} for k, weight in enumerate(weights)]
    return {"train_jsonl": None, "train_data": sets} | changes


def test_data_is_a_path_a_pattern_or_a_list_of_these():
    assert custom().data_sets == {"custom.train_jsonl": ("train.jsonl",)}
    several = custom(train_jsonl=["a.jsonl", "b-*.jsonl"], val_jsonl="v-*.jsonl")
    assert several.data_sets == {
        "custom.train_jsonl": ("a.jsonl", "b-*.jsonl"),
        "custom.val_jsonl": ("v-*.jsonl",),
    }
    mixed = custom(train_jsonl=None, train_data=[{"path": ["a.jsonl", "b.jsonl"]}, {"path": "c.jsonl"}])
    assert mixed.train_sets == {
        "custom.train_data[0].path": ("a.jsonl", "b.jsonl"),
        "custom.train_data[1].path": ("c.jsonl",),
    }
    assert mixed.shares == (1, 1)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ((0.7, 0.2, 0.1), (7, 2, 1)),
        ((2.0, 2.0), (1, 1)),
        ((1, 0.25), (4, 1)),
        ((1e-05, 3e-05), (1, 3)),
        ((118287.0, 5000.0), (118287, 5000)),
    ],
)
def test_weights_are_exact_ratios(weights, shares):
    assert custom(**mixture(*weights)).shares == shares


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"train_jsonl": None}, "custom.train_jsonl", "missing"),
        ({"train_jsonl": None}, "custom.train_jsonl", "train_data mixes several"),
        ({"train_data": [{"path": "b.jsonl"}]}, "custom.train_data", "so is custom.train_jsonl"),
        ({"train_data": [{"path": "b.jsonl"}]}, "custom.train_data", "train_jsonl: null"),
        ({"train_jsonl": []}, "custom.train_jsonl", "is"),
        ({"train_jsonl": 5}, "custom.train_jsonl", "5 is not text or a list of texts"),
        ({"train_jsonl": ["a", 5]}, "custom.train_jsonl", "write e.g. train_jsonl: data/train.jsonl"),
        (mixture(1, 0), "custom.train_data[1].weight", "0 is not a number > 0"),
        (mixture(1, 0.3333333), "custom.train_data", "round them"),
        (mixture(1, 1, curriculum=[{"objects": 1, "samples": 5}]), "custom.curriculum", "several data sets"),
    ],
)
def test_one_mistake_gives_one_message_with_a_way_out(changes, path, words):
    place, message = only_problem(stage2(**{f"custom__{name}": value for name, value in changes.items()}))
    assert (place, words in message) == (path, True), message


def test_a_curriculum_works_with_several_files_of_one_data_set():
    stages = [{"objects": 1, "samples": 5}]
    assert custom(train_jsonl=["a.jsonl", "b.jsonl"], curriculum=stages).curriculum
    assert custom(**mixture(1.0, curriculum=stages)).curriculum
