"""Compare a vLLM engine on the same device as the learner with the bare engine, on this machine.

python benchmarks/colocate.py            a table
python benchmarks/colocate.py --json     {name: {"value": x, "goal": y, "ok": true}}

Each figure is a ratio within one run, of the medians of calls that take turns:

- tokens per second of the backend, compared with `LLM.generate` on the same requests with the images in memory.
  Caches are emptied before each call.
- bytes per second of a sync (from the learner's weights to a committed version), compared with a copy of the same
  bytes within the learner. Measured on a model of 460 MB, and on the demo model of 2 MB, where the cost of calls
  dominates.
- the share of a training step that the sync takes, in Stage 2 of the demo.
- the CPU seconds until an engine is ready, compared with a bare engine with the same settings, each in its own
  process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from bare import BareGeneration, BenchmarkLearner, count_tokens, draw_images, start_bare_engine
from ratios import at_least, at_most, main, medians, without_goal
from rich.progress import Progress

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import VLLM, RolloutMatching
from coordexp.demo.model import Size, make_model
from coordexp.rollout.backend import Decode, ImageRef, Request
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.start import EngineSetup, start_engine

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples/stage2-cpu/model"
LARGE = Size(hidden=1024, layers=12, heads=8)
REQUESTS, TOKENS, STARTS = 32, 200, 3
SETTINGS = RolloutMatching(
    decode_batch_size=16,
    max_new_tokens=TOKENS,
    vllm=VLLM(gpu_memory_utilization=0.15, enforce_eager=True, max_model_len=512, tensor_parallel_size=1),
)


class NothingToDrop:
    """Stands for the memory that a learner offloads. There is none on this CPU."""

    def drop(self) -> None:
        pass


class ColocatedLearner(BenchmarkLearner):
    """A learner with an engine on the same device."""

    def __init__(self, folder: Path, images: list[ImageRef]) -> None:
        super().__init__(folder)
        offload = partial(nullcontext, NothingToDrop())
        self.backend = ColocateBackend(_engine_setup(folder), self.prompts, self.own, images[:1], offload)
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        with self.backend.session():
            self.backend.sync(self.weights, self.version)


def _engine_setup(folder: Path) -> EngineSetup:
    return EngineSetup(folder, "float32", SETTINGS, VocabularyTable.from_folder(folder), torch.device("cpu"))


def measure_generation(learner: ColocatedLearner, images: list[ImageRef]) -> dict[str, Any]:
    """Greedy answers have the same tokens in both cases, so the ratio of times is the ratio of tokens per
    second."""
    bare = BareGeneration(learner.backend.engine, learner.prompts, learner.table.end_of_turn, images, TOKENS)
    requests = [Request(image, Decode.greedy(TOKENS)) for image in images]
    tokens = [0]

    def ours() -> None:
        with learner.backend.session():
            tokens[0] = count_tokens(learner.backend.generate(requests))

    times = medians({"bare": bare.generate, "ours": ours}, before=bare.reset_caches)
    assert bare.tokens == tokens[0], (bare.tokens, tokens)
    return {
        "tokens a second / bare LLM.generate": at_least(times["bare"] / times["ours"], 0.95),
        "tokens a second": without_goal(tokens[0] / times["ours"]),
    }


def measure_sync(learner: ColocatedLearner, name: str, goal: float | None) -> dict[str, Any]:
    weights = [weight for _, weight in learner.weights()]
    copies = [torch.zeros_like(weight) for weight in weights]

    def copy() -> None:
        for target, weight in zip(copies, weights, strict=True):
            target.copy_(weight)

    times = medians({"copy": copy, "sync": learner.sync})
    size = sum(weight.nbytes for weight in weights)
    ratio = times["copy"] / times["sync"]
    return {
        f"bytes a second of a sync / copy, {name}": without_goal(ratio) if goal is None else at_least(ratio, goal),
        f"megabytes a second of a sync, {name}": without_goal(size / times["sync"] / 1e6),
    }


def measure_share_of_step(folder: Path) -> dict[str, Any]:
    """Return the median of `time/sync` divided by `time/step` over the steps of a run, except the first."""
    data = {f"{name}_jsonl": str(folder / f"data/{name}.jsonl") for name in ("train", "val")}
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage2-vllm.yaml", folder)],
        "model": {"path": str(DEMO)},
        "custom": {"trainer_variant": "stage2_rollout_aligned", **data},
        "stage2": None,
        "training": {
            "output_dir": str(folder / "run"),
            "max_steps": 8,
            "eval_strategy": "no",
            "save_strategy": "no",
        },
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    command = [sys.executable, "-m", "coordexp", "train", "--config", str(config)]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "time/step" in line][1:]
    shares = [line["time/sync"] / line["time/step"] for line in steps]
    return {"share of a training step that the sync takes": without_goal(statistics.median(shares))}


def time_start(kind: str, folder: Path) -> float:
    """Start an engine in this process, and return the CPU seconds since before the import of vLLM, also those of
    its own processes."""
    before = cpu_seconds()
    if kind == "ours":
        start_engine(_engine_setup(folder))
    else:
        vllm = SETTINGS.vllm
        assert vllm.max_model_len is not None
        most = SETTINGS.decode_batch_size
        start_bare_engine(folder, most, vllm.max_model_len, vllm.gpu_memory_utilization)
    return cpu_seconds() - before


def cpu_seconds() -> float:
    """Return the seconds of a processor that this process has used, and the processes that it has started."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(time.user + time.system + time.children_user + time.children_system for time in times)


def measure_start_up() -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for round in range(STARTS):
        for kind in sorted(seconds, reverse=round % 2 == 1):
            command = [sys.executable, __file__, "--start", kind]
            result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            seconds[kind].append(float(result.stdout.splitlines()[-1]))
    bare, ours = (statistics.median(of_kind) for of_kind in seconds.values())
    return {
        "CPU seconds of a start / bare engine": at_most(ours / bare, 0.5),
        "CPU seconds of a start": without_goal(ours),
    }


def measure(progress: Progress) -> dict[str, dict[str, Any]]:
    task = progress.add_task("start-up", total=4)
    results = measure_start_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = draw_images(folder / "data", REQUESTS)
        progress.update(task, advance=1, description="generation")
        small = ColocatedLearner(DEMO, images)
        results |= measure_generation(small, images) | measure_sync(small, "2 MB", None)
        small.backend.close()
        progress.update(task, advance=1, description="sync")
        large = ColocatedLearner(make_model(folder / "large", "small", size=LARGE), images)
        results |= measure_sync(large, "460 MB", 0.5)
        large.backend.close()
        progress.update(task, advance=1, description="training")
        results |= measure_share_of_step(folder)
        progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    main(__doc__, measure, "--start", {kind: partial(time_start, kind, DEMO) for kind in ("ours", "bare")})
