"""How much faster several workers predict, and whether killed ones change the result.

    python benchmarks/shards.py --images 2000 --cores 2

One process that is pinned to one core predicts first. Then `coordexp predict --workers` does, with one worker per
core, undisturbed and with two workers killed at random moments. The files of all three are compared byte for byte.
The times are those of the whole commands, with their start.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from coordexp.demo.scenes import SceneSettings, write_scenes

ROOT = Path(__file__).parents[1]
OPTIONS = ["--model", "examples/scenes-cpu/model", "--max-new-tokens", "192"]


def predict(folder: Path, name: str, cores: list[int], *more: str, kills: int = 0) -> float:
    """Run the command on these cores, kill so many workers, and return its seconds."""
    files = ["--data", str(folder / "scenes/val.jsonl"), "--out", str(folder / f"{name}.json")]
    command = [sys.executable, "-m", "coordexp", "predict", *OPTIONS, *files, *more]
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
    chance, began = random.Random(1), time.monotonic()
    run = subprocess.Popen(pinned, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    moments = sorted(chance.sample(range(1, 14), kills))  # the number of finished shards, of 16
    while run.poll() is None:
        if moments and len(list((folder / f"{name}.shards").glob("*.json"))) >= moments[0]:
            children = psutil.Process(run.pid).children()
            chance.choice([child for child in children if "spawn_main" in str(child.cmdline())]).kill()
            del moments[0]
        time.sleep(0.01)
    assert run.returncode == 0 and not moments
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--cores", type=int, default=2)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: given.cores]
    workers = ["--workers", str(given.cores)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_scenes(folder / "scenes", SceneSettings(), train=1, val=given.images, seed=0)
        alone = predict(folder, "alone", cores[:1])
        shared = predict(folder, "shared", cores, *workers)
        killed = predict(folder, "killed", cores, *workers, kills=2)
        for name in ("shared", "killed"):
            for suffix in (".json", ".answers.jsonl"):
                same = (folder / f"{name}{suffix}").read_bytes() == (folder / f"alone{suffix}").read_bytes()
                assert same, f"{name}{suffix} differs"
    print(f"{given.images} images on one core: {alone:.1f} s")
    print(f"{given.cores} workers: {shared:.1f} s, {alone / shared:.2f} times as fast")
    print(f"with two workers killed: {killed:.1f} s; all files are equal, byte for byte")


if __name__ == "__main__":
    main()
