"""The page of a data file shows records and their problems, and nothing in the data can run as code."""

import json
import re

import pytest

from tests.command import run
from tests.unit.data.planted import HEIGHT, WIDTH, write_clean
from tests.unit.pages.reader import Reader

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style></option><svg onload=alert(1)>",
    "&lt;b&gt; \u732b",
)


@pytest.fixture
def planted(tmp_path):
    return write_clean(tmp_path)


def view(planted, *options):
    target = planted.folder / "page.html"
    run("data", "view", planted.write(), "--out", target, *options)
    return Reader(target.read_text(encoding="utf-8"))


def test_a_question_is_shown_with_its_answer_and_its_image_if_it_has_one(planted):
    hostile = HOSTILE[0]
    planted.rows = [
        planted.rows[0] | {},
        {key: planted.rows[0][key] for key in ("image", "width", "height")} | {"question": "Why?", "answer": "3"},
        {"question": hostile, "answer": hostile},
    ]
    page = view(planted)
    assert page.texts["b"].count(hostile) == 2 and {"Why?", "3"} <= set(page.texts["b"])
    assert len(page.all("img")) == 2 and len(cards(page)) == 3
    assert any("no image" in text for text in page.texts["small"])
    assert any("2 of them questions" in text for texts in page.texts.values() for text in texts)
    assert all("alert" not in text for text in page.texts["script"])


def cards(page):
    return page.all("article")


def test_each_record_is_a_card_with_its_image_and_shapes(planted):
    page = view(planted)
    assert len(cards(page)) == 40
    assert len(page.all("polygon")) == 160
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.all("img"))
    assert page.all("svg")[0]["viewbox"] == f"0 0 {WIDTH} {HEIGHT}"
    assert page.all("polygon")[0]["points"] == f"0,0 {WIDTH},0 {WIDTH},{HEIGHT} 0,{HEIGHT}"


def test_classes_and_problems_can_be_chosen_and_have_counts(planted):
    planted.rows[3]["objects"][0]["bbox_2d"] = [40, 10, 20, 30]
    planted.rows.insert(5, "{")
    page = view(planted)
    assert "leaf (40)" in page.texts["option"]
    assert "inverted (1)" in page.texts["option"]
    assert "any problem (2)" in page.texts["option"]
    assert "no problem (39)" in page.texts["option"]
    assert [card["data-problems"] for card in cards(page) if card["data-problems"]] == ["inverted", "broken-line"]
    values = [option["value"] for option in page.all("option")]
    leaf = values[page.texts["option"].index("leaf (40)")]
    assert sum(leaf in card["data-classes"].split() for card in cards(page)) == 40


def plant_text(planted, text):
    planted.rows[0]["objects"][0]["desc"] = text
    planted.rows[1]["image"] = text
    planted.rows[2] = json.dumps({text: 1})


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_the_data_is_escaped(planted, text):
    plant_text(planted, "harmless")
    harmless = view(planted)
    plant_text(planted, text)
    page = view(planted)
    assert text in page.texts["title"]
    assert text in page.texts["span"]
    assert f"{text} (1)" in page.texts["option"]
    kept = [[tag for tag, _ in reader.elements if tag != "li"] for reader in (page, harmless)]
    assert kept[0] == kept[1]
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on")]


def test_a_hostile_file_name_is_escaped(planted):
    file = planted.write().rename(planted.folder / "<img src=x onerror=alert(1)>.jsonl")
    target = planted.folder / "page.html"
    run("data", "view", file, "--out", target)
    page = Reader(target.read_text(encoding="utf-8"))
    assert page.texts["h1"] == [str(file)]
    assert not [image for image in page.all("img") if not image["src"].startswith("data:")]


def test_the_page_loads_nothing_and_allows_no_script_but_its_own(planted):
    page = view(planted)
    (policy,) = [meta["content"] for meta in page.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert re.search(r"script-src( 'sha256-[\w+/=]+'){2}$", policy)
    assert page.all("link") == [{"rel": "icon", "href": "data:,"}]  # an empty icon, so that none is requested
    loaded = [a.get(name, "data:") for _, a in page.elements for name in ("href", "src")]
    assert not [address for address in loaded if not address.startswith("data:")]
    assert not [a for _, a in page.elements if "srcset" in a]


def test_a_missing_or_broken_image_is_reported_and_its_shapes_are_drawn(planted):
    (planted.folder / "images/0.png").unlink()
    (planted.folder / "images/1.png").write_text("no")
    page = view(planted)
    assert [card["data-problems"] for card in cards(page)][:3] == ["image-missing", "image-unreadable", ""]
    assert len(page.all("img")) == 38
    assert len(page.all("polygon")) == 160


def test_the_limit_counts_cards_and_the_rest_is_not_read(planted):
    planted.rows[30]["objects"][0]["desc"] = "-"
    assert len(cards(view(planted, "--limit", "7"))) == 7
    assert [card["data-problems"] for card in cards(view(planted, "--problems"))] == ["desc-thin"]
