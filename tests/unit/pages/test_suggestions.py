"""The page of suggestions: what it holds, and where its images are."""

import json
import re

from PIL import Image

from coordexp.data import Record, RecordObject
from coordexp.detect.suggestions import Suggestion, SuggestionFile
from coordexp.pages.suggestions import render_suggestions

LABEL = RecordObject("cat", "bbox_2d", (1, 2, 10, 20))
NASTY = "</script><script>alert(1)</script>"


def render(folder, *, images=2, place="auto", most=100, target=None, desc="dog"):
    records, suggestions = {}, []
    for k in range(1, images + 1):
        name = f"a {k}?#.png"
        Image.new("RGB", (64, 48), "teal").save(folder / name)
        records[k] = Record(name, 64, 48, "unit", (RecordObject("cat", "bbox_2d", (0, 0, 0.5, 0.5)),), k)
        item = RecordObject(desc, "poly", (0, 0, 1, 0, 1, 1))
        suggestions.append(Suggestion(k, k, name, 1, item, 0.5, 0.25))
    file = SuggestionFile(tuple(suggestions), "f" * 64)
    return render_suggestions(
        file, records, folder / "data.jsonl", target=target or folder, most=most, place=place
    )


def read_index(page):
    return json.loads(re.search(r'id="index">(.*?)</script>', page)[1])


def test_shapes_are_rings_in_pixels(tmp_path):
    index = read_index(render(tmp_path))
    assert index["items"][1] == [2, 1, "dog", 0.5, 0.25, [0, 0, 64, 0, 64, 48]]
    assert index["images"][1]["labels"] == [["cat", [0, 0, 32, 0, 32, 24, 0, 24]]]
    assert (index["total"], index["hash"]) == (2, "f" * 64)


def test_few_images_are_inside_the_page_and_many_are_linked(tmp_path, monkeypatch):
    page = render(tmp_path)
    assert "img-src data:;" in page and 'id="picture-1"' in page
    monkeypatch.setattr("coordexp.pages.suggestions.MOST_INSIDE", 1)
    page = render(tmp_path)
    assert "img-src data: file: 'self';" in page and 'id="picture-1"' not in page
    assert 'id="picture-1"' in render(tmp_path, place="inside")


def test_an_image_that_cannot_be_read_has_a_remark(tmp_path):
    render(tmp_path)
    (tmp_path / "a 1?#.png").write_bytes(b"")
    records = {1: Record("a 1?#.png", 64, 48, "pixel", (), 1)}
    file = SuggestionFile((Suggestion(1, 1, "a 1?#.png", 0, LABEL, 0.5),), "0" * 64)
    page = render_suggestions(file, records, tmp_path / "t", target=tmp_path, most=9)
    (image,) = read_index(page)["images"]
    assert image["remark"].startswith("image not shown") and "element" not in image


def test_text_of_the_data_cannot_become_markup(tmp_path):
    page = render(tmp_path, desc=NASTY)
    assert NASTY not in page
    assert read_index(page)["items"][0][2] == NASTY
