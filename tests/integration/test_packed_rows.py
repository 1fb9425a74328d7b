"""A packed row on the real tiny Qwen3-VL equals its segments run alone."""

from dataclasses import replace

import pytest
import torch

from coordexp.demo.model import Size, make_model
from coordexp.families import FAMILIES
from coordexp.objective.carry import Example
from coordexp.objective.collate import kind_counts
from tests.engines import drawing, prompt
from tests.rows import Tiny, chat_settings

SEEDS = range(6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("rows") / "model", "small", spread=3.0)


@pytest.fixture(scope="module")
def tiny(folder):
    return Tiny(folder)


@pytest.fixture(scope="module", params=FAMILIES)
def of_family(request, tmp_path_factory):
    size = Size(hidden=64, layers=3, patch=8, vision_hidden=32)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return make_model(folder, "small", family=request.param, spread=3.0, size=size)


def examples(tiny: Tiny) -> list[Example]:
    return [tiny.example(seed, "AB"[seed % 2]) for seed in SEEDS]


@pytest.mark.scenario("R05.C8", "R06.C6", on="model")
@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_logits_and_gradients_of_a_packed_row_are_those_of_its_segments_alone(of_family, attention):
    tiny = Tiny(of_family, attention=attention)
    counts = kind_counts(examples(tiny))

    def logits_and_gradients(rows):
        logits = []
        for row in rows:
            logits.append(tiny.logits(row))
            tiny.objective.loss(tiny.measure(logits[-1], row.supervision), counts).backward()
        return torch.cat(logits), tiny.gradients()

    logits, gradients = logits_and_gradients([tiny.collate(examples(tiny))])
    alone, gradients_alone = logits_and_gradients([tiny.collate([example]) for example in examples(tiny)])
    assert logits.shape == alone.shape
    assert (logits - alone).abs().max() <= 1e-5
    assert alone.std() > 0.1
    assert max((gradients[name] - gradients_alone[name]).abs().max() for name in gradients) <= 1e-5
    assert all(gradient.abs().max() > 0 for name, gradient in gradients.items() if "norm" not in name)


def chat_examples(tiny: Tiny) -> list[Example]:
    """Return questions with and without an image, between records with objects."""
    questions = [tiny.chat(seed, has_image=seed % 2 == 0) for seed in range(3, 7)]
    return [questions[0], tiny.example(0, "A"), *questions[1:], tiny.example(1, "B")]


def test_questions_with_and_without_an_image_share_a_row_with_records(of_family):
    tiny = Tiny(of_family, chat_settings())
    together = tiny.logits(tiny.collate(chat_examples(tiny)))
    alone = torch.cat([tiny.logits(tiny.collate([example])) for example in chat_examples(tiny)])
    assert together.shape == alone.shape
    assert (together - alone).abs().max() <= 1e-4
    # The padded batch of transformers uses none of our collation or attention.
    plain = tiny.model(**tiny.pad(chat_examples(tiny))).logits
    flat = torch.cat([plain[k, : len(example)] for k, example in enumerate(chat_examples(tiny))])
    row = tiny.collate(chat_examples(tiny))
    assert (flat[row.inputs["logits_to_keep"]] - together).abs().max() <= 1e-4


def test_a_row_without_an_image_has_a_gradient_of_zero_for_the_vision_tower(of_family):
    """Without the blank image, it would have none: DDP would wait for it, and the optimizer would skip it."""
    tiny = Tiny(of_family, chat_settings())
    row = tiny.collate([tiny.chat(3, has_image=False), tiny.chat(5, has_image=False)])
    assert row.inputs["mm_token_type_ids"].sum() == 1 and len(row.inputs["image_grid_thw"]) == 1
    counts = sum(span.counts for span in row.spans)
    tiny.objective.loss(tiny.measure(tiny.logits(row), row.supervision), counts).backward()
    with_blank = {name: weight.grad for name, weight in tiny.model.named_parameters()}
    tiny.model.zero_grad()
    without = replace(tiny.collate, blank=None)([tiny.chat(3, has_image=False), tiny.chat(5, has_image=False)])
    tiny.objective.loss(tiny.measure(tiny.logits(without), without.supervision), counts).backward()
    for name, weight in tiny.model.named_parameters():
        if ".visual." in name:
            assert weight.grad is None and with_blank[name] is not None and not with_blank[name].any()
        elif weight.grad is not None:
            assert (with_blank[name] - weight.grad).abs().max() <= 1e-5


def test_segmented_attention_generates_what_sdpa_generates(folder, tiny):
    """Padded prompts of different lengths and steps with a cache are not packed rows."""
    pictures = [drawing(1, 64), drawing(2, 128)]
    tiny.processor.tokenizer.padding_side = "left"
    text = [prompt(tiny.processor)] * 2
    inputs = tiny.processor(text=text, images=pictures, padding=True, return_tensors="pt")
    plain = Tiny(folder, attention="sdpa")
    answers = [
        model.eval().generate(**inputs, max_new_tokens=20, do_sample=False) for model in (tiny.model, plain.model)
    ]
    assert torch.equal(*answers)
    assert inputs["attention_mask"].min() == 0


def test_gradient_checkpointing_changes_nothing(folder):
    tiny = Tiny(folder)
    row, counts = tiny.collate(examples(tiny)[:3]), kind_counts(examples(tiny)[:3])
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            tiny.model.gradient_checkpointing_enable({"use_reentrant": False})
        tiny.model.train()
        tiny.objective.loss(tiny.measure(tiny.logits(row), row.supervision), counts).backward()
        gradients.append(tiny.gradients())
    first, second = gradients
    assert max((first[name] - second[name]).abs().max() for name in first) <= 1e-6
