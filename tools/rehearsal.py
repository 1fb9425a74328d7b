"""Take random weights of a published size through a whole run on a CPU, and measure each command.

    python tools/rehearsal.py --out rehearsal --size 2b

Prints a table: seconds, and the largest memory of all processes of a command together, mapped files included.
Commands that have ended are not run again, so an interrupted rehearsal goes on with the command that it was at.
For 2b expect two hours on two cores, 20 GB of memory and 25 GB of disk.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[1]
SIDE = 1024  # pixels of an image
SIDE_IN_STAGE_2 = 256  # to which images are reduced: in 16 bits a CPU takes 7 minutes to read one of 1024 pixels
# glibc keeps freed blocks below this size, which grows up to 32 MB by itself: activations of 2B are that large.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}


@dataclass(frozen=True)
class Command:
    """A command of coordexp, or of another program, and the file or folder that it writes, which is removed before
    it is run again."""

    name: str
    words: list[str]
    output: str | None = None
    program: tuple[str, ...] = ("-m", "coordexp")


def commands(out: Path, size: str) -> Iterator[Command]:
    """Yield the commands in order."""
    model, data, merged = out / "model", out / "scenes", out / "merged"
    stage1, stage2 = (_write(out, name, config) for name, config in _configs(out).items())
    random = out / "random"
    published = (str(ROOT / "tools/published.py"),)
    yield Command("tools/published.py", ["--size", size, "--out", str(random)], "random", published)
    scenes = ["--train", "2", "--val", "1", "--side", str(SIDE), "--objects", "1-1"]
    yield Command("demo scenes", ["demo", "scenes", "--out", str(data), *scenes], "scenes")
    yield Command(
        "model add-coords", ["model", "add-coords", "--model", str(random), "--out", str(model)], "model"
    )
    yield Command("check", ["check", "--config", str(stage1)])
    yield Command("train, Stage 1, two steps", ["train", "--config", str(stage1)], "stage1")
    adapter = ["--adapter", str(out / "stage1/checkpoint-2"), "--model", str(model)]
    yield Command("model merge", ["model", "merge", *adapter, "--out", str(merged)], "merged")
    machine = ["--gpus", "2", "--memory", "24"]
    yield Command("plan", ["plan", "--config", str(stage2), *machine])
    yield Command("launch, Stage 2, one step", ["launch", "--config", str(stage2), "--cpu"], "stage2")
    answers = ["--out", str(out / "preds.json"), "--max-new-tokens", "16"]
    yield Command(
        "predict", ["predict", "--model", str(merged), "--data", str(data / "val.jsonl"), *answers], "preds.json"
    )


def _configs(out: Path) -> dict[str, dict[str, Any]]:
    """Return the configs of both stages. In Stage 2 the weights have 16 bits, which a CPU multiplies slowly:
    learner and server in float32 would need 17 GB for their weights alone."""
    shared: dict[str, Any] = {
        "custom": {f"{part}_jsonl": str(out / f"scenes/{part}.jsonl") for part in ("train", "val")},
        "training": {
            "use_cpu": True,
            "bf16": False,
            "packing": False,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "eval_strategy": "no",
            "save_steps": 1,
            "report_to": [],
        },
    }
    adapter = {"rank": 8, "train_coord_rows": False}
    server = {"base_url": "http://127.0.0.1:8137", "group_port": 51337}
    stage1 = {
        "extends": [os.path.relpath(ROOT / "configs/stage1.yaml", out)],
        "model": {"path": str(out / "model"), "dtype": "float32", "adapter": adapter, "max_pixels": SIDE**2},
        "training": {"output_dir": str(out / "stage1"), "max_steps": 2},
    }
    stage2 = {
        "extends": [os.path.relpath(ROOT / "configs/stage2.yaml", out)],
        "model": {
            "path": str(out / "merged"),
            "dtype": "bfloat16",
            "adapter": adapter,
            "max_pixels": SIDE_IN_STAGE_2**2,
        },
        "training": {"output_dir": str(out / "stage2"), "max_steps": 1},
        "global_max_length": 1536,
        "rollout_matching": {
            "rollout_backend": "vllm",
            "decode_batch_size": 1,
            "max_new_tokens": 16,
            "vllm": {
                "mode": "server",
                "gpu_memory_utilization": 0.3,
                "enforce_eager": True,
                "server": {"servers": [server], "timeout_s": 3600, "infer_timeout_s": 3600, "hung_after_s": 3600},
                "sync": {"timeout_s": 1800},
            },
        },
    }
    return {"stage1.yaml": _merge(shared, stage1), "stage2.yaml": _merge(shared, stage2)}


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both trees as one. Where both have a value, the second counts."""
    merged = first | second
    for key in first.keys() & second.keys():
        if isinstance(first[key], dict) and isinstance(second[key], dict):
            merged[key] = _merge(first[key], second[key])
    return merged


def _write(out: Path, name: str, config: dict[str, Any]) -> Path:
    (out / name).write_text(yaml.safe_dump(config, sort_keys=False))
    return out / name


def measure(command: Command, log: Path) -> dict[str, float]:
    """Run a command, with its output in `log`. Return its seconds and its largest memory in GiB."""
    began, most, words = time.monotonic(), 0, [*command.program, *command.words]
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=file, env=os.environ | ENVIRONMENT
        )
        while process.poll() is None:
            most = max(most, _memory(process.pid))  # takes a second of processor time for a large process
            time.sleep(0.5 if time.monotonic() - began < 60 else 20)
    if process.returncode:
        sys.exit(f"{' '.join(words)} exited with {process.returncode}:\n{log.read_text()[-3000:]}")
    return {"seconds": time.monotonic() - began, "gibibytes": most / 2**30}


def _memory(pid: int) -> int:
    """Return the bytes that a process and its descendants have in memory. Shared pages count once."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                total += process.memory_full_info().pss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=("2b", "4b", "8b"), default="2b")
    options = parser.parse_args()
    out = options.out.resolve() / options.size
    out.mkdir(parents=True, exist_ok=True)
    record = out / "costs.json"
    costs: dict[str, dict[str, float]] = json.loads(record.read_text()) if record.exists() else {}
    for command in commands(out, options.size):
        if command.name not in costs:
            print(f"{time.strftime('%H:%M:%S')} {command.name}", flush=True)
            if command.output:
                _remove(out / command.output)
            costs[command.name] = measure(command, out / f"{command.name.replace(' ', '-').replace('/', '-')}.log")
            record.write_text(json.dumps(costs, indent=1))
    print("| command | seconds | GiB |\n| --- | --- | --- |")
    for name, cost in costs.items():
        print(f"| {name} | {cost['seconds']:.0f} | {cost['gibibytes']:.1f} |")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
