"""The page of predictions: images with the objects that a model found in them.

Without JavaScript the page shows all cards. With it, cards can be filtered by class and by what is wrong with an
answer, objects can be hidden below a score, and the arrow keys page through. All images are inside the page, so it
has at most `MOST_IMAGES` of them.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from coordexp.data import Record
from coordexp.detect.detections import DetectedObject, Detections
from coordexp.evaluate import ImageAnswer
from coordexp.evaluate.predictions import Truth
from coordexp.pages.document import (
    escape_text,
    render_document,
    render_header,
    render_pager,
    render_select,
)
from coordexp.pages.images import (
    choose_hue,
    explain_missing_image,
    format_points,
    make_thumbnail,
    render_name,
    render_stage,
)
from coordexp.pages.records import render_request

MOST_IMAGES = 2000  # on one page
LARGE_THUMBNAILS = 200  # images up to which thumbnails are large
SMALL_SIDE = 320  # pixels of the other thumbnails
MOST_NAMES = 40  # drawn over an image; its list has all of them
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
    found = [Detections.of(answer, record) for (_, record), answer in shown]
    classes = Counter(item.name for detections in found for item in detections)
    numbers = {name: k for k, (name, _) in enumerate(classes.most_common())}
    scope = f"all {len(images):,} images" if len(shown) == len(images) else _describe_part(len(shown), len(images))
    scope += f", {classes.total():,} objects of {len(classes):,} classes"
    flags = [_find_flags(answer) for _, answer in shown]
    side = {} if len(shown) <= LARGE_THUMBNAILS else {"side": SMALL_SIDE}
    cards = "".join(
        _render_card(image_id, record, answer, detections, words, numbers, _load(folder / record.image, side))
        for ((image_id, record), answer), detections, words in zip(shown, found, flags, strict=True)
    )
    body = (
        f"{render_header('predictions', title, scope, _render_controls(classes, flags))}\n"
        f'<main><div class="cards" data-page="12">{cards}</div>'
        '<p id="nothing" hidden>No image matches both filters. Choose another class or answer.</p></main>'
    )
    return render_document(f"Predictions: {title}", body, scripts=["cards.js"])


def _describe_part(shown: int, total: int) -> str:
    return f"the first {shown:,} of {total:,} images (a page has at most {MOST_IMAGES:,})"


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


def _render_controls(classes: Counter[str], flags: Sequence[Sequence[str]]) -> str:
    names = [(str(k), f"{name} ({count:,})") for k, (name, count) in enumerate(classes.most_common())]
    counts = Counter(name for words in flags for name in words)
    kinds = [(name, f"{words} ({counts[name]:,})") for name, words in FLAGS.items() if counts[name]]
    return (
        render_select("class", "class", [("", "all classes"), *names], 'data-filter="classes"')
        + render_select("flag", "answers", [("", "all"), *kinds], 'data-filter="flags"')
        + '<label>score from <input type="range" id="least" min="0" max="1" step="0.05" value="0">'
        + '<output id="least-score">0.00</output></label>'
        + '<label><input type="checkbox" data-kind="names" checked> names</label>'
        + render_pager("page", ("left arrow", "right arrow"))
    )


def _load(path: Path, side: dict[str, int]) -> tuple[str | None, str]:
    """Return the image as a data URL, or else why it is not shown."""
    try:
        return make_thumbnail(path, **side), ""
    except (OSError, ValueError) as error:
        return None, explain_missing_image(error)


def _render_card(
    image_id: int,
    record: Record,
    answer: ImageAnswer,
    detections: Detections,
    flags: Sequence[str],
    numbers: dict[str, int],
    image: tuple[str | None, str],
) -> str:
    url, remark = image
    classes = " ".join(map(str, sorted({numbers[item.name] for item in detections})))
    count = len(detections)
    facts = f"{record.width} x {record.height}, {count:,} object{'' if count == 1 else 's'}"
    below = f'<p class="remark">{escape_text(remark)}</p>' if remark else ""
    return (
        f'<article class="card" data-classes="{classes}" data-flags="{" ".join(flags)}">'
        f"{_render_image(record, detections, numbers, url)}{below}"
        f"<h3>{escape_text(Path(record.image).name)} <small>image_id {image_id}</small></h3><p>{facts}</p>"
        f"{render_request(record)}{_render_objects(detections, numbers)}{_render_answer(answer)}</article>"
    )


def _render_image(record: Record, detections: Detections, numbers: dict[str, int], url: str | None) -> str:
    shapes, names = [], []
    for k, item in enumerate(detections):
        left, top, right, bottom = item.box
        ring = item.polygon or ((left, top), (right, top), (right, bottom), (left, bottom))
        points = format_points(tuple(value for point in ring for value in point))
        attributes = _describe_object(k, item, numbers)
        title = f"<title>{escape_text(_label(item))}</title>"
        style = f'style="--hue:{choose_hue(numbers[item.name])}"'
        shapes.append(f'<g {attributes} {style}>{title}<polygon class="hued" points="{points}"/></g>')
        if k < MOST_NAMES:
            hue = f"--hue:{choose_hue(numbers[item.name])}"
            names.append(render_name(record, _label(item), item.box, f'class="tag" {attributes}', "above", hue))
    return render_stage(record, url, shapes, names)


def _describe_object(k: int, item: DetectedObject, numbers: dict[str, int]) -> str:
    return f'data-class="{numbers[item.name]}" data-object="{k}" data-score="{item.score:.4f}"'


def _label(item: DetectedObject) -> str:
    return f"{item.name} {item.score:.2f}"


def _render_objects(detections: Detections, numbers: dict[str, int]) -> str:
    items = [
        f'<li {_describe_object(k, item, numbers)} style="--hue:{choose_hue(numbers[item.name])}">'
        f"{escape_text(item.name)} <small>{item.score:.2f}</small></li>"
        for k, item in enumerate(detections)
    ]
    return f'<ol class="objects" start="0">{"".join(items)}</ol>' if items else ""


def _render_answer(answer: ImageAnswer) -> str:
    if not answer.was_asked:
        return '<p class="remark">the image could not be read, so the model was not asked</p>'
    reasons = Counter(item.reason for item in answer.objects if item.reason is not None)
    ended = f"{answer.tokens:,} tokens, ended by {answer.finish_reason}"
    if reasons:
        ended += f"; refused: {', '.join(f'{reason} {count}' for reason, count in reasons.items())}"
    ended += f"; dropped as duplicates: {len(answer.dropped)}" if answer.dropped else ""
    summary = f"<summary>Raw answer <small>{escape_text(ended)}</small></summary>"
    return f"<details>{summary}<pre>{escape_text(answer.text)}</pre></details>"
