"""Large files of images: tars in which every image has an address, and exports of records to them or to Parquet.
Each file of an export has 10,000 records.

A tar has an image and its record, as JSON, beside each other, and every tar has a part of all records in random
order, so whoever reads one tar after the other gets a well-mixed part of the data. Beside each tar is a file of
records with the addresses of its images. Parquet has the columns that Hugging Face's datasets have for detection.
"""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coordexp.data import stores
from coordexp.data.export import to_annotation
from coordexp.data.images import UNREADABLE, open_image_file, read_image_bytes
from coordexp.data.records import Record, RecordFile
from coordexp.data.shards import Command, Manifest, Shard, make_shard
from coordexp.errors import explain, need_packages
from coordexp.files import PARTIAL, sync, write_parts
from coordexp.tasks import ignore

BLOCK = tarfile.BLOCKSIZE
PER_SHARD = 10_000  # records
AHEAD = 256  # images that are read ahead
ROWS = 100  # of a row group of Parquet, as Hugging Face's datasets have it for images
UNFIT = "`coordexp data doctor` finds sizes that are too large and text that cannot be written"
Rows = Iterator[tuple[str, Record, bytes]]


@contextmanager
def write_tar(records: Path) -> Iterator[Callable[[str, bytes], str]]:
    """Yield a function that adds a member to the tar beside a file of records, and returns its address. The tar is
    written whole or not at all, and the same members give the same bytes."""
    path, position = records.with_suffix("").with_suffix(".tar"), 0
    with write_parts(path) as write:

        def add(name: str, content: bytes) -> str:
            nonlocal position
            member = tarfile.TarInfo(name)
            member.size = len(content)
            header = member.tobuf(tarfile.USTAR_FORMAT)
            begin = position + len(header)
            write(header + content + bytes(-len(content) % BLOCK))
            position = begin + -(-len(content) // BLOCK) * BLOCK
            return f"{path}#bytes={begin}:{len(content)}"

        yield add
        write(bytes(2 * BLOCK))


def image_suffix(content: bytes) -> str:
    """Return the suffix of the name of an image, such as `.png`. Raise ImageError if it is not an image."""
    with open_image_file(io.BytesIO(content)) as image:
        # MPO, of phones, is a JPEG with smaller ones behind it.
        return ".jpeg" if image.format == "MPO" else f".{str(image.format).lower()}"


@dataclass(frozen=True)
class ExportJob:
    """An export of records to large files, each of which is a shard. `seed` decides the order in tars."""

    form: Literal["webdataset", "parquet"]
    records: RecordFile
    folder: Path
    seed: int = 0

    @property
    def shards(self) -> int:
        return -(-len(self.records) // PER_SHARD)

    @property
    def request(self) -> dict[str, Any]:
        count = len(self.records)
        return {"data": self.records.sha256, "format": self.form, "seed": self.seed, "images": count}

    @cached_property
    def _order(self) -> NDArray[np.uint32]:
        order = np.arange(len(self.records), dtype=np.uint32)
        if self.form == "webdataset":
            np.random.default_rng(self.seed).shuffle(order)
        return order

    def __call__(self, number: int, notify: Callable[[str], None] = ignore) -> bool:
        """Write a shard and return True, or False if it was finished before. `notify` gets messages about the
        progress."""
        part = Shard(number, self.shards).cut(len(self.records), PER_SHARD)
        place = (number, self.shards, part.start, part.stop, str(self.records))
        command: Command = "export parquet" if self.form == "parquet" else "export webdataset"
        manifest = Manifest(command, *place, self.request)
        return make_shard(self.folder, manifest, partial(self._write, part, notify))

    def _write(self, part: range, notify: Callable[[str], None], result: Path) -> dict[str, int]:
        counts = {"images": len(part), "objects": 0}
        rows = self._read(part, counts, notify)
        (_write_parquet if self.form == "parquet" else _write_webdataset)(result, rows)
        return counts

    def _read(self, part: range, counts: dict[str, int], notify: Callable[[str], None]) -> Rows:
        """Yield the records of a shard, with a name and the bytes of the image of each."""
        for begin in range(part.start, part.stop, AHEAD):
            indices = self._order[begin : min(begin + AHEAD, part.stop)].tolist()
            records = [self.records[index] for index in indices]
            stores.read_ahead(map(self.records.image_address, records))
            notify(f"{begin - part.start:,} images")
            for index, record in zip(indices, records, strict=True):
                with explain(OSError, f"{self.records}: the image {record.image!r}", UNREADABLE):
                    content = read_image_bytes(self.records.image_address(record))
                    name = f"{index:09}{image_suffix(content)}"
                counts["objects"] += len(record.objects)
                yield name, record, content


def _write_webdataset(result: Path, rows: Rows) -> None:
    """Write a tar and its records."""
    with write_tar(result) as add, write_parts(result) as write:
        for name, record, content in rows:
            address = Path(add(name, content)).name
            labels = replace(record, image=name).as_json()
            add(str(Path(name).with_suffix(".json")), labels.encode(errors="backslashreplace"))
            write(f"{replace(record, image=address).as_json()}\n")


def _write_parquet(result: Path, rows: Rows) -> None:
    need_packages("Parquet", "pyarrow")
    import pyarrow  # type: ignore[import-not-found]
    from pyarrow import parquet

    numbers = pyarrow.list_(pyarrow.float64())
    lists = {"bbox": numbers, "area": pyarrow.float64(), "segmentation": pyarrow.list_(numbers)}
    lists |= {"category": pyarrow.string(), "category_id": pyarrow.int64()}
    columns = {
        "image": pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}),
        "image_id": pyarrow.int64(),
        "width": pyarrow.int32(),
        "height": pyarrow.int32(),
        "objects": pyarrow.struct({name: pyarrow.list_(kind) for name, kind in lists.items()}),
    }
    features = {"info": {"features": {"image": {"_type": "Image"}}}}  # without it, an image would be a struct
    schema = pyarrow.schema(columns, metadata={"huggingface": json.dumps(features)})
    unfinished = result.with_name(f"{result.name}{PARTIAL}")
    with parquet.ParquetWriter(unfinished, schema) as writer:
        while group := [_to_row(*row) for row in islice(rows, ROWS)]:
            problem = f"{result}: the records of {group[0]['image']['path']} to {group[-1]['image']['path']}"
            with explain((pyarrow.ArrowException, ValueError, OverflowError), problem, UNFIT):
                table = pyarrow.Table.from_pylist(group, schema)
            writer.write_table(table)
    sync(unfinished)
    unfinished.replace(result)


def _to_row(name: str, record: Record, content: bytes) -> dict[str, Any]:
    annotations = [to_annotation(record, item) for item in record.objects]
    lists = {key: [annotation[key] for annotation in annotations] for key in ("bbox", "area", "segmentation")}
    lists["category"] = [item.desc for item in record.objects]
    lists["category_id"] = [item.category_id for item in record.objects]
    size = {"width": record.width, "height": record.height}
    return {"image": {"bytes": content, "path": name}, "image_id": record.image_id, **size, "objects": lists}
