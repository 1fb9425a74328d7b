"""COCO's twelve numbers, AP and AR, for boxes and, if the ground truth has polygons, for masks.

hotcoco computes them; a test checks that they equal those of pycocotools. The box of a polygon is the box around
it, and the mask of a box is its rectangle. COCO considers at most 100 detections per image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotcoco import COCO, COCOeval

from coordexp.evaluate.answer import Detection
from coordexp.evaluate.comparison import ImageComparison, LabelledShape, encode_mask, mask_area
from coordexp.evaluate.predictions import category_ids, unknown_category_id

NAMES = {
    "AP": "ap",
    "AP50": "ap_50",
    "AP75": "ap_75",
    "APs": "ap_small",
    "APm": "ap_medium",
    "APl": "ap_large",
    "AR1": "ar_1",
    "AR10": "ar_10",
    "AR100": "ar_100",
    "ARs": "ar_small",
    "ARm": "ar_medium",
    "ARl": "ar_large",
}


@dataclass(frozen=True, slots=True)
class CocoScores:
    """`values` are named from `ap` to `ar_large` and are None if no object has that size; `classes` is AP by
    desc."""

    values: dict[str, float | None]
    classes: dict[str, float | None]


def coco_scores(comparisons: Sequence[ImageComparison], detections: Sequence[Detection], kind: str) -> CocoScores:
    """Return the numbers for boxes (`kind` is bbox) or masks (segm). A detection of a class that the ground truth
    does not have belongs to no category and is not counted."""
    categories = _category_ids(comparisons)
    truth = COCO(coco_truth(comparisons))
    unknown = unknown_category_id(categories)
    known = [detection.as_dict() for detection in detections if detection.category_id != unknown]
    evaluation = COCOeval(truth, truth.load_res(known), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summary_lines()  # fills the results; `summarize` would also print them
    results = evaluation.get_results(per_class=True)
    return CocoScores(
        {ours: _none_if_absent(results[theirs]) for theirs, ours in NAMES.items()},
        {desc: _none_if_absent(results[f"AP/{number}"]) for desc, number in categories.items()},
    )


def coco_truth(comparisons: Sequence[ImageComparison]) -> dict[str, Any]:
    """Return the ground truth as a COCO dataset. Categories are named by their number, so that no desc can break a
    key of the results."""
    categories = _category_ids(comparisons)
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


def _category_ids(comparisons: Sequence[ImageComparison]) -> dict[str, int]:
    return category_ids([(image.image_id, image.record) for image in comparisons])


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
