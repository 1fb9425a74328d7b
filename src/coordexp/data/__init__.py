"""Records and geometry: detection and questions before they become tokens. Imports no torch."""

from coordexp.data.geometry import BINS, Geometry, GeometryKind, TrueObject, is_degenerate, to_bin, to_pixels
from coordexp.data.records import (
    AnyRecord,
    ChatRecord,
    Record,
    RecordFile,
    RecordObject,
    parse_any_record,
    parse_record,
    read_any_records,
    read_records,
)
from coordexp.data.requests import Questions, draw_request, order_objects
from coordexp.data.sets import Records, RecordSet, find_wrong_kind, open_data
from coordexp.errors import DataError

__all__ = [
    "BINS",
    "AnyRecord",
    "ChatRecord",
    "DataError",
    "Geometry",
    "GeometryKind",
    "Questions",
    "Record",
    "RecordFile",
    "RecordObject",
    "RecordSet",
    "Records",
    "TrueObject",
    "draw_request",
    "find_wrong_kind",
    "is_degenerate",
    "open_data",
    "order_objects",
    "parse_any_record",
    "parse_record",
    "read_any_records",
    "read_records",
    "to_bin",
    "to_pixels",
]
