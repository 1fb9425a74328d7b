"""Joins segments into rows: selection and waiting here, tensors in `collate`. Imports no torch."""

from coordexp.pack.carry import CarryBuffer, PackedRow, PackingError, RowReport
from coordexp.pack.example import Example
from coordexp.pack.select import select, split_in_order

__all__ = ["CarryBuffer", "Example", "PackedRow", "PackingError", "RowReport", "select", "split_in_order"]
