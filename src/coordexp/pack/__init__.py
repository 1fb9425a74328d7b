"""Pack examples into rows. Importing this package does not import torch; its modules `collate` and `attention`
do."""

from coordexp.pack.carry import CarryBuffer, Example, ExampleId, PackingError, RowReport, select, split_in_order

__all__ = ["CarryBuffer", "Example", "ExampleId", "PackingError", "RowReport", "select", "split_in_order"]
