"""Training on images in an S3 server on this machine, read with s3fs: the same run as on files.

The server (moto) and s3fs are no part of the tests' environment. `.ci/full` installs them (`.ci/s3.txt`), and
names their folder in COORDEXP_TESTS_S3.
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

from coordexp.data import stores
from tests.integration.stage1_runs import make_parts, train
from tests.integration.stage2_runs import ROOT, finish, started, training
from tests.integration.test_addresses import SETS, check_equal, run_config
from tests.source import SOURCE
from tests.unit.data.addressed import pack_tar, rewrite

PACKAGES = os.environ.get("COORDEXP_TESTS_S3", "")
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PACKAGES, reason="COORDEXP_TESTS_S3 names no folder with s3fs and moto"),
]


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
    variables = {
        "PYTHONPATH": f"{ROOT}:{SOURCE}:{PACKAGES}",
        stores.PREFIXES: "s3://scenes/shards/",
        stores.CACHE: str(tmp_path / "cache"),
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "hidden",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    train(run_config(parts, "files", ""))
    shown = finish(training(run_config(parts, "s3", "-s3")), **variables)
    check_equal(parts / "s3", parts / "files")
    assert "hidden" not in shown and len(list((tmp_path / "cache").glob("*/*"))) > 20
    shutil.copytree(parts / "s3", parts / "cut")
    shutil.rmtree(parts / "cut/checkpoint-4")
    shutil.rmtree(tmp_path / "cache")
    assert "checkpoint-2" in finish(training(run_config(parts, "cut", "-s3"), "--resume"), **variables)
    check_equal(parts / "cut", parts / "files")
    with started(
        training(run_config(parts, "refused", "-s3")), **variables | {stores.PREFIXES: "s3://other/"}
    ) as run:
        assert run.wait(120) == 1
        assert "images are read only below s3://other/" in run.shown
