"""The page of an evaluation: numbers, curves, and the worst images with the objects drawn over them. With another
model to compare with, each image is there twice, and those that changed most come first.

Five kinds of outlines differ in dashes as well as in colour: matched, a wrong name, the true shape of these two,
missed and extra. If an image cannot be read, its place stays empty and a remark says why.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from coordexp.data.addresses import join_address
from coordexp.data.images import read_image_size
from coordexp.evaluate.behaviour import DEFINITIONS
from coordexp.evaluate.comparison import LabelledShape
from coordexp.evaluate.matching import CurvePoint, best_point, thin_curve
from coordexp.evaluate.report import MEASURES, EvaluationReport, ImageReport
from coordexp.pages.cards import Card, Drawing, Shape, describe_answer, try_thumbnail
from coordexp.pages.charts import lay_out
from coordexp.pages.curves import Curve
from coordexp.pages.document import render_page
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
CHANGES = {"better": "better than A", "worse": "worse than A"}
KINDS = {
    "matched": "matched",
    "wrong-name": "right place, wrong name: true → written",
    "true": "true shape of these two",
    "missed": "missed: true, but not predicted",
    "extra": "extra: predicted, but not true",
}
LETTERS = dict(zip(MEASURES, "ABC", strict=True))  # of the lines over the score threshold
MAX_COUNTS = 12  # names listed with their counts
MAX_NAMES = 12  # errors up to which each has its name in the image; otherwise names are in tooltips only
SIZE = (600, 260)  # of a chart


def render_evaluation(
    report: EvaluationReport, folder: Path, description: str, most: int, base: EvaluationReport | None = None
) -> str:
    """Return the page with at most `most` images. Image paths are relative to `folder`. `base` are the answers of
    another model, A, to the same images."""
    tally, values, before = report.with_class.at(0.5), report.metrics(), base.metrics() if base else {}
    if base is None:
        cards = [_make_card(image, folder, None) for image in choose_worst_images(report.images, most)]
    else:
        pairs = choose_changed_images(base.images, report.images, most)
        cards = [_make_card(image, folder, other) for other, image in pairs]
    return render_page(
        "evaluation.html",
        title=f"Evaluation: {description}",
        scripts=["common.js", "cards.js"],
        heading=description,
        scope=f"{len(report.images)} images, {tally.true} true objects, {tally.predicted} valid predictions",
        notes=make_notes(report),
        remarks=report.notes,
        tiles=[
            (f"{values[name]:.3f}", f"{title}, A {before[name]:.3f}" if name in before else title)
            for name, title in HEADLINE.items()
            if name in values
        ],
        curves=_draw_curves(report.curve),
        letters=LETTERS,
        rates=[
            (name.replace("_", " "), rate.value, report.describe_count(name), DEFINITIONS[name])
            for name, rate in report.behaviour.rates.items()
        ],
        counts=_count_names(report),
        most_counts=MAX_COUNTS,
        classes=_list_classes(report),
        asked=[
            [str(number), str(counts.true), str(counts.predicted), *_measures(counts)]
            for number, counts in report.asked.items()
        ],
        filters=[*FILTERS.items(), *(CHANGES.items() if base else ())],
        kinds=KINDS,
        is_comparison=base is not None,
        cards=cards,
        images=len(report.images),
    )


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


def _draw_curves(points: Sequence[CurvePoint]) -> dict[str, Any] | None:
    """Return the two charts and words on the best point, or None without a curve."""
    best = best_point(points)
    if best is None:
        return None
    shown = thin_curve(points)
    values = {name: np.array([getattr(point.counts, name) or 0.0 for point in shown]) for name in MEASURES}
    scores = np.array([point.score for point in shown])
    f1, precision, recall = (getattr(best.counts, name) or 0.0 for name in MEASURES)
    words = f"Ring: best F1 {f1:.3f}, keeping objects with a score of at least {best.score:.3g}"
    first, last = float(scores[-1]), float(scores[0])
    over_recall = [("A", _make_stairs(0.0, values["recall"], values["precision"]))]
    over_score = [(LETTERS[name], _make_stairs(first, scores[::-1], row[::-1])) for name, row in values.items()]
    charts = [
        ("Precision against recall", over_recall, (0.0, 1.0), "recall", (recall, precision, words)),
        ("Against the score threshold", over_score, (first, last), "score threshold", (best.score, f1, words)),
    ]
    return {
        "words": words,
        "charts": {
            title: lay_out(title, lines, SIZE, reach, axis=axis, ring=ring, limits=(0.0, 1.0))
            for title, lines, reach, axis, ring in charts
        },
    }


def _make_stairs(start: float, steps: np.ndarray, values: np.ndarray) -> Curve:
    """Return a line with steps and no slopes: the value of a point holds from the point before it."""
    before = np.concatenate([[start], steps[:-1]])
    return Curve.through(np.stack([before, steps], axis=1).ravel(), np.repeat(values, 2))


def _count_names(report: EvaluationReport) -> dict[str, list[tuple[str, int]]]:
    """Return lists of names with their counts, by title."""
    wrong = {f"{row['true']} → {row['written']}": row["count"] for row in report.count_wrong_names()}
    counts = {
        "Why objects were invalid": report.behaviour.reasons,
        "Classes that the data does not have": report.behaviour.unknown,
        "Most frequent wrong names at the right place": wrong,
    }
    return {title: list(names.items()) for title, names in counts.items() if names}


def _list_classes(report: EvaluationReport) -> list[list[str]]:
    """Return the rows of the classes, most frequent first."""
    rows = []
    for desc, scores in sorted(report.classes.items(), key=lambda item: -item[1].at(0.5).true):
        tally = scores.at(0.5)
        average = report.boxes.classes[desc] if report.boxes else None
        more = map(_format_share, (scores.at(0.95).f1, average, scores.mean_iou))
        rows.append([desc, str(tally.true), str(tally.predicted), *_measures(tally), *more])
    return rows


def _measures(counts: Any) -> list[str]:
    return [_format_share(getattr(counts, name)) for name in MEASURES]


def _format_share(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.3f}"


def choose_worst_images(images: Sequence[ImageReport], most: int) -> list[ImageReport]:
    """Return the images with the lowest F1 and those with the most errors, ordered by F1."""
    wrong = [image for image in images if image.errors or image.comparison.answer.is_truncated]
    by_f1 = sorted(wrong, key=lambda image: (_f1(image), -image.errors))
    by_errors = sorted(wrong, key=lambda image: (-image.errors, _f1(image)))
    ranks = {id(image): rank for rank, image in enumerate(by_errors)}
    chosen = sorted(enumerate(by_f1), key=lambda item: min(item[0], ranks[id(item[1])]))[:most]
    return [image for _, image in sorted(chosen, key=itemgetter(0))]


def choose_changed_images(
    base: Sequence[ImageReport], images: Sequence[ImageReport], most: int
) -> list[tuple[ImageReport, ImageReport]]:
    """Return the images whose F1 differs most between two models, the largest gain first."""
    pairs = sorted(zip(base, images, strict=True), key=lambda pair: -abs(_measure_gain(pair)))[:most]
    return sorted(pairs, key=_measure_gain, reverse=True)


def _measure_gain(pair: tuple[ImageReport, ImageReport]) -> float:
    return _f1(pair[1]) - _f1(pair[0])


def _f1(image: ImageReport) -> float:
    """Return 1 for an image without objects and without predictions: it is right."""
    return 1.0 if image.counts.f1 is None else image.counts.f1


def _make_card(image: ImageReport, folder: Path, other: ImageReport | None) -> Card:
    record, answer = image.comparison.record, image.comparison.answer
    missed, extra = _find_missed_and_extra(image)
    gain = _measure_gain((other or image, image))
    flags = {
        "better": gain > 0,
        "worse": gain < 0,
        "wrong-names": image.wrong_names,
        "misses": missed,
        "extras": extra,
        "invalid": image.comparison.refused,
        "truncated": answer.is_truncated,
    }
    address, size = join_address(folder, record.image), (record.width, record.height)
    url, remark = try_thumbnail(address)
    if url is not None and (own := read_image_size(address)) != size:
        remark = f"the file is {own[0]} x {own[1]}, but its record says {size[0]} x {size[1]}"
    sides = [("", image)] if other is None else [("A: ", other), ("B: ", image)]
    return Card(
        title=record.image,
        detail=f"image_id {image.comparison.image_id}",
        words={
            "data-flags": " ".join(name for name, applies in flags.items() if applies),
            "data-f1": f"{_f1(image):.6f}",
            "data-loss": f"{-gain:.6f}",
            "data-errors": image.errors,
        },
        drawings=[_draw_image(side, url) for _, side in sides],
        remark=remark,
        facts=[(f"{name}F1 {_f1(side):.2f}, {_count_objects(side)}", "") for name, side in sides],
        answer=describe_answer(answer),
    )


def _draw_image(image: ImageReport, url: str | None) -> Drawing:
    record, shapes = image.comparison.record, draw_objects(image)
    named = sum(bool(shape.name) for shape in shapes)
    return Drawing(record.width, record.height, url, shapes, len(shapes) if named <= MAX_NAMES else 0)


def _count_objects(image: ImageReport) -> str:
    wrong, (missed, extra) = len(image.wrong_names), _find_missed_and_extra(image)
    counts = f"{len(image.pairs)} matched, {wrong} wrong name{'' if wrong == 1 else 's'}"
    counts += f", {len(missed)} missed, {len(extra)} extra"
    return counts + (f", {image.comparison.refused} invalid" if image.comparison.refused else "")


def _find_missed_and_extra(image: ImageReport) -> tuple[list[int], list[int]]:
    """Return the missed objects and the false positives, without wrong names at the right place."""
    missed = set(image.missed_objects) - {j for _, j in image.wrong_names}
    extra = set(image.false_positives) - {i for i, _ in image.wrong_names}
    return sorted(missed), sorted(extra)


def draw_objects(image: ImageReport) -> list[Shape]:
    """Return the outlines of all objects, of which the wrong ones have names. Matches are drawn first, so that
    errors are drawn over them. `- cat` is above a missed object and `+ cat` inside an extra one, so that both can
    be read in one place. A wrong name at the right place is one mark, `cat → dog`."""
    true, predicted = image.comparison.true, image.comparison.predicted
    shapes = [_outline("true", true[j]) for _, j in (*image.pairs, *image.wrong_names)]
    shapes += [_outline("matched", predicted[i]) for i, _ in image.pairs]
    for i, j in image.wrong_names:
        both = replace(predicted[i], desc=f"{true[j].desc} → {predicted[i].desc}")
        shapes.append(_outline("wrong-name", both, both.desc))
    missed, extra = _find_missed_and_extra(image)
    shapes += [_outline("missed", true[j], f"- {true[j].desc}") for j in missed]
    return shapes + [_outline("extra", predicted[i], f"+ {predicted[i].desc}") for i in extra]


def _outline(kind: str, obj: LabelledShape, name: str = "") -> Shape:
    score = "" if obj.score is None else f" {obj.score:.2f}"
    title = f"{kind}: {obj.desc}{score}"
    return Shape(obj.shape.ring, title, name, kind, is_named_inside=kind == "extra")
