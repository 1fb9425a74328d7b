"""Records and geometry: a detection problem before it becomes tokens. Imports no torch."""

from coordexp.data.geometry import BINS, Geometry, GeometryKind, TrueObject, is_degenerate, to_bin, to_pixels
from coordexp.data.records import Record, RecordFile, RecordObject, parse_record, read_records
from coordexp.data.sets import Records, RecordSet, open_data
from coordexp.errors import DataError

__all__ = [
    "BINS",
    "DataError",
    "Geometry",
    "GeometryKind",
    "Record",
    "RecordFile",
    "RecordObject",
    "RecordSet",
    "Records",
    "TrueObject",
    "is_degenerate",
    "open_data",
    "parse_record",
    "read_records",
    "to_bin",
    "to_pixels",
]
