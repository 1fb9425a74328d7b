"""Measure how long training waits for images that take 100 ms to read: `python benchmarks/images.py`.

The same steps of Stage 1 on the demo model are run twice in this process: with each row made when it is needed,
and with each row made while the one before it is trained. Reading an image is slowed down by sleeping."""

import json
import os
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from coordexp.cli import main as coordexp
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.rollout.prompt import PromptBuilder
from coordexp.train.step import RowLoader

ROOT = Path(__file__).parents[1]
SECONDS, STEPS, ROWS, IMAGES, THREADS = 0.1, 6, 4, 8, 4
read_pixels = PromptBuilder.pixels


def read_slowly(self: PromptBuilder, *arguments: Any) -> Any:
    time.sleep(SECONDS)
    return read_pixels(self, *arguments)


class LazyLoader(RowLoader):
    """Makes a row when it is needed, as releases before this loader did."""

    def begin(self, rows: Any) -> None:
        pass

    def next_row(self, examples: Any) -> Any:
        return self._load(examples)


def waited(folder: Path, name: str) -> tuple[float, float]:
    """Train, and return the median seconds of a step, and those in which it waited for images."""
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage1-cpu.yaml", folder)],
        "model": {"path": str(ROOT / "examples/stage2-cpu/model")},
        "custom": {"train_jsonl": str(folder / "data/train.jsonl"), "val_jsonl": None, "curriculum": []},
        "training": {
            "output_dir": str(folder / name),
            "max_steps": STEPS,
            "per_device_train_batch_size": IMAGES,
            "gradient_accumulation_steps": ROWS,
            "packing": False,
            "dataloader_num_workers": THREADS,
            "eval_strategy": "no",
            "save_strategy": "no",
            "logging_steps": 1,
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    with suppress(SystemExit):
        coordexp(["train", "--config", str(file)])
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][1:]
    return tuple(statistics.median(step[key] for step in steps) for key in ("time/step", "time/pictures"))  # type: ignore[return-value]


def main() -> None:
    PromptBuilder.pixels = read_slowly  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_scenes(folder / "data", SceneSettings(), train=200, val=1, seed=1)
        from coordexp.train import run

        for name, loader in (("when it is needed", LazyLoader), ("ahead", RowLoader)):
            run.RowLoader = loader  # type: ignore[misc]
            step, pictures = waited(folder, name.replace(" ", "-"))
            print(f"a row is made {name}: {pictures:.2f} s of a step of {step:.2f} s wait for images")


if __name__ == "__main__":
    main()
