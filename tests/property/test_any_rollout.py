"""Whatever a model writes, on any byte-level vocabulary, the correction succeeds and can be trained on."""

import itertools
import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coordexp.answers.entries
from coordexp.answers.correct import correct
from coordexp.answers.entries import Reason
from coordexp.answers.parse import LOST, entry_spans, parse_rollout
from coordexp.config import RolloutMatching
from coordexp.config.rollout import CorrectionPolicy
from coordexp.dumps import CORRECTION_SETTINGS, describe_correction
from coordexp.pages.rollout_sample import CUT, show_sample
from tests.examples import examples
from tests.rollouts import PROMPT, check_rebuilt, check_rollout, random_policy, random_rollout, random_truth
from tests.vocabularies import encode, table

VOCABULARIES = ["qwen", "small", *(f"random-{seed}" for seed in range(30))]

seeds = st.integers(0, 2**64 - 1)


@pytest.mark.scenario("R19.C2", "R19.C10", "R19.C11", on="pure")
@examples(1500)
@given(st.sampled_from(VOCABULARIES), seeds, st.sampled_from(["desc_first", "geometry_first"]))
def test_the_correction_of_every_rollout_can_be_trained_on(vocabulary, seed, order):
    chooser = random.Random(seed)
    truth = random_truth(chooser)
    check_rollout(random_rollout(chooser, truth, table(vocabulary)), truth, table(vocabulary), order)


@examples(600)
@given(st.sampled_from(VOCABULARIES), seeds, st.sampled_from(["desc_first", "geometry_first"]))
def test_under_every_policy_the_rebuilt_answer_has_every_true_object_once_and_supervises_what_it_says(
    vocabulary, seed, order
):
    chooser = random.Random(seed)
    truth = random_truth(chooser)
    rollout = random_rollout(chooser, truth, table(vocabulary))
    check_rebuilt(rollout, truth, random_policy(chooser), table(vocabulary), order)


@examples(200)
@given(st.sampled_from(VOCABULARIES), seeds, st.booleans())
def test_whatever_was_corrected_the_inspector_links_every_coordinate_to_its_object(vocabulary, seed, is_specified):
    """An object that is trained has all of its coordinates once in the strip without the cut, in their order."""
    chooser = random.Random(seed)
    truth = random_truth(chooser)
    ids = random_rollout(chooser, truth, table(vocabulary))
    policy = CorrectionPolicy() if is_specified else random_policy(chooser)
    dump = _dump(ids, truth, RolloutMatching(correction=policy), table(vocabulary))
    sample = show_sample(dump, None, table(vocabulary), desc_is_masked=False)
    tokens, first = sample["tokens"], table(vocabulary).first_coord
    rows = list(zip(tokens["ids"], tokens["roles"], tokens["owner"], strict=True))
    assert [id for id, *_ in rows[: len(ids)]] == ids
    assert [id for id, role, _ in rows if role != CUT] == dump["result"]["streams"]["ids"][len(PROMPT) :]
    for obj in sample["objects"]:
        shown = [id - first for id, role, own in rows if own == obj["owner"] and role != CUT]
        bins = [bin for bin in shown if 0 <= bin < 1000]
        if obj["state"] not in ("invalid", "true"):
            assert bins == ([] if obj["state"] in ("duplicate", "removed") else list(obj["bins"]))


def _dump(ids, truth, matching, vocabulary):
    """Return the parts of a dumped example that the inspector reads."""
    correction = correct(PROMPT, ids, truth, table=vocabulary, order="desc_first", settings=matching)
    return {
        "place": {"step": 0, "micro": 0, "rank": 0, "record": 0},
        "picture": {"width": 64, "height": 48},
        "decode": {"mode": "greedy", "temperature": 0.0, "num_beams": 1, "max_new_tokens": 9},
        "seed": 1,
        "rollout": {"ids": ids, "finish_reason": "stop"},
        "truth": [
            {"desc": true.desc, "kind": true.geometry.kind, "bins": list(true.geometry.bins)} for true in truth
        ],
        "settings": matching.model_dump(mode="json", include=set(CORRECTION_SETTINGS)),
        "result": describe_correction(correction),
    }


@examples(200)
@given(st.sampled_from(VOCABULARIES), seeds)
def test_an_empty_answer_is_corrected_to_the_ground_truth_under_every_policy(vocabulary, seed):
    chooser = random.Random(seed)
    truth, policy = random_truth(chooser), random_policy(chooser).model_copy(update={"closing_weight": 1.0})
    segments = [
        correct(
            PROMPT,
            (),
            truth,
            table=table(vocabulary),
            order="desc_first",
            settings=RolloutMatching(correction=policy),
        ).segment
        for policy in (CorrectionPolicy(), policy)
    ]
    for name, expected in vars(segments[0]).items():
        np.testing.assert_array_equal(getattr(segments[1], name), expected)


@examples(100)
@given(st.sampled_from(VOCABULARIES), seeds)
def test_the_closing_weight_changes_the_weight_of_the_closing_brace_and_nothing_else(vocabulary, seed):
    chooser = random.Random(seed)
    truth = random_truth(chooser)
    ids = random_rollout(chooser, truth, table(vocabulary))
    plain, weighted = [
        correct(
            PROMPT,
            ids,
            truth,
            table=table(vocabulary),
            order="desc_first",
            settings=RolloutMatching(correction=policy),
        )
        for policy in (CorrectionPolicy(), CorrectionPolicy(closing_weight=0.25))
    ]
    assert weighted.rebuilt is None
    assert weighted.segment.ids.tolist() == plain.segment.ids.tolist()
    different = np.flatnonzero(weighted.segment.weights != plain.segment.weights) - len(plain.segment)
    assert different.tolist() == [-2]
    assert weighted.segment.weights[-2] == 0.25


@pytest.mark.scenario("R19.C10", on="pure")
@examples(400)
@given(st.sampled_from(VOCABULARIES), st.binary(max_size=60))
def test_the_correction_of_any_bytes_can_be_trained_on(vocabulary, content):
    ids = [table(vocabulary).byte_ids[byte] for byte in b"{" + content]
    check_rollout(ids, [], table(vocabulary))


@examples(300)
@given(st.sampled_from(VOCABULARIES), seeds)
def test_the_quick_reader_of_entries_gives_the_result_of_the_full_one(vocabulary, seed):
    chooser = random.Random(seed)
    ids = random_rollout(chooser, random_truth(chooser), table(vocabulary))
    quick = parse_rollout(ids, table(vocabulary))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordexp.answers.entries, "_canonical", re.compile("(?!)").match)
        assert parse_rollout(ids, table(vocabulary)) == quick


@examples(3000)
@given(st.sampled_from(VOCABULARIES), seeds)
def test_every_object_has_its_range_of_tokens(vocabulary, seed):
    """Ranges are in order, share at most one token with the next, and contain the coordinates of their object."""
    chooser = random.Random(seed)
    ids = random_rollout(chooser, random_truth(chooser), table(vocabulary))
    objects, spans = parse_rollout(ids, table(vocabulary)).objects, entry_spans(ids, table(vocabulary))
    assert len(spans) == len(objects)
    assert all(0 <= start <= end <= len(ids) for start, end in spans)
    assert all(start < end for (start, end), item in zip(spans, objects, strict=True) if item.reason not in LOST)
    assert all(end - 1 <= start for (_, end), (start, _) in itertools.pairwise(spans))
    for prediction, (start, end) in zip(objects, spans, strict=True):
        assert all(start <= at < end for at in prediction.coord_indices)
        written = [table(vocabulary).pieces[id] for id in ids[start:end] if id < len(table(vocabulary).pieces)]
        if prediction.reason not in LOST:
            assert b'"' in written[0]
            if prediction.key.isascii() and prediction.key.isidentifier() and "\\" not in str(written):
                assert f'"{prediction.key}"'.encode() in b"".join(written)


@examples(300)
@given(st.sampled_from(["qwen", "small"]), seeds, st.integers(1, 8), st.sampled_from(["!", "{,}", "[1 2]", "tru"]))
def test_every_object_that_was_written_is_counted_wherever_the_answer_breaks(vocabulary, seed, count, broken):
    """The valid objects, the broken one and the unread ones behind it add up to the number of written objects."""
    at = random.Random(seed).randrange(count)
    bodies = [broken if n == at else GOOD for n in range(count)]
    parsed = parse_rollout(encode(_answer(bodies), table(vocabulary)), table(vocabulary))
    assert len(parsed.valid) == at
    assert [prediction.reason for prediction in parsed.objects[at:]] == [Reason.syntax]
    assert len(parsed.objects) + parsed.unread == count


@examples(300)
@given(st.sampled_from(VOCABULARIES), seeds)
def test_no_object_without_a_key_in_the_text_is_counted(vocabulary, seed):
    chooser = random.Random(seed)
    ids = random_rollout(chooser, random_truth(chooser), table(vocabulary))
    text = table(vocabulary).text_of(ids)
    assert 0 <= parse_rollout(ids, table(vocabulary)).unread <= len(re.findall(r'"object_[0-9]+"\s*:', text))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
GOOD = '{"desc": "dog", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_30|>", "<|coord_40|>"]}'


def _answer(bodies):
    return "{" + ", ".join(f'"object_{n + 1}": {body}' for n, body in enumerate(bodies)) + "}"


@examples(300)
@given(st.sampled_from(["qwen", "small"]), values, st.integers(0, 2), st.booleans())
def test_an_entry_that_breaks_the_schema_does_not_affect_its_neighbours(vocabulary, value, place, escape):
    bodies = [GOOD] * 3
    bodies[place] = json.dumps(value, ensure_ascii=escape)
    if re.search("[\ud800-\udfff]", bodies[place]) or "\\ud" in bodies[place]:
        return  # half a character is a syntax break, not a schema break
    parsed, undamaged = (
        parse_rollout(encode(_answer(entries), table(vocabulary)), table(vocabulary))
        for entries in (bodies, [GOOD] * 3)
    )
    assert len(parsed.objects) == 3
    assert parsed.objects[place].reason not in (None, Reason.syntax, Reason.truncated)
    for n in {0, 1, 2} - {place}:
        assert parsed.objects[n]._replace(coord_indices=()) == undamaged.objects[n]._replace(coord_indices=())
        assert len(parsed.objects[n].coord_indices) == 4
