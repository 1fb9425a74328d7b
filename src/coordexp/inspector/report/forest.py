"""The comparison as tables: values, difference and intervals, with the intervals drawn on one scale for all
rows."""

from collections.abc import Sequence

from coordexp.document import escape_text
from coordexp.inspector.report.compare import ComparisonResult, GroupComparison, Interval, RateDifference
from coordexp.inspector.report.drawing import Scale, choose_ticks
from coordexp.inspector.report.families import EVALUATED

WIDTH, HEIGHT, MARGIN = 300, 22, 8
QUALITY = (
    "f1_50",
    "recall_50",
    "precision_50",
    "f1_50_any_class",
    "recall_50_any_class",
    "precision_50_any_class",
)
METHOD = (
    "Paired bootstrap over images: {resamples:,} times, as many images as there are ({images:,}) are drawn with "
    "replacement, the same ones for every run. Rates are ratios of sums over the drawn images, averaged over "
    "seeds. The bar is the middle 95 % of the differences: what to expect on other images with the same weights. "
    "Of twenty rates that do not differ, about one interval excludes 0 by chance."
)
SEEDS = (
    " The thin line includes other seeds: the variance over images plus that of the means over seeds, with "
    "Student's t (Welch), because a bootstrap of so few seeds would be overconfident. A difference is called "
    "better or worse if both intervals exclude 0."
)
SIGN = "Share of resamples in which the difference has this sign"
FEW_SEEDS = " With fewer than three seeds on a side, nothing can be said about other seeds."
NO_INTERVAL = (
    "AP has no interval: it ranks the objects of all images together, so it is not a ratio of sums over images. "
    "It is shown as the runs logged it."
)


def render_comparison(result: ComparisonResult) -> str:
    with_seeds = any(comparison.has_seed_intervals for comparison in result.comparisons)
    words = METHOD.format(resamples=result.resamples, images=result.images) + (SEEDS if with_seeds else FEW_SEEDS)
    notes = "".join(f'<p class="note">{escape_text(note)}</p>' for note in result.notes)
    tables = "".join(_render_table(comparison, result) for comparison in result.comparisons)
    return f'<p class="about">{escape_text(words)}</p>{notes}{tables}<p class="about">{NO_INTERVAL}</p>'


def _render_table(comparison: GroupComparison, result: ComparisonResult) -> str:
    rows = comparison.rows
    ends = [end for row in rows for pair in (row.image_interval, row.seed_interval) if pair for end in pair]
    reach = max((abs(end) for end in ends), default=0.01) or 0.01
    scale = Scale(-reach * 1.05, reach * 1.05, MARGIN, WIDTH - MARGIN)
    quality = [row for row in rows if row.name in QUALITY]
    behaviour = [row for row in rows if row.name not in QUALITY and (row.base or row.other)]
    never = [_title(row.name) for row in rows if row.name not in QUALITY and not row.base and not row.other]
    groups = (comparison.base, comparison.other)
    names = [f"{group.letter} {group.name}, {_describe_steps(result.steps[group.letter])}" for group in groups]
    seeds = comparison.has_seed_intervals
    quality_rows = [_render_row(row, scale, True, seeds) for row in quality]
    behaviour_rows = [_render_row(row, scale, False, seeds) for row in behaviour]
    body = [
        _render_part("Quality, higher is better", quality_rows, _render_average(comparison, seeds)),
        _render_part("Behaviour, lower is better", behaviour_rows, _render_never(never)),
    ]
    heads = ["difference", _draw_axis(scale), "95 % over images", *(["95 % with seeds"] if seeds else [])]
    head = "".join(f'<th scope="col"{" class=plot" if "<svg" in cell else ""}>{cell}</th>' for cell in heads)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Comparison"><table class="forest">'
        f"<caption>{escape_text(names[1])} against {escape_text(names[0])}</caption>"
        f'<thead><tr><th scope="col">rate</th>{_render_badge(comparison.base.letter)}'
        f"{_render_badge(comparison.other.letter)}{head}<th scope='col' title='{SIGN}'>same sign</th>"
        f"</tr></thead>{''.join(body)}</table></div>"
    )


def _describe_steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(set(steps)) == 1 else f"steps {', '.join(map(str, steps))}"


def _render_badge(letter: str) -> str:
    return f'<th scope="col"><b class="badge of-{letter}">{letter}</b></th>'


def _render_part(title: str, rows: Sequence[str], more: str = "") -> str:
    if not rows and not more:
        return ""
    head = f'<tr class="part"><th colspan="8" scope="rowgroup">{title}</th></tr>'
    return f"<tbody>{head}{''.join(rows)}{more}</tbody>"


def _render_row(row: RateDifference, scale: Scale, higher_is_better: bool, seeds: bool) -> str:
    style = "" if not row.is_clear else " better" if (row.value > 0) == higher_is_better else " worse"
    intervals = [row.image_interval, *([row.seed_interval] if seeds else [])]
    same_sign = "-" if row.same_sign is None else f"{100 * row.same_sign:.1f} %"
    cells = [*map(_format_interval, intervals), same_sign]
    return _render_cells(_title(row.name), style, row.base, row.other, _draw_intervals(row, scale), cells)


def _render_average(comparison: GroupComparison, seeds: bool) -> str:
    if comparison.average_precision is None:
        return ""
    return _render_cells("AP", "", *comparison.average_precision, "", ["-"] * (3 if seeds else 2))


def _render_never(names: Sequence[str]) -> str:
    words = f"0 in both: {', '.join(names)}"
    return f'<tr class="row"><td class="never" colspan="8">{escape_text(words)}</td></tr>' if names else ""


def _title(name: str) -> str:
    return EVALUATED.get(name, (name, ""))[0]


def _render_cells(title: str, style: str, base: float, other: float, plot: str, cells: Sequence[str]) -> str:
    rest = "".join(f"<td>{cell}</td>" for cell in cells)
    return (
        f'<tr class="row{style}"><th scope="row">{escape_text(title)}</th><td>{base:.4f}</td><td>{other:.4f}</td>'
        f'<td class="delta">{_format_signed(other - base)}</td><td class="plot">{plot}</td>{rest}</tr>'
    )


def _format_interval(interval: Interval | None) -> str:
    return "-" if interval is None else f"{_format_signed(interval[0])} to {_format_signed(interval[1])}"


def _draw_intervals(row: RateDifference, scale: Scale) -> str:
    middle, zero = HEIGHT / 2, scale.at(0)
    parts = [f'<line class="zero" x1="{zero:.1f}" x2="{zero:.1f}" y1="0" y2="{HEIGHT}"/>']
    if row.seed_interval is not None:
        low, high = (scale.at(end) for end in row.seed_interval)
        parts.append(f'<path class="seeds" d="M{low:.1f} {middle - 3}v6m0-3H{high:.1f}m0-3v6"/>')
    if row.image_interval is not None:
        low, high = (scale.at(end) for end in row.image_interval)
        place = f'x="{low:.1f}" width="{max(0.5, high - low):.1f}" y="{middle - 3}"'
        parts.append(f'<rect class="images" {place} height="6" rx="2"/>')
    parts.append(f'<circle class="value" cx="{scale.at(row.value):.1f}" cy="{middle}" r="4"/>')
    label = f"difference {_format_signed(row.value)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _draw_axis(scale: Scale) -> str:
    parts = []
    for value in choose_ticks(scale.low, scale.high, 4):
        x = min(max(scale.at(value), 16), WIDTH - 16)
        label = "0" if value == 0 else f"{value:+g}"
        parts.append(f'<text x="{x:.1f}" y="14" text-anchor="middle">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" aria-hidden="true">{"".join(parts)}</svg>'


def _format_signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.4f}"
