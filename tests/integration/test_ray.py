"""`examples/ray/predict.py` on a local Ray, which the test installs into a folder of its own: Ray is not among the
packages of the tests."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.command import run
from tests.integration.stage2_runs import MODEL, ROOT
from tests.source import SOURCE

LOCAL_RAY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.full
@pytest.mark.cold
@pytest.mark.timeout(900)
def test_a_local_ray_of_which_an_actor_is_killed_makes_the_predictions_of_one_process(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "packages")]
    pins = ["-c", str(ROOT / "constraints.txt"), "ray[data]==2.60.*"]
    subprocess.run([*install, *pins], check=True, timeout=300)
    write_scenes(tmp_path / "s", SceneSettings(objects=(1, 2)), train=1, val=24, seed=4)
    options = ["--model", str(MODEL), "--data", str(tmp_path / "s/val.jsonl")]
    options += ["--max-new-tokens", "60", "--batch", "2"]
    run("predict", *options, "--out", tmp_path / "whole.json")

    folder, log = tmp_path / "shards", tmp_path / "log"
    words = ["examples/ray/predict.py", *options, "--out", str(folder), "--shards", "12", "--actors", "2"]
    path = f"{tmp_path / 'packages'}:{SOURCE}"
    killed = None
    with log.open("wb") as file:
        env = os.environ | LOCAL_RAY | {"PYTHONPATH": path}
        predicting = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, stdout=file, stderr=file)
        deadline = time.monotonic() + 600
        while predicting.poll() is None and time.monotonic() < deadline:
            if killed is None and len(list(folder.glob("*.json"))) >= 3:
                actors = [
                    child for child in psutil.Process(predicting.pid).children(recursive=True) if is_actor(child)
                ]
                killed = actors[0].pid
                actors[0].kill()
            time.sleep(0.02)
        predicting.kill()
    assert predicting.wait(30) == 0 and killed, log.read_text()[-5000:]
    run("shards", "merge", folder, "--out", tmp_path / "merged.json")
    for suffix in (".json", ".answers.jsonl"):
        assert (tmp_path / "merged").with_suffix(suffix).read_bytes() == (
            (tmp_path / "whole").with_suffix(suffix).read_bytes()
        )


def is_actor(process):
    try:
        return process.cmdline()[0].startswith("ray::MapWorker")
    except (psutil.Error, IndexError):  # it has just ended
        return False
