"""What each image adds to a rate: two counts, so that any rate over any images is a ratio of two sums.

Truth and answers come in; for every rate, and for F1, precision and recall at IoU 0.5, two numbers an image go
out. That is all that resampling images needs.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from coordexp.evaluate.answer import Answer
from coordexp.evaluate.behaviour import DEFINITIONS, known_classes, observe_image
from coordexp.evaluate.matching import THRESHOLDS, Matching, Pair, match_scene
from coordexp.evaluate.predictions import Truth
from coordexp.evaluate.scene import Scene, build_scenes

Counts = NDArray[np.int64]  # [images, 2]: what is counted, and what it is a share of


def count_by_image(truth: Truth, answers: Sequence[Answer]) -> dict[str, Counts]:
    """By the names that a run logs, in the order of the truth. PredictionError as `evaluate` raises it."""
    scenes = build_scenes(truth, answers)
    matchings = [match_scene(scene, THRESHOLDS[:1]) for scene in scenes]
    known = known_classes(scenes)
    found = [_counts(scene, matching, known) for scene, matching in zip(scenes, matchings, strict=True)]
    return {name: np.array([image[name] for image in found], dtype=np.int64) for name in names()}


def names() -> tuple[str, ...]:
    found = (f"{name}_50{classes}" for classes in ("", "_any_class") for name in ("f1", "recall", "precision"))
    return (*found, *DEFINITIONS)


def _counts(scene: Scene, matching: Matching, known: frozenset[str]) -> dict[str, tuple[int, int]]:
    behaviour = {name: (rate.count, rate.of) for name, rate in observe_image(scene, matching, known).items()}
    return (
        _found(scene, matching.with_class[0], "") | _found(scene, matching.any_class[0], "_any_class") | behaviour
    )


def _found(scene: Scene, pairs: Sequence[Pair], classes: str) -> dict[str, tuple[int, int]]:
    """F1 is twice the pairs of all objects, predicted and true."""
    found, true = len(scene.found), len(scene.true)
    return {
        f"f1_50{classes}": (2 * len(pairs), found + true),
        f"recall_50{classes}": (len(pairs), true),
        f"precision_50{classes}": (len(pairs), found),
    }
