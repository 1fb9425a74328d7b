"""COCO's twelve numbers, AP and AR, of boxes and, where the truth has polygons, of masks.

They come from hotcoco, which equals pycocotools (a test holds the two together). Boxes of polygons are the boxes
around them; among masks a box counts as its rectangle. COCO looks at 100 detections an image at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotcoco import COCO, COCOeval

from coordexp.evaluate.predictions import Detection, category_ids, unknown_category
from coordexp.evaluate.scene import Labelled, Scene
from coordexp.evaluate.shapes import mask_area, mask_of

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
    """`values` from `ap` to `ar_large`, None where there is nothing of that size; `classes` is AP by desc."""

    values: dict[str, float | None]
    classes: dict[str, float | None]


def coco_scores(scenes: Sequence[Scene], detections: Sequence[Detection], kind: str) -> CocoScores:
    """`kind` is bbox or segm. A class that the truth does not have is in no category and costs nothing here."""
    categories = category_ids([(scene.image_id, scene.record) for scene in scenes])
    truth = COCO(coco_truth(scenes))
    unknown = unknown_category(categories)
    known = [found.as_dict() for found in detections if found.category_id != unknown]
    evaluation = COCOeval(truth, truth.load_res(known), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summary_lines()  # the results are empty before; `summarize` would also print them
    results = evaluation.get_results(per_class=True)
    return CocoScores(
        {ours: _computed(results[theirs]) for theirs, ours in NAMES.items()},
        {desc: _computed(results[f"AP/{number}"]) for desc, number in categories.items()},
    )


def coco_truth(scenes: Sequence[Scene]) -> dict[str, Any]:
    """The truth as a COCO dataset. Categories are named by their number, so that no desc can break a key."""
    categories = category_ids([(scene.image_id, scene.record) for scene in scenes])
    annotations: list[dict[str, Any]] = []
    for scene in scenes:
        for one in scene.true:
            annotation = _annotation(one, scene) | {"category_id": categories[one.desc]}
            annotations.append(annotation | {"id": len(annotations) + 1})
    images = [
        {"id": scene.image_id, "width": scene.record.width, "height": scene.record.height} for scene in scenes
    ]
    named = [{"id": number, "name": str(number)} for number in categories.values()]
    return {"images": images, "annotations": annotations, "categories": named}


def _annotation(one: Labelled, scene: Scene) -> dict[str, Any]:
    """The area decides whether an object is small: of a polygon that of its mask, as in COCO."""
    x1, y1, x2, y2 = one.shape.box
    area = one.shape.box_area
    if one.shape.kind == "poly":
        area = mask_area(mask_of(one.shape, scene.record.width, scene.record.height))
    return {
        "image_id": scene.image_id,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "area": area,
        "iscrowd": 0,
        "segmentation": [list(one.shape.ring)],
    }


def _computed(value: float) -> float | None:
    return None if value == -1.0 else float(value)
