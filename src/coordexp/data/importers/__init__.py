"""Importers: each reader yields `SourceImage`s, and `write_records` converts them to records by `Rules`.

Nothing is left out silently: whatever is dropped, changed or worth knowing is counted in `ImportCounts`. No torch.
"""

from coordexp.data.importers.coco import read_coco, read_lvis
from coordexp.data.importers.labelme import read_labelme
from coordexp.data.importers.labelstudio import read_labelstudio
from coordexp.data.importers.packed import ImportJob, find_sources
from coordexp.data.importers.shape import write_records
from coordexp.data.importers.source import ImportCounts, Rules, SourceImage, SourceObject
from coordexp.data.importers.yolo import find_split, read_classes, read_yolo

__all__ = [
    "ImportCounts",
    "ImportJob",
    "Rules",
    "SourceImage",
    "SourceObject",
    "find_sources",
    "find_split",
    "read_classes",
    "read_coco",
    "read_labelme",
    "read_labelstudio",
    "read_lvis",
    "read_yolo",
    "write_records",
]
