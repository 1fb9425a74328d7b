"""Measure how well rollouts and training overlap, with a real rollout server on one core and a learner on another.

python benchmarks/overlap.py           a table
python benchmarks/overlap.py --json    {name: {"value": x, "goal": y, "ok": true}}

The same run is made with `stage2.max_staleness` 0, 1 and 2. The figure is the time of a step, compared with the
longer of its two parts in the same run: making the rollouts, and everything that the learner does apart from
waiting for them.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from ratios import Results, at_most, main, without_goal
from rich.progress import Progress
from server import DEMO, ROOT, describe_server, serve

from coordexp.demo.scenes import SceneSettings, write_scenes

STEPS, SKIPPED = 14, 3
SAMPLES, TOKENS = 48, 80  # of a step, and of an answer: answering and training take about equally long


def write_config(folder: Path, name: str, vllm: dict[str, Any], max_staleness: int) -> Path:
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage2-vllm.yaml", folder)],
        "model": {"path": str(DEMO)},
        "custom": {
            "trainer_variant": "stage2_rollout_aligned",
            "train_jsonl": str(folder / "data/train.jsonl"),
            "val_jsonl": None,
        },
        "stage2": {"b_ratio": None, "max_staleness": max_staleness, "dump_every": None},
        "rollout_matching": {
            "decode_batch_size": SAMPLES,
            "max_new_tokens": TOKENS,
            "vllm": vllm | {"sync": {"canary_every": 1000}},
        },
        "training": {
            "output_dir": str(folder / name),
            "max_steps": STEPS,
            "per_device_train_batch_size": SAMPLES // 4,
            "gradient_accumulation_steps": 4,
            "learning_rate": 1e-6,  # the answers stay as long as they are
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_steps": 1,
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def train(file: Path, core: int) -> dict[str, float]:
    """Train on one core, and return the median seconds of a step, of its rollouts, and of all else."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", "coordexp", "train", "--config", str(file)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = [json.loads(line) for line in (file.with_suffix("") / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][SKIPPED:-1]  # the last one asks for no rollouts
    parts = [
        {
            "step": line["time/step"],
            "rollout": line.get("time/rollout_ahead", line["time/rollout"]),
            "rest": line["time/step"] - line["time/rollout"],
        }
        for line in steps
    ]
    return {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def measure(progress: Progress) -> Results:
    results: Results = {}
    bar = progress.add_task("overlap", total=4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_scenes(folder / "data", SceneSettings(), train=200, val=1, seed=1)
        vllm = describe_server()  # all runs use the same one
        files = [write_config(folder, f"bound-{bound}", vllm, bound) for bound in (0, 1, 2)]
        cores = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, {cores[0]})  # the server inherits it
        with serve(files[0]):
            for bound, file in enumerate(files):
                progress.advance(bar)
                seconds = train(file, cores[1])
                ratio = seconds["step"] / max(seconds["rollout"], seconds["rest"])
                name = f"step / longer part, max_staleness {bound}"
                if bound < 2:  # beyond, rollouts are those of several steps
                    results[name] = at_most(ratio, 1.15) if bound else without_goal(ratio)
                for part, value in seconds.items():
                    results[f"seconds of {part}, max_staleness {bound}"] = without_goal(value)
    progress.advance(bar)
    return results


if __name__ == "__main__":
    main(__doc__, measure, "--part", {})
