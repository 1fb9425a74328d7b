"""From truth and answers to one report, without files or images: what a training run logs and a page shows.

`evaluate` is a pure function. `Report.flat` names every number for a log, `Report.as_dict` keeps their structure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordexp.evaluate.answer import Answer
from coordexp.evaluate.behaviour import DEFINITIONS, Behaviour, observe
from coordexp.evaluate.coco import CocoScores, coco_scores
from coordexp.evaluate.curve import CurvePoint, best_point, score_curve, thinned
from coordexp.evaluate.matching import (
    THRESHOLDS,
    Matching,
    Pair,
    Scores,
    Tally,
    match_scene,
    score,
    score_by_class,
)
from coordexp.evaluate.predictions import Truth, detections_of
from coordexp.evaluate.scene import Scene, build_scenes

MEASURES = ("f1", "precision", "recall")


@dataclass(frozen=True, eq=False, slots=True)
class ImageReport:
    """An image and its pairs (predicted, true), with class, at IoU 0.5."""

    scene: Scene
    pairs: tuple[Pair, ...]

    @property
    def tally(self) -> Tally:
        return Tally(len(self.pairs), len(self.scene.found), len(self.scene.true))

    @property
    def missed(self) -> tuple[int, ...]:
        matched = {j for _, j in self.pairs}
        return tuple(j for j in range(len(self.scene.true)) if j not in matched)

    @property
    def extra(self) -> tuple[int, ...]:
        matched = {i for i, _ in self.pairs}
        return tuple(i for i in range(len(self.scene.found)) if i not in matched)

    @property
    def invalid(self) -> int:
        return len(self.scene.answer.objects) - len(self.scene.found)

    @property
    def errors(self) -> int:
        return self.tally.errors + self.invalid


@dataclass(frozen=True, eq=False, slots=True)
class Report:
    """`boxes` and `masks` are None where COCO's numbers cannot be had; `notes` says why."""

    with_class: Scores
    any_class: Scores
    classes: dict[str, Scores]
    boxes: CocoScores | None
    masks: CocoScores | None
    curve: tuple[CurvePoint, ...]
    behaviour: Behaviour
    images: tuple[ImageReport, ...]
    notes: tuple[str, ...]

    def flat(self) -> dict[str, float]:
        """Every number by one name. What is a share of nothing has no entry."""
        values: dict[str, float | None] = {}
        for suffix, scores in (("", self.with_class), ("_any_class", self.any_class)):
            values |= {f"{name}{suffix}": value for name, value in _named(scores).items()}
        for prefix, coco in (("", self.boxes), ("mask_", self.masks)):
            values |= {f"{prefix}{name}": value for name, value in (coco.values if coco else {}).items()}
        if best := best_point(self.curve):
            values |= {"best_f1_50": best.tally.f1, "best_score": best.score}
        values |= {name: rate.value for name, rate in self.behaviour.rates.items()}
        return {name: float(value) for name, value in values.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        behaviour = {
            name: {"rate": rate.value, "count": rate.count, "of": rate.of, "definition": DEFINITIONS[name]}
            for name, rate in self.behaviour.rates.items()
        }
        return {
            "images": len(self.images),
            "true_objects": self.with_class.at(0.5).true,
            "valid_objects": self.with_class.at(0.5).found,
            "notes": list(self.notes),
            "numbers": self.flat(),
            "thresholds": [_threshold(self, k) for k in range(len(THRESHOLDS))],
            "classes": {desc: self._class(desc) for desc in self.classes},
            "behaviour": behaviour,
            "invalid_reasons": self.behaviour.reasons,
            "unknown_classes": self.behaviour.unknown,
            "curve": [{"score": point.score, **_shares(point.tally)} for point in thinned(self.curve)],
        }

    def _class(self, desc: str) -> dict[str, Any]:
        scores = self.classes[desc]
        counts = {"true": scores.at(0.5).true, "found": scores.at(0.5).found}
        average = {
            f"{prefix}ap": coco.classes[desc] for prefix, coco in (("", self.boxes), ("mask_", self.masks)) if coco
        }
        return counts | average | _named(scores)


def evaluate(truth: Truth, answers: Sequence[Answer]) -> Report:
    """`truth` and `answers` are of the same images. PredictionError where they do not belong together."""
    scenes = build_scenes(truth, answers)
    matchings = [match_scene(scene) for scene in scenes]
    boxes, masks, notes = _coco(scenes, truth, answers)
    return Report(
        score(scenes, matchings, with_class=True),
        score(scenes, matchings, with_class=False),
        score_by_class(scenes, matchings),
        boxes,
        masks,
        score_curve(scenes),
        observe(scenes, matchings),
        tuple(ImageReport(*each) for each in zip(scenes, _loosest(matchings), strict=True)),
        (*notes, *_unread(answers)),
    )


def _unread(answers: Sequence[Answer]) -> tuple[str, ...]:
    unread = [answer.image for answer in answers if not answer.was_asked]
    if not unread:
        return ()
    count = f"{len(unread)} image{'s' if len(unread) > 1 else ''} could not be read (the first is {unread[0]})"
    return (f"{count}: the model was not asked, and their true objects count as missed",)


def _coco(
    scenes: Sequence[Scene], truth: Truth, answers: Sequence[Answer]
) -> tuple[CocoScores | None, CocoScores | None, tuple[str, ...]]:
    objects = [one for scene in scenes for one in scene.found]
    if not any(scene.true for scene in scenes):
        return None, None, ("no AP: the data has no true object",)
    if unscored := sum(one.score is None for one in objects):
        return None, None, (f"no AP: {unscored} of {len(objects)} objects have no score",)
    detections = list(detections_of(answers, truth))
    boxes = coco_scores(scenes, detections, "bbox")
    polygons = any(one.shape.kind == "poly" for scene in scenes for one in scene.true)
    masks = coco_scores(scenes, detections, "segm") if polygons else None
    equal = len(objects) > 1 and len({one.score for one in objects}) == 1
    note = "all scores are equal: AP depends on the order of the answers; F1 does not"
    return boxes, masks, (note,) if equal else ()


def _loosest(matchings: Sequence[Matching]) -> list[tuple[Pair, ...]]:
    return [matching.with_class[0] for matching in matchings]


def _named(scores: Scores) -> dict[str, float | None]:
    """f1_50, f1_95, f1 (the mean over 0.50:0.05:0.95), the same of precision and recall, and mean_iou."""
    values: dict[str, float | None] = {}
    for name in MEASURES:
        for threshold in (0.5, 0.95):
            values[f"{name}_{threshold * 100:.0f}"] = getattr(scores.at(threshold), name)
        values[name] = scores.mean(name)
    return values | {"mean_iou": scores.mean_iou}


def _threshold(report: Report, k: int) -> dict[str, Any]:
    with_class, any_class = report.with_class.tallies[k], report.any_class.tallies[k]
    return {"iou": THRESHOLDS[k], "with_class": _shares(with_class), "any_class": _shares(any_class)}


def _shares(tally: Tally) -> dict[str, float | int | None]:
    counts = {"pairs": tally.pairs, "found": tally.found, "true": tally.true}
    return counts | {name: getattr(tally, name) for name in MEASURES}
