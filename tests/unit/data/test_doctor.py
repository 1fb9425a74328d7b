"""The doctor reports each planted mistake, and nothing in clean data."""

import dataclasses
import json
import os
import random
import shutil
import signal
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.answers.formats import CoordTokenAnswers, NativeAnswers
from coordexp.answers.segment import count_answer_tokens
from coordexp.data import ChatRecord, DataError, Record, RecordObject
from coordexp.data.doctor import KINDS, check_record, examine
from coordexp.data.doctor.examine import ExampleTokens
from coordexp.data.images import read_image_facts
from tests.command import run
from tests.unit.data.planted import HEIGHT, WIDTH, write_clean
from tests.unit.data.sources import write_image
from tests.vocabularies import table

ANSWERS = CoordTokenAnswers(table("small"))
PROMPT = 10  # tokens


def count_tokens(record, answers=ANSWERS):
    """Return the tokens of an example. All prompts have the same number of them."""
    if isinstance(record, ChatRecord):
        return ExampleTokens(PROMPT, count_answer_tokens(record.answer, answers.table))
    return ExampleTokens(PROMPT, answers.count(record.true_objects()))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_clean(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def planted(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / "set")
    rows = json.loads(json.dumps(prepared.rows))
    return dataclasses.replace(prepared, folder=tmp_path / "set", rows=rows)


def examine_planted(planted, **options):
    """Return the findings by their codes."""
    report = examine(planted.write(), look=read_image_facts, **options)
    return {finding.subject: finding for finding in report.findings}


def test_clean_data_has_no_findings(planted):
    report = examine(planted.write(), look=read_image_facts, count_tokens=count_tokens, max_length=1000)
    assert report.findings == ()
    assert (report.facts.records, report.facts.objects, report.errors) == (40, 160, 0)


def test_questions_are_counted_and_checked_beside_records(planted):
    image = {name: planted.rows[0][name] for name in ("image", "width", "height")}
    planted.rows += [
        image | {"question": "How many?", "answer": "3"},
        {"question": "Where is <|coord_5|>?", "answer": "in the <|box_start|>first<|box_end|> image"},
        {"question": "Why?", "answer": "so<|im_end|>"},
        {"question": "half \ud83d", "answer": "x"},
        image | {"width": 9, "question": "How many?", "answer": "4"},
        {"image": "none.png", "width": 9, "height": 9, "question": "How many?", "answer": "4"},
        {"question": "Empty?", "answer": " "},
        {"question": "Long?", "answer": "long " * 400},
    ]
    options = {"look": read_image_facts, "count_tokens": count_tokens, "max_length": 300}
    report = examine(planted.write(), **options)
    assert {finding.subject: [place.line for place in finding.places] for finding in report.findings} == {
        "special-token": [43],
        "text-broken": [44],
        "size-mismatch": [45],
        "image-missing": [46],
        "broken-line": [47],
        "too-long": [48],
    }
    assert (report.facts.records, report.facts.questions, report.facts.objects) == (47, 7, 160)
    without = examine(planted.write().parent / "train.jsonl", count_tokens=count_tokens)
    planted.rows = planted.rows[:40]
    assert without.tokens.per_object == examine(planted.write(), count_tokens=count_tokens).tokens.per_object
    assert examine(planted.write(), processes=2, part=2000).facts.questions == 0


def replace_first_box(planted, box, line=11):
    planted.rows[line - 1]["objects"][0] = {"desc": "dog", "bbox_2d": box}


def cut_image_file(planted):
    file = planted.folder / "images/10.png"
    write_image(file, (400, 300), "red")
    file.write_bytes(file.read_bytes()[:-30])
    planted.rows[10] |= {"width": 400, "height": 300}


def change_row(**changes):
    return lambda planted: planted.rows[10].update(changes)


def change_desc(desc):
    return lambda planted: planted.rows[10]["objects"][0].update(desc=desc)


ONE_LINE = {
    "broken-line": [
        lambda planted: planted.rows.insert(10, '{"image": "a.png",'),
        lambda planted: planted.rows.insert(10, "[" * 100_000),
        lambda planted: planted.rows.insert(10, json.dumps({"image": "a.png", "boxes": []})),
        lambda planted: replace_first_box(planted, [1, 2, 3]),
        lambda planted: replace_first_box(planted, [1, 2, 3, 10**400]),
    ],
    "image-missing": [lambda planted: (planted.folder / "images/10.png").unlink()],
    "image-unreadable": [
        lambda planted: (planted.folder / "images/10.png").write_text("not an image"),
        cut_image_file,
        change_row(image="images"),
        change_row(image="a\0.png"),
    ],
    "size-mismatch": [
        lambda planted: write_image(planted.folder / "images/10.png", (WIDTH + 1, HEIGHT), "red"),
        lambda planted: write_image(planted.folder / "images/10.png", (HEIGHT, WIDTH), "red"),
    ],
    "inverted": [lambda planted: replace_first_box(planted, [40, 10, 20, 30])],
    "outside": [
        lambda planted: replace_first_box(planted, [10, 10, 30, HEIGHT + 5]),
        lambda planted: replace_first_box(planted, [-5, 10, 30, 30]),
        lambda planted: replace_first_box(planted, [WIDTH + 10, 10, WIDTH + 20, 20]),
    ],
    "over-the-edge": [lambda planted: replace_first_box(planted, [10, 10, WIDTH + 0.5, 30])],
    "no-area": [
        lambda planted: replace_first_box(planted, [10, 10, 10, 30]),
        change_row(objects=[{"desc": "line", "poly": [1, 1, 5, 5, 10, 10]}]),
    ],
    "no-area-in-bins": [lambda planted: replace_first_box(planted, [10, 10, 10.01, 30])],
    "duplicate-image": [change_row(image="./images/3.png")],
    "duplicate-content": [
        lambda planted: shutil.copy(planted.folder / "images/3.png", planted.folder / "images/10.png")
    ],
    "duplicate-object": [lambda planted: planted.rows[10]["objects"].append(planted.rows[10]["objects"][1])],
    "desc-thin": [change_desc("-"), change_desc("x"), change_desc("N/A")],
    "desc-broken": [change_desc("cup \ud83d")],
    "text-broken": [change_row(expression="the cup \ud83d"), change_row(classes=["cup", "\ud83d"])],
    "special-token": [change_row(prompt="Stop.<|im_end|>"), change_row(classes=["<|image_pad|>"])],
}


def test_an_image_with_several_requests_is_no_duplicate(planted):
    row = planted.rows[3]
    other = {"expression": "the left leaf"}
    planted.rows += [row | other, row | {"classes": ["leaf"]}, row | other, row]
    findings = {finding.subject: finding for finding in examine(planted.write(), look=read_image_facts).findings}
    assert list(findings) == ["duplicate-image"]
    assert [(place.line, place.detail) for place in findings["duplicate-image"].places] == [
        (43, "'images/3.png', as in line 41"),
        (44, "'images/3.png', as in line 4"),
    ]


@pytest.mark.parametrize(
    ("code", "plant"), [(code, plant) for code, plants in ONE_LINE.items() for plant in plants]
)
def test_a_mistake_in_one_line_is_reported_there_and_nothing_else_is(planted, code, plant):
    plant(planted)
    findings = examine_planted(planted)
    assert set(findings) == {code}
    assert findings[code].count == 1
    assert [place.line for place in findings[code].places] == [11]


def write_sizes(planted):
    for box in planted.boxes():
        box[2:] = [box[2] - box[0], box[3] - box[1]]


def write_centres(planted):
    for box in planted.boxes():
        box[:] = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]]


def swap_axes(planted):
    for row in planted.rows:
        for item in row["objects"]:
            for values in (item[key] for key in item if key != "desc"):
                values[::2], values[1::2] = values[1::2], values[::2]


def state_as(x, y, space):
    return lambda planted: planted.scale(x, y, space)


UNIT, NORM = (1 / WIDTH, 1 / HEIGHT), (1000 / WIDTH, 1000 / HEIGHT)


@pytest.mark.parametrize(
    ("code", "plant"),
    [
        ("suspect-xywh", write_sizes),
        ("suspect-centre", write_centres),
        ("suspect-swapped", swap_axes),
        *(("suspect-space", state_as(*UNIT, space)) for space in ("pixel", "norm1000")),
        *(("suspect-space", state_as(*NORM, space)) for space in ("pixel", "unit")),
        ("suspect-space", state_as(1, 1, "unit")),
        *(("maybe-space", state_as(1, 1, space)) for space in ("norm1000", "bin")),
    ],
)
def test_a_wrong_format_of_the_whole_file_is_suspected_and_no_other_is(planted, code, plant):
    plant(planted)
    findings = examine_planted(planted)
    assert {name for name in findings if name.startswith(("suspect", "maybe"))} == {code}
    assert findings[code].places[0].line is None


@pytest.mark.parametrize(("factors", "space"), [(UNIT, "unit"), (NORM, "norm1000")])
def test_clean_data_in_another_space_has_no_findings(planted, factors, space):
    planted.scale(*factors, space)
    assert examine_planted(planted) == {}


def test_boxes_whose_corners_are_all_inverted_are_not_taken_for_sizes(planted):
    planted.scale(1, 0.5, "pixel")
    for box in planted.boxes():
        box[0], box[2] = box[2], max(1, box[0])
    findings = examine_planted(planted)
    assert set(findings) == {"inverted"}
    assert findings["inverted"].count == 120


def test_classes_that_differ_in_case_or_spaces_are_reported(planted):
    change_desc("Red  Cup")(planted)
    findings = examine_planted(planted)
    assert set(findings) == {"desc-spelling"}


def test_small_objects_bring_the_warning_about_the_resolution(planted):
    for row in planted.rows:
        for item, k in zip(row["objects"], range(9), strict=False):
            item.pop("poly", None)
            item["bbox_2d"] = [20 * k + 1, 10, 20 * k + 2, 11]
    findings = examine_planted(planted)
    assert [(name, finding.severity) for name, finding in findings.items()] == [("small-objects", "warning")]


def test_answers_over_the_length_are_reported_with_their_tokens(planted):
    planted.rows[10]["objects"] += [{"desc": "dog", "bbox_2d": [k, k, k + 20, k + 9]} for k in range(30)]
    report = examine(planted.write(), count_tokens=count_tokens, max_length=400)
    assert [(finding.subject, finding.count) for finding in report.findings] == [("too-long", 1)]
    assert report.findings[0].places[0].line == 11
    assert report.tokens.records == 40
    assert report.tokens.longest > 400 >= report.tokens.p95 >= report.tokens.median
    text = '{"object_1": {"desc": "dog", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}'
    alone = len(table("small").encode(text.encode()))
    assert alone / 2 < report.tokens.per_object < alone * 2


def test_a_polygon_is_reported_where_answers_can_have_none(planted):
    report = examine(planted.write(), count_tokens=partial(count_tokens, answers=NativeAnswers(table("small"))))
    assert [(finding.subject, finding.severity, finding.count) for finding in report.findings] == [
        ("not-writable", "error", 40)
    ]


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "train.jsonl").write_text("\n\n")
    report = examine(tmp_path / "train.jsonl")
    assert [finding.subject for finding in report.findings] == ["no-records"]
    assert report.errors == 1


coordinate = st.one_of(st.floats(-5, 110, allow_nan=False), st.integers(-3, 100), st.floats(-1e11, 1e11))
boxes = st.tuples(coordinate, coordinate, coordinate, coordinate)
rings = st.integers(3, 5).flatmap(lambda n: st.tuples(*[coordinate] * (2 * n)))
objects = st.builds(RecordObject, st.text(min_size=1).filter(str.strip), st.just("bbox_2d"), boxes) | st.builds(
    RecordObject, st.sampled_from(["cup", "\ud800", "-"]), st.just("poly"), rings
)


@given(st.lists(objects, max_size=3), st.sampled_from(["pixel", "unit", "norm1000", "bin"]))
def test_a_record_without_an_error_can_be_trained_on(items, space):
    record = Record("a.png", 100, 80, space, tuple(items))
    problems = check_record(record)
    if not any(KINDS[problem.code].severity == "error" for problem in problems):
        assert len(record.true_objects()) == len(items)


def test_the_command_exits_1_on_errors_only_and_names_the_lines(planted):
    run("data", "doctor", planted.write())
    change_desc("-")(planted)
    run("data", "doctor", planted.write())
    replace_first_box(planted, [40, 10, 20, 30], 3)
    result = run("data", "doctor", planted.write(), code=1)
    assert "train.jsonl:3: " in result.stdout
    assert result.stdout.index("error inverted") < result.stdout.index("warning desc-thin")


def test_the_report_as_json_has_findings_classes_and_sizes(planted):
    replace_first_box(planted, [40, 10, 20, 30], 3)
    answer = json.loads(run("data", "doctor", planted.write(), "--json", code=1).stdout)
    assert answer["ok"] is False
    (place,) = answer["findings"][0]["places"]
    assert place["line"] == 3
    details = answer["details"]
    assert details["classes"]["leaf"] == 40
    assert sum(step["objects"] for step in details["sides_in_bins"]["histogram"]) == 160


def test_what_could_steer_a_terminal_is_not_printed(planted):
    planted.rows.insert(0, json.dumps({"\x1b[2J": 1}).replace("\\u001b", "\x1b"))
    planted.rows.insert(0, json.dumps({"\x1b[2J": 1}))
    change_desc("\x1b[2J")(planted)
    assert "\x1b" not in run("data", "doctor", planted.write(), code=1).output


@pytest.mark.parametrize("processes", [1, 3])
def test_parts_and_processes_give_the_report_of_one_reading(planted, processes):
    """The file has blank and broken lines, duplicates in other parts, and boxes whose order only many show."""
    file = planted.write()
    lines = file.read_text().splitlines()
    flipped = [json.loads(line) for line in lines]
    for row in flipped:
        for item in row["objects"]:
            if "bbox_2d" in item:
                item["bbox_2d"] = item["bbox_2d"][2:] + item["bbox_2d"][:2]
    file.write_text("\n\n".join([*lines, "{", *lines[::-1], *map(json.dumps, flipped), "[]"]))
    options = {"look": read_image_facts, "count_tokens": count_tokens, "max_length": 20}
    whole = examine(file, **options)
    codes = {finding.subject for finding in whole.findings}
    assert {"broken-line", "duplicate-image", "inverted", "too-long"} <= codes
    shares = []
    parts = examine(file, **options, notify=shares.append, processes=processes, part=500)
    assert parts.findings == whole.findings
    assert dataclasses.replace(parts.facts, suspicions=None) == dataclasses.replace(whole.facts, suspicions=None)
    assert len(shares) > 10 and shares == sorted(shares) and shares[-1] == 1


@pytest.mark.slow
def test_a_killed_process_is_an_error_with_a_way_out(planted):
    def die(path):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(DataError, match="killed"):
        examine(planted.write(), look=die, processes=2, part=500)


def test_a_class_with_boxes_and_polygons_is_named_and_a_single_odd_shape_is_not(tmp_path):
    box, ring = {"bbox_2d": [10, 10, 40, 40]}, {"poly": [10, 10, 40, 10, 40, 40]}
    shapes = {"mixed": [box, ring] * 10, "boxes": [box] * 20, "nearly": [box] * 39 + [ring]}
    objects = [{"desc": desc} | shape for desc, items in shapes.items() for shape in items]
    lines = [
        {"image": f"{k}.png", "width": 64, "height": 48, "space": "pixel", "objects": [item]}
        for k, item in enumerate(objects)
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for processes in (1, 2):
        report = examine(tmp_path / "a.jsonl", processes=processes, part=500)
        (finding,) = [item for item in report.findings if item.subject == "mixed-shapes"]
        assert [place.detail for place in finding.places] == ["'mixed': 10 boxes and 10 polygons"]


def write_ordered(path, sort_key, records=260):
    """Write records of five boxes with random places and sizes, in an order."""
    rng, lines = random.Random(3), []
    for k in range(records):
        corners = [(rng.randrange(60), rng.randrange(40)) for _ in range(5)]
        boxes = [[x, y, x + rng.randrange(4, 30), y + rng.randrange(4, 20)] for x, y in corners]
        objects = [{"desc": "cup", "bbox_2d": box} for box in sorted(boxes, key=sort_key)]
        lines.append({"image": f"{k}.png", "width": 96, "height": 64, "space": "pixel", "objects": objects})
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return [finding for finding in examine(path).findings if finding.subject == "no-order"]


@pytest.mark.parametrize(
    ("sort_key", "count"),
    [
        (lambda box: (box[1], box[0]), 0),
        (lambda box: (box[0], box[1]), 0),
        (lambda box: (box[0] - box[2]) * (box[3] - box[1]), 0),
        (lambda box: -box[1], 1),  # from the bottom to the top: none of the orders that training knows
        (lambda box: hash(tuple(box)), 1),
    ],
    ids=["reading", "left_to_right", "large_first", "upwards", "random"],
)
def test_labels_without_an_order_that_can_be_seen_are_a_warning(tmp_path, sort_key, count):
    findings = write_ordered(tmp_path / "a.jsonl", sort_key)
    assert [(finding.severity, finding.count) for finding in findings] == [("warning", 1)] * count
    assert all("1,040" in finding.places[0].detail for finding in findings)


def test_a_few_labels_say_nothing_about_their_order(tmp_path):
    assert write_ordered(tmp_path / "a.jsonl", lambda box: -box[1], records=249) == []
