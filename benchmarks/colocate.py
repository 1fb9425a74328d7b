"""What a vLLM engine beside the learner costs against the bare engine, on this machine.

python benchmarks/colocate.py            a table
python benchmarks/colocate.py --json     {name: {"value": x, "goal": y, "ok": true}}

Each is a ratio within one run, medians of calls made in turn:
- tokens a second by the backend, against `LLM.generate` on the same requests with the pictures in memory. Caches
  are emptied before each.
- bytes a second of a sync (from the learner's weights to a committed version), against a copy of the same bytes
  within the learner; on a model of 460 MB, and on the demo's of 2 MB, where it is a matter of calls.
- the share of a training step that the sync takes, by the demo's Stage 2.
- the time until an engine is ready, against that of a bare one with the same settings, each in its own process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from bare import Bare, Learning, bare_engine, drawn_pictures, written
from ratios import at_least, at_most, main, medians, shown
from rich.progress import Progress

from coordexp.config.rollout import VLLM, RolloutMatching
from coordexp.demo.model import Size, make_model
from coordexp.rollout.backend import Decode, Picture, Request
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.engine import start_engine, stop_engine
from coordexp.rollout.setup import Setup
from coordexp.vocab import VocabularyTable

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "examples/stage2-cpu/model"
LARGE = Size(hidden=1024, layers=12, heads=8)
REQUESTS, TOKENS, REPEATS = 32, 200, 5
SETTINGS = RolloutMatching(
    decode_batch_size=16,
    max_new_tokens=TOKENS,
    vllm=VLLM(gpu_memory_utilization=0.15, enforce_eager=True, max_model_len=512, tensor_parallel_size=1),
)


class Nothing:
    def drop(self) -> None:
        pass


class Beside(Learning):
    """A learner and its engine."""

    def __init__(self, folder: Path, pictures: list[Picture]) -> None:
        super().__init__(folder)
        room = lambda: nullcontext(Nothing())  # noqa: E731
        self.backend = ColocateBackend(_about(folder), self.prompts, self.own, pictures[0], room)
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        with self.backend.session():
            self.backend.sync(self.weights, self.version)


def _about(folder: Path) -> Setup:
    return Setup(folder, "float32", SETTINGS, VocabularyTable.from_folder(folder), torch.device("cpu"))


def generation(beside: Beside, pictures: list[Picture]) -> dict[str, Any]:
    """Greedy answers have the same tokens both ways, so the ratio of times is that of tokens a second."""
    end = beside.backend.about.table.end_of_turn
    bare = Bare(beside.backend.engine, beside.prompts, end, pictures, TOKENS)
    requests = [Request(picture, Decode.greedy(TOKENS)) for picture in pictures]
    tokens = [0]

    def ours() -> None:
        with beside.backend.session():
            tokens[0] = written(beside.backend.generate(requests))

    times = medians({"bare": bare.generate, "ours": ours}, before=bare.forget)
    assert bare.tokens == tokens[0], (bare.tokens, tokens)
    return {
        "tokens a second / bare LLM.generate": at_least(times["bare"] / times["ours"], 0.95),
        "tokens a second": shown(tokens[0] / times["ours"]),
    }


def sending(beside: Beside, name: str, goal: float | None) -> dict[str, Any]:
    weights = [weight for _, weight in beside.weights()]
    copies = [torch.zeros_like(weight) for weight in weights]

    def copy() -> None:
        for to, weight in zip(copies, weights, strict=True):
            to.copy_(weight)

    times = medians({"copy": copy, "sync": beside.sync})
    size = sum(weight.nbytes for weight in weights)
    ratio = times["copy"] / times["sync"]
    return {
        f"bytes a second of a sync / copy, {name}": shown(ratio) if goal is None else at_least(ratio, goal),
        f"megabytes a second of a sync, {name}": shown(size / times["sync"] / 1e6),
    }


def share_of_step(folder: Path) -> dict[str, Any]:
    """As `time/sync` and `time/step` of a run have it, without the first step."""
    drawn = {f"{name}_jsonl": str(folder / f"data/{name}.jsonl") for name in ("train", "val")}
    tree = {
        "extends": [os.path.relpath(ROOT / "configs/demo/stage2-vllm.yaml", folder)],
        "model": {"path": str(DEMO)},
        "custom": {"trainer_variant": "stage2_rollout_aligned", **drawn},
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
    return {"share of a training step that the sync takes": shown(statistics.median(shares))}


def start(kind: str, folder: Path) -> float:
    """In this process, from before vLLM is imported."""
    since = time.perf_counter()
    if kind == "ours":
        engine = start_engine(_about(folder))
    else:
        vllm = SETTINGS.vllm
        assert vllm.max_model_len is not None
        most = SETTINGS.decode_batch_size
        engine = bare_engine(folder, most, vllm.max_model_len, vllm.gpu_memory_utilization)
    spent = time.perf_counter() - since
    stop_engine(engine.llm_engine.engine_core)
    return spent


def start_up() -> dict[str, Any]:
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for round in range(REPEATS):
        for kind in sorted(times, reverse=round % 2 == 1):
            command = [sys.executable, __file__, "--start", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            times[kind].append(float(done.stdout.splitlines()[-1]))
    bare, ours = (statistics.median(found) for found in times.values())
    return {"start-up / bare engine": at_most(ours / bare, 1.05), "start-up, seconds": shown(ours)}


def measure(progress: Progress) -> dict[str, dict[str, Any]]:
    task = progress.add_task("start-up", total=4)
    results = start_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pictures = drawn_pictures(folder / "data", REQUESTS)
        progress.update(task, advance=1, description="generation")
        small = Beside(DEMO, pictures)
        results |= generation(small, pictures) | sending(small, "2 MB", None)
        small.backend.close()
        progress.update(task, advance=1, description="sync")
        large = Beside(make_model(folder / "large", "small", size=LARGE), pictures)
        results |= sending(large, "460 MB", 0.5)
        large.backend.close()
        progress.update(task, advance=1, description="training")
        results |= share_of_step(folder)
        progress.update(task, advance=1)
    return results


if __name__ == "__main__":
    main(__doc__, measure, "--start", {kind: partial(start, kind, DEMO) for kind in ("ours", "bare")})
