"""The page of a data file: its first records as cards, with their images, shapes and problems."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordexp.data import AnyRecord, ChatRecord, Record
from coordexp.data.addresses import join_address
from coordexp.data.doctor import KINDS, Problem, check_lines
from coordexp.data.images import read_image_facts
from coordexp.data.index import open_records
from coordexp.pages.cards import (
    Card,
    Drawing,
    Shape,
    choose_hue,
    describe_request,
    make_thumbnail,
    number_classes,
    ring_of,
)
from coordexp.pages.document import render_page


@dataclass(frozen=True, slots=True)
class ViewedRecord:
    """`record` is None if the line is broken. `image` is a data URL, None if there is no image or it cannot be
    read."""

    line: int
    record: AnyRecord | None
    problems: tuple[Problem, ...]
    image: str | None


def view_records(
    path: Path, limit: int, *, problems_only: bool = False, notify: Callable[[int], None] | None = None
) -> Iterator[ViewedRecord]:
    """Yield at most `limit` records; the rest of the file is not read. Call `notify` with the number of each
    line."""
    count, look = 0, partial(read_image_facts, decode=True)
    with open_records(path) as file:
        for line in check_lines(file, path.parent, look):
            if notify is not None:
                notify(line.number)
            record, problems = line.record, line.problems
            if problems or not problems_only:
                thumbnail = None
                if line.image is not None and record is not None and record.image is not None:
                    thumbnail = make_thumbnail(join_address(path.parent, record.image))
                yield ViewedRecord(line.number, record, problems, thumbnail)
                count += 1
            if count == limit:
                return


def render_records(viewed: Sequence[ViewedRecord], title: str, scope: str) -> str:
    """Return the page. `scope` says which part of the file this is."""
    records = [one.record for one in viewed]
    counts = Counter(obj.desc for record in records if isinstance(record, Record) for obj in record.objects)
    numbers, classes = number_classes(counts)
    healthy = sum(not one.problems for one in viewed)
    codes = Counter(code for one in viewed for code in {problem.code for problem in one.problems})
    problems = [
        ("", "all records"),
        ("any", f"any problem ({len(viewed) - healthy:,})"),
        ("none", f"no problem ({healthy:,})"),
    ]
    problems += [(code, f"{code} ({codes[code]:,})") for code in KINDS if codes[code]]
    if questions := sum(isinstance(record, ChatRecord) for record in records):
        scope += f", {questions:,} of them questions"
    scope += f", {counts.total():,} objects of {len(counts):,} classes, {len(viewed) - healthy:,} with problems"
    return render_page(
        "cards.html",
        title=title,
        scripts=["common.js", "cards.js"],
        kind="records",
        scope=scope,
        filters=[("class", "class", classes, "classes"), ("problem", "problem", problems, "problems")],
        cards=[_make_card(one, numbers) for one in viewed],
    )


def _make_card(viewed: ViewedRecord, numbers: Mapping[str, int]) -> Card:
    record = viewed.record
    shapes = _make_shapes(record, numbers) if isinstance(record, Record) else []
    facts: list[tuple[str, str]] = []
    kinds: list[str] = []
    if isinstance(record, ChatRecord):
        facts = [("question", record.question), ("answer", record.answer)]
    elif record is not None:
        count = len(record.objects)
        size = f"{record.width} x {record.height}, {record.space}, {count:,} object{'' if count == 1 else 's'}"
        facts = [(size, ""), *describe_request(record)]
        kinds = ["box" if o.kind == "bbox_2d" else f"polygon of {len(o.coords) // 2}" for o in record.objects]
    codes = sorted({problem.code for problem in viewed.problems})
    return Card(
        title=f"line {viewed.line}",
        detail="" if record is None else record.image or "no image",
        words={
            "data-classes": " ".join(sorted({str(shape.data["data-class"]) for shape in shapes})),
            "data-problems": " ".join(codes),
        },
        drawings=[Drawing(record.width, record.height, viewed.image, shapes)] if record and record.image else [],
        facts=facts,
        problems=[(KINDS[problem.code].severity, problem.code, problem.detail) for problem in viewed.problems],
        objects=[(shape, shape.name, kind) for shape, kind in zip(shapes, kinds, strict=True)],
    )


def _make_shapes(record: Record, numbers: Mapping[str, int]) -> list[Shape]:
    shapes = []
    for k, obj in enumerate(record.objects):
        coords, number = record.in_pixels(obj), numbers[obj.desc]
        inverted = obj.kind == "bbox_2d" and (coords[2] < coords[0] or coords[3] < coords[1])
        style = "inverted" if inverted else ""
        data = {"data-class": number, "data-object": k}
        shapes.append(
            Shape(ring_of(obj.kind, coords), obj.desc, obj.desc, style, data=data, hue=choose_hue(number))
        )
    return shapes
