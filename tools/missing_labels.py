"""Measure how well suggested labels are those that were removed from a data set.

    python tools/missing_labels.py --complete train-complete.jsonl --data train.jsonl --preds preds.json

`--data` has the records of `--complete` without some of their labels, as `coordexp data thin` writes them. The
predictions are those of `coordexp predict --data train.jsonl`, and each row is a way to rank the suggestions that
`coordexp data suggest` makes of them. A suggestion is right if it has the class of a removed label and overlaps it
by half, and no better suggestion has that label.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

from coordexp.answers.match import pairwise_iou
from coordexp.data import Record, RecordFile, TrueObject
from coordexp.detect.suggestions import RESOLUTION, Suggestion, SuggestionRules, suggest_labels
from coordexp.evaluate import read_predictions, read_truth
from coordexp.evaluate.predictions import Truth, read_samples

PRECISION = 0.9  # that the best suggestions should have
IOU = 0.5  # of a right suggestion and the label
SAME_IOU = 0.3  # of `coordexp data suggest`
HEADS = ("ranking", "suggestions", "precision", "removed labels found", "first 10 %", "top at 90 %", "found there")


@dataclass(frozen=True)
class Measurement:
    """Whether each suggestion is right, from the best score, and how many labels were removed."""

    right: tuple[bool, ...]
    removed: int
    scores: tuple[float, ...]

    def precision(self, count: int) -> float:
        """Return the share of the first suggestions that are right."""
        return sum(self.right[:count]) / count if count else 0.0

    def recall(self, count: int) -> float:
        """Return the share of the removed labels that the first suggestions have."""
        return sum(self.right[:count]) / self.removed

    @property
    def precise(self) -> int:
        """The largest number of first suggestions of which `PRECISION` are right."""
        hits = accumulate(self.right)
        return max((k for k, hit in enumerate(hits, start=1) if hit >= PRECISION * k), default=0)


def measure(truth: Truth, complete: Truth, suggestions: Sequence[Suggestion]) -> Measurement:
    removed = {id: find_removed(record, dict(complete)[id]) for id, record in truth}
    total = sum(map(len, removed.values()))
    records = dict(truth)
    right = [take_match(suggestion, records[suggestion.image_id], removed) for suggestion in suggestions]
    return Measurement(tuple(right), total, tuple(suggestion.score for suggestion in suggestions))


def find_removed(record: Record, complete: Record) -> list[TrueObject]:
    """Return the labels that the complete record has and this one does not."""
    assert record.image == complete.image, f"{record.image} is not {complete.image}"
    rest = list(complete.true_objects())
    for label in record.true_objects():
        rest.remove(label)
    return rest


def take_match(suggestion: Suggestion, record: Record, removed: dict[int, list[TrueObject]]) -> bool:
    """Take the removed label that a suggestion has out of the list. Return False if there is none."""
    rest = removed[suggestion.image_id]
    (label,) = Record(record.image, record.width, record.height, record.space, (suggestion.item,)).true_objects()
    overlaps = pairwise_iou([label.geometry, *(item.geometry for item in rest)], RESOLUTION)[0, 1:]
    matches = [k for k, item in enumerate(rest) if item.desc == label.desc and overlaps[k] >= IOU]
    if not matches:
        return False
    rest.pop(max(matches, key=lambda k: overlaps[k]))
    return True


def format_row(name: str, result: Measurement) -> str:
    count, precise = len(result.right), result.precise
    first = max(1, count // 10)
    score = f"score {result.scores[precise - 1]:.3f}" if precise else "-"
    cells = (
        name,
        f"{count}",
        f"{result.precision(count):.3f}",
        f"{result.recall(count):.3f} of {result.removed}",
        f"{result.precision(first):.3f}",
        f"{precise}, {score}",
        f"**{result.recall(precise):.3f}**",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--complete", "--data", "--preds"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--samples", type=int, default=0, help="Also with this many sampled answers per image.")
    options = parser.parse_args()
    truth, complete = (read_truth(RecordFile(path)) for path in (options.data, options.complete))
    answers = read_predictions(options.preds, truth)
    ids = {answer.image_id for answer in answers}
    kept = [(id, record) for id, record in truth if id in ids]
    sampled = read_samples(options.preds, options.samples, [*ids]) if options.samples else []
    print(f"{len(ids)} images\n\n| {' | '.join(HEADS)} |\n|{' --- |' * len(HEADS)}")
    report = suggest_labels(kept, [*answers, *chain(*sampled)], SuggestionRules(SAME_IOU, SAME_IOU))
    print(format_row("agreement" if sampled else "score", measure(kept, complete, report.suggestions)))


if __name__ == "__main__":
    main()
