"""Write records and suggested labels as tasks of Label Studio, and the labelling config that shows them.

    {"data": {"image": "/data/local-files/?d=images/7.png",
              "coordexp": {"image": "images/7.png", "width": 640, "height": 480, "image_id": 7},
              "category_ids": {"cup": 3}},
     "annotations": [{"result": [REGION, ...]}],
     "predictions": [{"model_version": "coordexp", "score": 0.93, "result": [REGION, ...]}]}

A region is a rectangle or a polygon in percent of the image. The annotation has the labels of the record. A record
with suggestions also has a prediction with its labels and the suggestions, each of these with its score: a person
copies it to an annotation and removes what is wrong. `coordexp` has all keys of the record but its objects and
their space, so `read_labelstudio` brings back the same record, in pixels.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from coordexp.data.records import Record, RecordFile, RecordObject
from coordexp.data.suggestions import Suggestion, check_all_used, group_by_image
from coordexp.files import write_whole

TOOLS = {"bbox_2d": ("box", "rectanglelabels"), "poly": ("polygon", "polygonlabels")}  # name and type of a region


@dataclass(frozen=True)
class TaskSettings:
    """The address of an image is its path after the prefix, which is by default that of Label Studio's local
    storage. `model_version` names the model in Label Studio."""

    prefix: str = "/data/local-files/?d="
    model_version: str = "coordexp"
    only_suggested: bool = False


@dataclass
class TaskCounts:
    """The number of tasks, and the classes of their labels and suggestions."""

    tasks: int
    classes: dict[str, None]


def to_task(record: Record, suggestions: Sequence[Suggestion], settings: TaskSettings) -> dict[str, Any]:
    """Return the task of a record with the labels that are suggested for it."""
    numbered = [*record.objects, *(suggestion.item for suggestion in suggestions)]
    category_ids = {item.desc: item.category_id for item in numbered if item.category_id is not None}
    head = json.loads(replace(record, objects=()).as_json())
    data = {
        "image": settings.prefix + quote(record.image),
        "coordexp": {key: value for key, value in head.items() if key not in ("objects", "space")},
        **({"category_ids": category_ids} if category_ids else {}),
    }
    labels = [_to_region(item, record, f"label-{k}") for k, item in enumerate(record.objects, start=1)]
    task: dict[str, Any] = {"data": data, "annotations": [{"result": labels}]}
    if suggestions:
        regions = [
            _to_region(suggestion.item, record, f"suggestion-{suggestion.id}") | {"score": suggestion.score}
            for suggestion in suggestions
        ]
        best = max(suggestion.score for suggestion in suggestions)
        prediction = {"model_version": settings.model_version, "score": best, "result": [*labels, *regions]}
        task["predictions"] = [prediction]
    return task


def _to_region(item: RecordObject, record: Record, id: str) -> dict[str, Any]:
    name, kind = TOOLS[item.kind]
    extent = record.extent
    percents = [100 * value / extent[k % 2] for k, value in enumerate(item.coords)]
    value: dict[str, Any]
    if item.kind == "poly":
        value = {
            "points": [list(pair) for pair in zip(percents[::2], percents[1::2], strict=True)],
            "closed": True,
        }
    else:
        x1, y1, x2, y2 = percents
        value = {"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1, "rotation": 0}
    return {
        "id": id,
        "type": kind,
        "from_name": name,
        "to_name": "image",
        "original_width": record.width,
        "original_height": record.height,
        "image_rotation": 0,
        "value": value | {kind: [item.desc]},
    }


def write_tasks(
    target: Path, records: RecordFile, suggestions: Sequence[Suggestion], settings: TaskSettings
) -> TaskCounts:
    """Write the tasks, whole or not at all, and beside them the labelling config. Raise DataError if the
    suggestions were made for other records."""
    counts = TaskCounts(0, {})
    write_whole(target, _format_tasks(records, suggestions, settings, counts))
    write_whole(target.with_suffix(".xml"), labelling_config(sorted(counts.classes)))
    return counts


def _format_tasks(
    records: RecordFile, suggestions: Sequence[Suggestion], settings: TaskSettings, counts: TaskCounts
) -> Iterator[str]:
    """Yield the JSON of all tasks, and count them."""
    by_image = group_by_image(suggestions)
    for index in range(len(records)):
        image_id, record = records.read_with_image_id(index)
        added = by_image.pop(image_id, [])
        if settings.only_suggested and not added:
            continue
        for suggestion in added:
            suggestion.check_record(record)
        counts.classes.update({item.desc: None for item in (*record.objects, *(s.item for s in added))})
        yield ("[\n" if not counts.tasks else ",\n") + json.dumps(to_task(record, added, settings))
        counts.tasks += 1
    check_all_used(by_image, records)
    yield "\n]\n" if counts.tasks else "[]\n"


def labelling_config(classes: Iterable[str]) -> str:
    """Return the XML with which Label Studio shows the tasks: rectangles and polygons of these classes."""
    labels = "".join(f"    <Label value={quoteattr(desc)}/>\n" for desc in classes)
    return (
        '<View>\n  <Image name="image" value="$image" zoom="true"/>\n'
        f'  <RectangleLabels name="box" toName="image">\n{labels}  </RectangleLabels>\n'
        f'  <PolygonLabels name="polygon" toName="image">\n{labels}  </PolygonLabels>\n</View>\n'
    )
