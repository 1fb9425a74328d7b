"""Small ground truths and answers to evaluate: exact ones, written in bins, and random crowds."""

import random
from typing import Any

from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from coordexp.data import Record, RecordObject
from coordexp.evaluate import AnswerObject, ImageAnswer

EDGE = 999  # images are 999 pixels wide and high, so that a bin is a pixel
BOX = (100, 100, 300, 300)
FAR = (600, 600, 800, 800)


def record(*objects, image="a.png", width=EDGE, height=EDGE, classes=None):
    """Return a record. Each object is a desc and its coordinates: four of a box, more of a polygon."""
    items = tuple(RecordObject(desc, _kind(coords), tuple(map(float, coords))) for desc, coords in objects)
    return Record(image, width, height, "bin", items, classes=classes)


def prediction(desc, bins, score=0.5):
    return AnswerObject(desc, _kind(bins), tuple(bins), score, None)


def invalid_object(reason="degenerate"):
    return AnswerObject(None, None, None, None, reason)


def answer(*objects, image_id=1, image="a.png", text="{}", finish="stop"):
    return ImageAnswer(image_id, image, text, finish, 10, tuple(objects))


def crowd(seed, images=12, classes=("cat", "cup", "dog"), shapes=("bbox_2d",), ties=False, asks=False):
    """Return many overlapping objects: true ones moved a little, false positives, wrong classes, repeats. With
    `asks`, some records ask for a list of classes."""
    rng = random.Random(seed)
    truth, answers = [], []
    for image_id in range(1, images + 1):
        size = (rng.randint(300, 900), rng.randint(300, 900))
        true = [(rng.choice(classes), _shape(rng, rng.choice(shapes))) for _ in range(rng.choice((0, 3, 8, 20)))]
        predicted = [(desc, _move(rng, bins)) for desc, bins in true if rng.random() < 0.8]
        predicted += [
            (rng.choice((*classes, "ghost")), _shape(rng, rng.choice(shapes))) for _ in range(rng.randint(0, 4))
        ]
        predicted += [(desc, _move(rng, bins)) for desc, bins in predicted[:3]]
        rng.shuffle(predicted)
        name = f"{image_id}.png"
        asked = (*classes[:2], "absent") if asks and image_id % 5 == 0 else None
        truth.append((image_id, record(*true, image=name, width=size[0], height=size[1], classes=asked)))
        scored = [prediction(desc, bins, round(rng.random(), 1 if ties else 6)) for desc, bins in predicted]
        answers.append(answer(*scored, image_id=image_id, image=name))
    return truth, answers


def run_pycocotools(truth: COCO, results, kind="bbox") -> COCOeval:
    """Return what pycocotools finds: its `stats` are the twelve numbers of COCO."""
    evaluation = COCOeval(truth, truth.loadRes(results), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return evaluation


def masks_alone(results, truth) -> list[dict[str, Any]]:
    """Return COCO results with their masks as run lengths and without boxes, from which pycocotools would take the
    area."""
    lines, masks = dict(truth), []
    for result in results:
        x, y, w, h = result["bbox"]
        shape = result.get("segmentation") or [[x, y, x + w, y, x + w, y + h, x, y + h]]
        if isinstance(shape, list):
            line = lines[result["image_id"]]
            shape = rle.merge(rle.frPyObjects(shape, line.height, line.width))
        names = ("image_id", "category_id", "score")
        masks.append({name: result[name] for name in names} | {"segmentation": shape})
    return masks


def _kind(coords):
    return "bbox_2d" if len(coords) == 4 else "poly"


def _shape(rng, kind):
    """Return a random shape of one of COCO's three sizes."""
    side = rng.choice((30, 90, 300))
    x, y = rng.randint(0, 600), rng.randint(0, 600)
    w, h = rng.randint(side // 2, side), rng.randint(side // 2, side)
    if kind == "bbox_2d":
        return (x, y, x + w, y + h)
    return (x + w // 2, y, x + w, y + h // 2, x + w // 2, y + h, x, y + h // 2)


def _move(rng, bins):
    most = max(1, (max(bins[::2]) - min(bins[::2])) // 8)
    dx, dy = rng.randint(-most, most), rng.randint(-most, most)
    return tuple(min(EDGE, max(0, bin + (dy if k % 2 else dx))) for k, bin in enumerate(bins))
