"""The page of an evaluation: numbers, curves, and the worst images with the objects drawn over them.

Five kinds of outlines differ in dashes as well as in colour: matched, a wrong name, the true shape of these two,
missed and extra. If an image cannot be read, its place stays empty and a remark says why.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np

from coordexp.data.images import read_image_size
from coordexp.evaluate.behaviour import DEFINITIONS
from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.matching import THRESHOLDS, CurvePoint, best_point, thin_curve
from coordexp.evaluate.report import MEASURES, EvaluationReport, ImageReport
from coordexp.pages.charts import Frame, draw_key, draw_lines
from coordexp.pages.curves import Curve
from coordexp.pages.document import (
    escape_text,
    render_document,
    render_header,
    render_list,
    render_look,
    render_select,
    render_table,
    render_tiles,
)
from coordexp.pages.images import (
    NamePlace,
    explain_missing_image,
    format_points,
    make_thumbnail,
    render_name,
    render_stage,
)
from coordexp.pages.report_notes import MAX_BAD_SHARE, MAX_REPEATS

HEADLINE = {
    "f1_50": "F1 at IoU 0.5",
    "f1_50_any_class": "F1 without class",
    "f1": "F1, mean 0.50:0.95",
    "ap": "AP",
    "ap_50": "AP at IoU 0.5",
    "ar_100": "AR, 100 per image",
    "mask_ap": "mask AP",
    "mean_iou": "mean IoU of matches",
}
TO_LOOK_AT = {
    "unreadable": (
        MAX_BAD_SHARE,
        "answers do not begin with {, so nothing of them is read: the model was not trained to answer in this "
        "format, or not with this prompt",
    ),
    "truncated": (
        MAX_BAD_SHARE,
        "answers were cut off at the token limit, and the objects behind it count as missed: raise "
        "--max-new-tokens, unless the raw answers below repeat themselves",
    ),
    "invalid": (MAX_BAD_SHARE, "objects are invalid; the reasons are listed under Behaviour"),
    "duplicates": (MAX_REPEATS, "valid objects are duplicates; predict --dedup drops them"),
}
FILTERS = {
    "": "all",
    "wrong-names": "with wrong names",
    "misses": "with misses",
    "extras": "with extras",
    "invalid": "with invalid objects",
    "truncated": "truncated",
}
KINDS = {
    "matched": "matched",
    "wrong-name": "right place, wrong name: true &rarr; written",
    "true": "true shape of these two",
    "missed": "missed: true, but not predicted",
    "extra": "extra: predicted, but not true",
}
TITLES = {"f1": "F1", "precision": "precision", "recall": "recall"}
MAX_COUNTS = 12  # names listed with their counts
MAX_NAMES = 12  # errors up to which each has its name in the image; otherwise names are in tooltips only
CHART = (600, 260)


def render_evaluation(report: EvaluationReport, folder: Path, description: str, most: int) -> str:
    """Return the page with at most `most` images. Image paths are relative to `folder`."""
    tally = report.with_class.at(0.5)
    counts = f"{len(report.images)} images, {tally.true} true objects, {tally.predicted} valid predictions"
    notes = "".join(f'<p class="note">{escape_text(note)}</p>' for note in report.notes)
    values = report.metrics()
    tiles = [(f"{values[name]:.3f}", title, "") for name, title in HEADLINE.items() if name in values]
    sections = {
        "Curves": _render_curves(report.curve),
        "Behaviour": _render_behaviour(report),
        "By IoU": _render_thresholds(report),
        "By class": _render_classes(report),
        **({"By number of classes asked": _render_requests(report)} if report.asked else {}),
        '<span id="worst-images">Worst images</span>': _render_images(report, folder, most),
    }
    body = (
        f"{render_header('evaluation', description, counts)}"
        f"<main><section>{render_look(make_notes(report))}{notes}{render_tiles(tiles)}"
        '<p class="about"><a href="#worst-images">Worst images</a></p></section>'
        f"{''.join(f'<section><h2>{title}</h2>{content}</section>' for title, content in sections.items())}</main>"
    )
    return render_document(f"Evaluation: {description}", body, scripts=["cards.js"])


def make_notes(report: EvaluationReport) -> list[str]:
    """Return what may explain the numbers: rates of behaviour above their thresholds, and a lack of objects."""
    counts = report.with_class.at(0.5)
    notes = []
    if counts.true and not counts.predicted:
        notes.append("no answer has a valid object, so every number of quality is 0")
    for name, (most, words) in TO_LOOK_AT.items():
        rate = report.behaviour.rates[name]
        if rate.value is not None and rate.value > most:
            notes.append(f"{rate.count:,} of {rate.of:,} {words}")
    return notes


def _render_curves(points: Sequence[CurvePoint]) -> str:
    best = best_point(points)
    if best is None:
        return '<p class="note">No curve: it needs objects, and a score for each of them.</p>'
    shown = thin_curve(points)
    values = {name: np.array([getattr(point.counts, name) or 0.0 for point in shown]) for name in MEASURES}
    scores = np.array([point.score for point in shown])
    reached = {name: getattr(best.counts, name) or 0.0 for name in MEASURES}
    words = f"Ring: best F1 {reached['f1']:.3f}, keeping objects with a score of at least {best.score:.3g}"
    against_recall = draw_lines(
        "Precision against recall",
        [("A", Curve.through(values["recall"], values["precision"]))],
        Frame(*CHART, 0.0, 1.0, "recall"),
        limits=(0.0, 1.0),
        ring=(reached["recall"], reached["precision"], words),
        stairs=True,
    )
    letters = dict(zip(TITLES, "ABC", strict=True))
    against_score = draw_lines(
        "Precision, recall and F1 against the score threshold",
        [(letter, Curve.through(scores[::-1], values[name][::-1])) for name, letter in letters.items()],
        Frame(*CHART, float(scores[-1]), float(scores[0]), "score threshold"),
        limits=(0.0, 1.0),
        ring=(best.score, reached["f1"], words),
        stairs=True,
    )
    keys = "".join(
        f'<span class="of-{letter}">{draw_key(letter)}{TITLES[name]}</span>' for name, letter in letters.items()
    )
    return (
        f'<p class="about">At IoU 0.5, all classes together. {escape_text(words)}.</p><div class="charts pair">'
        f"<figure><figcaption><b>Precision against recall</b></figcaption>{against_recall}</figure>"
        f"<figure><figcaption><b>Against the score threshold</b><output>{keys}</output></figcaption>"
        f"{against_score}</figure></div>"
    )


def _render_thresholds(report: EvaluationReport) -> str:
    names = ["F1", "precision", "recall", "any class: F1", "precision", "recall"]
    both = (report.with_class, report.any_class)
    rows = []
    for k, threshold in enumerate(THRESHOLDS):
        tallies = [scores.per_threshold[k] for scores in both]
        shares = [_format_share(getattr(tally, name)) for tally in tallies for name in MEASURES]
        rows.append([f"{threshold:.2f}", *shares])
    means = [_format_share(scores.mean(name)) for scores in both for name in MEASURES]
    words = "Best assignment in each image, regardless of scores. Left: with class; right: without."
    return f'<p class="about">{words}</p>' + render_table(["IoU", *names], [*rows, ["mean", *means]], "numbers")


def _render_classes(report: EvaluationReport) -> str:
    """Render the classes, most frequent first. The script sorts by other columns."""
    rows = []
    for desc, scores in sorted(report.classes.items(), key=lambda item: -item[1].at(0.5).true):
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        shares = [*(getattr(tally, name) for name in MEASURES), scores.at(0.95).f1, average, scores.mean_iou]
        rows.append([escape_text(desc), str(tally.true), str(tally.predicted), *map(_format_share, shares)])
    heads = ["class", "true", "predicted", "F1 at 0.5", "precision", "recall", "F1 at 0.95", "AP", "mean IoU"]
    return '<p class="about">Click a column to sort by it.</p>' + render_table(heads, rows, "numbers sortable")


def _render_requests(report: EvaluationReport) -> str:
    rows = []
    for number, counts in report.asked.items():
        shares = [_format_share(getattr(counts, name)) for name in MEASURES]
        rows.append([str(number), str(counts.true), str(counts.predicted), *shares])
    words = "Records that ask for a list of classes, by its length, at IoU 0.5."
    heads = ["classes asked", "true", "predicted", "F1", "precision", "recall"]
    return f'<p class="about">{words}</p>' + render_table(heads, rows, "numbers")


def _render_behaviour(report: EvaluationReport) -> str:
    rows = []
    for name, rate in report.behaviour.rates.items():
        share = "&ndash;" if rate.value is None else f"{100 * rate.value:.1f} %"
        bar = f'<span class="meter"><i style="width:{100 * (rate.value or 0.0):.1f}%"></i></span>'
        cells = (report.describe_count(name), escape_text(DEFINITIONS[name]))
        rows.append([name.replace("_", " "), share, bar, *cells])
    lists = _render_counts("Why objects were invalid", report.behaviour.reasons)
    lists += _render_counts("Classes that the data does not have", report.behaviour.unknown)
    wrong = {f"{row['true']} → {row['written']}": row["count"] for row in report.count_wrong_names()}
    lists += _render_counts("Most frequent wrong names at the right place", wrong)
    return render_table(["", "rate", "", "count", "what is counted"], rows, "numbers last-words") + lists


def _render_counts(title: str, counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    items = [f"{escape_text(name)} <b>{count}</b>" for name, count in list(counts.items())[:MAX_COUNTS]]
    more = [f"and {len(counts) - MAX_COUNTS} more"] if len(counts) > MAX_COUNTS else []
    return f"<h3>{title}</h3>{render_list([*items, *more], 'counts')}"


def _format_share(value: float | None) -> str:
    return "&ndash;" if value is None else f"{value:.3f}"


def _render_images(report: EvaluationReport, folder: Path, most: int) -> str:
    worst = choose_worst_images(report.images, most)
    if not worst:
        return "<p>No image has an error.</p>"
    orders = {"f1": "lowest F1 first", "errors": "most errors first"}
    controls = render_select("filter", "show", FILTERS.items(), 'data-filter="flags"')
    controls += render_select("order", "order", orders.items())
    return f"""<p class="about">{len(worst)} of {len(report.images)} images: lowest F1 at IoU 0.5, or most errors.
A wrong name at the right place counts as a missed and an extra object.
Point at a shape for its class and score, click an image to enlarge it.</p>
<div class="controls">{controls}<output id="where"></output>{_render_legend()}
<label><input type="checkbox" checked data-kind="names">names</label></div>
<div class="cards">{"".join(_render_card(image, folder) for image in worst)}</div>
<p id="nothing" hidden>No image on this page matches. Choose another filter.</p>"""


def _render_legend() -> str:
    """Render each kind of outline, with a checkbox to hide it."""
    sample = '<polygon class="halo" points="2,3 38,3 38,17 2,17"/><polygon points="2,3 38,3 38,17 2,17"/>'
    return "".join(
        f'<label><input type="checkbox" checked data-kind="{kind}"><svg class="sample" viewBox="0 0 40 20">'
        f'<g class="shape {kind}">{sample}</g></svg>{words}</label>'
        for kind, words in KINDS.items()
    )


def choose_worst_images(images: Sequence[ImageReport], most: int) -> list[ImageReport]:
    """Return the images with the lowest F1 and those with the most errors, ordered by F1."""
    wrong = [image for image in images if image.errors or image.comparison.answer.is_truncated]
    by_f1 = sorted(wrong, key=lambda image: (_f1(image), -image.errors))
    by_errors = sorted(wrong, key=lambda image: (-image.errors, _f1(image)))
    ranks = {id(image): rank for rank, image in enumerate(by_errors)}
    chosen = sorted(enumerate(by_f1), key=lambda item: min(item[0], ranks[id(item[1])]))[:most]
    return [image for _, image in sorted(chosen, key=itemgetter(0))]


def _f1(image: ImageReport) -> float:
    """Return 1 for an image without objects and without predictions: it is right."""
    return 1.0 if image.counts.f1 is None else image.counts.f1


def _render_card(image: ImageReport, folder: Path) -> str:
    wrong, (missed, extra) = len(image.wrong_names), _find_missed_and_extra(image)
    counts = f"{len(image.pairs)} matched, {wrong} wrong name{'' if wrong == 1 else 's'}"
    counts += f", {len(missed)} missed, {len(extra)} extra"
    counts += f", {image.invalid} invalid" if image.invalid else ""
    flags = {
        "wrong-names": wrong,
        "misses": missed,
        "extras": extra,
        "invalid": image.invalid,
        "truncated": image.comparison.answer.is_truncated,
    }
    words = " ".join(name for name, applies in flags.items() if applies)
    return f"""<article class="card" data-flags="{words}" data-f1="{_f1(image):.6f}" data-errors="{image.errors}">
{_render_image(image, folder)}
<h3>{escape_text(image.comparison.record.image)} <small>image_id {image.comparison.image_id}</small></h3>
<p><b>F1 {_f1(image):.2f}</b> &middot; {counts}</p>
{_render_answer(image)}
</article>"""


def _render_image(image: ImageReport, folder: Path) -> str:
    record = image.comparison.record
    url, remark, size = None, "", (record.width, record.height)
    try:
        url, size = make_thumbnail(folder / record.image), read_image_size(folder / record.image)
    except (OSError, ValueError) as error:
        remark = explain_missing_image(error)
    if size != (record.width, record.height):
        remark = f"the file is {size[0]} x {size[1]}, but its record says {record.width} x {record.height}"
    below = f'<p class="remark">{escape_text(remark)}</p>' if remark else ""
    return render_stage(record, url, *draw_objects(image)) + below


def _render_answer(image: ImageReport) -> str:
    answer = image.comparison.answer
    if not answer.has_text:
        return ""
    reasons = ", ".join(obj.reason for obj in answer.objects if obj.reason is not None)
    ended = f"{answer.tokens} tokens, ended by {answer.finish_reason}"
    ended += f"; invalid: {reasons}" if reasons else ""
    ended += f"; dropped as duplicates: {len(answer.dropped)}" if answer.dropped else ""
    summary = f"<summary>Raw answer <small>{escape_text(ended)}</small></summary>"
    return f"<details>{summary}<pre>{escape_text(answer.text)}</pre></details>"


def _find_missed_and_extra(image: ImageReport) -> tuple[list[int], list[int]]:
    """Return the missed objects and the false positives, without wrong names at the right place."""
    missed = set(image.missed_objects) - {j for _, j in image.wrong_names}
    extra = set(image.false_positives) - {i for i, _ in image.wrong_names}
    return sorted(missed), sorted(extra)


def draw_objects(image: ImageReport) -> tuple[list[str], list[str]]:
    """Return the outlines of all objects, and the names of the wrong ones. Matches are drawn first, so that errors
    are drawn over them. `- cat` is above a missed object and `+ cat` inside an extra one, so that both can be read
    in one place. A wrong name at the right place is one mark, `cat → dog`."""
    true, predicted = image.comparison.true, image.comparison.predicted
    shapes = [_draw_outline("true", true[j]) for _, j in (*image.pairs, *image.wrong_names)]
    shapes += [_draw_outline("matched", predicted[i]) for i, _ in image.pairs]
    wrong = [replace(predicted[i], desc=f"{true[j].desc} → {predicted[i].desc}") for i, j in image.wrong_names]
    missed, extra = _find_missed_and_extra(image)
    kinds: dict[str, tuple[list[LabelledShape], str, NamePlace]] = {
        "wrong-name": (wrong, "", "above"),
        "missed": ([true[j] for j in missed], "- ", "above"),
        "extra": ([predicted[i] for i in extra], "+ ", "bottom"),
    }
    names = []
    for kind, (objects, sign, place) in kinds.items():
        for obj in objects:
            shapes.append(_draw_outline(kind, obj))
            attributes, words = f'class="tag {kind}"', f"{sign}{obj.desc}"
            names.append(render_name(image.comparison.record, words, obj.shape.box, attributes, place))
    return shapes, names if len(names) <= MAX_NAMES else []


def _draw_outline(kind: str, obj: LabelledShape) -> str:
    points = format_points(obj.shape.ring)
    score = "" if obj.score is None else f" {obj.score:.2f}"
    outline = f'<polygon class="halo" points="{points}"/><polygon points="{points}"/>'
    return f'<g class="shape {kind}"><title>{escape_text(f"{kind}: {obj.desc}{score}")}</title>{outline}</g>'
