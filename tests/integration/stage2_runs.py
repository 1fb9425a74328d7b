"""Stage-2 runs on the committed model and drawn scenes: their configs, their processes, and what they leave."""

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file

from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.tasks import ignore
from tests import zygote
from tests.source import SOURCE
from tests.unit.config.trees import apply_changes

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/scenes-cpu/model"
COUNTED = ("rollout/", "parse/", "match/", "packing/")  # how the names of counters begin


def draw(folder: Path) -> Path:
    """Draw 40 scenes of one or two objects. The model was trained on such scenes, and finds most of the
    objects."""
    write_scenes(folder / "data", SceneSettings(objects=(1, 2)), train=40, val=6, seed=1)
    return folder


def specified_settings() -> dict[str, Any]:
    """Return the section `rollout_matching` of the shipped configs, with the target of the specification."""
    files = (ROOT / "configs" / name for name in ("stage2.yaml", "stage2-specified.yaml"))
    general, specified = (yaml.safe_load(file.read_text())["rollout_matching"] for file in files)
    return general | specified


# What a sample asks for, and the order of its objects, are drawn for every step.
DRAWN = {
    "custom__class_requests": {"rate": 0.5},
    "custom__negatives": {"rate": 0.5},
    "custom__object_order": "random",
}


def config(folder: Path, name: str, **changes: Any) -> Path:
    """Write the config of a run called `name` on the scenes of `folder`, with the shipped objective. Answers
    of two objects are cut off. `changes` are dotted paths with __ for the dots."""
    rollout = specified_settings()
    tree: dict[str, Any] = {
        "model": {"path": str(MODEL), "dtype": "float32"},
        "custom": {
            "trainer_variant": "stage2_rollout_aligned",
            "train_jsonl": str(folder / "data/train.jsonl"),
            "val_jsonl": str(folder / "data/val.jsonl"),
        },
        "global_max_length": 256,
        "rollout_matching": rollout | {"rollout_backend": "hf", "decode_batch_size": 4, "max_new_tokens": 48},
        "training": {
            "output_dir": str(folder / name),
            "use_cpu": True,
            "max_steps": 4,
            "save_steps": 4,
            "logging_steps": 1,
            "learning_rate": 5e-4,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "packing": True,
            "packing_buffer": 32,
            "packing_min_fill_ratio": 0.5,
            "report_to": "none",
        },
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(apply_changes(tree, **changes)))
    return file


def training(file: Path, *options: str) -> list[str]:
    return ["-m", "src.sft", "--config", str(file), *options]


@dataclass
class Started:
    process: zygote.Program
    log: Path
    began: float

    def wait(self, seconds: float) -> int:
        return self.process.wait(timeout=seconds)

    @property
    def shown(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> dict[int, str]:
        """Return the living processes of this run, each with its command."""
        left = {}
        for process in self.process.processes():
            with suppress(psutil.NoSuchProcess):
                left[process.pid] = " ".join(process.cmdline()) or process.name()
        return left

    def remains(self, seconds: float = 10, meanwhile: Callable[[], None] = ignore) -> dict[int, str]:
        """Return what is left after some seconds to end: Python's resource trackers end a moment after their
        process. `meanwhile` is called again and again."""
        until = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < until:
            meanwhile()
            time.sleep(0.1)
        return left

    def rank(self, rank: int) -> int:
        """Return the process of a rank. Python's resource tracker may be below it."""
        ranks = []
        for process in self.process.processes():
            with suppress(psutil.Error):  # it has just ended
                ranks += [process] if process.environ().get("RANK") == str(rank) else []
        return min(ranks, key=psutil.Process.create_time).pid


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}:{SOURCE}", "OMP_NUM_THREADS": "1"}


@contextmanager
def started(words: list[str], processes: int = 1, **variables: str) -> Iterator[Started]:
    """Start Python with these arguments, alone or with torchrun. Whatever is left of it at the end is killed."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "shown"
        with log.open("wb") as file:
            process = zygote.start(
                [*(launch if processes > 1 else []), *words],
                cwd=ROOT,
                env=environment() | variables,
                stdout=file.fileno(),
                stderr=file.fileno(),
            )
        try:
            yield Started(process, log, time.monotonic())
        finally:
            process.close()


def replayed_steps(shown: str) -> int:
    """Return the number of steps whose dumps came out the same. Images that come again are dumped at more than
    the chosen steps."""
    (steps,) = re.findall(r"^\d+ examples of (\d+) steps come out the same$", shown, re.MULTILINE)
    return int(steps)


def finish(words: list[str], processes: int = 1, seconds: float = 400, **variables: str) -> str:
    """Run it to its end, which must be exit code 0, and return what it printed."""
    with started(words, processes, **variables) as run:
        code = run.wait(seconds)
        assert code == 0, run.shown[-5000:]
        return run.shown


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the log lines of a run's steps and evaluations, without measured times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "time/", "train_")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "loss" in line]


def check_losses(run: Path, own: Path, count: int) -> None:
    """Check that a run of `count` steps has the losses and counters of one whose learner answers itself."""
    expected = steps(own)
    check_steps(steps(run), expected)
    assert len({line["loss"] for line in expected}) == len(expected) == count


def check_steps(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare steps, losses and counters. A sample that was lost or trained twice would change them."""
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    apart = max(abs(line["loss"] - other["loss"]) for line, other in zip(actual, expected, strict=True))
    print(f"largest difference of a loss: {apart:.1e}")
    assert apart <= 1e-5
    for line, other in zip(actual, expected, strict=True):
        assert "rollout/answers" in counters(other)
        assert {name: line[name] for name in counters(other)} == counters(other)


def counters(line: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step that a sample which was lost or trained twice would change."""
    return {name: value for name, value in line.items() if name.startswith(COUNTED)}
