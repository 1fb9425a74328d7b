"""Training and predictions on images that are files, parts of local tars, or in a store: the same numbers, also
when a run is resumed or killed, and when the store is slow or away for a while."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from coordexp.data import stores
from coordexp.data.image_cache import ImageCache
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.command import run
from tests.http_store import http_store
from tests.integration.stage1_runs import config, make_parts, train
from tests.integration.stage2_runs import metrics, started, training, weights
from tests.unit.data.addressed import pack_tar, rewrite

pytestmark = pytest.mark.timeout(240)
SETS = ("train", "val")


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A tiny model, and scenes whose images are files, and members of tars."""
    parts = make_parts(tmp_path_factory.mktemp("addresses"))
    for name in SETS:
        file = parts / f"data/{name}.jsonl"
        addresses = pack_tar(file, f"{name}.tar")
        assert "#bytes=" in next(iter(addresses.values()))
        rewrite(file, f"{name}-tar.jsonl", addresses.__getitem__)
    return parts


@pytest.fixture
def store(parts, tmp_path, monkeypatch):
    """A store that has the tars, an empty cache, and records of the members of the tars in it."""
    with http_store(parts / "data") as store:
        monkeypatch.setenv(stores.PREFIXES, f"{store.url}/")
        monkeypatch.setenv(stores.CACHE, str(tmp_path / "cache"))
        for name in SETS:
            rewrite(parts / f"data/{name}-tar.jsonl", f"{name}-http.jsonl", lambda image: f"{store.url}/{image}")
        yield store


def run_config(parts: Path, name: str, data: str, **changes: object) -> Path:
    """Write the config of a run of four steps on the records `data`, with an evaluation at its end."""
    settings = {"max_steps": 4, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 4} | changes
    file = config(parts, name, **settings)
    tree = yaml.safe_load(file.read_text())
    for part in SETS:
        tree["custom"][f"{part}_jsonl"] = str(parts / f"data/{part}{data}.jsonl")
    file.write_text(yaml.safe_dump(tree))
    return file


def check_equal(run: Path, expected: Path) -> None:
    """Check that two runs have the same losses and evaluations, and end with the same weights."""
    assert len([line for line in metrics(expected) if "loss" in line]) == 4
    assert metrics(run) == metrics(expected)
    ends = [weights(folder / "checkpoint-4") for folder in (run, expected)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def train_in_two_parts(parts: Path, name: str, data: str) -> tuple[Path, Path]:
    """Train four steps at once, and train the last two again from the checkpoint in the middle. Return the folders
    of both runs."""
    train(run_config(parts, name, data))
    shutil.copytree(parts / name, parts / f"{name}-cut")
    shutil.rmtree(parts / f"{name}-cut/checkpoint-4")
    assert "checkpoint-2" in train(run_config(parts, f"{name}-cut", data), "--resume")
    return parts / name, parts / f"{name}-cut"


@pytest.fixture(scope="module")
def on_files(parts):
    whole, cut = train_in_two_parts(parts, "files", "")
    check_equal(cut, whole)
    return whole


def test_a_run_on_tars_equals_one_on_files_also_when_it_is_resumed(parts, on_files):
    for trained in train_in_two_parts(parts, "tars", "-tar"):
        check_equal(trained, on_files)


def test_a_run_on_a_store_equals_one_on_files_also_when_it_is_resumed(parts, store, on_files):
    store.fault = lambda path, number: (503, "cut", None, None)[number % 4]
    for trained in train_in_two_parts(parts, "http", "-http"):
        check_equal(trained, on_files)
    assert len({request for request in store.requests if "train" in request}) > 20


def test_a_run_that_was_killed_while_it_filled_the_cache_goes_on_with_the_same_steps(
    parts, store, on_files, tmp_path
):
    store.delay = 0.05
    file = run_config(parts, "killed", "-http")
    with started(training(file)) as run:
        until = time.monotonic() + 120
        while not (parts / "killed/checkpoint-2/manifest.json").is_file():
            assert time.monotonic() < until, run.shown[-3000:]
            time.sleep(0.02)
        run.process.kill()
        run.process.wait(timeout=30)
    assert "checkpoint-2" in train(file, "--resume")
    check_equal(parts / "killed", on_files)
    cache, image = ImageCache(tmp_path / "cache", 2**30), "train.tar#bytes="
    lines = (parts / "data/train-tar.jsonl").read_text().splitlines()
    keys = [f"{store.url}/{json.loads(line)['image']}" for line in lines]
    kept = [key for key in keys if cache.has(key)]
    assert len(kept) > 20 and image in kept[0]
    for key in kept:
        offset, size = map(int, key.partition("=")[2].split(":"))
        assert cache.get(key) == (parts / "data/train.tar").read_bytes()[offset : offset + size]


def test_a_run_waits_for_a_store_that_is_away_for_20_seconds(parts, store, on_files):
    away = threading.Event()

    def leave(path: str, number: int) -> None:
        if number >= 10 and not away.is_set():
            away.set()
            threading.Thread(target=store.close).start()
            threading.Timer(20.0, store.open).start()

    store.fault = leave
    began = time.monotonic()
    shown = train(run_config(parts, "away", "-http"))
    assert away.is_set() and time.monotonic() - began > 20
    assert f"waiting for {store.url}" in shown
    check_equal(parts / "away", on_files)


def test_a_step_does_not_wait_for_images_that_take_200_milliseconds_each(parts, store):
    """A step takes up to 32 images, which would be 6.4 seconds one after the other, and no image comes twice. The
    first three steps begin before enough has been read ahead."""
    write_scenes(parts / "data/many", SceneSettings(objects=(1, 3)), train=230, val=1, seed=2)
    records = rewrite(parts / "data/many/train.jsonl", "many.jsonl", lambda image: f"{store.url}/many/{image}")
    records.rename(parts / "data/train-many.jsonl")
    shutil.copy(parts / "data/val.jsonl", parts / "data/val-many.jsonl")
    store.delay = 0.2
    sizes = {"per_device_train_batch_size": 16, "eval_strategy": "no", "max_steps": 7, "save_steps": 7}
    train(run_config(parts, "slow", "-many", **sizes))
    assert len(store.requests) == len(set(store.requests)) > 120
    lines = [json.loads(line) for line in (parts / "slow/metrics.jsonl").read_text().splitlines()]
    times = [(line["time/pictures"], line["time/step"]) for line in lines if "time/step" in line][3:]
    assert len(times) == 4
    # Under a tenth on an idle machine; other tests run beside this one, and a step takes 0.2 s.
    assert sum(pictures for pictures, _ in times) < 0.2 * sum(step for _, step in times), times


def test_a_run_ends_with_the_reason_if_its_store_refuses(parts, store):
    store.fault = lambda path, number: 403 if number > 8 else None
    with started(training(run_config(parts, "refused", "-http"))) as run:
        assert run.wait(120) == 1
        assert f"{store.url}/train.tar: the store refuses it: status 403" in run.shown
        assert "not a readable image" not in run.shown


def test_predictions_wait_for_no_answer_of_a_store_in_vain_and_go_on_where_they_ended(parts, store, tmp_path):
    """No image is called unreadable because of its store."""

    def predict(data: str, *more: str, code: int = 0) -> tuple[str, list[dict]]:
        files = {
            "--model": parts / "model",
            "--data": parts / f"data/val{data}.jsonl",
            "--out": tmp_path / "p.json",
        }
        words = [word for option in files.items() for word in option]
        result = run("predict", *words, "--max-new-tokens", 16, "--batch", 2, *more, code=code)
        answers = tmp_path / "p.answers.jsonl"
        lines = answers.read_text().splitlines() if answers.is_file() else []
        return result.output, [json.loads(line) | {"image": ""} for line in lines]

    _, expected = predict("")
    for file in tmp_path.glob("p.*"):
        file.unlink()
    store.fault = lambda path, number: 403 if number > 4 else None
    assert "the store refuses it" in predict("-http", code=1)[0]
    assert "image_unreadable" not in "".join(file.read_text() for file in tmp_path.glob("p.*"))
    store.fault = lambda path, number: None
    output, answers = predict("-http", "--resume")
    assert answers == expected, output
