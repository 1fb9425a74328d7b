"""Read packed data sets: WebDataset tars, Parquet as Hugging Face's datasets write it, and TSV as Rex-Omni has it.

    000012.jpg and 000012.json in a tar     the members of a sample have one name, up to its first dot
    image, objects in a Parquet file        an image is {"bytes": ..., "path": ...}, or its bytes
    17 <tab> {"boxes": [...]}               in NAME.annotations.tsv: the byte at which the image's line begins in
    name <tab> base64                       NAME.images.tsv

The images of a tar or a TSV stay where they are: records have their addresses. Parquet has no places of images, as
its pages are compressed, so they are copied to a tar. A source is read once, from its beginning to its end, so it
may be in a store. Members of a row are read as `coordexp.data.importers.rows` says.
"""

import hashlib
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from coordexp.data import stores
from coordexp.data.addresses import decode_base64, is_url
from coordexp.data.importers.rows import CLASSES, ID_KEYS, LISTS, SIZE_KEYS, Names, RowReader
from coordexp.data.importers.shape import write_records
from coordexp.data.importers.source import Dropped, ImportCounts, Rules, SourceImage
from coordexp.data.importers.yolo import SUFFIXES
from coordexp.data.pack import image_suffix, write_tar
from coordexp.data.records import load_strictly
from coordexp.data.shards import Manifest, make_shard
from coordexp.errors import DataError, explain, need_packages
from coordexp.files import RELATIVE_PATHS, describe_missing, match_files, open_file
from coordexp.tasks import ignore

ENDINGS = {"webdataset": ".tar", "parquet": ".parquet", "tsv": "annotations.tsv"}  # of the files in a folder
MOST_LABELS = 2**26  # bytes of the labels of an image
MOST_MEMBERS = 100  # of a sample
ROWS = 32  # of Parquet that are in memory at a time
_SAMPLE = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)", re.DOTALL)


def find_sources(name: str, form: str) -> dict[str, int]:
    """Return the files that a path, a folder, a pattern or a URL with a pattern stands for, and their sizes."""
    if is_url(name):
        if name.endswith("/"):
            raise DataError(f"{name} is a folder", f"name the files in it: {name}*{ENDINGS[form]}")
        sizes = stores.list_objects(name)
    else:
        folder = Path(name)
        files = sorted(folder.rglob(f"*{ENDINGS[form]}")) if folder.is_dir() else match_files(name)
        sizes = {str(file.absolute()): file.stat().st_size for file in files}
    if not sizes:
        raise DataError(describe_missing(name), f"{RELATIVE_PATHS}; of a folder, files *{ENDINGS[form]} are read")
    return sizes


def _open(location: str) -> IO[bytes]:
    return stores.open_object(location) if is_url(location) else open_file(Path(location))


def read_webdataset(location: str, reader: RowReader) -> Iterator[SourceImage]:
    # A place beyond all files is an OverflowError.
    with _open(location) as file, _explain_tar(location, tarfile.TarError, OverflowError):
        for key, members in groupby(_list_members(file, location, reader.counts), key=itemgetter(0)):
            where = f"{location}: {key}"
            with reader.counts.dropping(where):
                yield _read_sample(location, list(islice(members, MOST_MEMBERS + 1)), where, reader)


def _explain_tar(location: str, *kinds: type[Exception]) -> AbstractContextManager[None]:
    fix = "give tars that are complete and not compressed; of tars that were joined with cat, give each by itself"
    return explain(kinds, f"{location}: not a tar that can be read", fix)


def _check_end(file: IO[bytes]) -> None:
    """Raise ReadError unless the rest of a tar is its end: two blocks of zeros at least, and nothing else. The
    tarfile module also takes a damaged header, one block of zeros, or the end of the file for it."""
    begin = end = file.tell()
    while block := file.read(stores.BLOCK):
        if block.strip(b"\0"):
            raise tarfile.ReadError(f"damaged, or the end of a first tar, at byte {end:,}")
        end += len(block)
    if end - begin < 2 * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"cut off at byte {end:,}")


def _list_members(
    file: IO[bytes], location: str, counts: ImportCounts
) -> Iterator[tuple[str, str, tarfile.TarInfo, IO[bytes]]]:
    """Yield the name of the sample, the kind, the place and the content of every file in a tar."""
    # A broken header may be any ValueError of the tarfile module, and very many extended headers a RecursionError.
    with _explain_tar(location, ValueError, RecursionError), tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined] # which would grow with the tar
            match = _SAMPLE.fullmatch(member.name)
            if member.size < 0:  # tarfile would go back, and read the same members for ever
                raise tarfile.ReadError(f"member {member.name} of a negative size")
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if match and content is not None:
                yield match[1], match[2].lower(), member, content
            elif not member.isdir():
                counts.add("dropped", "member that is no file with a suffix", f"{location}: {member.name}")
        file.seek(tar.offset)
        _check_end(file)


def _read_sample(location: str, members: list[Any], where: str, reader: RowReader) -> SourceImage:
    if len(members) > MOST_MEMBERS:
        raise Dropped(f"sample of more than {MOST_MEMBERS} members")
    files = {kind: file for _, kind, _, file in members}
    images = [(kind, place) for _, kind, place, _ in members if f".{kind}" in (".gif", *SUFFIXES)]
    if len(files) < len(members) or len(images) != 1:
        raise Dropped("sample that does not have exactly one image and at most one member of each kind")
    ((kind, place),) = images
    if files.keys() - {"json", kind}:
        reader.counts.add("noted", "sample with members that are neither an image nor .json: not read", where)
    row = _parse_row(files["json"].read(MOST_LABELS + 1)) if "json" in files else {}
    return reader.read(row, f"{location}#bytes={place.offset_data}:{place.size}", files[kind], where)


def _parse_row(text: bytes) -> dict[str, Any]:
    if len(text) > MOST_LABELS:
        raise Dropped(f"labels of more than {MOST_LABELS:,} bytes")
    try:
        row = load_strictly(text)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise Dropped("labels that are not a JSON object")
    return row


def read_tsv(location: str, reader: RowReader) -> Iterator[SourceImage]:
    folder, slash, name = location.rpartition("/")
    images = f"{folder}{slash}{name.replace('annotations', 'images')}"
    if images == location:
        raise DataError(f"{location}: its name does not say which file has the images", "give *annotations.tsv")
    with _open(location) as file, _open(images) as image_file:
        for number, line in enumerate(iter(partial(file.readline, MOST_LABELS + 1), b""), start=1):
            where = f"{location}:{number}"
            if len(line) > MOST_LABELS:
                problem = f"{where}: a line of more than {MOST_LABELS:,} bytes"
                raise DataError(problem, "give *annotations.tsv with the labels of one image on each line")
            with reader.counts.dropping(where):
                offset, _, labels = line.partition(b"\t")
                if not re.fullmatch(rb"\d{1,13}", offset):
                    raise Dropped("line that is not the place of an image and its labels")
                image_file.seek(int(offset))
                key, _, content = image_file.readline(2 * stores.LARGEST).rstrip(b"\r\n").partition(b"\t")
                if len(content) * 3 // 4 > stores.LARGEST:  # base64 has four bytes for three
                    raise Dropped(f"image of more than {stores.LARGEST:,} bytes")
                begin = int(offset) + len(key) + 1
                if content.startswith(b"b'"):  # as Python prints bytes
                    begin, content = begin + 2, content[2:-1]
                image = io.BytesIO(decode_base64(content))
                address = f"{images}#bytes={begin}:{len(content)};base64"
                yield reader.read(_parse_row(labels), address, image, where)


def read_parquet(
    location: str, reader: RowReader, column: str, add: Callable[[str, bytes], str]
) -> Iterator[SourceImage]:
    """Yield the images of the rows. `column` has the images, and `add` copies one and returns its new address."""
    need_packages("Parquet", "pyarrow")
    import pyarrow  # type: ignore[import-not-found]
    from pyarrow import parquet

    # pyarrow raises OSError for damaged pages, and ValueError for text that is not UTF-8.
    kinds = (pyarrow.ArrowException, OSError, ValueError, OverflowError)
    problem = f"{location}: not Parquet that can be read"

    def list_rows(columns: list[str]) -> Iterator[dict[str, Any]]:
        with explain(kinds, problem, "give complete files"):
            for batch in table.iter_batches(ROWS, columns=columns):
                yield from batch.to_pylist()

    with _open(location) as file:
        with explain(kinds, problem, "give complete files"):
            table = parquet.ParquetFile(file)
            names, metadata = table.schema_arrow.names, table.schema_arrow.metadata or {}
        if column not in names:
            missing = f"{location}: no column {column}; it has {', '.join(names)}"
            raise DataError(missing, "name that of the images with --key")
        if reader.names is None:
            fix = "give the names of the classes with --names"
            broken = (ValueError, TypeError, AttributeError, LookupError, RecursionError)
            with explain(broken, f"{location}: its metadata `huggingface` cannot be read", fix):
                reader = replace(reader, names=_find_class_names(metadata))
        columns = [key for key in (column, *SIZE_KEYS, *ID_KEYS, *LISTS) if key in names]
        for number, row in enumerate(list_rows(columns), start=1):
            where = f"{location}, row {number}"
            with reader.counts.dropping(where):
                image = row.pop(column)
                content = image.get("bytes") if isinstance(image, dict) else image
                if not isinstance(content, bytes):
                    raise Dropped("row without the bytes of an image")
                address = add(f"{number:09}{image_suffix(content)}", content)
                yield reader.read(row, address, io.BytesIO(content), where)


def _find_class_names(metadata: Mapping[bytes, bytes]) -> Names:
    """Return the names of the classes of labels, if Hugging Face's datasets have kept them beside the schema."""
    features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    for labels in (_unwrap(features.get(key)) for key in LISTS):
        for feature in (_unwrap(labels.get(key)) for key in CLASSES):
            if feature.get("_type") == "ClassLabel":
                return dict(enumerate(feature["names"]))
    return None


def _unwrap(feature: Any) -> dict[str, Any]:
    """Return what the items of a list are, or of a list of lists."""
    while isinstance(feature, list) or (isinstance(feature, dict) and "feature" in feature):
        feature = feature[0] if isinstance(feature, list) else feature["feature"]
    return feature if isinstance(feature, dict) else {}


@dataclass(frozen=True)
class ImportJob:
    """An import of a packed data set. Each of its files is a shard."""

    form: str
    sources: Mapping[str, int]  # locations and sizes
    folder: Path  # for the records of all files, and for the tars that are made of Parquet
    rules: Rules
    names: Names = None
    column: str = "image"

    @property
    def shards(self) -> int:
        return len(self.sources)

    @cached_property
    def request(self) -> dict[str, Any]:
        files = [(Path(location).name, size) for location, size in self.sources.items()]
        data = json.dumps([files, self.names and list(self.names.items())])
        sha256 = hashlib.sha256(data.encode()).hexdigest()
        return {"data": sha256, "format": self.form, "column": self.column} | asdict(self.rules)

    def __call__(self, number: int, notify: Callable[[str], None] = ignore) -> bool:
        """Write the records of a file and return True, or False if that was done before. `notify` gets messages
        about the progress."""
        location = list(self.sources)[number]
        manifest = Manifest("import", number, self.shards, number, number + 1, location, self.request)
        return make_shard(self.folder, manifest, partial(self._write, location, notify))

    def _write(self, location: str, notify: Callable[[str], None], result: Path) -> dict[str, int]:
        counts = ImportCounts()
        reader = RowReader(self.names, self.rules, counts)
        with ExitStack() as files:
            if self.form == "parquet":
                add = files.enter_context(write_tar(result))
                images = read_parquet(location, reader, self.column, add)
            else:
                images = (read_tsv if self.form == "tsv" else read_webdataset)(location, reader)
            write_records(images, result, self.rules, counts, notify)
        return counts.as_dict()
