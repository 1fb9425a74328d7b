"""Answers in Qwen3-VL's own format: the exact text, the roles of its tokens, and what reading accepts."""

import json

import numpy as np
import pytest

from coordexp.answers.entries import Reason
from coordexp.answers.formats import NativeAnswers, is_readable, load_format
from coordexp.answers.native import write_native
from coordexp.answers.segment import Role, TokenKind
from coordexp.answers.table import VocabularyError, VocabularyTable
from coordexp.data import Geometry, TrueObject, to_bin
from coordexp.demo.model import make_tokenizer
from coordexp.errors import UserError
from tests.unit.answers.conftest import box
from tests.vocabularies import encode, table

QWEN = NativeAnswers(table("qwen"))
PROMPT = (1, 2, 3)
# As Qwen's notebook `2d_grounding` prints it, shortened to two objects.
PUBLISHED = (
    '```json\n[\n\t{"bbox_2d": [74, 361, 324, 808], "label": "plate/dish"},\n'
    '\t{"bbox_2d": [691, 235, 775, 328], "label": "scallop"}\n]\n```'
)
CUP, DOG = '{"bbox_2d": [10, 20, 300, 400], "label": "cup"}', '{"bbox_2d": [1, 2, 3, 1000], "label": "dog"}'


def scaled(*numbers):
    return Geometry("bbox_2d", tuple(to_bin(number, 1000) for number in numbers))


def read(text, answers=QWEN):
    return answers.read(encode(text, answers.table)).objects


def summarise(text):
    return [(item.desc, item.geometry, item.reason) for item in read(text)]


BOTH = [("cup", scaled(10, 20, 300, 400), None), ("dog", scaled(1, 2, 3, 1000), None)]


def test_the_text_is_that_of_the_published_example():
    objects = [
        TrueObject("plate/dish", scaled(74, 361, 324, 808)),
        TrueObject("scallop", scaled(691, 235, 775, 328)),
    ]
    assert write_native(objects, QWEN.table).text.decode() == PUBLISHED
    assert write_native((), QWEN.table).text.decode() == "```json\n[]\n```"
    assert [(item.desc, item.geometry) for item in read(PUBLISHED)] == [(o.desc, o.geometry) for o in objects]


def test_every_token_of_the_answer_is_trained_and_digits_have_the_kind_of_coordinates():
    segment = QWEN.write(PROMPT, [TrueObject("red cup", scaled(74, 361, 324, 1000))])
    by_kind = {
        kind: QWEN.table.bytes_of(segment.ids[segment.kinds == kind].tolist()).decode()
        for kind in (TokenKind.desc, TokenKind.coord, TokenKind.structure)
    }
    assert by_kind[TokenKind.desc] == "red cup"
    assert by_kind[TokenKind.coord] == "743613241000"
    assert by_kind[TokenKind.structure] == '```json\n[\n\t{"bbox_2d": [, , , ], "label": ""}\n]\n```'
    assert segment.ids[: len(PROMPT)].tolist() == list(PROMPT)
    assert segment.ids[-1] == QWEN.table.end_of_turn
    assert (segment.roles[: len(PROMPT)] == Role.prompt).all()
    assert segment.roles[-1] == Role.end_of_turn
    expected = {TokenKind.desc: Role.tail_desc, TokenKind.coord: Role.tail_coord}
    for kind, role in zip(segment.kinds[len(PROMPT) : -1], segment.roles[len(PROMPT) : -1], strict=True):
        assert role == expected.get(TokenKind(kind), Role.tail_structure)
    assert segment.weights.tolist() == [0.0] * len(PROMPT) + [1.0] * (len(segment) - len(PROMPT))
    assert np.isnan(segment.coord_targets).all()
    assert not segment.sides.any()


def test_a_polygon_cannot_be_written():
    with pytest.raises(ValueError, match="'leaf' is a polygon, and native answers have boxes only"):
        QWEN.write(PROMPT, [TrueObject("leaf", Geometry("poly", (1, 1, 9, 1, 5, 9)))])


@pytest.mark.parametrize(
    "text",
    [
        f"```json\n[\n\t{CUP},\n\t{DOG}\n]\n```",
        f"```json\n[{CUP}, {DOG}]\n```",
        f"```\n[{CUP},{DOG}]\n```",
        f"[{CUP}, {DOG}]",
        f"\n [ {CUP} , {DOG} ] ",
        f"Here are the objects:\n```json\r\n[{CUP}, {DOG}]\n```\nTell me if you need more.",
        f"[{CUP}, {DOG}]\n```\nno fence was opened",
        '[{"label": "cup", "bbox_2d": [10, 20, 300, 400]}, {"desc": "dog", "bbox_2d": [1,2,3,1000]}]',
        '[{"bbox_2d": [10, 20, 300, 400],\n"desc": "\\u0063up"},{"bbox_2d": [1,\n2,\n3,\n1000], "label": "dog"}]',
    ],
)
def test_reading_accepts_the_forms_that_published_models_write(text):
    assert summarise(text) == BOTH
    assert is_readable(text, "native")


def test_a_single_object_stands_for_a_list_of_one():
    assert summarise(f"```json\n{CUP}\n```") == BOTH[:1]


@pytest.mark.parametrize("text", ["", "No cups.", "cup: [1, 2, 3, 4]", "```json\n", "```python\n[1]\n```"])
def test_other_text_has_no_objects_and_is_not_readable(text):
    assert read(text) == ()
    assert not is_readable(text, "native")


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        ("7", Reason.not_a_mapping),
        ("[10, 20, 300, 400]", Reason.not_a_mapping),
        ('{"bbox_2d": [1, 2, 3, 4], "bbox_2d": [1, 2, 3, 4], "label": "a"}', Reason.repeated_field),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a", "desc": "a"}', Reason.repeated_field),
        ('{"bbox_2d": [1, 2, 3, 4], "label": "a", "color": "red"}', Reason.unexpected_key),
        ('{"point_2d": [1, 2], "label": "a"}', Reason.unexpected_key),
        ('{"label": "a"}', Reason.missing_geometry),
        ('{"bbox_2d": [1, 2, 3, 4]}', Reason.missing_desc),
        ('{"bbox_2d": [1, 2, 3, 4], "label": 5}', Reason.missing_desc),
        ('{"bbox_2d": [1, 2, 3, 4], "label": " "}', Reason.empty_desc),
        ('{"bbox_2d": "1, 2, 3, 4", "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [1, 2, 3, "4"], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [1, 2, 3, 4.5], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [1, 2, 3, 1e2], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [-1, 2, 3, 4], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [1, 2, 3, 1001], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [[1, 2], [3, 4]], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": ["<|coord_1|>", 2, 3, 4], "label": "a"}', Reason.bad_geometry),
        ('{"bbox_2d": [1, 2, 3], "label": "a"}', Reason.wrong_count),
        ('{"bbox_2d": [1, 2, 3, 4, 5, 6, 7, 8, 9], "label": "a"}', Reason.wrong_count),
        ('{"bbox_2d": [3, 2, 1, 4], "label": "a"}', Reason.degenerate),
        ('{"bbox_2d": [1, 2, 1, 4], "label": "a"}', Reason.degenerate),
    ],
)
def test_a_wrong_object_is_kept_with_its_reason_and_the_others_are_read(item, reason):
    first, wrong, last = summarise(f"```json\n[{CUP}, {item}, {DOG}]\n```")
    assert [first, last] == BOTH
    assert wrong[1:] == (None, reason)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ("", None),
        (",", None),
        (",\n\t", None),
        (',\n\t{"bbox', Reason.truncated),
        (', {"bbox_2d": [1, 2, 3, 4], "label": "do', Reason.truncated),
        (', {"bbox_2d": [1, 2, 3, 4], "label": "dog"', Reason.truncated),
        (", {bbox_2d: [1, 2, 3, 4]}]", Reason.syntax),
        (", ]", Reason.syntax),
        (' {"bbox_2d": [1, 2, 3, 4], "label": "dog"}]', Reason.syntax),
        (', {"bbox_2d": [1, <|image_pad|> 2, 3, 4], "label": "dog"}]', Reason.placeholder),
        (', {"bbox_2d": [1, 2<|im_end|>, 3, 4], "label": "dog"}]', Reason.truncated),
    ],
)
def test_an_object_that_is_cut_off_comes_last_with_its_reason(rest, reason):
    objects = read(f"```json\n[\n\t{CUP}{rest}")
    assert (objects[0].desc, objects[0].reason) == ("cup", None)
    assert [item.reason for item in objects[1:]] == ([] if reason is None else [reason])


def test_the_digits_of_an_object_are_its_coordinate_tokens():
    ids = encode(PUBLISHED, QWEN.table)
    objects = QWEN.read(ids).objects
    spelled = [QWEN.table.bytes_of([ids[k] for k in item.coord_indices]).decode() for item in objects]
    assert spelled == ["74361324808", "691235775328"]


def test_the_tokens_of_an_object_begin_where_it_is_decided_that_there_is_another():
    ids = encode(PUBLISHED, QWEN.table)
    first, second = QWEN.read(ids).tokens
    text = [QWEN.table.bytes_of([id]).decode() for id in ids]
    assert (text[first[0]], text[second[0]]) == ("[\n", '"},\n')
    assert (first[-1] + 1, second[-1] + 1) == (second[0], len(ids))


def test_a_tokenizer_without_coordinate_tokens_writes_and_reads_native_answers_only():
    tokenizer = make_tokenizer("small", coords=False, native=True).backend_tokenizer
    plain = VocabularyTable.from_tokenizer(tokenizer, needs_coords=False)
    answers = NativeAnswers(plain)
    truth = [TrueObject("cup", box(0, 5, 999, 998)), TrueObject("<|coord_5|>", box(1, 2, 3, 4))]
    segment = answers.write(PROMPT, truth)
    objects = answers.read(segment.ids[len(PROMPT) :].tolist()).objects
    assert [(item.desc, item.geometry) for item in objects] == [(item.desc, item.geometry) for item in truth]
    assert not plain.is_coord(7)
    with pytest.raises(VocabularyError, match="1000 of the 1000 coordinate tokens are missing"):
        VocabularyTable.from_tokenizer(tokenizer)
    with pytest.raises(VocabularyError, match="answer_format: native"):
        _ = plain.first_coord


def write_checkpoint(folder, model_type, note=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    make_tokenizer("small", coords=note is None).backend_tokenizer.save(str(folder / "tokenizer.json"))
    if note is not None:
        (folder / "coordexp.json").write_text(json.dumps(note))
    return folder


def test_a_checkpoint_records_its_format(tmp_path):
    plain = write_checkpoint(tmp_path / "plain", "qwen3_vl")
    trained = write_checkpoint(tmp_path / "trained", "qwen3_vl", {"prompt": "?", "answer_format": "native"})
    older = write_checkpoint(tmp_path / "older", "qwen3_vl", {"prompt": "?"})
    newer = write_checkpoint(tmp_path / "newer", "qwen3_vl", {"answer_format": "yaml"})
    assert load_format(plain).name == "coord_tokens"
    assert load_format(plain, "native").name == "native"
    assert load_format(trained).name == "native"
    with pytest.raises(VocabularyError, match="--answer-format native"):
        load_format(older)
    with pytest.raises(UserError, match="the answer format 'yaml' is unknown"):
        load_format(newer)


def test_families_that_write_pixels_have_no_native_answers(tmp_path):
    folder = write_checkpoint(tmp_path / "pixels", "qwen2_5_vl")
    assert load_format(folder).name == "coord_tokens"
    with pytest.raises(UserError, match="qwen2_5_vl do not write boxes as numbers from 0 to 1000"):
        load_format(folder, "native")
