"""Soak test: one real server gets thousands of weight updates and requests, and must neither grow nor slow down.

python benchmarks/soak.py                                            2,000 updates and 20,000 requests
python benchmarks/soak.py --updates 60 --requests 600 --every 2      a short one
python benchmarks/soak.py --json soak.json --svg soak.svg            also writes the samples and a picture

The benchmark starts `coordexp serve` with the demo model. A learner's own client and sender update the weights,
which alternate between two sets, and ask for answers after each update. Every answer is compared with that of
the learner's own model for this set of weights. After every `--every` updates, while nothing runs, it reads the
memory (USS, the pages that no other process has), the open files and the threads of each process of the server and
of this one, the segments of shared memory, and the load average of the machine. Times are medians since the
previous sample. Ctrl-C or SIGTERM ends the run after the current update, with the results so far.

The first 30 % of the updates are warm-up, in which every block of the KV cache is used once and allocators reach
their size. In a shorter run the cache still fills up after it. The rest gives the Theil-Sen slope of each quantity
with its 95 % confidence interval. The goal of each is a slope of zero within noise: zero is in the interval, or
the drift over the whole measured part is less than 1 % of the median (5 % for times, because other work on the
machine changes them). Times are also divided by the learner's CPU time of the same updates: its work is the same
each time, so a machine that becomes slower changes both. The load average has no goal: it tells what else the
machine did.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from bare import draw_images
from rich.progress import Progress
from scipy.stats import theilslopes
from server import DEMO, ROOT, ServedLearner, serve, write_config

from coordexp.rollout.backend import Decode, ImageRef, Request

sys.path.insert(0, str(ROOT))  # for the tests, which are not installed
from tests.integration.leavings import find_segments

IMAGES, TOKENS = 32, 24
WARM_UP = 0.3  # of the updates
# GiB of the KV cache. A request takes the block that was unused for the longest time, and the memory of a block
# counts once it was used: 6,000 requests of a block each use all of a cache of 1 GiB.
KV_CACHE = "1"
CONFIDENCE = 0.95
DRIFT, DRIFT_OF_TIMES = 0.01, 0.05  # of the median, over the measured part
NOISE = 0.05  # of the standard deviation of each weight: the second set of weights
CLIENT, HTTP = "learner", "HTTP server"
ROLES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "engine worker"}  # by the names that vLLM gives them
SEEN, MACHINE = "seen from the learner", "machine"
TITLES = {
    "memory": "memory (USS), MB",
    "files": "open files",
    "threads": "threads",
    "segments": "segments of shared memory",
    "update": "milliseconds per weight update",
    "call": "milliseconds per call",
    "health": "milliseconds of the health route",
    "cpu": "CPU milliseconds per update and its call",
    "relative": "CPU time, relative to that of the learner",
    "load": "load average of the last minute",
}
TIMES = ("update", "call", "health", "cpu", "relative")
Sample = dict[str, Any]


class Watch:
    """Reads the resources of a server's processes and of this one."""

    def __init__(self, server: psutil.Process) -> None:
        self.processes = {HTTP: server, CLIENT: psutil.Process()}
        for process in server.children(recursive=True):
            name = " ".join(process.cmdline())
            role = next((role for prefix, role in ROLES.items() if name.startswith(prefix)), None)
            if role:
                self.processes[role] = process
        self.server, self._cpu = server, self._cpu_seconds()

    def sample(self, rounds: int) -> Sample:
        """Return the resources of now, by process. `rounds` updates were made since the previous sample."""
        before, self._cpu = self._cpu, self._cpu_seconds()
        family = [self.server, *self.server.children(recursive=True)]
        cpu = {name: 1000 * (self._cpu[name] - before[name]) / max(rounds, 1) for name in self.processes}
        return {
            "memory": {name: process.memory_full_info().uss / 1e6 for name, process in self.processes.items()},
            "files": {name: process.num_fds() for name, process in self.processes.items()},
            "threads": {name: process.num_threads() for name, process in self.processes.items()},
            "segments": {HTTP: len(set[str]().union(*(find_segments(process.pid) for process in family)))},
            "cpu": cpu,
            "relative": {name: cpu[name] / cpu[CLIENT] for name in cpu if name != CLIENT},
            "load": {MACHINE: os.getloadavg()[0]},
            "processes": len(family),
        }

    def _cpu_seconds(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}


class WeightSets:
    """Two sets of weights that the learner's model takes in turn, and its own answers with each of them."""

    def __init__(self, learner: ServedLearner, requests: Sequence[Request]) -> None:
        self.learner = learner
        draws = torch.Generator().manual_seed(1)
        first = [weight.detach().clone() for weight in learner.model.parameters()]
        noise = [torch.randn(weight.shape, generator=draws) for weight in first]
        second = [w + NOISE * w.std().nan_to_num() * n for w, n in zip(first, noise, strict=True)]
        self.sets = (first, second)
        self.answers: list[dict[ImageRef, tuple[int, ...]]] = []
        for number in range(2):
            self.use(number)
            rollouts = learner.own.generate(requests)
            self.answers.append({r.image: tuple(a.ids) for r, a in zip(requests, rollouts, strict=True)})
        assert self.answers[0] != self.answers[1], "the two sets of weights must answer differently"

    @torch.no_grad()
    def use(self, number: int) -> None:
        for weight, value in zip(self.learner.model.parameters(), self.sets[number], strict=True):
            weight.copy_(value)


@dataclass
class Soak:
    """The run: its size, its samples, and the answers that differ from those of the learner."""

    updates: int
    requests: int
    every: int
    samples: list[Sample] = field(default_factory=list)
    wrong: int = 0
    is_ended: bool = False  # by a signal

    def end(self, *_: Any) -> None:
        """End the run after the current update."""
        self.is_ended = True

    def run(self, progress: Progress) -> None:
        task = progress.add_task("a server", total=self.updates)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            images = draw_images(folder / "data", IMAGES)
            file = write_config(folder, DEMO, "soak")
            with serve(file) as url:
                (server,) = [p for p in psutil.Process().children() if "serve" in p.cmdline()]
                learner = ServedLearner(file, url, images)
                requests = [Request(image, Decode.greedy(TOKENS)) for image in images]
                sets = WeightSets(learner, requests)
                with closing(learner.backend), httpx.Client(base_url=url, trust_env=False) as http:
                    self._repeat(learner, sets, requests, Watch(server), http, lambda: progress.advance(task))

    def _repeat(
        self,
        learner: ServedLearner,
        sets: WeightSets,
        requests: Sequence[Request],
        watch: Watch,
        http: httpx.Client,
        advance: Callable[[], None],
    ) -> None:
        stream, began, asked = cycle(requests), time.monotonic(), 0
        milliseconds: dict[str, list[float]] = {"update": [], "call": [], "health": []}

        def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
            since = time.perf_counter()
            result = call(*arguments)
            milliseconds[name].append(1000 * (time.perf_counter() - since))
            return result

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.end)
        for update in range(1, self.updates + 1):
            if self.is_ended:
                break
            sets.use(update % 2)
            timed("update", learner.sync)
            due = self.requests * update // self.updates - asked
            batch, asked = list(islice(stream, due)), asked + due
            rollouts = timed("call", learner.backend.generate, batch)
            expected = sets.answers[update % 2]
            self.wrong += sum(tuple(a.ids) != expected[r.image] for r, a in zip(batch, rollouts, strict=True))
            timed("health", http.get, "/health/").raise_for_status()
            advance()
            if update % self.every == 0:
                medians = {name: {SEEN: statistics.median(values)} for name, values in milliseconds.items()}
                place = {"update": update, "asked": asked, "seconds": time.monotonic() - began}
                self.samples.append({"at": place} | watch.sample(self.every) | medians)
                for values in milliseconds.values():
                    values.clear()

    @property
    def first_measured(self) -> int:
        return int(WARM_UP * self.updates)

    def curves(self) -> dict[tuple[str, str], list[tuple[float, float]]]:
        """Return the points of each quantity of each process, warm-up included."""
        return {
            (quantity, name): [(sample["at"]["update"], sample[quantity][name]) for sample in self.samples]
            for quantity in TITLES
            for name in (self.samples[0][quantity] if self.samples else ())
        }

    def slopes(self) -> list[dict[str, Any]]:
        """Return the slope of each quantity, per 1,000 updates, and whether its goal is reached. There is none if
        the run ended in the warm-up."""
        results: list[dict[str, Any]] = []
        for (quantity, name), points in self.curves().items():
            kept = [point for point in points if point[0] > self.first_measured]
            if len(kept) > 1:
                goal = {"ok": None} if quantity == "load" else {}
                results.append({"quantity": quantity, "process": name, **fit(kept, quantity in TIMES), **goal})
        return results


def fit(points: Sequence[tuple[float, float]], is_time: bool) -> dict[str, Any]:
    """Return the median of the values, their Theil-Sen slope per 1,000 steps with its interval, the drift over all
    points as a share of the median, and whether that is zero within noise."""
    across, values = zip(*points, strict=True)
    slope, _, low, high = map(float, theilslopes(values, across, CONFIDENCE))
    median = statistics.median(values)
    drift = slope * (across[-1] - across[0]) / median if median else 0.0
    return {
        "median": median,
        "slope": 1000 * slope,
        "low": 1000 * low,
        "high": 1000 * high,
        "drift": drift,
        "ok": low <= 0 <= high or abs(drift) < (DRIFT_OF_TIMES if is_time else DRIFT),
    }


def draw_picture(soak: Soak) -> str:
    """Return an SVG with a panel per quantity. A curve of times as the learner sees them has a name of its own."""
    import line_chart  # from tools/, which `main` adds to the path

    curves = soak.curves()
    names = [HTTP, *ROLES.values(), CLIENT, SEEN, MACHINE]
    panels = {title: [curves.get((key, name), []) for name in names] for key, title in TITLES.items()}
    across = ticks(soak.samples[-1]["at"]["update"])
    most = {title: max(value for points in parts for _, value in points) for title, parts in panels.items()}
    axes = {title: line_chart.Axes(across, ticks(value), name="updates") for title, value in most.items()}
    return line_chart.draw(names, panels, axes)


def ticks(most: float) -> list[float]:
    """Return round values from zero to at least `most`."""
    power = 10.0 ** len(str(int(most))) / 100
    step = next(power * k for k in (1, 2, 2.5, 5, 10, 20, 25, 50) if power * k * 4 >= most)
    return [step * k for k in range(5)]


def show(soak: Soak, slopes: Sequence[dict[str, Any]]) -> None:
    last = soak.samples[-1]["at"]
    loads = [sample["load"][MACHINE] for sample in soak.samples]
    print(
        f"{last['update']} of {soak.updates} updates, {last['asked']} requests, {last['seconds'] / 60:.1f} minutes"
    )
    print(f"load average: {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}")
    print(f"answers that differ from the learner's own: {soak.wrong}")
    print(f"slopes per 1,000 updates after the first {soak.first_measured}, with intervals of {CONFIDENCE:.0%}")
    for row in slopes:
        name = f"{TITLES[row['quantity']]}, {row['process']}"
        interval = f"{row['low']:+.3g} to {row['high']:+.3g}"
        goal = {True: "ok", False: "not reached", None: "no goal"}[row["ok"]]
        print(
            f"{name:<66} {row['median']:>8.4g}  {row['slope']:+9.3g}  {interval:>22}  {row['drift']:+7.2%}  {goal}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000, help="weight updates")
    parser.add_argument("--requests", type=int, default=20_000, help="requests, divided among the updates")
    parser.add_argument("--every", type=int, default=20, help="updates between two samples")
    parser.add_argument("--json", type=Path, help="file for the samples")
    parser.add_argument("--svg", type=Path, help="file for the picture")
    options = parser.parse_args()
    sys.path.append(str(ROOT / "tools"))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = KV_CACHE
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the server ends too
    soak = Soak(options.updates, options.requests, options.every)
    with Progress(transient=True) as progress:
        soak.run(progress)
    if not soak.samples:
        sys.exit(f"The run ended before its first sample, after {options.every} updates.")
    slopes = soak.slopes()
    if options.json:
        content = {"wrong": soak.wrong, "slopes": slopes, "samples": soak.samples}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(draw_picture(soak))
    show(soak, slopes)
    sys.exit(bool(soak.wrong) or not slopes or any(row["ok"] is False for row in slopes))


if __name__ == "__main__":
    main()
