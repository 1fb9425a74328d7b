"""Cards to one HTML page, whose text from the data is escaped.

Shapes are SVG in the pixels of the record, stretched over its thumbnail. Without JavaScript the page shows all
cards; with it, cards can be filtered by class and by problem and turned over with the arrow keys.
"""

from collections import Counter
from collections.abc import Sequence

from coordexp.data.doctor import KINDS
from coordexp.data.records import Record, RecordObject
from coordexp.data.view.cards import Card
from coordexp.document import document, part, written

MOST_TAGS = 40  # names drawn over one picture; all are in its list


def page(cards: Sequence[Card], title: str, scope: str) -> str:
    """`scope` says what part of the file this is."""
    style, script = (part("coordexp.data.view", name) for name in ("page.css", "page.js"))
    classes = Counter(found.desc for card in cards if card.record for found in card.record.objects)
    numbers = {desc: k for k, (desc, _) in enumerate(classes.most_common())}
    body = (
        f"{_toolbar(cards, title, scope, classes)}\n"
        f'<main id="cards">{"".join(_card(card, numbers) for card in cards)}</main>\n'
        '<p id="nothing" hidden>No record has both. Choose another class or problem.</p>'
    )
    return document(title, body, styles=[style], scripts=[script])


def _toolbar(cards: Sequence[Card], title: str, scope: str, classes: Counter[str]) -> str:
    codes = Counter(code for card in cards for code in {problem.code for problem in card.problems})
    healthy = sum(not card.problems for card in cards)
    names = [(str(k), desc, count) for k, (desc, count) in enumerate(classes.most_common())]
    problems = [("any", "any problem", len(cards) - healthy), ("none", "no problem", healthy)]
    problems += [(code, code, codes[code]) for code in KINDS if codes[code]]
    objects = f"{classes.total():,} objects of {len(classes):,} classes, {len(cards) - healthy:,} with problems"
    return (
        f'<header id="bar"><div><h1>{written(title)}</h1><p>{written(scope)}, {objects}</p></div>'
        f"<label>class {_select('class', 'all classes', names)}</label>"
        f"<label>problem {_select('problem', 'all records', problems)}</label>"
        '<label><input type="checkbox" id="tags" checked> names</label>'
        '<nav><button id="back" title="left arrow">&larr;</button><output id="where"></output>'
        '<button id="on" title="right arrow">&rarr;</button></nav></header>'
    )


def _select(id: str, everything: str, options: Sequence[tuple[str, str, int]]) -> str:
    rows = [
        f'<option value="{written(value)}">{written(name)} ({count:,})</option>' for value, name, count in options
    ]
    return f'<select id="{id}"><option value="">{everything}</option>{"".join(rows)}</select>'


def _card(card: Card, numbers: dict[str, int]) -> str:
    record = card.record
    codes = " ".join(sorted({problem.code for problem in card.problems}))
    items = [
        f'<li class="{KINDS[problem.code].severity}"><b>{problem.code}</b> {written(problem.detail)}</li>'
        for problem in card.problems
    ]
    problems = f'<ul class="problems">{"".join(items)}</ul>' if items else ""
    if record is None:
        head = f"<h2>line {card.line}</h2>{problems}"
        return f'<article class="card" data-classes="" data-problems="{codes}">{head}</article>'
    classes = " ".join(map(str, sorted({numbers[found.desc] for found in record.objects})))
    facts = f"{record.width} x {record.height}, {record.space}, {_many(len(record.objects), 'object')}"
    head = f'<h2>line {card.line} <span>{written(record.image)}</span></h2><p class="facts">{facts}</p>'
    body = _stage(card, record, numbers) + problems + _list(record, numbers)
    return f'<article class="card" data-classes="{classes}" data-problems="{codes}">{head}{body}</article>'


def _stage(card: Card, record: Record, numbers: dict[str, int]) -> str:
    """The picture, its shapes, and their names."""
    shapes, tags = [], []
    for k, found in enumerate(record.objects):
        coords, number = record.in_pixels(found), numbers[found.desc]
        paint = f'data-class="{number}" data-object="{k}" style="--hue:{_hue(number)}"'
        shapes.append(f"<g {paint}><title>{written(found.desc)}</title>{_shape(found, coords)}</g>")
        if k < MOST_TAGS:
            left, top = _percent(min(coords[::2]), record.width), _percent(min(coords[1::2]), record.height)
            place = f"left:{left:.2f}%;top:{top:.2f}%;--hue:{_hue(number)}"
            tags.append(
                f'<span data-class="{number}" data-object="{k}" style="{place}">{written(found.desc)}</span>'
            )
    picture = f'<img alt="" src="{card.picture}">' if card.picture else '<p class="none">no image</p>'
    box = f"0 0 {record.width} {record.height}"
    return (
        f'<div class="stage" style="aspect-ratio:{record.width}/{record.height}">{picture}'
        f'<svg viewBox="{box}" preserveAspectRatio="none">{"".join(shapes)}</svg>{"".join(tags)}</div>'
    )


def _shape(found: RecordObject, coords: tuple[float, ...]) -> str:
    if found.kind == "poly":
        points = " ".join(f"{x:.6g},{y:.6g}" for x, y in zip(coords[::2], coords[1::2], strict=True))
        return f'<polygon points="{points}"/>'
    x1, y1, x2, y2 = coords
    inverted = ' class="inverted"' if x2 < x1 or y2 < y1 else ""
    x, y, width, height = min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1)
    return f'<rect{inverted} x="{x:.6g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}"/>'


def _list(record: Record, numbers: dict[str, int]) -> str:
    items = []
    for k, found in enumerate(record.objects):
        number = numbers[found.desc]
        name = "box" if found.kind == "bbox_2d" else f"polygon of {len(found.coords) // 2}"
        items.append(
            f'<li data-class="{number}" data-object="{k}" style="--hue:{_hue(number)}">'
            f"{written(found.desc)} <small>{name}</small></li>"
        )
    return f'<ol class="objects" start="0">{"".join(items)}</ol>' if items else ""


def _hue(number: int) -> int:
    """Neighbours in the list of classes are far apart in colour."""
    return round(number * 137.5) % 360


def _percent(value: float, size: float) -> float:
    return min(96.0, max(0.0, 100 * value / size))


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
