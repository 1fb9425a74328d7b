"""What each correction policy does with an answer, by examples. Properties for any answer are in
tests/property."""

import json
from types import SimpleNamespace

import numpy as np

from coordexp.answers.correct import Correction, correct
from coordexp.config import RolloutMatching
from coordexp.config.rollout import CorrectionPolicy
from coordexp.data import Geometry, TrueObject
from tests.vocabularies import encode, table

PROMPT = (7, 8, 9)
QWEN = table("qwen")


def box(desc: str, x: int, y: int, size: int = 100) -> TrueObject:
    return TrueObject(desc, Geometry("bbox_2d", (x, y, x + size, y + size)))


def write(*objects: TrueObject, first: int = 1) -> str:
    """Return an answer with these objects in the project's own format."""
    entries = []
    for number, thing in enumerate(objects, first):
        coords = [f"<|coord_{bin}|>" for bin in thing.geometry.bins]
        entry = {"desc": thing.desc, thing.geometry.kind: coords}
        entries.append(f'"object_{number}": {json.dumps(entry)}')
    return "{" + ", ".join(entries) + "}"


def corrected(
    text: str, truth: list[TrueObject], *, complete=(), agreed=None, match_classes="any", **policy
) -> Correction:
    settings = RolloutMatching(correction=CorrectionPolicy(**policy), match_classes=match_classes)
    ids = encode(text, QWEN)
    return correct(
        PROMPT, ids, truth, table=QWEN, order="desc_first", settings=settings, agreed=agreed, complete=complete
    )


def text_of(correction: Correction) -> str:
    return QWEN.text_of(correction.segment.ids[len(PROMPT) : -1].tolist())


def supervised_text(correction: Correction) -> str:
    """Return the text of the supervised tokens. Masked ones are dots."""
    segment = correction.segment
    return "".join(
        QWEN.text_of([id]) if weight else "."
        for id, weight in zip(
            segment.ids[len(PROMPT) : -1].tolist(), segment.weights[len(PROMPT) : -1], strict=True
        )
    )


CUP, DOG, CAT = box("cup", 0, 0), box("dog", 500, 300), box("cat", 100, 700)
TRUTH = [CUP, DOG, CAT]  # in reading order


def test_an_answer_without_a_mistake_stays_as_it_is():
    for insertion in ("append", "in_order"):
        correction = corrected(write(*TRUTH), TRUTH, insertion=insertion, supervise="matched")
        assert correction.segment.ids[len(PROMPT) : -1].tolist() == encode(write(*TRUTH), QWEN)


def test_a_matched_object_in_the_wrong_place_is_moved_in_order_and_stays_when_appending():
    assert text_of(corrected(write(CAT, CUP, DOG), TRUTH, insertion="in_order")) == write(*TRUTH)
    assert corrected(write(CAT, CUP, DOG), TRUTH, insertion="in_order").rebuilt.moved == (0,)
    assert text_of(corrected(write(CAT, CUP, DOG), TRUTH, supervise="matched")) == write(CAT, CUP, DOG)


def test_in_reading_order_extras_in_one_row_or_one_gap_are_sorted_by_left_edges():
    truth = [box("a", 100, 50, 60), box("b", 300, 50, 60), box("d", 700, 50, 60)]
    c, e, f = box("c", 500, 50, 60), box("e", 800, 400, 60), box("f", 600, 400, 60)
    correction = corrected(write(truth[2], e, f, c), truth, insertion="reading_order")
    assert text_of(correction) == write(truth[0], truth[1], c, truth[2], f, e)


def test_in_order_an_extra_stays_behind_the_object_it_followed():
    truth = [box("a", 500, 800), box("b", 0, 0), box("c", 800, 400)]
    first, lamp = box("first", 200, 300), box("lamp", 300, 500)
    correction = corrected(write(first, truth[1], lamp), truth, insertion="in_order")
    assert text_of(correction) == write(first, truth[0], truth[1], lamp, truth[2])


def test_two_true_objects_that_overlap_are_not_duplicates():
    truth = [box("cup", 0, 0), box("saucer", 10, 10)]
    correction = corrected(write(*truth), truth, duplicates="remove", duplicate_iou=0.5)
    assert text_of(correction) == write(*truth)


def test_if_the_second_of_two_is_the_better_one_the_first_is_the_duplicate():
    near = box("cup", 30, 0)
    correction = corrected(write(near, CUP), [CUP], duplicates="remove")
    assert text_of(correction) == write(CUP)
    assert correction.match.pairs == ((1, 0),)


def test_a_box_around_a_group_does_not_cost_the_objects_in_it():
    left = TrueObject("p", Geometry("bbox_2d", (0, 0, 700, 900)))
    right = TrueObject("p", Geometry("bbox_2d", (300, 0, 999, 900)))
    group = TrueObject("p", Geometry("bbox_2d", (0, 0, 990, 900)))
    correction = corrected(write(group, left, right), [left, right], duplicates="remove")
    assert text_of(correction) == write(left, right)
    assert correction.rebuilt.duplicates == (0,)


def test_polygons_are_inserted_and_their_duplicates_removed():
    leaf = TrueObject("leaf", Geometry("poly", (100, 400, 200, 400, 150, 500)))
    again = TrueObject("leaf", Geometry("poly", (101, 400, 201, 400, 150, 501)))
    truth = [CUP, leaf, CAT]
    correction = corrected(write(CUP, leaf, again), truth, duplicates="remove", insertion="in_order")
    assert text_of(correction) == write(CUP, leaf, CAT)
    assert text_of(corrected(write(CUP, CAT), truth, insertion="in_order")) == write(CUP, leaf, CAT)


def test_an_extra_of_a_class_that_is_labelled_completely_is_left_out_and_others_are_kept():
    extra_cup, lamp = box("cup", 700, 700), box("lamp", 300, 500)
    written = write(CUP, extra_cup, lamp, DOG, CAT)
    correction = corrected(written, TRUTH, complete=("cup", "dog"), extras="remove_exhaustive")
    assert text_of(correction) == write(CUP, lamp, DOG, CAT)
    assert correction.rebuilt.removed_extras == (1,)
    assert text_of(corrected(written, TRUTH, extras="remove_exhaustive")) == written
    assert text_of(corrected(written, TRUTH, complete=("cup",), supervise="matched")) == written


def test_answers_that_agree_on_an_object_do_not_outweigh_the_statement_that_its_class_is_complete():
    extra_cup, lamp = box("cup", 700, 700), box("lamp", 700, 710)
    correction = corrected(
        write(*TRUTH, extra_cup), TRUTH, complete=("cup",), agreed=[extra_cup, lamp], extras="remove_exhaustive"
    )
    assert correction.rebuilt.removed_extras == (3,)
    assert "cup" not in text_of(correction).split("lamp")[0].split("cat")[1]


class LastFirst:
    """A policy of another package, which turns the order around, leaves out objects called lamp and teaches other
    extras."""

    def revise(self, items, truth, complete):
        assert truth == TRUTH and complete == ("cup",)
        return [
            item if item.true is not None else item._replace(targets=tuple(map(float, item.geometry.bins)))
            for item in reversed(items)
            if item.desc != "lamp"
        ]


class Generated(LastFirst):
    def revise(self, items, truth, complete):
        yield from super().revise(items, truth, complete)


def revised(text: str, config=LastFirst, **policy) -> Correction:
    added = SimpleNamespace(config=config())
    settings = RolloutMatching(correction=CorrectionPolicy(**policy).model_copy(update={"added_policy": added}))
    ids = encode(text, QWEN)
    return correct(PROMPT, ids, TRUTH, table=QWEN, order="desc_first", settings=settings, complete=("cup",))


def test_a_policy_of_another_package_revises_what_the_settings_have_made_of_an_answer():
    fox, lamp = box("fox", 300, 500), box("lamp", 800, 400)
    correction = revised(write(CUP, fox, lamp, CAT), insertion="in_order", supervise="matched_with_desc")
    assert text_of(correction) == write(CAT, DOG, fox, CUP)
    assert [(item.predicted, item.true) for item in correction.rebuilt.items] == [
        (3, 2),
        (None, 1),
        (1, None),
        (0, 0),
    ]
    assert (correction.rebuilt.duplicates, correction.rebuilt.removed_extras) == ((), (2,))
    targets = correction.segment.coord_targets
    bins = [bin for thing in (CAT, DOG, fox, CUP) for bin in thing.geometry.bins]
    assert targets[~np.isnan(targets)].tolist() == bins


def test_a_policy_of_another_package_may_yield_its_objects():
    text = write(CUP, box("lamp", 800, 400), CAT)
    generated, listed = revised(text, Generated), revised(text)
    assert generated.rebuilt == listed.rebuilt and len(listed.rebuilt.items) == 3
    assert np.array_equal(generated.segment.ids, listed.segment.ids)


def test_a_policy_of_another_package_alone_rebuilds_answers_and_leaves_those_made_from_labels_alone():
    assert text_of(revised(write(CUP, DOG))) == write(CAT, DOG, CUP)
    for empty in ("", "{}"):
        assert text_of(revised(empty)) == text_of(corrected(empty, TRUTH)) == write(*TRUTH)


RIDER, HORSE = TrueObject("rider", Geometry("bbox_2d", (100, 100, 300, 500))), box("horse", 100, 200, 400)
POLICY = {"duplicates": "remove", "insertion": "reading_order", "supervise": "matched_with_desc"}


def test_a_right_object_without_a_label_is_not_renamed_to_another_class_that_it_overlaps():
    """The rider has no label, and the model missed the horse below it, which it overlaps by more than the gate."""
    for classes in ("any", "prefer"):
        correction = corrected(write(RIDER), [HORSE], match_classes=classes, **POLICY)
        assert correction.match.pairs == ((0, 0),)
        assert text_of(correction) == write(TrueObject("horse", RIDER.geometry))
    assert text_of(corrected(write(RIDER), [HORSE], match_classes="same", **POLICY)) == write(RIDER, HORSE)


def test_a_right_object_without_a_label_that_overlaps_one_of_another_class_is_not_a_duplicate():
    person = box("person", 10, 0)
    assert text_of(corrected(write(CUP, person), [CUP], **POLICY)) == write(CUP)
    for classes in ("prefer", "same"):
        assert text_of(corrected(write(CUP, person), [CUP], match_classes=classes, **POLICY)) == write(CUP, person)
        again = write(CUP, box("cup", 10, 0))
        assert text_of(corrected(again, [CUP], match_classes=classes, **POLICY)) == write(CUP)
