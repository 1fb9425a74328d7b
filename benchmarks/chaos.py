"""Train with real rollout servers while processes, connections, disk and checkpoints fail, and compare the result
with runs that nothing disturbed.

python benchmarks/chaos.py --minutes 60 --seed 1             a table; exits 1 if anything differs or is left
python benchmarks/chaos.py --minutes 60 --seed 1 --json FILE the same, with every fault and round in a file

Two servers and a learner run in rounds of 24 steps: one rank, two ranks under `coordexp launch`, and one rank with
rollouts ahead of time (`stage2.max_staleness: 1`) take turns. In each round, up to six faults are drawn from the
seed. With rollouts ahead of time, only the second server has faults: if both were lost, the missing rollouts would
come from newer weights, as docs/operations.md says. Whatever ends is started again, as a supervisor would do it:
servers anew, the learner with `--resume`. The processes, the proxy and the search for leavings are those of the
tests.

- kill: SIGKILL of one process of a server or of the learner.
- stop: SIGSTOP of a process, and SIGCONT after 1 to 15 s.
- terminate: SIGTERM of a server, or of the learner, which saves and ends.
- delay, drop, truncate: the connections to a server, for 1 to 8 s.
- disk: the file system of the run has no room for 2 to 10 s. (Needs the right to mount; if there is none, the
  benchmark says so and goes on without this fault.)
- checkpoint: the learner is killed, and a file of its newest checkpoint is damaged.

A fault comes at a drawn moment: during rollouts, a weight sync, an evaluation, a save, the start of the learner,
or at any time. After each round, these must be as in the undisturbed run: the steps, each trained once; losses and
counters of all steps; the weights and the optimizer of the last checkpoint, and its place in the stream of
samples. At the end, no process, port, shared memory or temporary file may be left, and servers that lived through
several rounds must not have grown.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

from coordexp.train.checkpoints import checkpoints, is_finished

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests, which are not installed
from tests.integration.faulty_proxy import Relay
from tests.integration.leavings import Leavings, leavings
from tests.integration.servers import Fleet
from tests.integration.stage2_runs import DRAWN, Started, counters, metrics, started, steps

STEPS, SAVED, EVALUATED = 24, 4, 8
MOST_FAULTS = 6  # of a round
MOST_STARTS = 40  # of the learner, in a round
START = 600.0  # seconds for both servers to start
ROUND = 900.0  # seconds after which a round has failed
LEAVING = 15.0  # seconds in which the folder of a server goes that was ended while it started
NETWORK_FAULTS = ("delay", "drop", "truncate")
PHASES = ("rollout", "sync", "evaluation", "save", "start", "any")
PHASE_WAIT = 12.0  # seconds to wait for the drawn phase, before the fault comes regardless
TOLERANCE = 1e-5  # of losses
GROWTH = 1.15  # of a server's memory, after its first round
DISK = 400  # MiB
VARIANTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {},
    "ahead": {"stage2__max_staleness": 1},
}
COMMON = DRAWN | {
    "training__max_steps": STEPS,
    "training__save_steps": SAVED,
    "training__save_total_limit": 3,
    "training__eval_strategy": "steps",
    "training__eval_steps": EVALUATED,
    "training__lr_scheduler_type": "constant",
    "rollout_matching__vllm__server__timeout_s": 120.0,
    "rollout_matching__vllm__sync__timeout_s": 15.0,
}


@dataclass
class Fault:
    """A fault that was drawn, and what became of it."""

    kind: str
    target: str
    phase: str
    seconds: float  # that it lasts
    at_step: int = 0
    recovered_after: float | None = None  # seconds until the next step was trained
    back_after: float | None = None  # seconds until a server that had ended received weights again

    @property
    def server(self) -> int | None:
        """The server that it hits, if it hits one."""
        return None if self.target == "learner" else int(self.target.removeprefix("server "))


@dataclass
class Network:
    """The connections to one server. While a fault lasts, it hits each part that passes with some probability."""

    draw: random.Random
    kind: str = ""
    seen: Counter[str] = field(default_factory=Counter)  # calls that have passed, by path

    def alter(self, part: bytes, is_answer: bool) -> bytes | None:
        if not is_answer and part.startswith(b"POST /"):
            self.seen[part.split(b" ", 2)[1].decode(errors="replace")] += 1
        if not self.kind or self.draw.random() < 0.5:
            return part
        if self.kind == "delay":
            time.sleep(self.draw.uniform(0.05, 3))
            return part
        if self.kind == "truncate" and len(part) > 1:
            return part[: self.draw.randrange(1, len(part))]
        return None


class Machine:
    """The servers behind their relays, and a file system for runs that can be filled."""

    def __init__(self, folder: Path, left: Leavings, draw: random.Random) -> None:
        self.fleet = Fleet(folder, 2)
        self.fleet.variables = left.variables | {"VLLM_CPU_KVCACHE_SPACE": "1"}
        self.left, self.problems = left, list[str]()
        self.networks = [Network(random.Random(draw.random())) for _ in range(2)]
        self.relays = [
            Relay(port, network.alter) for port, network in zip(self.fleet.ports, self.networks, strict=True)
        ]
        self.hit: set[int] = set()  # servers that a fault has ended
        self.ended_by_themselves: list[str] = []
        self.starts = 0
        self.runs = folder / "runs"
        self.runs.mkdir()
        size = f"size={DISK}m"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.runs)], capture_output=True
        )
        self.can_fill = mounted.returncode == 0

    def start(self, index: int) -> None:
        self.fleet.launch(index)
        self.starts += 1

    def is_ready(self, index: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.fleet.ports[index]), timeout=1):
            return True
        return False

    def keep(self) -> None:
        """Start servers that have ended. None of their processes may be left."""
        for index in range(2):
            server = self.fleet[index]
            if server.process.poll() is not None:
                if index not in self.hit:
                    end = f"server {index} ended by itself with exit code {server.process.poll()}"
                    self.ended_by_themselves.append(f"{end}: {server.shown[-2000:]}")
                    report(self.ended_by_themselves[-1])
                self.hit.discard(index)
                if left := server.remains(30):
                    self.problems.append(f"server {index} has ended, but processes of it live: {list(left)}")
                self.fleet.stop(index)
                self.start(index)

    def look(self) -> None:
        """Record the shared memory of all servers, to check later that it is gone."""
        for index in range(2):
            with suppress(psutil.NoSuchProcess):
                self.left.look(self.fleet[index].process.pid)

    def sizes(self) -> dict[int, tuple[int, int]]:
        """Return the memory in bytes, and the open files, of each server that runs, by the pid of its main
        process."""
        sizes = {}
        for index in filter(self.is_ready, range(2)):
            with suppress(psutil.NoSuchProcess):
                main = psutil.Process(self.fleet[index].process.pid)
                family = [main, *main.children(recursive=True)]
                memory = sum(process.memory_full_info().uss for process in family)
                sizes[main.pid] = (memory, sum(process.num_fds() for process in family))
        return sizes

    @property
    def balloon(self) -> Path:
        return self.runs / "balloon"

    def fill(self) -> None:
        with suppress(OSError), self.balloon.open("wb") as file:
            while True:
                file.write(bytes(2**16))

    def close(self) -> None:
        """End everything in the orderly way, and record what is left."""
        for index in range(2):
            for number in (signal.SIGCONT, signal.SIGTERM):
                send(self.fleet[index].process.pid, number)
        for index in range(2):
            with suppress(subprocess.TimeoutExpired):
                self.fleet[index].wait(60)
            if left := self.fleet[index].remains(20):
                self.problems.append(f"processes of server {index} are left: {list(left)}")
            if self.is_ready(index):
                self.problems.append(f"port {self.fleet.ports[index]} is still open")
        self.fleet.close()
        for relay in self.relays:
            relay.close()
        if self.can_fill:
            subprocess.run(["umount", "-l", str(self.runs)], check=True)


class Round:
    """One run from its first step to its last, however often its learner is started."""

    def __init__(self, machine: Machine, variant: str, name: str) -> None:
        self.machine, self.variant = machine, variant
        self.folder = machine.runs / name
        servers = [
            {"base_url": relay.url, "group_port": server["group_port"]}
            for relay, server in zip(machine.relays, machine.fleet.servers, strict=True)
        ]
        changes = COMMON | VARIANTS[variant] | {"rollout_matching__vllm__server__servers": servers}
        self.file = machine.fleet.config(name, **(changes | {"training__output_dir": str(self.folder)}))
        self.stack, self.learner = ExitStack(), None
        self.starts, self.began = 0, time.monotonic()
        self.codes: Counter[int] = Counter()
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.away: list[tuple[Fault, float, int]] = []  # servers that were ended: when, and after how many syncs

    def start(self) -> None:
        words = ["-m", "coordexp", "train", "--config", str(self.file), "--resume"]
        if self.variant == "two ranks":
            words[2:3] = ["launch", "--no-servers", "--cpu", "--learners", "2"]
        self.stack = ExitStack()
        self.learner: Started | None = self.stack.enter_context(started(words, **self.machine.fleet.variables))
        self.starts += 1

    def steps(self) -> list[dict[str, Any]]:
        with suppress(OSError, ValueError):
            return steps(self.folder)
        return []

    def syncs(self) -> list[list[int]]:
        """Return the servers that received the weights of each sync."""
        with suppress(OSError, ValueError):
            lines = (self.folder / "servers.jsonl").read_text().splitlines()
            return [event["synced"] for line in lines if (event := json.loads(line))["event"] == "sync"]
        return []

    @property
    def is_done(self) -> bool:
        return self.learner is None and is_finished(self.folder / f"checkpoint-{STEPS}")

    def tick(self) -> None:
        """Do what is due: end faults that have lasted long enough, and start what has ended."""
        time.sleep(0.02)
        if time.monotonic() - self.began > ROUND:
            raise AssertionError(f"the round did not end in {ROUND:g} s")
        self.end_faults()
        self.machine.keep()
        self._look_for_servers()
        if self.learner is None:
            if not self.is_done:
                assert self.starts < MOST_STARTS, "the learner does not get further"
                self.start()
            return
        if (code := self.learner.process.poll()) is not None:
            self._check_end(code)
            self.stack.close()
            self.learner = None

    def end_faults(self) -> None:
        """End the faults that have lasted long enough. A process that is stopped cannot end before that."""
        now = time.monotonic()
        due = [act for when, act in self.later if when <= now]
        self.later = [(when, act) for when, act in self.later if when > now]
        for act in due:
            act()

    def _look_for_servers(self) -> None:
        """Note which servers are back: those that were started again, and have received weights since then."""
        for entry in list(self.away):
            fault, began, count = entry
            if any(fault.server in synced for synced in self.syncs()[count:]):
                fault.back_after = round(time.monotonic() - began, 1)
                self.away.remove(entry)

    def _check_end(self, code: int) -> None:
        self.codes[code] += 1
        shown = self.learner.shown if self.learner else ""
        own = shown.partition("torch/distributed/elastic")[0]  # torchrun has a traceback of its own
        if "Traceback" in own:
            self.machine.problems.append(f"{self.folder.name}: traceback of the learner:\n{own[-3000:]}")
        if self.learner and (left := self.learner.remains(30, self.end_faults)):
            self.machine.problems.append(f"{self.folder.name}: the learner left processes: {list(left)}")

    def wait_until(self, is_reached: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not is_reached():
            if self.is_done or time.monotonic() > until:
                return False
            self.tick()
        return True

    def wait_for_a_step(self) -> None:
        """Wait until a step is trained that was not there before. A resumed run drops steps that it had not
        saved."""
        count = len(self.steps())
        while (now := len(self.steps())) <= count and not self.is_done:
            count = min(count, now)
            self.tick()

    def phase_begins(self, phase: str) -> Callable[[], bool]:
        """Return a function that becomes true in this phase of the run."""
        seen = [network.seen for network in self.machine.networks]

        def calls(*paths: str) -> int:
            return sum(counter[path] for counter in seen for path in paths)

        paths = {"rollout": ("/infer/",), "sync": ("/begin_update/", "/load_bucket/")}.get(phase, ())
        before = calls(*paths)
        if paths:
            return lambda: calls(*paths) > before
        if phase == "evaluation":
            return self._is_evaluating
        if phase == "save":
            return lambda: any(not is_finished(path) for path in checkpoints(self.folder))
        if phase == "start":
            return lambda: self.learner is not None and self.learner.seconds < 8
        return lambda: True

    def _is_evaluating(self) -> bool:
        with suppress(OSError, ValueError, IndexError):
            line = metrics(self.folder)[-1]
            return "loss" in line and line["step"] % EVALUATED == 0
        return False

    def run(self, faults: Iterator[Fault], draw: random.Random, most: int = MOST_FAULTS) -> list[Fault]:
        """Run to the end, with at most so many faults. Return those that happened."""
        done: list[Fault] = []
        self.start()
        try:
            while not self.is_done:
                if len(done) == most:
                    self.tick()
                    continue
                fault = next(faults)
                if self.variant == "ahead":
                    fault.target = fault.target.replace("server 0", "server 1")
                self.wait_until(lambda: False, draw.uniform(0, 4))
                if not self.wait_until(self.phase_begins(fault.phase), PHASE_WAIT):
                    fault.phase = "any"
                self.wait_until(lambda: False, draw.uniform(0, 0.3))
                if self.is_done:
                    break
                fault.at_step = len(self.steps())
                began = time.monotonic()
                if not inject(fault, self, draw):
                    continue
                done.append(fault)
                report(f"step {fault.at_step}: {fault.kind} {fault.target} (phase {fault.phase})")
                if draw.random() < 0.7:  # else the next one comes before the run has recovered
                    self.wait_for_a_step()
                    fault.recovered_after = round(time.monotonic() - began, 1)
        finally:
            for _, act in self.later:
                act()
            self.stack.close()
        return done


def draw_faults(draw: random.Random, can_fill: bool) -> Iterator[Fault]:
    weights = {"kill": 5, "stop": 4, "terminate": 3, "delay": 2, "drop": 2, "truncate": 2}
    weights |= {"checkpoint": 2} | ({"disk": 2} if can_fill else {})
    while True:
        (kind,) = draw.choices(list(weights), list(weights.values()))
        targets = (
            ["server 0", "server 1"] if kind in NETWORK_FAULTS else ["server 0", "server 1", "learner", "learner"]
        )
        target = "learner" if kind in ("disk", "checkpoint") else draw.choice(targets)
        seconds = {"stop": draw.uniform(1, 15), "disk": draw.uniform(2, 10)}.get(kind, draw.uniform(1, 8))
        yield Fault(kind, target, draw.choice(PHASES), round(seconds, 1))


def inject(fault: Fault, run: Round, draw: random.Random) -> bool:
    """Make it happen. Return False if that is impossible at this moment."""
    machine, index = run.machine, fault.server
    if index is not None and fault.kind in NETWORK_FAULTS:
        network = machine.networks[index]
        network.kind = fault.kind
        run.later.append((time.monotonic() + fault.seconds, lambda: setattr(network, "kind", "")))
        return True
    if fault.kind == "disk":
        machine.fill()
        run.later.append((time.monotonic() + fault.seconds, lambda: machine.balloon.unlink(missing_ok=True)))
        return True
    process = run.learner if index is None else machine.fleet[index]
    if process is None or process.process.poll() is not None or not (pids := sorted(process.left())):
        return False
    machine.look()
    if fault.kind == "checkpoint":
        whole = [path for path in checkpoints(run.folder) if is_finished(path)]
        if len(whole) < 2:
            return False
        send(process.process.pid, signal.SIGKILL)
        process.remains(30, run.end_faults)  # its other processes end too, and none writes after the damage
        damage(draw.choice(sorted(path for path in whole[0].rglob("*") if path.is_file())), draw)
    elif fault.kind in ("terminate", "kill"):
        is_kill = fault.kind == "kill"
        send(draw.choice(pids) if is_kill else process.process.pid, signal.SIGKILL if is_kill else signal.SIGTERM)
        if index is not None:
            machine.hit.add(index)
            began = time.monotonic()
            until_ended(process)
            run.away.append((fault, began, len(run.syncs())))
    else:
        chosen = draw.choice(pids)
        send(chosen, signal.SIGSTOP)
        run.later.append((time.monotonic() + fault.seconds, lambda: send(chosen, signal.SIGCONT)))
    return True


def until_ended(process: Started) -> None:
    """Wait until all of a server has ended, at most 15 s. It does if one of its processes is killed."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(15)


def send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def damage(path: Path, draw: random.Random) -> None:
    """Cut the file, or change a byte of it."""
    content = bytearray(path.read_bytes())
    if draw.random() < 0.5 or not content:
        path.write_bytes(content[: len(content) // 2])
        return
    content[draw.randrange(len(content))] ^= 0xFF
    path.write_bytes(content)


@dataclass
class Outcome:
    """The parts of a finished run that must be the same whatever happened."""

    steps: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    stream: list[Any]

    @classmethod
    def of(cls, folder: Path) -> "Outcome":
        last = folder / f"checkpoint-{STEPS}"
        tensors = dict(load_file(last / "model.safetensors"))
        state = torch.load(last / "optimizer.pt", weights_only=True)["state"]
        for index, values in state.items():
            tensors |= {
                f"{index}.{name}": value for name, value in values.items() if isinstance(value, torch.Tensor)
            }
        stream = [json.loads(path.read_text()) for path in sorted(last.glob("stream_*.json"))]
        return cls(steps(folder), tensors, stream)

    def differences(self, expected: "Outcome", may_lack_lines: bool) -> tuple[list[str], float]:
        """Return what differs from the undisturbed run, and the largest difference of a loss or a weight."""
        problems = []
        lines, others = ({line["step"]: line for line in run.steps} for run in (self, expected))
        numbers = [line["step"] for line in self.steps]
        if len(lines) != len(numbers) or numbers != sorted(numbers):
            problems.append(f"steps are not each there once, in order: {numbers}")
        if (lacking := sorted(others.keys() - lines.keys())) and not may_lack_lines:
            problems.append(f"steps without a line: {lacking}")
        gaps = [0.0]
        for step, line in lines.items():
            other = others[step]
            gaps.append(abs(line["loss"] - other["loss"]))
            if not gaps[-1] <= TOLERANCE:  # also if it is NaN
                problems.append(f"step {step}: the loss is {line['loss']}, not {other['loss']}")
            if unlike := [name for name, value in counters(other).items() if line.get(name) != value]:
                problems.append(f"step {step}: other counters: {unlike}")
        if self.tensors.keys() != expected.tensors.keys():
            problems.append("the last checkpoint has other tensors")
        else:
            gaps += [(self.tensors[name] - value).abs().max().item() for name, value in expected.tensors.items()]
            unlike = [name for name, value in expected.tensors.items() if not is_close(self.tensors[name], value)]
            if unlike:
                problems.append(f"tensors of the last checkpoint differ: {unlike[:5]}")
        if self.stream != expected.stream:
            problems.append("the last checkpoint is at another place of the stream of samples")
        return problems, max(gaps)


def is_close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return False if a number differs, or is NaN. Second moments of the optimizer are as small as 1e-8."""
    return torch.allclose(tensor.float(), expected.float(), rtol=1e-4, atol=1e-10)


@contextmanager
def prepared(seed: int) -> Iterator[Machine]:
    with leavings() as left, tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        machine = Machine(Path(folder), left, random.Random(f"network {seed}"))
        try:
            machine.start(0)
            machine.start(1)
            report("starting two servers")
            until = time.monotonic() + START
            while not all(machine.is_ready(index) for index in range(2)):
                assert time.monotonic() < until, f"the servers did not start in {START:g} s"
                machine.keep()
                time.sleep(0.5)
            yield machine
        finally:
            machine.close()
        until = time.monotonic() + LEAVING
        while (remaining := left.left()) and time.monotonic() < until:
            time.sleep(0.2)
        if remaining:
            machine.problems.append(f"left behind: {remaining}")


def report(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def check_growth(sizes: dict[int, list[tuple[int, int]]]) -> list[str]:
    """Return the servers that have grown since the end of their first round."""
    problems = []
    for pid, measured in sizes.items():
        (memory, files), (last_memory, last_files) = measured[0], measured[-1]
        if last_memory > GROWTH * memory:
            problems.append(f"server process {pid} grew from {memory >> 20} to {last_memory >> 20} MiB")
        if last_files > files + 16:
            problems.append(f"server process {pid} had {files} open files, then {last_files}")
    return problems


def run_chaos(minutes: float, seed: int, variants: list[str]) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    sizes: dict[int, list[tuple[int, int]]] = defaultdict(list)
    undisturbed: dict[str, Outcome] = {}
    with prepared(seed) as machine:
        until = time.monotonic() + 60 * minutes
        if not machine.can_fill:
            report("the disk is never full: no right to mount a file system")
        while not rounds or time.monotonic() < until:
            number = len(rounds)
            variant = variants[number % len(variants)]
            if variant not in undisturbed:
                report(f"undisturbed run, {variant}")
                calm = Round(machine, variant, f"calm-{variant.replace(' ', '-')}")
                calm.run(iter(()), random.Random(seed), most=0)
                undisturbed[variant] = Outcome.of(calm.folder)
                shutil.rmtree(calm.folder)
            draw = random.Random(f"{seed} {number}")
            run = Round(machine, variant, f"round-{number}")
            began = time.monotonic()
            faults = run.run(draw_faults(draw, machine.can_fill), draw)
            filled = any(fault.kind == "disk" for fault in faults)
            problems, largest = Outcome.of(run.folder).differences(undisturbed[variant], may_lack_lines=filled)
            machine.problems += [f"round {number} ({variant}): {problem}" for problem in problems]
            shutil.rmtree(run.folder)
            for pid, size in machine.sizes().items():
                sizes[pid].append(size)
            seconds = time.monotonic() - began
            report(f"round {number}, {variant}: {len(faults)} faults in {seconds:.0f} s, {len(problems)} problems")
            rounds.append(
                {
                    "variant": variant,
                    "seconds": round(seconds),
                    "starts of the learner": run.starts,
                    "exit codes": dict(run.codes),
                    "largest difference": largest,
                    "faults": [asdict(fault) for fault in faults],
                }
            )
    return {
        "minutes": minutes,
        "seed": seed,
        "rounds": rounds,
        "starts of servers": machine.starts,
        "servers that ended by themselves": machine.ended_by_themselves,
        "problems": machine.problems + check_growth(sizes),
    }


def show(result: dict[str, Any]) -> None:
    """Print a table of the faults by kind, and the comparison with the undisturbed runs."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in result["rounds"]:
        for fault in entry["faults"]:
            kinds[f"{fault['kind']}, {fault['target'].split()[0]}"].append(fault)
    print(f"{'':<24} {'':>5} {'seconds to the next step':^26} {'until the server is back':^26}")
    print(f"{'fault':<24} {'count':>5} " + 2 * f"{'measured':>8} {'median':>8} {'worst':>8} ")
    for name, faults in sorted(kinds.items()):
        columns = [_summarize(faults, key) for key in ("recovered_after", "back_after")]
        print(f"{name:<24} {len(faults):>5} {' '.join(columns)}".rstrip())
    rounds = result["rounds"]
    starts = sum(entry["starts of the learner"] for entry in rounds)
    largest = max((entry["largest difference"] for entry in rounds), default=0.0)
    total = sum(len(entry["faults"]) for entry in rounds)
    print(f"{len(rounds)} rounds of {STEPS} steps, {total} faults")
    print(f"{starts} starts of the learner, {result['starts of servers']} of servers")
    print(f"{len(result['servers that ended by themselves'])} servers ended by themselves")
    print(f"largest difference of a loss, weight or optimizer state from the undisturbed run: {largest:g}")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    if not result["problems"]:
        print("every step was trained once, nothing differs, nothing is left")


def _summarize(faults: list[dict[str, Any]], key: str) -> str:
    times = [fault[key] for fault in faults if fault[key] is not None]
    return f"{len(times):>8} {statistics.median(times):>8.1f} {max(times):>8.1f}" if times else " " * 26


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--minutes", type=float, default=60, help="the round that is running then is finished")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), help="default: all, in turn")
    parser.add_argument("--json", type=Path, help="a file for every fault and round")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and the mount do not stay
    result = run_chaos(options.minutes, options.seed, options.variant or list(VARIANTS))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    sys.exit(1 if result["problems"] else 0)


if __name__ == "__main__":
    main()
