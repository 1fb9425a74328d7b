"""Parquet that cannot be read or written is an error that names its file."""

import json

import pytest

from coordexp.data import DataError, RecordFile
from coordexp.data.importers.packed import read_parquet
from coordexp.data.importers.rows import RowReader
from coordexp.data.importers.source import ImportCounts, Rules
from coordexp.data.pack import ExportJob
from tests.unit.data.packed import draw
from tests.unit.data.test_pack import write_set

pyarrow = pytest.importorskip("pyarrow")


def write(path, texts, metadata=None):
    """Write images with labels, and return their file."""
    from pyarrow import parquet

    rows = {"image": [draw(0)] * len(texts), "id": texts}
    table = pyarrow.table(rows, pyarrow.schema({"image": pyarrow.binary(), "id": pyarrow.string()}, metadata))
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    return path


def read(path):
    return list(
        read_parquet(str(path), RowReader(None, Rules(), ImportCounts()), "image", lambda name, content: name)
    )


def test_damaged_parquet_is_an_error_that_names_the_file(tmp_path):
    good = write(tmp_path / "a.parquet", ["abc"] * 9)
    assert len(read(good)) == 9
    content = good.read_bytes()
    middle = len(content) // 2
    damages = (
        content[:middle],
        content.replace(b"abc", b"\xff\xfe\xfd"),
        content[:4] + b"\xff" * 40 + content[44:],
    )
    for damaged in damages:
        good.write_bytes(damaged)
        with pytest.raises(DataError) as raised:
            read(good)
        assert raised.value.problem.startswith(f"{good}: not Parquet") and raised.value.fix


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"info": 3}', '{"info": {"features": {"objects": []}}}', "[" * 100_000]
)
def test_broken_metadata_of_classes_are_an_error_that_asks_for_names(tmp_path, text):
    file = write(tmp_path / "a.parquet", ["abc"], {"huggingface": text})
    with pytest.raises(DataError) as raised:
        read(file)
    assert str(file) in raised.value.problem and "--names" in raised.value.fix


def test_a_record_that_parquet_cannot_have_is_an_error_that_names_its_place(tmp_path):
    file = write_set(tmp_path, 3)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], json.dumps(json.loads(lines[2]) | {"width": 2**31})]))
    with pytest.raises(DataError) as raised:
        ExportJob("parquet", RecordFile(file), tmp_path / "out")(0)
    assert "000000002.webp" in raised.value.problem and raised.value.fix
