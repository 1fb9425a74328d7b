"""Compare ground truth and answers and return one report, without files or images. Training logs it, pages show
it.

`evaluate` is a pure function. `EvaluationReport.metrics` names every number for a log, `as_dict` keeps their
structure.

hotcoco computes COCO's twelve numbers, AP and AR, for boxes and, if the ground truth has polygons, for masks; a
test checks that they equal those of pycocotools. The box of a polygon is the box around it, and the mask of a box
is its rectangle. COCO considers at most 100 detections per image.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hotcoco import COCO, COCOeval
from numpy.typing import NDArray

from coordexp.evaluate.answer import Detection, ImageAnswer
from coordexp.evaluate.behaviour import DEFINITIONS, NEED_TEXT, Behaviour, observe, observe_image, true_classes
from coordexp.evaluate.comparison import (
    ImageComparison,
    LabelledShape,
    compare_images,
    compare_results,
    encode_mask,
    mask_area,
)
from coordexp.evaluate.matching import (
    THRESHOLDS,
    CurvePoint,
    MatchCounts,
    Matching,
    MatchScores,
    Pair,
    assign_at,
    best_point,
    count_by_classes_asked,
    match_image,
    score,
    score_by_class,
    score_curve,
    thin_curve,
)
from coordexp.evaluate.predictions import Truth, category_ids

AP = {"AP": "ap", "AP50": "ap_50", "AP75": "ap_75", "APs": "ap_small", "APm": "ap_medium", "APl": "ap_large"}
AR = {"AR1": "ar_1", "AR10": "ar_10", "AR100": "ar_100", "ARs": "ar_small", "ARm": "ar_medium", "ARl": "ar_large"}
NAMES = AP | AR  # of COCO's numbers


@dataclass(frozen=True, slots=True)
class CocoScores:
    """`values` are named from `ap` to `ar_large` and are None if no object has that size; `classes` is AP by
    desc."""

    values: dict[str, float | None]
    classes: dict[str, float | None]


def coco_scores(comparisons: Sequence[ImageComparison], kind: str) -> CocoScores:
    """Return the numbers for boxes (`kind` is bbox) or masks (segm). A prediction of a class that the ground truth
    does not have belongs to no category and is not counted."""
    categories = category_ids([(image.image_id, image.record) for image in comparisons])
    truth, results = COCO(coco_truth(comparisons)), list[dict[str, Any]]()
    for image in comparisons:
        for item in image.predicted:
            if item.desc in categories:
                ids = {"image_id": image.image_id, "category_id": categories[item.desc], "score": item.score}
                results.append(ids | _to_result(item, image, kind))
    evaluation = COCOeval(truth, truth.load_res(results), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summary_lines()  # fills the results; `summarize` would also print them
    numbers = evaluation.get_results(per_class=True)
    return CocoScores(
        {ours: _none_if_absent(numbers[theirs]) for theirs, ours in NAMES.items()},
        {desc: _none_if_absent(numbers.get(f"AP/{number}", -1.0)) for desc, number in categories.items()},
    )


def _to_result(item: LabelledShape, image: ImageComparison, kind: str) -> dict[str, Any]:
    """Return a predicted object as COCO has it. A mask has no box: its area would count as that of the box."""
    if kind == "segm":
        return {"segmentation": encode_mask(item.shape, image.record.width, image.record.height)}
    x1, y1, x2, y2 = item.shape.box
    return {"bbox": [x1, y1, x2 - x1, y2 - y1]}


def coco_truth(comparisons: Sequence[ImageComparison]) -> dict[str, Any]:
    """Return the ground truth as a COCO dataset. Categories are named by their number, so that no desc can break a
    key of the results."""
    categories = category_ids([(image.image_id, image.record) for image in comparisons])
    annotations: list[dict[str, Any]] = []
    for image in comparisons:
        for item in image.true:
            ids = {"id": len(annotations) + 1, "category_id": categories[item.desc]}
            annotations.append(_to_annotation(item, image) | ids)
    images = [
        {"id": image.image_id, "width": image.record.width, "height": image.record.height} for image in comparisons
    ]
    named = [{"id": number, "name": str(number)} for number in categories.values()]
    return {"images": images, "annotations": annotations, "categories": named}


def _to_annotation(item: LabelledShape, image: ImageComparison) -> dict[str, Any]:
    """Return a true object as COCO has it. Its area decides whether it is small; as in COCO, that of a polygon is
    the area of its mask."""
    x1, y1, x2, y2 = item.shape.box
    area = item.shape.box_area
    if item.shape.kind == "poly":
        area = mask_area(encode_mask(item.shape, image.record.width, image.record.height))
    return {
        "image_id": image.image_id,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "area": area,
        "iscrowd": 0,
        "segmentation": [list(item.shape.ring)],
    }


def _none_if_absent(value: float) -> float | None:
    """Return None for -1, with which COCO says that there was nothing to compute."""
    return None if value == -1.0 else float(value)


NO_ANSWERS = (
    "detections without answers: rates about the text of answers are not available. F1, precision and recall "
    "count every detection, whatever its score; the curve shows them over the threshold"
)
MEASURES = ("f1", "precision", "recall")
MAX_WRONG_NAMES = 10  # pairs of names that a report lists
Counts = NDArray[np.int64]  # [images, 2]: the numerator and the denominator of a rate, for each image


@dataclass(frozen=True, eq=False, slots=True)
class ImageReport:
    """An image and its pairs (predicted, true), with class, at IoU 0.5."""

    comparison: ImageComparison
    pairs: tuple[Pair, ...]

    @property
    def counts(self) -> MatchCounts:
        return MatchCounts(len(self.pairs), len(self.comparison.predicted), len(self.comparison.true))

    @property
    def missed_objects(self) -> tuple[int, ...]:
        matched = {j for _, j in self.pairs}
        return tuple(j for j in range(len(self.comparison.true)) if j not in matched)

    @property
    def false_positives(self) -> tuple[int, ...]:
        matched = {i for i, _ in self.pairs}
        return tuple(i for i in range(len(self.comparison.predicted)) if i not in matched)

    @property
    def wrong_names(self) -> tuple[Pair, ...]:
        """False positives, each with the missed object at its place (IoU 0.5). Two of the same name would be a
        match."""
        extra, missed = self.false_positives, self.missed_objects
        (pairs,) = assign_at(THRESHOLDS[:1], self.comparison.overlap[np.ix_(extra, missed)])
        return tuple((extra[i], missed[j]) for i, j in pairs)

    @property
    def errors(self) -> int:
        return self.counts.errors + self.comparison.refused


@dataclass(frozen=True, eq=False, slots=True)
class EvaluationReport:
    """All results of an evaluation. `asked` has the counts at IoU 0.5, with class, by the number of classes that a
    record asks for. `boxes` and `masks` are None if COCO's numbers cannot be computed; `notes`
    says why."""

    with_class: MatchScores
    any_class: MatchScores
    classes: dict[str, MatchScores]
    boxes: CocoScores | None
    masks: CocoScores | None
    curve: tuple[CurvePoint, ...]
    behaviour: Behaviour
    asked: dict[int, MatchCounts]
    images: tuple[ImageReport, ...]
    notes: tuple[str, ...]

    def describe_count(self, name: str) -> str:
        """Return the two numbers of a behaviour rate as words. Another detector has no texts of answers."""
        rate, has_text = self.behaviour.rates[name], all(image.comparison.answer.has_text for image in self.images)
        return f"{rate.count} of {rate.of}" if has_text or name not in NEED_TEXT else "not available"

    def count_wrong_names(self) -> list[dict[str, Any]]:
        """Return the most frequent pairs of a true name and the one that was written at its place."""
        pairs = ((image.comparison, *pair) for image in self.images for pair in image.wrong_names)
        names = Counter((image.true[j].desc, image.predicted[i].desc) for image, i, j in pairs)
        most = names.most_common(MAX_WRONG_NAMES)
        return [{"true": true, "written": written, "count": count} for (true, written), count in most]

    def metrics(self) -> dict[str, float]:
        """Return every number by its metric name. A share of nothing is left out."""
        values: dict[str, float | None] = {}
        for suffix, scores in (("", self.with_class), ("_any_class", self.any_class)):
            values |= {f"{name}{suffix}": value for name, value in _name_scores(scores).items()}
        for prefix, coco in (("", self.boxes), ("mask_", self.masks)):
            values |= {f"{prefix}{name}": value for name, value in (coco.values if coco else {}).items()}
        if best := best_point(self.curve):
            values |= {"best_f1_50": best.counts.f1, "best_score": best.score}
        values |= {name: rate.value for name, rate in self.behaviour.rates.items()}
        values |= {f"f1_50_asked_{number}": counts.f1 for number, counts in self.asked.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        behaviour = {
            name: {"rate": rate.value, "count": rate.count, "of": rate.of, "definition": DEFINITIONS[name]}
            for name, rate in self.behaviour.rates.items()
        }
        thresholds = [
            {"iou": iou, "with_class": counts_to_dict(with_class), "any_class": counts_to_dict(any_class)}
            for iou, with_class, any_class in zip(
                THRESHOLDS, self.with_class.per_threshold, self.any_class.per_threshold, strict=True
            )
        ]
        return {
            "images": len(self.images),
            "true_objects": self.with_class.at(0.5).true,
            "valid_objects": self.with_class.at(0.5).predicted,
            "notes": list(self.notes),
            "numbers": self.metrics(),
            "thresholds": thresholds,
            "classes": {desc: self._class_to_dict(desc) for desc in self.classes},
            "behaviour": behaviour,
            "classes_asked": {str(number): counts_to_dict(counts) for number, counts in self.asked.items()},
            "wrong_names": self.count_wrong_names(),
            "invalid_reasons": self.behaviour.reasons,
            "unknown_classes": self.behaviour.unknown,
            "curve": [{"score": point.score, **counts_to_dict(point.counts)} for point in thin_curve(self.curve)],
        }

    def _class_to_dict(self, desc: str) -> dict[str, Any]:
        scores = self.classes[desc]
        counts = {"true": scores.at(0.5).true, "found": scores.at(0.5).predicted}
        average = {
            f"{prefix}ap": coco.classes[desc] for prefix, coco in (("", self.boxes), ("mask_", self.masks)) if coco
        }
        return counts | average | _name_scores(scores)


def evaluate(truth: Truth, answers: Sequence[ImageAnswer]) -> EvaluationReport:
    """Compare answers with the ground truth of the same images. Raise DataError if they do not belong together."""
    return _report(compare_images(truth, answers), _note_answers(answers))


def evaluate_results(truth: Truth, results: Sequence[Detection]) -> EvaluationReport:
    """Compare the detections of another detector with the ground truth. Rates that need answers are of nothing.
    Raise DataError if a detection is about an image that the ground truth does not have."""
    comparisons, known = compare_results(truth, results), set(category_ids(truth).values())
    notes = [NO_ANSWERS]
    if unknown := [result.category_id for result in results if result.category_id not in known]:
        notes.append(
            f"{len(unknown):,} of {len(results):,} detections have a category_id that no class of the data has, "
            f"first {min(unknown)}: the detector may number classes in another way, e.g. from 0, and then all "
            "classes are compared with others"
        )
    return _report(comparisons, notes)


def _note_answers(answers: Sequence[ImageAnswer]) -> list[str]:
    """Return notes about objects that were dropped, and about images that could not be read."""
    notes = []
    if dropped := sum(len(answer.dropped) for answer in answers):
        plural = "s" if dropped > 1 else ""
        notes.append(
            f"`predict --dedup` dropped {dropped} object{plural} as duplicate{plural}; no number counts them"
        )
    if unread := [answer.image for answer in answers if not answer.was_asked]:
        plural = "s" if len(unread) > 1 else ""
        notes.append(
            f"{len(unread)} image{plural} could not be read (the first is {unread[0]}): the model was not asked, "
            "and their true objects count as missed"
        )
    return notes


def _report(comparisons: Sequence[ImageComparison], notes: Sequence[str]) -> EvaluationReport:
    matchings = [match_image(image) for image in comparisons]
    boxes, masks, coco_notes = _coco(comparisons)
    return EvaluationReport(
        score(comparisons, matchings, with_class=True),
        score(comparisons, matchings, with_class=False),
        score_by_class(comparisons, matchings),
        boxes,
        masks,
        score_curve(comparisons),
        observe(comparisons, matchings),
        count_by_classes_asked(comparisons, matchings),
        tuple(
            ImageReport(image, matching.with_class[0])
            for image, matching in zip(comparisons, matchings, strict=True)
        ),
        (*coco_notes, *notes),
    )


def count_by_image(truth: Truth, answers: Sequence[ImageAnswer]) -> dict[str, Counts]:
    """Return, by metric name, what each image adds to every rate and to F1, precision and recall at IoU 0.5, in
    the order of the ground truth. Raise DataError like `evaluate`.

    Each of them is two counts per image, so its value over any images is a ratio of two sums. That is all that
    resampling images needs."""
    return count_comparisons(compare_images(truth, answers))


def count_comparisons(comparisons: Sequence[ImageComparison]) -> dict[str, Counts]:
    """Return the same for images that have been compared."""
    classes = true_classes(comparisons)
    by_image = [_count_image(image, match_image(image, THRESHOLDS[:1]), classes) for image in comparisons]
    return {name: np.array([counts[name] for counts in by_image], dtype=np.int64) for name in by_image[0]}


def _count_image(
    image: ImageComparison, matching: Matching, classes: frozenset[str]
) -> dict[str, tuple[int, int]]:
    counts, predicted, true = {}, len(image.predicted), len(image.true)
    for suffix, pairs in (("", matching.with_class[0]), ("_any_class", matching.any_class[0])):
        counts[f"f1_50{suffix}"] = (2 * len(pairs), predicted + true)
        counts[f"recall_50{suffix}"] = (len(pairs), true)
        counts[f"precision_50{suffix}"] = (len(pairs), predicted)
    rates = observe_image(image, matching, classes)
    return counts | {name: (rate.count, rate.of) for name, rate in rates.items()}


def _coco(comparisons: Sequence[ImageComparison]) -> tuple[CocoScores | None, CocoScores | None, tuple[str, ...]]:
    """Return COCO's numbers for boxes and masks, and notes about them."""
    objects = [item for image in comparisons for item in image.predicted]
    if not any(image.true for image in comparisons):
        return None, None, ("no AP: the data has no true object",)
    if unscored := sum(item.score is None for item in objects):
        return None, None, (f"no AP: {unscored} of {len(objects)} objects have no score",)
    boxes = coco_scores(comparisons, "bbox")
    has_polygons = any(item.shape.kind == "poly" for image in comparisons for item in image.true)
    masks = coco_scores(comparisons, "segm") if has_polygons else None
    all_equal = len(objects) > 1 and len({item.score for item in objects}) == 1
    note = "all scores are equal: AP depends on the order of the answers; F1 does not"
    return boxes, masks, (note,) if all_equal else ()


def _name_scores(scores: MatchScores) -> dict[str, float | None]:
    """Return f1_50, f1_95 and f1 (the mean over 0.50:0.05:0.95), the same for precision and recall, and
    mean_iou."""
    values: dict[str, float | None] = {}
    for name in MEASURES:
        for threshold in (0.5, 0.95):
            values[f"{name}_{threshold * 100:.0f}"] = getattr(scores.at(threshold), name)
        values[name] = scores.mean(name)
    return values | {"mean_iou": scores.mean_iou}


def counts_to_dict(counts: MatchCounts) -> dict[str, float | int | None]:
    """Return counts and their shares as a dict for JSON."""
    numbers = {"pairs": counts.pairs, "found": counts.predicted, "true": counts.true}
    return numbers | {name: getattr(counts, name) for name in MEASURES}
