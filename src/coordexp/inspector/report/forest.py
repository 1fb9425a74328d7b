"""The comparison as tables: values, difference, interval, and the interval drawn on one scale for all rows."""

from collections.abc import Sequence

from coordexp.document import written
from coordexp.inspector.report.axes import Scale, ticks
from coordexp.inspector.report.bootstrap import Difference
from coordexp.inspector.report.compare import Compared, Comparison
from coordexp.inspector.report.families import EVALUATED

WIDTH, HEIGHT, ROOM = 300, 22, 8
FOUND = ("f1_50", "recall_50", "precision_50", "f1_50_any_class", "recall_50_any_class", "precision_50_any_class")
METHOD = (
    "Paired bootstrap over images: {resamples:,} times, as many images as there are ({images:,}) are drawn with "
    "replacement, the same for every run; rates are ratios of sums over the drawn images, averaged over seeds. "
    "The bar is the middle 95 % of the differences: what to expect on other images, of these same "
    "weights. Of twenty rates that do not differ, about one interval leaves out 0 by chance."
)
SEEDS = (
    " The thin line adds other seeds: the variance over images plus that of the means over seeds, with Student's "
    "t (Welch), since a bootstrap of so few seeds would be too sure of itself. A difference is called better or "
    "worse when both leave out 0."
)
SIGN = "Share of resamples in which the difference has this sign"
FEW_SEEDS = " With fewer than three seeds on a side, nothing is said about other seeds."
NO_INTERVAL = (
    "AP has no interval: it ranks the objects of all images together, so it is no ratio of sums over images. "
    "It is shown as the runs logged it."
)


def comparison_section(found: Compared) -> str:
    both = any(row.with_seeds for one in found.comparisons for row in one.rows)
    words = METHOD.format(resamples=found.resamples, images=found.images) + (SEEDS if both else FEW_SEEDS)
    notes = "".join(f'<p class="note">{written(note)}</p>' for note in found.notes)
    tables = "".join(_table(one, found) for one in found.comparisons)
    return f'<p class="about">{written(words)}</p>{notes}{tables}<p class="about">{NO_INTERVAL}</p>'


def _table(one: Comparison, found: Compared) -> str:
    ends = [end for row in one.rows for pair in (row.images, row.with_seeds) if pair for end in pair]
    reach = max((abs(end) for end in ends), default=0.01) or 0.01
    scale = Scale(-reach * 1.05, reach * 1.05, ROOM, WIDTH - ROOM)
    good = [row for row in one.rows if row.name in FOUND]
    bad = [row for row in one.rows if row.name not in FOUND and (row.base or row.other)]
    never = [_titled(row.name) for row in one.rows if row.name not in FOUND and not row.base and not row.other]
    names = [f"{group.letter} {group.name}, {_at(found.steps[group.letter])}" for group in (one.base, one.other)]
    seeds = _has_seeds(one)
    body = [
        _part("Found, higher is better", [_row(row, scale, True, seeds) for row in good], _average(one, seeds)),
        _part("Behaviour, lower is better", [_row(row, scale, False, seeds) for row in bad], _never(never)),
    ]
    heads = ["difference", _axis(scale), "95 % over images", *(["95 % with seeds"] if _has_seeds(one) else [])]
    head = "".join(f'<th scope="col"{" class=plot" if "<svg" in each else ""}>{each}</th>' for each in heads)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison"><table class="forest">'
        f"<caption>{written(names[1])} against "
        f'{written(names[0])}</caption><thead><tr><th scope="col">rate</th>{_head(one.base.letter)}'
        f"{_head(one.other.letter)}{head}<th scope='col' title='{SIGN}'>same sign</th>"
        f"</tr></thead>{''.join(body)}</table></div>"
    )


def _has_seeds(one: Comparison) -> bool:
    return any(row.with_seeds is not None for row in one.rows)


def _at(steps: Sequence[int]) -> str:
    each = sorted(set(steps))
    return f"step {each[0]}" if len(each) == 1 else f"steps {', '.join(map(str, steps))}"


def _head(letter: str) -> str:
    return f'<th scope="col"><b class="badge of-{letter}">{letter}</b></th>'


def _part(title: str, rows: Sequence[str], more: str = "") -> str:
    if not rows and not more:
        return ""
    head = f'<tr class="part"><th colspan="8" scope="rowgroup">{title}</th></tr>'
    return f"<tbody>{head}{''.join(rows)}{more}</tbody>"


def _row(row: Difference, scale: Scale, higher: bool, seeds: bool) -> str:
    kind = "" if not row.clear else " better" if (row.value > 0) == higher else " worse"
    agreeing = "-" if row.agreeing is None else f"{100 * row.agreeing:.1f} %"
    words = [_interval(row.images), *([_interval(row.with_seeds)] if seeds else []), agreeing]
    return _cells(_titled(row.name), kind, row.base, row.other, _bar(row, scale), words)


def _average(one: Comparison, seeds: bool) -> str:
    if one.average_precision is None:
        return ""
    return _cells("AP", "", *one.average_precision, "", ["-"] * (3 if seeds else 2))


def _never(names: Sequence[str]) -> str:
    words = f"0 in both: {', '.join(names)}"
    return f'<tr class="row"><td class="never" colspan="8">{written(words)}</td></tr>' if names else ""


def _titled(name: str) -> str:
    return EVALUATED.get(name, (name, ""))[0]


def _cells(title: str, kind: str, base: float, other: float, plot: str, words: Sequence[str]) -> str:
    rest = "".join(f"<td>{word}</td>" for word in words)
    return (
        f'<tr class="row{kind}"><th scope="row">{written(title)}</th><td>{base:.4f}</td><td>{other:.4f}</td>'
        f'<td class="delta">{_signed(other - base)}</td><td class="plot">{plot}</td>{rest}</tr>'
    )


def _interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{_signed(interval[0])} to {_signed(interval[1])}"


def _bar(row: Difference, scale: Scale) -> str:
    middle, zero = HEIGHT / 2, scale.at(0)
    parts = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{HEIGHT}"/>']
    if row.with_seeds is not None:
        low, high = (scale.at(end) for end in row.with_seeds)
        parts.append(f'<path class="seeds" d="M{low:.1f} {middle - 3}v6m0-3H{high:.1f}m0-3v6"/>')
    if row.images is not None:
        low, high = (scale.at(end) for end in row.images)
        place = f'x="{low:.1f}" width="{max(0.5, high - low):.1f}" y="{middle - 3}"'
        parts.append(f'<rect class="images" {place} height="6" rx="2"/>')
    parts.append(f'<circle class="value" cx="{scale.at(row.value):.1f}" cy="{middle}" r="4"/>')
    words = f"difference {_signed(row.value)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">{"".join(parts)}</svg>'


def _axis(scale: Scale) -> str:
    parts = []
    for value in ticks(scale.low, scale.high, 4):
        x = min(max(scale.at(value), 16), WIDTH - 16)
        parts.append(
            f'<text x="{x:.1f}" y="14" text-anchor="middle">{"0" if value == 0 else f"{value:+g}"}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>'


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.4f}"
