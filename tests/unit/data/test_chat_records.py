"""Chat records: questions with answers, in files of their own or beside records with objects."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data import (
    ChatRecord,
    DataError,
    Record,
    RecordFile,
    find_wrong_kind,
    open_data,
    parse_any_record,
    parse_record,
    read_any_records,
    read_records,
)

ABOUT_IMAGE = {"image": "a.png", "width": 64, "height": 48, "question": "How many?", "answer": "3"}
ALONE = {"question": "Why?", "answer": "Because."}
DETECTION = {"image": "a.png", "width": 64, "height": 64, "space": "bin", "objects": []}


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_question_has_an_image_or_none():
    assert parse_any_record(json.dumps(ABOUT_IMAGE)) == ChatRecord("How many?", "3", "a.png", 64, 48)
    assert parse_any_record(json.dumps(ALONE)) == ChatRecord("Why?", "Because.")
    assert isinstance(parse_any_record(json.dumps(DETECTION)), Record)


words = st.text(min_size=1).filter(str.strip)


@given(words, words, st.none() | words, st.integers(1, 9999), st.integers(1, 9999))
def test_any_chat_record_is_read_as_it_was_written(question, answer, image, width, height):
    size = (width, height) if image is not None else (0, 0)
    record = ChatRecord(question, answer, image, *size)
    assert parse_any_record(record.as_json()) == record


def test_where_objects_are_needed_a_question_is_an_error_that_names_its_line(tmp_path):
    file = write(tmp_path / "a.jsonl", DETECTION, ALONE)
    records = RecordFile(file)
    assert isinstance(records[0], Record) and isinstance(records.read(1), ChatRecord)
    assert records.read(-1) == ChatRecord("Why?", "Because.")
    for read in (lambda: records[1], lambda: records[-1], lambda: list(read_records(file))):
        with pytest.raises(DataError, match=r"a\.jsonl:2"):
            read()
    with pytest.raises(ValueError):
        parse_record(json.dumps(ALONE))
    assert [number for number, _ in read_any_records(file)] == [1, 2]
    assert records.object_counts.tolist() == [0, 0]


def test_a_set_of_several_files_reads_both_kinds(tmp_path):
    files = [write(tmp_path / "a.jsonl", DETECTION), write(tmp_path / "b.jsonl", ALONE, ABOUT_IMAGE)]
    records = open_data([[file] for file in files])
    assert [type(records.read(k)) for k in range(3)] == [Record, ChatRecord, ChatRecord]


def test_each_setting_has_records_of_its_kind():
    chat, objects = parse_any_record(json.dumps(ALONE)), parse_any_record(json.dumps(DETECTION))
    train, val, questions = "custom.train_data[1].path", "custom.val_jsonl", "custom.eval_data[0].path"
    assert find_wrong_kind(train, [chat, objects], trains_chat=True) is None
    assert "chat_ce" in find_wrong_kind(train, [objects, chat], trains_chat=False)[1]
    assert find_wrong_kind(val, [objects], trains_chat=True) is None
    assert "custom.eval_data" in find_wrong_kind(val, [objects, chat], trains_chat=True)[1]
    assert find_wrong_kind(questions, [chat], trains_chat=False) is None
    assert "custom.val_jsonl" in find_wrong_kind(questions, [chat, objects], trains_chat=True)[1]
