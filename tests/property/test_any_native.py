"""Native answers on any byte-level vocabulary: what is written is read again, and whatever a model writes can be
read."""

import json
import random
import unicodedata

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordexp.answers.formats import NativeAnswers
from coordexp.answers.native import to_number
from coordexp.answers.segment import Role
from coordexp.data import Geometry, TrueObject
from tests.examples import examples
from tests.rollouts import DESCS, PROMPT
from tests.vocabularies import encode, table

VOCABULARIES = ["qwen", "small", *(f"random-{seed}" for seed in range(30))]
seeds = st.integers(0, 2**64 - 1)
bins = st.integers(0, 999)
sides = st.tuples(bins, bins).filter(lambda pair: pair[0] < pair[1])
descs = st.one_of(
    st.sampled_from(DESCS), st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
)


@st.composite
def true_objects(draw):
    (x1, x2), (y1, y2) = draw(sides), draw(sides)
    return TrueObject(draw(descs), Geometry("bbox_2d", (x1, y1, x2, y2)))


answers = st.lists(true_objects(), max_size=6)
# Without the texts of special tokens, which only `write` escapes.
plain_answers = answers.filter(lambda truth: not any("<|" in item.desc for item in truth))


def content(objects):
    return [(unicodedata.normalize("NFC", item.desc), item.geometry) for item in objects]


@examples(600)
@given(st.sampled_from(VOCABULARIES), answers)
def test_what_is_written_is_read_again_and_every_token_is_trained(vocabulary, truth):
    native = NativeAnswers(table(vocabulary))
    segment = native.write(PROMPT, truth)
    answer = native.read(segment.ids[len(PROMPT) :].tolist())
    assert [(item.desc, item.geometry, item.reason) for item in answer.objects] == [
        (desc, geometry, None) for desc, geometry in content(truth)
    ]
    assert (segment.roles[len(PROMPT) :] > Role.masked_prefix).all()
    assert segment.ids.tolist().count(native.table.end_of_turn) == 1
    covered = [k for tokens in answer.tokens for k in tokens]
    assert covered == list(range(covered[0], len(segment) - len(PROMPT)) if covered else [])
    for item, tokens in zip(answer.objects, answer.tokens, strict=True):
        assert set(item.coord_indices) <= set(tokens)


@examples(400)
@given(st.sampled_from(["qwen", "small", "random-3"]), plain_answers, seeds)
def test_any_other_layout_of_the_same_list_is_read_alike(vocabulary, truth, seed):
    chooser, native = random.Random(seed), NativeAnswers(table(vocabulary))
    items = []
    for item in truth:
        fields = [
            ("bbox_2d", [to_number(bin) for bin in item.geometry.bins]),
            (chooser.choice(("label", "desc")), unicodedata.normalize("NFC", item.desc)),
        ]
        items.append(dict(chooser.sample(fields, 2)))
    separators = chooser.choice(((",", ":"), (", ", ": "), (" ,\n", " : ")))
    text = json.dumps(items, indent=chooser.choice((None, 2, "\t")), separators=separators)
    text = chooser.choice(("", "\n ", "```json\n", "```\n", "I see this:\n\n```json \r\n")) + text
    text += chooser.choice(("", "\n```", "\n```\nDone.", " \n", "<|im_end|>"))
    objects = native.read(encode(text, native.table)).objects
    assert [(item.desc, item.geometry) for item in objects] == content(truth)


@examples(600)
@given(st.sampled_from(VOCABULARIES), answers, seeds)
def test_any_ids_can_be_read(vocabulary, truth, seed):
    chooser, native = random.Random(seed), NativeAnswers(table(vocabulary))
    ids = native.write((), truth).ids.tolist()
    for _ in range(chooser.randint(1, 4)):
        at = chooser.randrange(len(ids) + 1)
        ids = chooser.choice(
            (
                ids[:at],
                ids[at:],
                [*ids[:at], *ids[at + 1 :]],
                [*ids[:at], chooser.randrange(-1, len(native.table.pieces) + 3), *ids[at:]],
            )
        )
    answer = native.read(ids)
    assert len(answer.objects) == len(answer.tokens)
    assert all((item.geometry is None) == (item.reason is not None) for item in answer.objects)
    assert all(0 <= k < len(ids) for tokens in answer.tokens for k in tokens)
    assert all(np.diff([tokens.start for tokens in answer.tokens]) >= 0)
