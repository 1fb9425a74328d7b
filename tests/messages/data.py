"""Messages about records, files of data, and what is imported."""

import json
from dataclasses import replace

import pytest

from coordexp.data import Record, RecordFile, RecordObject, open_data, parse_any_record, parse_record
from coordexp.data.doctor import examine
from coordexp.data.images import read_image_facts, size_problem
from coordexp.data.importers import ImportCounts, Rules, find_sources, find_split, read_lvis
from coordexp.data.importers.packed import read_webdataset
from coordexp.data.importers.rows import RowReader
from coordexp.data.masks import decode_mask
from coordexp.data.stores import PREFIXES, check_allowed
from coordexp.detect.suggestions import (
    Suggestion,
    complete_records,
    read_decisions,
    read_suggestions,
    write_suggestions,
)
from coordexp.files import find_data_files
from tests.command import run
from tests.messages import provoke
from tests.unit.data import test_doctor, test_import_labelme, test_import_yolo
from tests.unit.data.packed import draw as draw_image
from tests.unit.data.packed import write_members
from tests.unit.data.planted import write_clean
from tests.unit.data.sources import (
    annotation,
    coco,
    count_reasons,
    import_coco,
    list_shapes,
    write_and_read,
    write_image,
)
from tests.unit.data.test_labelstudio import import_tasks, region, task

ALONE = {"question": "Why?", "answer": "Because."}
ABOUT_IMAGE = {"image": "a.png", "width": 64, "height": 48, "question": "How many?", "answer": "3"}
EMPTY = {"image": "a.png", "width": 64, "height": 48, "space": "pixel", "objects": []}
BOX = {"desc": "a", "bbox_2d": [1, 2, 3, 4]}
NOTES = {"image": "a.png", "labels": 0, "complete": True, "added": []}
SIZES = {"width": 64, "height": 48}


@provoke(
    *(ALONE | {"answer": answer} for answer in (" \n", 3)),
    ALONE | {"question": ""},
    {"question": "Why?"},
    {"answer": "3"},
    *(ALONE | {key: "x"} for key in ("objects", "prompt", "image")),
    ALONE | {"width": 4, "height": 4},
    ABOUT_IMAGE | {"image": ""},
    ABOUT_IMAGE | {"width": 0},
)
def a_chat_record(folder, line):
    parse_any_record(json.dumps(line))


@provoke(
    *({key: value} for key in ("width", "image_id") for value in ("640", -1, True)),
    {"width": None},
    *({"bbox": 1}, {"space": "xywh"}, {"image": ""}, {"objects": {}}, {"a\0": 1}, {"meta": "a note"}),
    {"image_id": 2**63},
    {"classes": []},
    {"classes": ["a", "a"]},
    {"classes": ["a"], "expression": "b"},
    {"prompt": "{classes}?"},
    {"prompt": "{expression}?"},
    {"expression": " "},
)
def a_record_with(folder, changes):
    parse_record(json.dumps(EMPTY | changes))


@provoke(
    *("a", {"desc": "a"}, BOX | {"poly": []}, BOX | {"desc": " "}, BOX | {"category_id": 1.0}),
    *(BOX | {"bbox_2d": numbers} for numbers in ([1, 2, 3], [1, 2, 3, None], [1, 2, 3, float("nan")])),
    {"desc": "a", "poly": [1, 2, 3, 4, 5, 6, 7]},
)
def an_object(folder, item):
    parse_record(json.dumps(EMPTY | {"objects": [item]}))


@provoke(
    *("[]", "{", '{"image": "a"}', '{"image": "a", "image": "b"}'),
    '{"messages": [], "images": ["a.png"]}',
    '{"id": 1, "image": "a.png", "conversations": []}',
    '{"instruction": "", "input": "", "output": ""}',
)
def a_line(folder, line):
    parse_record(line)


@provoke()
def a_line_that_is_nested_too_deeply(folder):
    parse_record("[" * 100_000)


@provoke()
def a_record_with_many_objects_of_another_form(folder):
    parse_record(json.dumps(EMPTY | {"objects": [{"label": "x", "bbox": [1, 2, 3, 4]}] * 20}))


def write_lines(folder, *lines):
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@provoke()
def a_broken_line_of_a_file(folder):
    RecordFile(write_lines(folder, EMPTY, {}))[1]


@provoke()
def a_question_where_objects_are_needed(folder):
    RecordFile(write_lines(folder, EMPTY, ALONE))[1]


@provoke()
def a_shape_without_area(folder):
    Record("a.png", 10, 10, "pixel", (RecordObject("line", "bbox_2d", (1.0, 1.0, 1.0, 5.0)),)).true_objects()


@provoke(
    b"\n",
    b"\x1f\x8b",  # as gzip begins
    b'{"images": [{"id": 1}], "annotations": [], "categories": []}',
    b'[{"image_id": 1, "bbox": [1, 2, 3, 4]}]',
)
def a_file_with(folder, content):
    (folder / "train.jsonl").write_bytes(content)
    RecordFile(folder / "train.jsonl")


@provoke(["none-*.jsonl"], ["none.jsonl"], ["train.jsonl", "tr*"])
def files_named(folder, names):
    write_lines(folder, EMPTY)
    find_data_files([str(folder / name) for name in names])


@provoke((2, 1000), (201, 1), (2**14, 2**13 + 1))
def an_image_of_the_size(folder, size):
    return size_problem(*size)


# What is imported.


@provoke(
    *("{", "[]", {"images": [], "annotations": []}, {"images": [], "annotations": [3], "categories": []}),
    *(
        coco([], [{"id": 1, "file_name": name} | SIZES])
        for name in ("../a.png", "sub\\..\\..\\a.png", "/etc/a.png", "C:\\a.png", None)
    ),
    coco([], [{"id": 1, "file_name": "a.png"}]),
    coco([], [{"id": 1, "file_name": "a.png", "width": "64", "height": 48}]),
    coco([], [{"file_name": "a.png"} | SIZES]),
    coco([], [{"id": 1, "file_name": file} | SIZES for file in "ab"]),
    coco([], None, [{"id": 1, "name": name} for name in "ab"]),
    coco([], None, [{"id": 1, "name": " "}]),
    coco([], None, [{"id": 1, "name": "\ud800"}]),
)
def a_coco_file(folder, document):
    try:
        import_coco(folder, document)
    finally:
        assert not list(folder.glob("*out.jsonl*"))


@provoke("http://x/../../a.png", "http://x/%2e%2e/a.png", None)
def the_address_of_an_lvis_image(folder, url):
    import_coco(folder, coco([], [{"id": 1, "coco_url": url} | SIZES]), read_lvis)


def describe_import(imported):
    """Return the shapes that were imported, and the reasons for which others were not."""
    records, counts = imported
    return [*list_shapes(records), *(reason for reason in count_reasons(counts) if not reason.startswith("noted"))]


@provoke(
    *([[1, 2, 3, 4]], [[1, 2, 3, 4, 5, 6, 7]], [[1, 1, 2, 2, 3, 3]], [["a", 1, 2, 2, 3, 3]]),
    *([[float("nan"), 1, 2, 2, 3, 3]], "polygon", {"size": [2, 2], "counts": [4]}),
    *({"size": [48, 64], "counts": "~~"}, {"size": [48, 64], "counts": [48 * 64]}),
)
def a_segmentation_for_which_the_box_is_taken(folder, segmentation):
    return describe_import(import_coco(folder, coco([annotation(segmentation=segmentation)])))


@provoke(*([8, 6, 0, 12], [8, 6, -4, 12], [8, 6, 0.01, 12], [70, 6, 10, 12], [8, 6, 16], [8, 6, 16, None], None))
def a_box_of_coco(folder, bbox):
    return describe_import(import_coco(folder, coco([annotation(bbox=bbox)])))


@provoke(*({"image_id": 99}, {"image_id": [1]}, {"category_id": 99}, {"category_id": None}))
def a_second_annotation_with(folder, changes):
    return describe_import(import_coco(folder, coco([annotation(1), annotation(2) | changes])))


@provoke("clip", "drop", "refuse")
def a_box_beyond_the_image_by_the_rule(folder, rule):
    return describe_import(import_coco(folder, coco([annotation(bbox=[-10, 40, 20, 20])]), outside=rule))


@provoke(
    *({"size": [3, 4], "counts": [12]}, {"size": [4, 3], "counts": [11]}, {"size": [4, 3], "counts": [-1, 13]}),
    *({"size": [4, 3], "counts": counts} for counts in ([12.0], "\u00e9", "o" * 40, "P")),
)
def a_mask(folder, segmentation):
    decode_mask(segmentation, 3, 4)


@provoke(
    *({"imagePath": "../images/a.png"}, {"imageHeight": None}),
    {"shapes": [{"label": "", "points": [[1, 1], [9, 9]], "shape_type": "rectangle"}]},
)
def a_labelme_file_with(folder, changes):
    test_import_labelme.import_files(folder, [], **changes)


@provoke(
    *(("point", [[1, 1]]), ("circle", [[1, 1]]), ("rectangle", [[1, 1, 3]]), ("polygon", None)),
    *(("rectangle", [[5, 5], [5, 9]]), ("polygon", [[5, 5], [5, 9]])),
)
def a_labelme_shape(folder, shape):
    return describe_import(test_import_labelme.import_files(folder, ["text", test_import_labelme.shape(*shape)]))


BOX_OF_ROW = {"bbox": [8, 6, 16, 12], "category": "cat"}
OF_TAR = [("a.png", draw_image(0)), ("a.json", json.dumps({"objects": [BOX_OF_ROW]}).encode())]


def import_tar(folder, members, **rules):
    counts = ImportCounts()
    reader = RowReader(None, Rules(**{"boxes": "xywh"} | rules), counts)
    images = read_webdataset(str(write_members(folder / "s.tar", members)), reader)
    return describe_import((write_and_read(folder, images, counts), counts))


@provoke(
    *({"objects": value} for value in ("text", [3], {"bbox": [[1, 2, 3, 4]], "category": []}, [{"bbox": [1, 2]}])),
    *({"objects": [BOX_OF_ROW | {"category": value}]} for value in (None, " ", "\ud800", 7, 1.5)),
    *({"objects": [BOX_OF_ROW | {"bbox": value}]} for value in (None, [1, 2, 3])),
    {"objects": [BOX_OF_ROW | {"iscrowd": 1}]},
    {"space": "pixel", "objects": []},
)
def a_row_with(folder, row):
    return import_tar(folder, [OF_TAR[0], ("a.json", json.dumps(row).encode())])


TARS = {
    "a broken image": [("a.png", b"no image")],
    "labels without an image": OF_TAR[1:],
    "two images of one name": [*OF_TAR, ("a.jpg", b"")],
    "broken labels and a file without a suffix": [("a.json", b"["), OF_TAR[0], ("b", b"")],
}


@provoke(*TARS)
def a_tar_with(folder, what):
    return import_tar(folder, TARS[what])


@provoke()
def a_box_that_may_be_two_corners(folder):
    import_tar(folder, OF_TAR, boxes=None)


@provoke()
def a_tar_that_is_none(folder):
    (folder / "s.tar").write_bytes(b"x" * 600)
    list(read_webdataset(str(folder / "s.tar"), RowReader(None, Rules(), ImportCounts())))


@provoke("none-*.tar", "https://example.org/*.tar", "s3://example/*.tar")
def a_source_of_tars(folder, name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PREFIXES, "https://example.org/")
        find_sources(name if "://" in name else str(folder / name), "webdataset")


def import_yolo(folder, labels, names="names: [cat]"):
    write_image(folder / "images/a.png")
    (folder / "labels").mkdir()
    (folder / "data.yaml").write_text(names)
    return describe_import(test_import_yolo.import_files(folder, labels))


@provoke(
    *("cat 0.5 0.5 0.2 0.2", "0 nan 0.5 0.2 0.2", "1 0.5 0.5 0.2 0.2", "0.5 0.5 0.5 0.2 0.2"),
    *("0 0.5 0.5 0.2 0.2 0.9", "0 32 24 10 10", "0 0.5 0.5 0 0.2", "0 0.1 0.1 0.2 0.2 0.3 0.3"),
)
def a_line_of_yolo(folder, line):
    return import_yolo(folder, line)


@provoke("names: [yes, no]", "names: {a: cat}", "nc: 2", "names: [", "names: {0: 2020-99-99}")
def the_names_of_yolo(folder, names):
    import_yolo(folder, "", names)


@provoke("val: images", "train: [a, b]", "train: none", "- train")
def a_split_of_yolo(folder, content):
    (folder / "data.yaml").write_text(content)
    find_split(folder / "data.yaml", "train")


@provoke(
    *(region("brushlabels"), region(names=[]), region(x="left"), region(rotation="much"), region(width=0)),
    *(region() | {"image_rotation": 90}, region("polygonlabels"), "text", region(names=["cat", "dog"])),
)
def a_region_of_label_studio(folder, drawn):
    return describe_import(import_tasks(folder, task(drawn, region(names=["dog"]))))


@provoke(
    {"image": "a.png", "label": []},
    {"data": {}},
    *(
        task(region(), data=data)
        for data in (
            *({"photo": "a.png"}, {"image": "/data/local-files/?d=../a.png"}, {"coordexp": 3}),
            {"coordexp": {"image": "a.png"}},
        )
    ),
)
def a_task_of_label_studio(folder, exported):
    import_tasks(folder, exported)


# Suggestions, and commands.

SUGGESTION = Suggestion(1, 1, "a.png", 1, RecordObject("cup", "bbox_2d", (10, 20, 110.5, 220)), 0.9, None)


@provoke(
    *({"id": 2}, {"id": True}, {"score": 1.5}, {"score": None}, {"agreement": -0.1}, {"labels": -1}),
    *({"colour": "red"}, {"poly": [1, 2, 3, 4, 5, 6]}, {"bbox_2d": [1, 2, 3]}, {"desc": " "}),
)
def a_suggestion_with(folder, changes):
    (folder / "s.jsonl").write_text(json.dumps(json.loads(SUGGESTION.as_json()) | changes) + "\n")
    read_suggestions(folder / "s.jsonl")


@provoke("", "{", "[]", '{"id": 1, "id": 1}')
def a_line_of_suggestions(folder, text):
    (folder / "s.jsonl").write_text(f"{text}\n")
    read_suggestions(folder / "s.jsonl")


@provoke(
    *({"suggestions": "0" * 64}, {"format": 2}, {"more": 1}),
    *({"decisions": {id: "accept"}} for id in ("3", "0", "a", "1" * 20)),
    *({"decisions": {"1": "maybe"}}, {"images": []}, {"images": {"-1": NOTES}}, {"images": {"1": {}}}),
    *(
        {"images": {"1": NOTES | {key: value}}}
        for key, value in (("complete", 1), ("added", [BOX | {"desc": " "}]))
    ),
)
def decisions_with(folder, changes):
    file = write_suggestions(folder / "s.jsonl", [SUGGESTION])
    text = json.dumps({"format": 1, "suggestions": file.sha256, "decisions": {}} | changes)
    (folder / "d.json").write_text(text)
    read_decisions(folder / "d.json", file)


@provoke([60, 40, 64.5, 48], [-1, 0, 5, 5], [9, 9, 5, 5], [5, 5, 5.01, 9], [1, 1, 9, 1, 9])
def an_added_box(folder, box):
    item = RecordObject("a", "bbox_2d", tuple(box))
    replace(SUGGESTION, item=item, state="added").to_label(parse_record(json.dumps(EMPTY)))


@provoke({"image": "b.png"}, {"labels": 0}, {"image_id": 5})
def suggestions_for_other_records(folder, changes):
    records = open_data([[write_lines(folder, EMPTY | {"objects": [BOX]})]])
    list(complete_records(records, [replace(SUGGESTION, **changes)], folder))


@provoke(["--val", "0"], ["--val", "1.5"], ["--val", "2"], ["--val", "0.0001"])
def a_split(folder, words):
    write_lines(folder, EMPTY, EMPTY | {"image": "b.png"})
    return run("data", "split", folder / "train.jsonl", *words, code=1).output


@provoke()
def cleaning(folder):
    write_image(folder / "a.png")
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:30])
    boxes = ([30, 6, 10, 18], [1, 1, 9, 9], [1, 1, 9, 9], [70, 50, 90, 60], [5, 5, 5, 5])
    good = EMPTY | {"objects": [{"desc": "cat", "bbox_2d": box} for box in boxes]}
    lost = {"objects": [{"desc": "cat", "bbox_2d": [5, 5, 5, 5]}]}
    other = {"width": 48, "height": 64}
    bare = {name: value for name, value in EMPTY.items() if name != "objects"}
    lines = [good, bare, EMPTY | {"image": "none.png"}, EMPTY | {"image": "torn.png"}, EMPTY | other, EMPTY | lost]
    write_lines(folder, *lines, EMPTY | lost | {"classes": ["cat"]})
    return run("data", "clean", folder / "train.jsonl", "--out", folder / "clean.jsonl").output


@provoke("write_sizes", "write_centres", "swap_axes")
def the_doctor_on_boxes_in_another_form(folder, change):
    planted = write_clean(folder)
    getattr(test_doctor, change)(planted)
    return examine(planted.write()).findings


@provoke(("norm1000", "pixel"), ("unit", "pixel"), ("pixel", "unit"), ("pixel", "norm1000"))
def the_doctor_on_a_stated_space(folder, stated):
    planted = write_clean(folder)
    factors = {"pixel": (1, 1), "norm1000": test_doctor.NORM, "unit": test_doctor.UNIT}
    planted.scale(*factors[stated[0]], stated[1])
    findings = examine(planted.write()).findings
    return [item for item in findings if item.subject.startswith(("suspect", "maybe"))] or "nothing"


@provoke(*test_doctor.ONE_LINE)
def the_doctor_on_one_mistake(folder, code):
    planted = write_clean(folder)
    test_doctor.ONE_LINE[code][0](planted)
    return examine(planted.write(), look=read_image_facts).findings


@provoke(
    "file:///a.png",
    "s3://key:secret@bucket/a.png",
    "s3://buck et/a.png",
    "https://host/a.png?token=secret",
    "s3://bucket/../a.png",
    "https://host/a.png",
    "gs://bucket/a.tar#bytes=512:9",
)
def an_image_in_a_store(folder, url):
    write_lines(folder, EMPTY | {"image": url})
    return run("data", "doctor", folder / "train.jsonl", code=1).output


@provoke("a.tar#bytes=9:9", "a.tar#bytes=0:9", "a.tar#bytes=0:9;base64", "b.tar#bytes=0:9")
def an_image_in_a_part_of_a_file(folder, address):
    (folder / "a.tar").write_bytes(b"0123456 8")
    write_lines(folder, EMPTY | {"image": address})
    return examine(folder / "train.jsonl", look=read_image_facts).findings


@provoke("s3:bucket", "s3://key:secret@bucket/", "https://")
def a_prefix_of_stores(folder, prefix):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PREFIXES, prefix)
        check_allowed("s3://bucket/a.png")
