"""How good are a model's answers: COCO's AP and AR, F1, and behaviour. Needs no image and imports no torch.

`evaluate` takes truth and answers and gives a `Report`; `predictions` is their form on disk.
"""

from coordexp.evaluate.predictions import (
    Answer,
    AnswerObject,
    Detection,
    PredictionError,
    Predictions,
    check_predictions,
    read_predictions,
    read_truth,
    write_predictions,
)
from coordexp.evaluate.report import Report, evaluate
from coordexp.evaluate.scores import ScoreMode, rescored

__all__ = [
    "Answer",
    "AnswerObject",
    "Detection",
    "PredictionError",
    "Predictions",
    "Report",
    "ScoreMode",
    "check_predictions",
    "evaluate",
    "read_predictions",
    "read_truth",
    "rescored",
    "write_predictions",
]
