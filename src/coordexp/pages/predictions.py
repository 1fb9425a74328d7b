"""The page of predictions: images with the objects that a model found in them, which can be hidden below a score.
All images are inside the page, so it has at most `MOST_IMAGES` of them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordexp.data import Record
from coordexp.data.addresses import join_address
from coordexp.detect.detections import Detections
from coordexp.evaluate import ImageAnswer
from coordexp.evaluate.predictions import Truth
from coordexp.pages.cards import (
    SIDE,
    Card,
    Drawing,
    Shape,
    choose_hue,
    describe_answer,
    describe_request,
    number_classes,
    ring_of,
    try_thumbnail,
)
from coordexp.pages.document import render_page

MOST_IMAGES = 2000  # on one page
LARGE_THUMBNAILS = 200  # images up to which thumbnails are large
SMALL_SIDE = 320  # pixels of the other thumbnails
FLAGS = {
    "empty": "without objects",
    "refused": "with refused objects",
    "dropped": "with dropped duplicates",
    "truncated": "cut off",
    "unread": "not read",
}


def render_predictions(images: Truth, answers: Sequence[ImageAnswer], folder: Path, title: str) -> str:
    """Return the page of the first images and their answers. Image paths are relative to `folder`."""
    shown = list(zip(images, answers, strict=True))[:MOST_IMAGES]
    counts = Counter(item.name for (_, record), answer in shown for item in Detections.of(answer, record))
    numbers, classes = number_classes(counts)
    side = SIDE if len(shown) <= LARGE_THUMBNAILS else SMALL_SIDE
    cards = [
        _make_card(image_id, record, answer, numbers, try_thumbnail(join_address(folder, record.image), side))
        for (image_id, record), answer in shown
    ]
    flags = Counter(flag for _, answer in shown for flag in _find_flags(answer))
    kinds = [("", "all"), *((flag, f"{words} ({flags[flag]:,})") for flag, words in FLAGS.items() if flags[flag])]
    scope = f"all {len(images):,} images"
    if len(shown) < len(images):
        scope = f"the first {len(shown):,} of {len(images):,} images (a page has at most {MOST_IMAGES:,})"
    return render_page(
        "cards.html",
        title=title,
        scripts=["common.js", "cards.js"],
        kind="predictions",
        scope=f"{scope}, {counts.total():,} objects of {len(counts):,} classes",
        filters=[("class", "class", classes, "classes"), ("flag", "answers", kinds, "flags")],
        cards=cards,
    )


def _find_flags(answer: ImageAnswer) -> list[str]:
    """Return what is remarkable about an answer, in the words of `FLAGS`."""
    applies = {
        "empty": answer.was_asked and not answer.valid,
        "refused": len(answer.valid) < len(answer.objects),
        "dropped": bool(answer.dropped),
        "truncated": answer.is_truncated,
        "unread": not answer.was_asked,
    }
    return [name for name, is_true in applies.items() if is_true]


def _make_card(
    image_id: int, record: Record, answer: ImageAnswer, numbers: Mapping[str, int], image: tuple[str | None, str]
) -> Card:
    url, remark = image
    found = list(Detections.of(answer, record))
    shapes = []
    for k, item in enumerate(found):
        ring = (
            [value for point in item.polygon for value in point] if item.polygon else ring_of("bbox_2d", item.box)
        )
        label, number = f"{item.name} {item.score:.2f}", numbers[item.name]
        data = {"data-class": number, "data-object": k, "data-score": f"{item.score:.4f}"}
        shapes.append(Shape(ring, label, label, data=data, hue=choose_hue(number)))
    size = f"{record.width} x {record.height}, {len(found):,} object{'' if len(found) == 1 else 's'}"
    unread = [] if answer.was_asked else [("the image could not be read, so the model was not asked", "")]
    return Card(
        title=Path(record.image).name,
        detail=f"image_id {image_id}",
        words={
            "data-classes": " ".join(sorted({str(numbers[item.name]) for item in found})),
            "data-flags": " ".join(_find_flags(answer)),
        },
        drawings=[Drawing(record.width, record.height, url, shapes)],
        remark=remark,
        facts=[(size, ""), *describe_request(record), *unread],
        objects=[(shape, item.name, f"{item.score:.2f}") for shape, item in zip(shapes, found, strict=True)],
        answer=describe_answer(answer),
    )
