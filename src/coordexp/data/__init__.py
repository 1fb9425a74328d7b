"""Samples and geometry: what a detection problem is made of, before any token. Imports no torch."""

from coordexp.data.coordinates import BINS, to_bin, to_pixels
from coordexp.data.records import Record, RecordError, RecordFile, RecordObject, Space, parse_record, read_records
from coordexp.data.sample import Geometry, GeometryKind, Sample, TrueObject, degenerate
from coordexp.errors import DataError

__all__ = [
    "BINS",
    "DataError",
    "Geometry",
    "GeometryKind",
    "Record",
    "RecordError",
    "RecordFile",
    "RecordObject",
    "Sample",
    "Space",
    "TrueObject",
    "degenerate",
    "parse_record",
    "read_records",
    "to_bin",
    "to_pixels",
]
