"""The examples of docs/answer-formats.md: the code runs, and the texts and numbers are true."""

import re
from pathlib import Path

import pytest

from coordexp.answers.formats import CoordTokenAnswers, NativeAnswers
from coordexp.answers.native import write_native
from coordexp.data import Geometry, TrueObject
from tests.vocabularies import encode, table

PAGE = (Path(__file__).parents[3] / "docs/answer-formats.md").read_text()
CUP = TrueObject("red cup", Geometry("bbox_2d", (74, 361, 324, 807)))


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/answer-formats.md", "exec"), {})


def test_the_page_shows_both_texts():
    vocabulary = table("qwen")
    lines = write_native([CUP], vocabulary).text.decode().splitlines()
    assert all(line in PAGE for line in lines)
    segment = CoordTokenAnswers(vocabulary).write((), [CUP])
    assert f"coord_tokens   {vocabulary.text_of(segment.ids[:-1].tolist())}\n" in PAGE


def test_an_object_takes_as_many_tokens_as_the_page_says():
    vocabulary = table("qwen")
    box = TrueObject("red cup", Geometry("bbox_2d", (100, 361, 324, 807)))
    counts = {}
    for answers in (NativeAnswers(vocabulary), CoordTokenAnswers(vocabulary)):
        one, two = (len(answers.write((), [box] * number)) for number in (1, 2))
        counts[answers.name] = two - one
    fence = len(NativeAnswers(vocabulary).write((), [box])) - counts["native"]
    other = len(CoordTokenAnswers(vocabulary).write((), [box])) - counts["coord_tokens"]
    assert (counts, fence - other) == ({"native": 34, "coord_tokens": 31}, 6)


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if line.startswith(("| `[", "| `{"))])
def test_the_wrong_values_of_the_page_have_the_reasons_that_it_says(line):
    _, values, reason, _ = line.split("|")
    for value in re.findall(r"`([\[{].*?[\]}])`", values):
        item = value if value.startswith("{") else f'{{"bbox_2d": {value}, "label": "cup"}}'
        (wrong,) = NativeAnswers(table("qwen")).read(encode(f"[{item}]", table("qwen"))).objects
        assert f" `{wrong.reason}` " == reason
