"""The page of a data file: its first records as cards, with their images, shapes and problems.

Without JavaScript the page shows all cards. With it, cards can be filtered by class and by problem, and paged
through with the arrow keys.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordexp.data import AnyRecord, ChatRecord, Record, RecordObject, parse_any_record
from coordexp.data.doctor import KINDS, Problem, check_record, look_at_image
from coordexp.data.images import read_image_facts
from coordexp.data.records import open_records
from coordexp.pages.document import (
    escape_text,
    render_document,
    render_header,
    render_list,
    render_pager,
    render_select,
)
from coordexp.pages.images import choose_hue, format_points, make_thumbnail, render_name, render_stage

MAX_NAMES = 40  # drawn over an image; its list has all of them


@dataclass(frozen=True, slots=True)
class Card:
    """`record` is None if the line is broken. `image` is a data URL, None if there is no image or it cannot be
    read."""

    line: int
    record: AnyRecord | None
    problems: tuple[Problem, ...]
    image: str | None


def read_cards(
    path: Path, limit: int, *, problems_only: bool = False, notify: Callable[[int], None] | None = None
) -> Iterator[Card]:
    """Yield at most `limit` cards; the rest of the file is not read. Call `notify` with the number of each
    line."""
    count = 0
    with open_records(path) as file:
        for number, line in enumerate(file, start=1):
            if notify is not None:
                notify(number)
            if not line.strip():
                continue
            card = _make_card(path, number, line, problems_only)
            if card is not None:
                yield card
                count += 1
            if count == limit:
                return


def _make_card(path: Path, number: int, line: bytes, problems_only: bool) -> Card | None:
    try:
        record = parse_any_record(line)
    except (ValueError, RecursionError) as error:
        return Card(number, None, (Problem("broken-line", str(error)),), None)
    facts, of_image = look_at_image(path.parent, record, partial(read_image_facts, decode=True))
    problems = (*of_image, *check_record(record))
    if problems_only and not problems:
        return None
    image = None if facts is None or record.image is None else make_thumbnail(path.parent / record.image)
    return Card(number, record, problems, image)


def render_records(cards: Sequence[Card], title: str, scope: str) -> str:
    """Return the page. `scope` says which part of the file this is."""
    classes = Counter(obj.desc for card in cards if isinstance(card.record, Record) for obj in card.record.objects)
    numbers = {desc: k for k, (desc, _) in enumerate(classes.most_common())}
    healthy = sum(not card.problems for card in cards)
    if questions := sum(isinstance(card.record, ChatRecord) for card in cards):
        scope += f", {questions:,} of them questions"
    scope += f", {classes.total():,} objects of {len(classes):,} classes, {len(cards) - healthy:,} with problems"
    body = (
        f"{render_header('records', title, scope, _render_controls(cards, classes, healthy))}\n"
        f'<main><div class="cards" data-page="12">{"".join(_render_card(card, numbers) for card in cards)}</div>'
        '<p id="nothing" hidden>No record matches both filters. Choose another class or problem.</p></main>'
    )
    return render_document(title, body, scripts=["cards.js"])


def _render_controls(cards: Sequence[Card], classes: Counter[str], healthy: int) -> str:
    codes = Counter(code for card in cards for code in {problem.code for problem in card.problems})
    names = [(str(k), f"{desc} ({count:,})") for k, (desc, count) in enumerate(classes.most_common())]
    problems = [("any", f"any problem ({len(cards) - healthy:,})"), ("none", f"no problem ({healthy:,})")]
    problems += [(code, f"{code} ({codes[code]:,})") for code in KINDS if codes[code]]
    return (
        render_select("class", "class", [("", "all classes"), *names], 'data-filter="classes"')
        + render_select("problem", "problem", [("", "all records"), *problems], 'data-filter="problems"')
        + '<label><input type="checkbox" data-kind="names" checked> names</label>'
        + render_pager("page", ("left arrow", "right arrow"))
    )


def _render_card(card: Card, numbers: dict[str, int]) -> str:
    record = card.record
    codes = " ".join(sorted({problem.code for problem in card.problems}))
    problems = render_list(
        (
            f'<b class="{KINDS[problem.code].severity}">{problem.code}</b> {escape_text(problem.detail)}'
            for problem in card.problems
        ),
        "problems",
    )
    if record is None:
        head = f"<h3>line {card.line}</h3>{problems}"
        return f'<article class="card" data-classes="" data-problems="{codes}">{head}</article>'
    if isinstance(record, ChatRecord):
        return (
            f'<article class="card" data-classes="" data-problems="{codes}">'
            f"{_render_question(card, record)}{problems}</article>"
        )
    classes = " ".join(map(str, sorted({numbers[obj.desc] for obj in record.objects})))
    count = len(record.objects)
    facts = f"{record.width} x {record.height}, {record.space}, {count:,} object{'' if count == 1 else 's'}"
    return (
        f'<article class="card" data-classes="{classes}" data-problems="{codes}">'
        f"{_render_image(card, record, numbers)}"
        f"<h3>line {card.line} <small>{escape_text(record.image)}</small></h3><p>{facts}</p>"
        f"{render_request(record)}{problems}{_render_objects(record, numbers)}</article>"
    )


def _render_question(card: Card, record: ChatRecord) -> str:
    """Render the image of a chat record, if it has one, its question and its answer."""
    image = "" if record.image is None else render_stage(record, card.image, [], [])
    name = "no image" if record.image is None else escape_text(record.image)
    return (
        f"{image}<h3>line {card.line} <small>{name}</small></h3>"
        f"<p>question: <b>{escape_text(record.question)}</b></p><p>answer: <b>{escape_text(record.answer)}</b></p>"
    )


def render_request(record: Record) -> str:
    """Render what the record asks for, if it has a request of its own."""
    parts = {
        "asks for": ", ".join(record.classes or ()),
        "asks for what is described as": record.expression or "",
        "prompt": record.prompt or "",
    }
    return "".join(f"<p>{title}: <b>{escape_text(text)}</b></p>" for title, text in parts.items() if text)


def _render_image(card: Card, record: Record, numbers: dict[str, int]) -> str:
    """Render the image, its shapes, and their names."""
    shapes, names = [], []
    for k, obj in enumerate(record.objects):
        coords, number = record.in_pixels(obj), numbers[obj.desc]
        paint = f'data-class="{number}" data-object="{k}" style="--hue:{choose_hue(number)}"'
        shapes.append(f"<g {paint}><title>{escape_text(obj.desc)}</title>{_draw_shape(obj, coords)}</g>")
        if k < MAX_NAMES:
            box = [reduce(coords[axis::2]) for reduce in (min, max) for axis in (0, 1)]
            attributes = f'class="tag" data-class="{number}" data-object="{k}"'
            names.append(render_name(record, obj.desc, box, attributes, "top", f"--hue:{choose_hue(number)}"))
    return render_stage(record, card.image, shapes, names)


def _draw_shape(obj: RecordObject, coords: tuple[float, ...]) -> str:
    if obj.kind == "poly":
        return f'<polygon class="hued" points="{format_points(coords)}"/>'
    x1, y1, x2, y2 = coords
    inverted = " inverted" if x2 < x1 or y2 < y1 else ""
    x, y, width, height = min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1)
    return f'<rect class="hued{inverted}" x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"/>'


def _render_objects(record: Record, numbers: dict[str, int]) -> str:
    items = []
    for k, obj in enumerate(record.objects):
        number = numbers[obj.desc]
        shape = "box" if obj.kind == "bbox_2d" else f"polygon of {len(obj.coords) // 2}"
        items.append(
            f'<li data-class="{number}" data-object="{k}" style="--hue:{choose_hue(number)}">'
            f"{escape_text(obj.desc)} <small>{shape}</small></li>"
        )
    return f'<ol class="objects" start="0">{"".join(items)}</ol>' if items else ""
