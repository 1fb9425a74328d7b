"""`coordexp data clean`: what it drops, what it keeps, and that the doctor has nothing to add."""

import json

from coordexp.data.doctor import examine
from coordexp.data.images import read_image_facts
from tests.command import run
from tests.unit.data.sources import write_image


def line(image="a.png", objects=(("cat", [8, 6, 24, 18]),), size=(64, 48)):
    items = [{"desc": desc, "bbox_2d": box} for desc, box in objects]
    return json.dumps(
        {"image": image, "width": size[0], "height": size[1], "space": "pixel", "objects": items, "image_id": 4}
    )


def clean(folder, *lines, code=0):
    for name in ("a.png", "b.png"):
        write_image(folder / name)
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:30])
    file, target = folder / "train.jsonl", folder / "clean.jsonl"
    file.write_text("".join(f"{text}\n" for text in lines))
    return run("data", "clean", file, "--out", target, code=code), target


def test_records_and_objects_with_errors_are_dropped_and_named(tmp_path):
    good = line().replace("[8, 6", "[8,  6")  # whole lines are copied as they are
    wrong = [("cat", [30, 6, 10, 18]), ("dog", [1, 1, 9, 9]), ("dog", [1, 1, 9, 9]), ("far", [70, 50, 90, 60])]
    result, target = clean(
        tmp_path,
        good,
        "{not json",
        line("none.png"),
        line("torn.png"),
        line("b.png", size=(48, 64)),
        line("b.png", wrong),
        line("b.png", [("cat", [5, 5, 5, 5])]),
        line("b.png", []),
    )
    lines = target.read_text().splitlines()
    assert lines[0] == good
    assert [json.loads(text)["objects"] for text in lines[1:]] == [[{"desc": "dog", "bbox_2d": [1, 1, 9, 9]}], []]
    assert json.loads(lines[1])["image_id"] == 4
    rows = [row.split()[1] for row in result.stdout.splitlines() if row.startswith("dropped")]
    assert rows == ["1"] * 9 and "train.jsonl:2" in result.stdout
    report = examine(target, look=lambda path: read_image_facts(path, decode=False))
    assert not report.errors


def test_a_file_that_is_suspect_as_a_whole_is_refused(tmp_path):
    boxes = [line("a.png", [("cat", [20 + k % 9, 20, 8, 9])]) for k in range(30)]
    _, target = clean(tmp_path, *boxes, code=1)
    assert not target.exists() and not (tmp_path / "clean.jsonl.partial").exists()


def test_nothing_is_written_if_nothing_would_be_left_or_the_folder_is_another_one(tmp_path):
    _, target = clean(tmp_path, "{not json", code=1)
    assert not target.exists()
    (tmp_path / "other").mkdir()
    run("data", "clean", tmp_path / "train.jsonl", "--out", tmp_path / "other/clean.jsonl", code=1)


def test_questions_are_kept_unless_they_cannot_be_used(tmp_path):
    kept = '{"question": "How many?", "answer": "3"}'
    _, target = clean(tmp_path, kept, '{"question": "How many?", "answer": " "}')
    assert target.read_text() == f"{kept}\n"


def test_a_class_that_lost_an_object_is_neither_exhaustive_nor_asked_for(tmp_path):
    lost, kept, twice = ("cat", [5, 5, 5, 5]), ("cat", [8, 6, 24, 18]), ("dog", [1, 1, 9, 9])
    request = {"classes": ["cat", "dog", "cow"], "exhaustive": ["cat", "dog", "cow"]}
    lines = [
        json.dumps(json.loads(line(objects=objects)) | more)
        for objects, more in (
            ([lost, twice, twice], request),
            ([lost, kept], request),
            ([lost, twice], {"classes": ["cat"]}),
        )
    ]
    _, target = clean(tmp_path, *lines)
    records = [json.loads(text) for text in target.read_text().splitlines()]
    assert [(record["classes"], record["exhaustive"]) for record in records] == [
        (["dog", "cow"], ["dog", "cow"]),
        (["cat", "dog", "cow"], ["dog", "cow"]),
    ]


def test_what_is_kept_of_a_record_keeps_its_meta(tmp_path):
    record = json.loads(line("a.png", [("cat", [0, 0, 20, 20]), ("dog", [19, 9, 1, 1])]))
    record["meta"], record["objects"][0]["meta"] = {"source": "x"}, {"score": 1}
    _, target = clean(tmp_path, json.dumps(record))
    assert json.loads(target.read_text()) == record | {"objects": record["objects"][:1]}
