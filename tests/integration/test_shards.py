"""Predictions and imports in shards: the files of many processes, some of them killed, are those of one
undisturbed one."""

import json
import random
import signal
import time
from contextlib import suppress

import psutil
import pytest

from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.command import run
from tests.integration.stage2_runs import MODEL, finish, started
from tests.unit.data.packed import write_webdataset
from tests.unit.data.test_import_packed import LISTS, import_packed

pytestmark = pytest.mark.timeout(240)
ANSWERED = ["--max-new-tokens", "60", "--batch", "2"]


def predict(folder, out, *more):
    return ["predict", "--model", MODEL, "--data", folder / "s/val.jsonl", "--out", folder / out, *ANSWERED, *more]


def read_all(folder, name):
    suffixes = (".json", ".answers.jsonl", ".samples.jsonl")
    return [(folder / name).with_suffix(suffix).read_bytes() for suffix in suffixes]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder with 13 scenes, of which one has no image, and what one process predicts, as preds.json."""
    folder = tmp_path_factory.mktemp("scenes")
    write_scenes(folder / "s", SceneSettings(objects=(1, 2)), train=1, val=13, seed=4)
    sorted((folder / "s/images/val").iterdir())[5].unlink()
    run(*predict(folder, "preds.json", "--samples", "1"))
    return folder


def test_the_merged_shards_are_the_predictions_of_one_process_byte_for_byte(scenes):
    for number in (2, 0, 4, 1):
        run(*predict(scenes, "merged", "--samples", "1", "--shard", f"{number}/5"))
    status = run("shards", "status", scenes / "merged", code=1)
    assert "4 of 5 shards" in status.output and "not begun: 3" in status.output
    early = run("shards", "merge", scenes / "merged", "--out", scenes / "merged.json", code=1)
    assert "not finished: 3" in early.output
    run(*predict(scenes, "merged", "--samples", "1", "--shard", "3/5"))
    run("shards", "status", scenes / "merged")
    merged = run("shards", "merge", scenes / "merged", "--out", scenes / "merged.json")
    assert "1 of 13 images could not be read" in merged.output
    assert read_all(scenes, "merged.json") == read_all(scenes, "preds.json")
    manifest = json.loads((scenes / "merged/00002-of-00005.json").read_text())
    assert (manifest["begin"], manifest["end"], manifest["counts"]["images"]) == (4, 8, 4)
    assert manifest["counts"]["unreadable"] == 1

    before = {file.name: file.stat().st_mtime_ns for file in (scenes / "merged").glob("0*")}
    again = run(*predict(scenes, "merged", "--samples", "1", "--shard", "2/5"))
    assert "it was finished before" in again.output
    assert {file.name: file.stat().st_mtime_ns for file in (scenes / "merged").glob("0*")} == before
    other = run(*predict(scenes, "merged", "--shard", "2/5"), code=1)
    assert "00002-of-00005.json was made with another" in other.output


def test_the_suggestions_of_merged_shards_are_those_of_one_process(scenes):
    words = ["data", "suggest", "--model", MODEL, "--data", scenes / "s/val.jsonl", *ANSWERED, "--samples", "1"]
    words += ["--iou", "0.99", "--other-iou", "0.99", "--new-classes", "--page-limit", "3"]
    run(*words, "--out", scenes / "suggested")
    assert (scenes / "suggested/suggestions.jsonl").stat().st_size
    for number in (1, 0):
        run(*words, "--out", scenes / "parts", "--shard", f"{number}/2")
    merged = run("shards", "merge", scenes / "parts", "--out", scenes / "joined")
    for name in ("suggestions.jsonl", "preds.json", "preds.answers.jsonl", "preds.samples.jsonl"):
        assert (scenes / "joined" / name).read_bytes() == (scenes / "suggested" / name).read_bytes()
    assert merged.output.splitlines()[-1].endswith("complete.html to accept or reject them")
    other = run(*predict(scenes, "parts", "--samples", "1", "--shard", "0/2"), code=1)
    assert "another suggest" in other.output
    run("shards", "merge", scenes / "parts", "--out", scenes / "joined", code=1)


def test_options_that_make_no_sense_for_a_shard_are_refused(scenes):
    for words in (["--shard", "5/5"], ["--shard", "0/5", "--page", "p.html"], ["--shard", "0/5", "--resume"]):
        refused = run(*predict(scenes, "refused", *words), code=1)
        assert words[-2 if words[-1] != "--resume" else -1] in refused.output
    run(*predict(scenes, "s"), code=1)


def test_two_workers_of_which_two_are_killed_at_random_make_the_predictions_of_one_process(scenes):
    """The first process replaces a worker that was killed, and removes the folder of the shards at the end."""
    chance = random.Random(7)
    moments = sorted(chance.sample(range(5), 2))  # the number of finished shards, of seven
    words = ["-m", "coordexp", *map(str, predict(scenes, "two.json", "--samples", "1", "--workers", "2"))]
    folder = scenes / "two.shards"
    with started(words) as process:
        while moments:
            assert process.process.poll() is None and process.seconds < 200, process.shown
            if len(list(folder.glob("*.json"))) >= moments[0] and list(folder.glob("*.unfinished.jsonl")):
                children = psutil.Process(process.process.pid).children()
                chance.choice([child for child in children if is_worker(child)]).kill()
                del moments[0]
                time.sleep(0.5)
            time.sleep(0.005)
        assert process.wait(200) == 0, process.shown
        assert process.shown.count("another takes it") == 2, process.shown
        assert not process.remains()
    assert read_all(scenes, "two.json") == read_all(scenes, "preds.json")
    assert not folder.exists()


def is_worker(process):
    with suppress(psutil.Error):
        return any("spawn_main" in word for word in process.cmdline())
    return False


def test_workers_end_with_the_first_process_and_their_answers_are_resumed(scenes):
    words = ["-m", "coordexp", *map(str, predict(scenes, "ended.json", "--samples", "1", "--workers", "2"))]
    folder = scenes / "ended.shards"
    with started(words) as process:
        while not any(file.read_bytes().count(b"\n") > 1 for file in folder.glob("*.unfinished.jsonl")):
            assert process.process.poll() is None and process.seconds < 120, process.shown
            time.sleep(0.01)
        process.process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert not process.remains()
    run(*words[2:], code=1)
    finish([*words[:-1], "1", "--resume"])
    assert read_all(scenes, "ended.json") == read_all(scenes, "preds.json") and not folder.exists()


def test_an_import_that_was_killed_keeps_its_finished_files_and_goes_on(tmp_path):
    for number in range(8):
        write_webdataset(tmp_path / f"{number}.tar", {f"{number}{k}": LISTS for k in range(150)})
    import_packed("webdataset", tmp_path, tmp_path / "whole.jsonl", "--boxes", "xywh")
    out = tmp_path / "killed"
    words = ["data", "import", "webdataset", tmp_path, "--boxes", "xywh", "--out", out]
    with started(["-m", "coordexp", *map(str, words)]) as process:
        while len(list(out.glob("*-of-00008.json"))) < 3:
            assert process.process.poll() is None and process.seconds < 120, process.shown
            time.sleep(0.002)
        process.process.send_signal(signal.SIGKILL)
        process.wait(60)
    finished = {file: file.stat().st_mtime_ns for file in out.glob("*-of-00008.json")}
    assert 3 <= len(finished) < 8
    import_packed("webdataset", tmp_path, tmp_path / "killed.jsonl", "--boxes", "xywh")
    assert finished.items() <= {file: file.stat().st_mtime_ns for file in out.glob("*.json")}.items()
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
