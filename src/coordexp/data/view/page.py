"""Cards as one HTML page. All text from the data is escaped.

Shapes are SVG in the pixels of the record, stretched over its thumbnail. Without JavaScript the page shows all
cards. With it, cards can be filtered by class and by problem, and paged through with the arrow keys.
"""

from collections import Counter
from collections.abc import Sequence

from coordexp.data.doctor import KINDS
from coordexp.data.records import Record, RecordObject
from coordexp.data.view.cards import Card
from coordexp.document import escape_text, read_resource, render_document

MAX_TAGS = 40  # names drawn over an image; its list has all of them


def render_records(cards: Sequence[Card], title: str, scope: str) -> str:
    """`scope` says which part of the file this is."""
    style, script = (read_resource(__package__, name) for name in ("page.css", "page.js"))
    classes = Counter(obj.desc for card in cards if card.record for obj in card.record.objects)
    numbers = {desc: k for k, (desc, _) in enumerate(classes.most_common())}
    body = (
        f"{_render_toolbar(cards, title, scope, classes)}\n"
        f'<main id="cards">{"".join(_render_card(card, numbers) for card in cards)}</main>\n'
        '<p id="nothing" hidden>No record matches both filters. Choose another class or problem.</p>'
    )
    return render_document(title, body, styles=[style], scripts=[script])


def _render_toolbar(cards: Sequence[Card], title: str, scope: str, classes: Counter[str]) -> str:
    codes = Counter(code for card in cards for code in {problem.code for problem in card.problems})
    healthy = sum(not card.problems for card in cards)
    names = [(str(k), desc, count) for k, (desc, count) in enumerate(classes.most_common())]
    problems = [("any", "any problem", len(cards) - healthy), ("none", "no problem", healthy)]
    problems += [(code, code, codes[code]) for code in KINDS if codes[code]]
    objects = f"{classes.total():,} objects of {len(classes):,} classes, {len(cards) - healthy:,} with problems"
    return (
        f'<header id="bar"><div><h1>{escape_text(title)}</h1><p>{escape_text(scope)}, {objects}</p></div>'
        f"<label>class {_render_select('class', 'all classes', names)}</label>"
        f"<label>problem {_render_select('problem', 'all records', problems)}</label>"
        '<label><input type="checkbox" id="tags" checked> names</label>'
        '<nav><button id="back" title="left arrow">&larr;</button><output id="where"></output>'
        '<button id="on" title="right arrow">&rarr;</button></nav></header>'
    )


def _render_select(id: str, everything: str, options: Sequence[tuple[str, str, int]]) -> str:
    rows = [
        f'<option value="{escape_text(value)}">{escape_text(name)} ({count:,})</option>'
        for value, name, count in options
    ]
    return f'<select id="{id}"><option value="">{everything}</option>{"".join(rows)}</select>'


def _render_card(card: Card, numbers: dict[str, int]) -> str:
    record = card.record
    codes = " ".join(sorted({problem.code for problem in card.problems}))
    items = [
        f'<li class="{KINDS[problem.code].severity}"><b>{problem.code}</b> {escape_text(problem.detail)}</li>'
        for problem in card.problems
    ]
    problems = f'<ul class="problems">{"".join(items)}</ul>' if items else ""
    if record is None:
        head = f"<h2>line {card.line}</h2>{problems}"
        return f'<article class="card" data-classes="" data-problems="{codes}">{head}</article>'
    classes = " ".join(map(str, sorted({numbers[obj.desc] for obj in record.objects})))
    count = len(record.objects)
    facts = f"{record.width} x {record.height}, {record.space}, {count:,} object{'' if count == 1 else 's'}"
    head = f'<h2>line {card.line} <span>{escape_text(record.image)}</span></h2><p class="facts">{facts}</p>'
    body = _render_image(card, record, numbers) + problems + _render_objects(record, numbers)
    return f'<article class="card" data-classes="{classes}" data-problems="{codes}">{head}{body}</article>'


def _render_image(card: Card, record: Record, numbers: dict[str, int]) -> str:
    """Render the image, its shapes, and their names."""
    shapes, tags = [], []
    for k, obj in enumerate(record.objects):
        coords, number = record.in_pixels(obj), numbers[obj.desc]
        paint = f'data-class="{number}" data-object="{k}" style="--hue:{_hue(number)}"'
        shapes.append(f"<g {paint}><title>{escape_text(obj.desc)}</title>{_draw_shape(obj, coords)}</g>")
        if k < MAX_TAGS:
            left, top = _percent(min(coords[::2]), record.width), _percent(min(coords[1::2]), record.height)
            place = f"left:{left:.2f}%;top:{top:.2f}%;--hue:{_hue(number)}"
            attributes = f'data-class="{number}" data-object="{k}" style="{place}"'
            tags.append(f"<span {attributes}>{escape_text(obj.desc)}</span>")
    image = f'<img alt="" src="{card.image}">' if card.image else '<p class="none">no image</p>'
    box = f"0 0 {record.width} {record.height}"
    return (
        f'<div class="stage" style="aspect-ratio:{record.width}/{record.height}">{image}'
        f'<svg viewBox="{box}" preserveAspectRatio="none">{"".join(shapes)}</svg>{"".join(tags)}</div>'
    )


def _draw_shape(obj: RecordObject, coords: tuple[float, ...]) -> str:
    if obj.kind == "poly":
        points = " ".join(f"{x:.6g},{y:.6g}" for x, y in zip(coords[::2], coords[1::2], strict=True))
        return f'<polygon points="{points}"/>'
    x1, y1, x2, y2 = coords
    inverted = ' class="inverted"' if x2 < x1 or y2 < y1 else ""
    x, y, width, height = min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1)
    return f'<rect{inverted} x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"/>'


def _render_objects(record: Record, numbers: dict[str, int]) -> str:
    items = []
    for k, obj in enumerate(record.objects):
        number = numbers[obj.desc]
        shape = "box" if obj.kind == "bbox_2d" else f"polygon of {len(obj.coords) // 2}"
        items.append(
            f'<li data-class="{number}" data-object="{k}" style="--hue:{_hue(number)}">'
            f"{escape_text(obj.desc)} <small>{shape}</small></li>"
        )
    return f'<ol class="objects" start="0">{"".join(items)}</ol>' if items else ""


def _hue(number: int) -> int:
    """Return hues that are far apart for neighbours in the list of classes."""
    return round(number * 137.5) % 360


def _percent(value: float, size: float) -> float:
    """Return the position of a tag, so that it starts inside the image."""
    return min(96.0, max(0.0, 100 * value / size))
