"""Other formats to records: each reader gives `SourceImage`s, and `write_records` settles their shapes by `Rules`.

Nothing is left out in silence: whatever is dropped, changed or worth knowing is counted in a `Tally`. No torch.
"""

from coordexp.data.importers.coco import read_coco
from coordexp.data.importers.labelme import read_labelme
from coordexp.data.importers.lvis import read_lvis
from coordexp.data.importers.source import Rules, SourceError, SourceImage, SourceObject
from coordexp.data.importers.tally import Tally
from coordexp.data.importers.write import write_records
from coordexp.data.importers.yolo import read_yolo

__all__ = [
    "Rules",
    "SourceError",
    "SourceImage",
    "SourceObject",
    "Tally",
    "read_coco",
    "read_labelme",
    "read_lvis",
    "read_yolo",
    "write_records",
]
