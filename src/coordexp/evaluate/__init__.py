"""How good a model's answers are: COCO's AP and AR, F1, and behaviour. Needs no image and imports no torch.

`evaluate` compares ground truth and answers and returns an `EvaluationReport`; `predictions` reads and writes the
answers on disk.
"""

from coordexp.evaluate.answer import AnswerObject, ImageAnswer
from coordexp.evaluate.predictions import read_predictions, read_results, read_truth, write_predictions
from coordexp.evaluate.report import EvaluationReport, count_by_image, evaluate, evaluate_results

__all__ = [
    "AnswerObject",
    "EvaluationReport",
    "ImageAnswer",
    "count_by_image",
    "evaluate",
    "evaluate_results",
    "read_predictions",
    "read_results",
    "read_truth",
    "write_predictions",
]
