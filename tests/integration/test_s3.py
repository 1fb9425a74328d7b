"""Training on images in an S3 server on this machine, read with s3fs: the same run as on files. Parquet and tars
there are imported, and Hugging Face's datasets read exported Parquet.

The server (moto), s3fs, pyarrow and datasets are no part of the tests' environment. `.ci/full` installs them
(`.ci/s3.txt`), and names their folder in COORDEXP_TESTS_S3.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from coordexp.data import RecordFile, pack, stores
from tests.command import run
from tests.integration.stage1_runs import make_parts, train
from tests.integration.stage2_runs import ROOT, finish, started, training
from tests.integration.test_addresses import SETS, check_equal, run_config
from tests.source import SOURCE
from tests.unit.data.addressed import pack_tar, rewrite
from tests.unit.data.packed import draw, write_webdataset
from tests.unit.data.test_import_packed import LISTS, import_packed, load
from tests.unit.data.test_pack import by_id, write_set

PACKAGES = os.environ.get("COORDEXP_TESTS_S3", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PACKAGES, reason="COORDEXP_TESTS_S3 names no folder with s3fs, moto and pyarrow"),
]


def variables(server: str, folder: Path) -> dict[str, str]:
    """Return the variables of a process that reads from the server."""
    return {
        stores.PREFIXES: "s3://scenes/",
        stores.CACHE: str(folder / "cache"),
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.fixture
def here(server, tmp_path, monkeypatch) -> None:
    """Let this process import the packages, and read from the server."""
    monkeypatch.setattr(sys, "path", [*sys.path, PACKAGES])
    for name, value in variables(server, tmp_path).items():
        monkeypatch.setenv(name, value)


def put(server: str, name: str, content: bytes) -> None:
    httpx.put(f"{server}/scenes/{name}", content=content).raise_for_status()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": PACKAGES}, stderr=subprocess.DEVNULL)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + 60
    while True:
        try:
            httpx.put(f"{url}/scenes").raise_for_status()
            break
        except httpx.TransportError:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.2)
    yield url
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def parts(server, tmp_path_factory) -> Path:
    """A tiny model, scenes whose images are files, and records of the members of tars in a bucket."""
    parts = make_parts(tmp_path_factory.mktemp("s3"))
    for name in SETS:
        file = parts / f"data/{name}.jsonl"
        addresses = pack_tar(file, f"{name}.tar")
        rewrite(
            file, f"{name}-s3.jsonl", lambda image, addresses=addresses: f"s3://scenes/shards/{addresses[image]}"
        )
        content = (parts / f"data/{name}.tar").read_bytes()
        httpx.put(f"{server}/scenes/shards/{name}.tar", content=content).raise_for_status()
    return parts


def test_a_run_on_s3_equals_one_on_files_also_when_it_is_resumed(parts, server, tmp_path):
    given = variables(server, tmp_path) | {"PYTHONPATH": f"{ROOT}:{SOURCE}:{PACKAGES}"}
    train(run_config(parts, "files", ""))
    shown = finish(training(run_config(parts, "s3", "-s3")), **given)
    check_equal(parts / "s3", parts / "files")
    assert "hidden" not in shown and len(list((tmp_path / "cache").glob("*/*"))) > 20
    shutil.copytree(parts / "s3", parts / "cut")
    shutil.rmtree(parts / "cut/checkpoint-4")
    shutil.rmtree(tmp_path / "cache")
    assert "checkpoint-2" in finish(training(run_config(parts, "cut", "-s3"), "--resume"), **given)
    check_equal(parts / "cut", parts / "files")
    with started(training(run_config(parts, "refused", "-s3")), **given | {stores.PREFIXES: "s3://other/"}) as run:
        assert run.wait(120) == 1
        assert "images are read only below s3://other/" in run.shown


@pytest.mark.filterwarnings("ignore")
def test_datasets_reads_exported_parquet_and_an_import_brings_the_same_records_back(tmp_path, monkeypatch, here):
    monkeypatch.setattr(pack, "PER_SHARD", 10)
    monkeypatch.setattr(pack, "ROWS", 4)
    file = write_set(tmp_path)
    run("data", "export", "parquet", file, "--out", tmp_path / "hf")
    import datasets

    files = str(tmp_path / "hf/*.parquet")
    rows = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(rows.features["image"], datasets.Image) and len(rows) == 23
    assert rows[4]["image"].size == (64, 48) and rows[5]["image"].format == "WEBP"
    objects = rows[8]["objects"]
    assert objects["category"] == ["cat", "red cup"] and objects["category_id"] == [None, None]
    assert objects["bbox"][0] == pytest.approx([1, 2, 31, 38]) and objects["segmentation"][0] == []
    run("shards", "merge", tmp_path / "hf", "--out", tmp_path / "hf.jsonl", code=1)

    import_packed("parquet", tmp_path / "hf", tmp_path / "again.jsonl", "--boxes", "xywh")
    found, expected = by_id(load(tmp_path / "again.jsonl")), by_id(load(file))
    assert [content for _, content in found] == [content for _, content in expected]
    for (record, _), (other, _) in zip(found, expected, strict=True):
        assert [(item.desc, item.kind, item.category_id) for item in record.objects] == [
            (item.desc, item.kind, item.category_id) for item in other.objects
        ]
        for item, twin in zip(record.objects, other.objects, strict=True):
            assert item.coords == pytest.approx(twin.coords, abs=0.0011)
    assert len(list((tmp_path / "again").glob("*.tar"))) == 3


@pytest.mark.filterwarnings("ignore")
def test_parquet_of_the_datasets_library_is_imported_with_its_names_of_classes(tmp_path, here):
    import pyarrow
    from datasets import ClassLabel, Features, Image, List, Value
    from pyarrow import parquet

    kinds = {"id": List(Value("int64")), "area": List(Value("int64")), "bbox": List(List(Value("float32")))}
    objects = kinds | {"category": List(ClassLabel(names=["Coverall", "Mask"]))}
    features = Features(
        {"image_id": Value("int64"), "image": Image(), "width": Value("int32"), "objects": objects}
    )
    rows = [
        {
            "image_id": 15 + number,
            "image": {"bytes": content, "path": f"{number}.png"},
            "width": 64,
            "objects": {"id": [1], "area": [192], "bbox": [[8.0, 6.0, 16.0, 12.0]], "category": [number % 2]},
        }
        for number, content in enumerate([draw(0), draw(1), b"no image", None, draw(4)])
    ]
    table = pyarrow.Table.from_pylist(rows, features.arrow_schema)
    parquet.write_table(table, tmp_path / "train-00000-of-00001.parquet")
    shown = import_packed("parquet", tmp_path, tmp_path / "train.jsonl", "--boxes", "xywh")
    loaded = load(tmp_path / "train.jsonl")
    assert [content for _, content in loaded] == [draw(0), draw(1), draw(4)]
    assert [(record.image_id, record.objects[0].desc, record.objects[0].category_id) for record, _ in loaded] == [
        (15, "Coverall", 0),
        (16, "Mask", 1),
        (19, "Coverall", 0),
    ]
    assert loaded[0][0].objects[0].coords == (8, 6, 24, 18) and loaded[0][0].height == 48
    assert shown.count("dropped") == 2 and "3 images, 3 objects" in shown
    wrong = run("data", "import", "parquet", tmp_path, "--key", "picture", "--out", tmp_path / "o", code=1)
    assert "no column picture" in wrong.output


def test_tars_in_a_bucket_are_imported_where_they_are(tmp_path, server, here):
    for number in range(3):
        file = write_webdataset(tmp_path / f"{number}.tar", {f"{number}{k}": LISTS for k in range(4)})
        put(server, f"packed/{number}.tar", file.read_bytes())
    import_packed("webdataset", "s3://scenes/packed/*.tar", tmp_path / "far.jsonl", "--boxes", "xywh")
    import_packed("webdataset", tmp_path / "?.tar", tmp_path / "near.jsonl", "--boxes", "xywh")
    far, near = (load(tmp_path / name) for name in ("far.jsonl", "near.jsonl"))
    assert [(record.objects, content) for record, content in far] == [
        (record.objects, content) for record, content in near
    ]
    images = [record.image for record, _ in far]
    assert images[0].startswith("s3://scenes/packed/0.tar#bytes=") and len(images) == 12
    words = ("data", "import", "webdataset", "--boxes", "xywh", "--out", tmp_path / "other")
    for url, problem in (("s3://other/*.tar", "images are read only below"), ("s3://scenes/none.tar", "no")):
        assert problem in run(*words[:3], url, *words[3:], code=1).output


@pytest.mark.timeout(600)
def test_from_parquet_on_s3_to_a_page_of_predictions_in_shards(tmp_path, server, here, monkeypatch):
    """The way of `docs/tutorials/large-data.md`: import, doctor in shards, training on addresses of a bucket,
    predictions in shards, one file and a page of them."""
    parts, given = make_parts(tmp_path), variables(server, tmp_path)
    monkeypatch.setattr(pack, "PER_SHARD", 10)
    for name in SETS:
        run("data", "export", "parquet", parts / f"data/{name}.jsonl", "--out", tmp_path / f"hf-{name}")
        for file in (tmp_path / f"hf-{name}").glob("*.parquet"):
            put(server, f"hf/{name}/{file.name}", file.read_bytes())

    for name, shards in zip(SETS, (2, 1), strict=True):
        folder = tmp_path / f"imported/{name}"
        for number in range(shards):
            words = ("--boxes", "xywh", "--shard", f"{number}/{shards}", "--out", folder)
            run("data", "import", "parquet", f"s3://scenes/hf/{name}/*.parquet", *words)
        run("shards", "merge", folder, "--out", parts / f"data/{name}-local.jsonl")
        for tar in folder.glob("*.tar"):
            put(server, f"tars/{name}/{tar.name}", tar.read_bytes())
        near = f"../imported/{name}/"
        rewrite(
            parts / f"data/{name}-local.jsonl",
            f"{name}-far.jsonl",
            lambda image, near=near, name=name: image.replace(near, f"s3://scenes/tars/{name}/"),
        )
    train_file, val = parts / "data/train-far.jsonl", parts / "data/val-far.jsonl"
    assert len(RecordFile(train_file)) == 40 and "s3://scenes/tars/train/" in train_file.read_text()

    for number in range(2):
        run("data", "doctor", train_file, "--shard", f"{number}/2", "--out", tmp_path / "facts")
    assert "no errors" in run("shards", "merge", tmp_path / "facts").output

    finish(training(run_config(parts, "far", "-far")), **given | {"PYTHONPATH": f"{ROOT}:{SOURCE}:{PACKAGES}"})
    model = ("--model", parts / "far/checkpoint-4", "--max-new-tokens", "16", "--batch", "2")
    for number in range(3):
        run("predict", *model, "--data", val, "--shard", f"{number}/3", "--out", tmp_path / "answers")
    run("shards", "merge", tmp_path / "answers", "--out", tmp_path / "preds.json")
    run("predict", *model, "--data", parts / "data/val-local.jsonl", "--out", tmp_path / "whole.json")
    assert (tmp_path / "preds.json").read_bytes() == (tmp_path / "whole.json").read_bytes()
    page = tmp_path / "page.html"
    run("evaluate", "--data", val, "--preds", tmp_path / "preds.json", "--page", page)
    assert page.read_text().count("data:image/") >= 6
