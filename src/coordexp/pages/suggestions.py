"""The page on which a person decides about suggested labels, one after the other, with the keyboard.

The page is one HTML file that asks for nothing from the network. Images are inside it, as thumbnails, or stay
where they are and are linked: a page with many images would be too large to open, and linked images keep all their
pixels. Decisions stay in the browser until they are saved as decisions.json.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from coordexp.data import GeometryKind, Record
from coordexp.data.geometry import box_ring
from coordexp.detect.suggestions import Suggestion, SuggestionFile
from coordexp.pages.document import read_asset, render_document, render_header, render_pager, render_select
from coordexp.pages.images import explain_missing_image, make_thumbnail
from coordexp.tasks import ignore

SIDE = 800  # pixels of an image inside the page, at most
MOST_INSIDE = 300  # images inside a page; with more of them, they are linked
STATES = (("undecided", "undecided"), ("", "all"), ("accept", "accepted"), ("reject", "rejected"))

ImagePlace = Literal["auto", "inside", "linked"]


def render_suggestions(
    file: SuggestionFile,
    records: Mapping[int, Record],
    title: str,
    *,
    folder: Path,
    target: Path,
    most: int,
    place: ImagePlace = "auto",
    notify: Callable[[int], None] = ignore,
) -> str:
    """Return the page with at most `most` suggestions, the best ones, for a file in the folder `target`. `records`
    are by image_id, and their images are relative to `folder`. `notify` gets the number of each image."""
    shown = file.suggestions[:most]
    numbers = {image_id: k for k, image_id in enumerate(dict.fromkeys(item.image_id for item in shown))}
    are_linked = place == "linked" or (place == "auto" and len(numbers) > MOST_INSIDE)
    images, elements = [], {}
    for image_id, number in numbers.items():
        notify(number + 1)
        entry = _describe_image(records[image_id])
        if are_linked:
            entry["source"] = _link(folder / records[image_id].image, target)
        else:
            try:
                elements[f"picture-{number}"] = make_thumbnail(folder / records[image_id].image, SIDE)
                entry["element"] = f"picture-{number}"
            except (OSError, ValueError) as error:
                entry["remark"] = explain_missing_image(error)
        images.append(entry)
    classes = Counter(item.item.desc for item in shown)
    index = {
        "hash": file.sha256,
        "total": len(file.suggestions),
        "classes": [desc for desc, _ in classes.most_common()],
        "images": images,
        "items": [_describe(item, numbers[item.image_id], records[item.image_id]) for item in shown],
    }
    scope = f"{f'the best {len(shown):,} of ' if most < len(file.suggestions) else ''}{len(file.suggestions):,}"
    return render_document(
        title,
        render_header("suggestions", title, f"{scope} suggestions in {len(images):,} images", _controls(classes))
        + read_asset("suggestions.html"),
        scripts=["suggestions.js"],
        styles=("page.css", "suggestions.css"),
        data={"index": index, **elements},
        linked_images=are_linked,
    )


def _controls(classes: Counter[str]) -> str:
    names = [(str(k), f"{desc} ({count:,})") for k, (desc, count) in enumerate(classes.most_common())]
    return (
        render_select("class", "class", [("", "all classes"), *names])
        + '<label>score from <input type="number" id="least" min="0" max="1" step="0.05" value="0"></label>'
        + render_select("filter", "show", STATES)
        + render_pager("suggestion", ("left arrow", "right arrow"))
        + '<button type="button" id="help" aria-label="Keys" title="Keys (?)">?</button>'
    )


def _describe_image(record: Record) -> dict[str, Any]:
    labels = [[item.desc, _ring(item.kind, record.in_pixels(item))] for item in record.objects]
    return {"name": record.image, "width": record.width, "height": record.height, "labels": labels}


def _describe(suggestion: Suggestion, image: int, record: Record) -> list[Any]:
    item = suggestion.item
    ring = _ring(item.kind, record.in_pixels(item))
    return [suggestion.id, image, item.desc, suggestion.score, suggestion.agreement, ring]


def _ring(kind: GeometryKind, coords: Sequence[float]) -> list[float]:
    """Return the vertices of a shape, rounded to a hundredth of a pixel."""
    values = [round(value, 2) for value in coords]
    return values if kind == "poly" else list(box_ring(values))


def _link(image: Path, target: Path) -> str:
    """Return the address of an image, relative to the page."""
    path = os.path.relpath(image.parent.resolve() / image.name, target.resolve())
    return quote(Path(path).as_posix())
