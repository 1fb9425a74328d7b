"""Every file of a run folder meets every fault of a disk or a kill: the run resumes exactly, or the file is
named."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from coordexp.demo.model import Size, make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from tests.integration.run_faults import FAULTS_AFTERWARDS, FAULTS_OF_WRITES
from tests.integration.stage2_runs import specified_settings
from tests.source import SOURCE

ROOT = Path(__file__).parents[2]
WORKERS = 2


def config(folder: Path) -> Path:
    """Write the config of a tiny run on rollouts that leaves all kinds of files: dumps, evaluations,
    TensorBoard, a carry buffer."""
    write_scenes(folder / "data", SceneSettings(objects=(1, 2)), train=12, val=2, seed=1)
    make_model(folder / "model", "small", ordinal=True, size=Size(hidden=64, layers=2, patch=8, vision_hidden=32))
    rollout = specified_settings()
    tree = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "custom": {
            "trainer_variant": "stage2_rollout_aligned",
            "train_jsonl": str(folder / "data/train.jsonl"),
            "val_jsonl": str(folder / "data/val.jsonl"),
        },
        "global_max_length": 256,
        "rollout_matching": rollout | {"rollout_backend": "hf", "decode_batch_size": 4, "max_new_tokens": 8},
        "stage2": {"dump_every": 1, "dump_samples": 1},
        "training": {
            "output_dir": "set by the worker",
            "use_cpu": True,
            "save_steps": 1,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "per_device_train_batch_size": 2,
            "packing": True,
            "packing_buffer": 32,
            "packing_min_fill_ratio": 0.1,
            "report_to": "tensorboard",
        },
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.timeout(1500)  # three minutes on two free cores
def test_whatever_happens_to_a_file_of_a_run_it_resumes_exactly_or_the_file_is_named(tmp_path):
    file = config(tmp_path)
    workers = []
    for part in range(WORKERS):
        folder = tmp_path / str(part)
        folder.mkdir()
        words = ["-m", "tests.integration.run_faults", file, folder, part, WORKERS]
        with (folder / "outcomes.jsonl").open("w") as outcomes:
            workers.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    env=os.environ | {"PYTHONPATH": f"{SOURCE}:{ROOT}", "OMP_NUM_THREADS": "1"},
                    cwd=ROOT,
                    stdout=outcomes,
                )
            )
    try:
        for worker in workers:
            worker.wait()
    finally:
        for worker in workers:
            worker.kill()
    outcomes = [
        line for file in sorted(tmp_path.glob("*/outcomes.jsonl")) for line in file.read_text().splitlines()
    ]
    rows = [json.loads(line) for line in outcomes]
    assert [worker.returncode for worker in workers] == [0] * WORKERS
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for row in rows:
        table[row["file"]][row["fault"]] = row["outcome"]
    print_matrix(table)
    failed = [f"{row['file']}, {row['fault']}: {row['outcome']}" for row in rows if "FAILED" in row["outcome"]]
    assert not failed, "\n\n".join(failed)
    files = {name.partition("/")[2] for name in table if name.startswith("checkpoint-")}
    assert {"manifest.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "stream_0.json"} <= files
    assert {"metrics.jsonl", "run.json", "resolved.yaml", "runs/events", "dumps/tokenizer.json"} <= set(table)
    for name, outcomes in table.items():
        if name.startswith("checkpoint-3/"):
            assert outcomes["killed"] == "killed; exact from checkpoint-2"
            assert outcomes["no room"] == "error; exact from checkpoint-2"
        if name.startswith("checkpoint-2/"):
            assert set(outcomes.values()) == {"exact from checkpoint-1"}


def print_matrix(table: dict[str, dict[str, str]]) -> None:
    for faults in (FAULTS_OF_WRITES, FAULTS_AFTERWARDS):
        rows = [
            [name, *(outcomes.get(fault, "-").partition("\n")[0] for fault in faults)]
            for name, outcomes in table.items()
            if any(fault in outcomes for fault in faults)
        ]
        rows = [["file", *faults], *rows]
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print()
