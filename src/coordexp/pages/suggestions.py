"""The page on which a person decides about suggested labels, one after the other, with the keyboard.

The page is one HTML file that asks for nothing from the network. Images are inside it, as thumbnails, or stay
where they are and are linked: a page with many images would be too large to open, and linked images keep all their
pixels. An image that is no file of its own is always inside the page. Decisions stay in the browser until they are
saved as decisions.json.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from coordexp.data import Record, RecordObject
from coordexp.data.addresses import is_file, join_address, move_address
from coordexp.detect.suggestions import SuggestionFile, fix_order
from coordexp.pages.cards import number_classes, ring_of, try_thumbnail
from coordexp.pages.document import render_page
from coordexp.tasks import ignore

SIDE = 800  # pixels of an image inside the page, at most
MOST_INSIDE = 300  # images inside a page; with more of them, they are linked
MOST_NAMES = 1000  # of classes to choose from, the most frequent ones

ImagePlace = Literal["auto", "inside", "linked"]


def render_suggestions(
    file: SuggestionFile,
    records: Mapping[int, Record],
    data: Path,
    *,
    target: Path,
    most: int,
    place: ImagePlace = "auto",
    notify: Callable[[str], None] = ignore,
) -> str:
    """Return the page with at most `most` suggestions, the first ones, for a file in the folder `target`. Of many
    images it has those with suggestions. `records` of `data` are by image_id. `notify` gets the number of one."""
    shown, total = file.suggestions[:most], len(file.suggestions)
    chosen = {item.image_id for item in shown}
    if len(records) <= MOST_INSIDE:
        chosen |= {image_id for image_id, record in records.items() if record.expression is None}
    numbers = {image_id: k for k, image_id in enumerate(fix_order(chosen))}
    are_linked = place == "linked" or (place == "auto" and len(numbers) > MOST_INSIDE)
    images: list[dict[str, Any]] = []
    pictures: dict[str, str] = {}
    for image_id, number in numbers.items():
        notify(f"image {number + 1:,}")
        record = records[image_id]
        labels = [[item.desc, _ring(item, record)] for item in record.objects]
        size = {"width": record.width, "height": record.height}
        image: dict[str, Any] = {"id": str(image_id), "name": record.image, "labels": labels} | size
        if are_linked and is_file(record.image):
            source = data.parent / record.image
            image["source"] = quote(move_address(source.name, source.parent, target))
        else:
            url, image["remark"] = try_thumbnail(join_address(data.parent, record.image), SIDE)
            if url:
                image["element"] = f"picture-{number}"
                pictures[f"picture-{number}"] = url
        images.append(image)
    names, classes = number_classes(Counter(one.item.desc for one in shown))
    items = [
        [one.id, numbers[one.image_id], one.item.desc, one.score, one.agreement, _ring(one.item, record)]
        for one in shown
        if (record := records[one.image_id])
    ]
    labelled = [*(one.item for one in shown), *(item for record in records.values() for item in record.objects)]
    counts = Counter((item.desc, -1 if item.category_id is None else item.category_id) for item in labelled)
    known = sorted(pair for pair, _ in counts.most_common(MOST_NAMES))
    index = {"hash": file.sha256, "total": total, "classes": list(names), "images": images, "items": items}
    first = f"the first {len(shown):,} of " if len(shown) < total else ""
    return render_page(
        "suggestions.html",
        title=str(data),
        scripts=["common.js", "suggestions.js"],
        styles=("page.css", "suggestions.css"),
        data={"index": index | {"known": known}, **pictures},
        linked_images=are_linked,
        scope=f"{first}{total:,} suggestions in {len(images):,} images",
        classes=classes,
    )


def _ring(item: RecordObject, record: Record) -> list[float]:
    """Return the vertices of a shape, rounded to a hundredth of a pixel."""
    return [round(value, 2) for value in ring_of(item.kind, record.in_pixels(item))]
