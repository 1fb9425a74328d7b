"""Simulate Stage 2 on many GPUs: `python benchmarks/scale.py [--draw FILE.svg]`.

The clock, the servers' devices and the learner's GPUs are simulated, with the constants below. What decides is the
project's own code: the pool and its window of requests, the plan of steps and rollouts ahead, and packing. Answers
have heavy-tailed lengths, and servers fail and come back.
"""

import argparse
import heapq
import itertools
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import line_chart

from coordexp.config import Settings
from coordexp.config.load import load_settings
from coordexp.objective.carry import CarryBuffer
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout, request_seed
from coordexp.servers.pool import Chunk, Loss, Pool, Window, sending_rank
from coordexp.train.encode import MicroBatch, StepIndex, StepPlan
from coordexp.train.metrics import StepMetrics
from coordexp.train.rollouts import RolloutSource
from coordexp.train.stream import RowStream, SampleOrder

T = TypeVar("T")
NODE = 8  # learner ranks of a node


@dataclass(frozen=True)
class Constants:
    """Qwen3-VL-4B on H100 GPUs, images of one megapixel. Estimates, except where a measurement is named."""

    image_tokens: int = 1000
    prompt_tokens: int = 40
    mean_answer: float = 350.0  # tokens, exponentially distributed
    longest_answer: int = 3072
    appended: float = 0.1  # of the answer: the objects that a correction appends
    decode_step: float = 4.7e-3  # seconds, and for each sequence of the batch
    decode_sequence: float = 0.04e-3
    prefill: float = 23e-3  # seconds of a device per request
    front_end: float = 21e-3  # seconds of a server's process per image: measured on one core
    train_token: float = 105e-6  # seconds of a learner's GPU: 40 % of its peak, with gradient checkpointing
    train_overhead: float = 0.3  # seconds of a step: optimizer, reduction of gradients
    correct_sample: float = 1.5e-3  # measured on one core
    weights: float = 8.9e9  # bytes
    network: float = 50e9  # bytes a second of a rank that sends weights
    sync_fixed: float = 0.3  # seconds: calls, caches, the first and the last bucket
    failure: float = 6 * 3600.0  # mean seconds of a server between two failures
    absence: float = 90.0  # seconds until a server that failed is back


def answer_length(seed: int, constants: Constants) -> int:
    """Return how many tokens the answer to a request has: a function of its seed."""
    uniform = (seed * 0x9E3779B97F4A7C15 % 2**64 + 1) / 2**64
    return max(8, min(constants.longest_answer, round(-math.log(uniform) * constants.mean_answer)))


@dataclass
class Answering:
    """A request on a device: the tokens that are left, and what to call at the end."""

    left: float
    done: Callable[[], None]


class Device:
    """A GPU that decodes up to `batch` sequences together. A prefill stops all of them."""

    def __init__(self, clock: "Clock", constants: Constants, batch: int) -> None:
        self.clock, self.constants, self.batch = clock, constants, batch
        self.running: list[Answering] = []
        self.waiting: list[Answering] = []
        self.stalled = self.since = self.busy = 0.0
        self.stamp = 0

    def add(self, answering: Answering) -> None:
        self._advance()
        self.waiting.append(answering)
        self._admit()

    def clear(self) -> None:
        self._advance()
        self.running, self.waiting, self.stalled = [], [], 0.0
        self.stamp += 1

    def _seconds_per_token(self) -> float:
        return self.constants.decode_step + self.constants.decode_sequence * len(self.running)

    def _advance(self) -> None:
        passed, self.since = self.clock.now - self.since, self.clock.now
        if not self.running:
            return
        self.busy += passed
        stalled = min(passed, self.stalled)
        self.stalled -= stalled
        tokens = (passed - stalled) / self._seconds_per_token()
        for answering in self.running:
            answering.left -= tokens

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.batch:
            self.running.append(self.waiting.pop(0))
            self.stalled += self.constants.prefill
        self.stamp += 1
        if self.running:
            seconds = self.stalled + max(0.0, min(a.left for a in self.running)) * self._seconds_per_token()
            stamp = self.stamp
            self.clock.call_at(self.clock.now + seconds, lambda: self._end(stamp))

    def _end(self, stamp: int) -> None:
        if stamp != self.stamp:
            return
        self._advance()
        ended = [answering for answering in self.running if answering.left <= 1e-6]
        self.running = [answering for answering in self.running if answering.left > 1e-6]
        self._admit()
        for answering in ended:
            answering.done()


class RanksInTurn:
    """Runs the ranks as threads, of which one runs at a time. When all of them wait, the clock goes on."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock
        self._changed = threading.Condition()
        self._ready: deque[int] = deque()
        self._turn: int | None = None
        self._own = threading.local()

    def run(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of all works, which begin at the same simulated time."""
        results: dict[int, T] = {}
        self._ready.extend(range(len(works)))

        def work(number: int) -> None:
            self._own.number = number
            self._take_turn()
            results[number] = works[number]()
            self._give_turn()

        for number in range(len(works)):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        while len(results) < len(works):
            while not self._ready:
                self.clock.run_next()
            with self._changed:
                self._turn = self._ready.popleft()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._turn is None)
        return [results[number] for number in range(len(works))]

    def wait_for(self, part: "Started") -> None:
        """Let other ranks run until the rollouts of this part are there."""
        if part.left:
            part.whose = self._own.number
            self._give_turn()
            self._take_turn()

    def note_answers(self, part: "Started", count: int) -> None:
        part.left -= count
        if count and not part.left and part.whose is not None:
            self._ready.append(part.whose)

    def _take_turn(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == self._own.number)

    def _give_turn(self) -> None:
        with self._changed:
            self._turn = None
            self._changed.notify_all()


class Clock:
    """Simulated time, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def call_at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))

    def advance_to(self, when: float) -> None:
        while self._events and self._events[0][0] <= when:
            self.run_next()
        self.now = max(self.now, when)

    def run_next(self) -> None:
        when, _, action = heapq.heappop(self._events)
        self.now = max(self.now, when)
        action()


class Server:
    """A process that prepares images one after the other, in front of one or several devices."""

    def __init__(self, clock: Clock, constants: Constants, devices: int, batch: int) -> None:
        self.clock, self.constants = clock, constants
        self.devices = [Device(clock, constants, batch) for _ in range(devices)]
        self.is_up, self._front_free = True, 0.0
        self.lost: list[Callable[[], None]] = []  # what to call if it fails now

    def ask(self, seeds: Sequence[int], done: Callable[[], None], lost: Callable[[], None]) -> None:
        left = len(seeds)

        def end() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.lost.remove(lost)
                done()

        self.lost.append(lost)
        for seed in seeds:
            self._front_free = max(self._front_free, self.clock.now) + self.constants.front_end
            answering = Answering(answer_length(seed, self.constants), end)
            self.clock.call_at(self._front_free, lambda answering=answering: self._begin(answering))

    def fail(self) -> None:
        self.is_up = False
        lost, self.lost = self.lost, []
        for device in self.devices:
            device.clear()
        for call in lost:
            call()

    def _begin(self, answering: Answering) -> None:
        if self.is_up:
            least = min(self.devices, key=lambda device: len(device.running) + len(device.waiting))
            least.add(answering)


@dataclass
class Started:
    """Rollouts of one step that are being made: how many are left, and the rank that waits for them, if it
    does."""

    backend: "SimulatedBackend"
    indices: range
    left: int
    whose: int | None = None
    seconds: float = 0.0
    rollouts: list[Rollout | None] = field(default_factory=list)

    def wait(self) -> None:
        self.backend.world.ranks_in_turn.wait_for(self)


class SimulatedBackend:
    """The servers as one rank sees them. It drives the project's window with simulated calls."""

    requests_per_call = 1

    def __init__(self, world: "World", rank: int) -> None:
        self.world, self.rank = world, rank
        self.seeds: list[int] = []
        self.answered: dict[int, int] = {}  # with the version
        self.window: Window | None = None
        self.parts: list[Started] = []

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Any, version: int) -> None:
        self.world.sync(version)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        assert self.world.pool.version is not None
        return self.finish(self.start([requests])[0], self.world.pool.version)

    def start(self, steps: Sequence[Sequence[Request]]) -> list[Started]:
        self.seeds, self.answered = [request.seed for requests in steps for request in requests], {}
        self.window = Window(self.world.pool, self.world.batch, self.rank, self.world.ranks)
        ends = list(itertools.accumulate(map(len, steps)))
        parts = [range(end - len(requests), end) for requests, end in zip(steps, ends, strict=True)]
        for part in parts:
            self.window.add(part)
        self.parts = [Started(self, part, len(part)) for part in parts]
        self._make_calls()
        return self.parts

    def finish(self, started: Started, version: int) -> list[Rollout]:
        started.wait()
        return [Rollout((), (), "", (), "stop", self.answered[k]) for k in started.indices]

    def describe(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass

    def _make_calls(self) -> None:
        assert self.window is not None
        for call in self.window.next_calls():
            self._ask(self.window, call)

    def _ask(self, window: Window, call: Chunk) -> None:
        server, indices = call
        version = self.world.pool.version
        assert version is not None

        def done() -> None:
            self.answered.update(dict.fromkeys(indices, version))
            for part in self.parts:
                self.world.ranks_in_turn.note_answers(part, sum(index in part.indices for index in indices))
            window.close(call)
            self._make_calls()

        def lost() -> None:
            window.lose(server, Loss("it failed"))
            self.world.lose(server)
            self._make_calls()

        if self.world.servers[server].is_up:
            self.world.servers[server].ask([self.seeds[k] for k in indices], done, lost)
        else:
            lost()


class World:
    """All servers, and the pool that all ranks agree on."""

    def __init__(self, constants: Constants, setup: "Setup", seed: int) -> None:
        sizes, batch = setup.sizes, setup.decode_batch_size
        self.constants, self.batch, self.ranks, self.senders = constants, batch, setup.ranks, setup.senders
        self.clock = Clock()
        self.ranks_in_turn = RanksInTurn(self.clock)
        self.servers = [Server(self.clock, constants, size, batch) for size in sizes]
        self.pool = Pool.of(sizes)
        self.sync_seconds = 0.0
        self.failures = 0
        self._draws = np.random.default_rng(seed)
        for index in range(len(sizes)):
            self._plan_failure(index)

    def sync(self, version: int) -> None:
        """Send the weights: to each server over its own group, which is one per node. All senders send at the same
        time, and each sends all bytes once per server of its share."""
        if self.pool.version == version:
            return
        up = [k for k, server in enumerate(self.servers) if server.is_up]
        largest_share = max(Counter(sending_rank(k, self.senders, self.ranks) for k in up).values())
        seconds = self.constants.sync_fixed + largest_share * self.constants.weights / self.constants.network
        self.sync_seconds += seconds
        self.clock.advance_to(self.clock.now + seconds)
        self.pool = replace(self.pool, version=version)
        for k in up:
            self.pool = self.pool.mark(k, version)

    def lose(self, server: int) -> None:
        self.pool = self.pool.mark(server, Loss("it failed"))

    def _plan_failure(self, index: int) -> None:
        if math.isfinite(self.constants.failure):
            after = float(self._draws.exponential(self.constants.failure))
            self.clock.call_at(self.clock.now + after, lambda: self._fail(index))

    def _fail(self, index: int) -> None:
        if sum(server.is_up for server in self.servers) > 1:
            self.failures += 1
            self.servers[index].fail()
            self.clock.call_at(self.clock.now + self.constants.absence, lambda: self._return(index))
        self._plan_failure(index)

    def _return(self, index: int) -> None:
        self.servers[index].is_up = True


@dataclass(frozen=True)
class SimulatedExample:
    length: int

    def __len__(self) -> int:
        return self.length


@dataclass(frozen=True)
class SimulatedEncoder:
    """Makes requests with the project's seeds, and examples of the simulated lengths."""

    constants: Constants
    rank: int
    uses_noise: bool = False

    def takes_rollouts(self, step: int) -> bool:
        return True

    def prepare(self, plan: StepPlan) -> list[MicroBatch]:
        image, decode = ImageRef("", 1, 1), Decode.greedy(self.constants.longest_answer)
        return [
            MicroBatch(
                StepIndex(plan.step, micro),
                (),
                tuple(
                    Request(image, decode, request_seed(17, plan.step, micro, self.rank, k))
                    for k in range(len(records))
                ),
            )
            for micro, records in enumerate(plan.records)
        ]

    def encode(self, batch: MicroBatch) -> list[SimulatedExample]:
        own = self.constants.image_tokens + self.constants.prompt_tokens
        lengths = [answer_length(request.seed, self.constants) for request in batch.requests]
        return [SimulatedExample(own + round(length * (1 + self.constants.appended))) for length in lengths]


@dataclass(frozen=True)
class Setup:
    """A run: the devices of each server, and the learner's side."""

    sizes: tuple[int, ...]
    ranks: int
    batch: int  # samples of a micro-step
    accumulation: int
    decode_batch_size: int
    max_staleness: int
    senders: int = 1
    packing: bool = True
    row: int = 16000
    buffer: int = 256

    @classmethod
    def of(cls, settings: Settings, ranks: int) -> "Setup":
        vllm, training = settings.rollout_matching.vllm, settings.training
        contract = settings.rollout_matching_cfg
        return cls(
            (vllm.devices_per_server,) * len(vllm.server.servers),
            ranks,
            training.per_device_train_batch_size,
            training.gradient_accumulation_steps,
            settings.rollout_matching.decode_batch_size,
            settings.stage2.max_staleness,
            vllm.sync.senders,
            contract.packing,
            contract.packing_length,
            contract.packing_buffer,
        )


@dataclass(frozen=True)
class Outcome:
    setup: Setup
    step_seconds: float
    samples_per_second: float
    learner_busy: float
    servers_busy: float
    sync: float  # seconds of a step
    waited: float  # seconds of a step in which the learner waits for rollouts
    staleness: float
    failures: int


def simulate(setup: Setup, constants: Constants, steps: int = 24, seed: int = 1) -> Outcome:
    """Run so many steps. The first three are left out of the outcome."""
    world = World(constants, setup, seed)
    sources, streams, encoders = [], [], []
    for rank in range(setup.ranks):
        order = SampleOrder(10**7, rank, setup.ranks, seed=0, shuffled=False)
        buffer: CarryBuffer[Any] | None = CarryBuffer(setup.row, setup.buffer) if setup.packing else None
        stream = RowStream(order, setup.batch, buffer, max_length=setup.row, accumulation=setup.accumulation)
        encoder: Any = SimulatedEncoder(constants, rank)
        backend = SimulatedBackend(world, rank)
        streams.append(stream)
        encoders.append(encoder)
        sources.append(
            RolloutSource(stream, encoder, backend, iter, StepMetrics(), setup.max_staleness, max_steps=10**9)
        )
    skipped = 3
    began = trained = waited = sync_before = 0.0
    samples, behind = 0, 0
    busy_before: list[float] = []
    for step in range(steps):
        if step == skipped:
            began, trained, waited, samples, behind = world.clock.now, 0.0, 0.0, 0, 0
            sync_before, busy_before = world.sync_seconds, list(_busy(world))
        syncs, since = world.sync_seconds, world.clock.now
        world.ranks_in_turn.run([source.make_rollouts for source in sources])
        batches = [[source.next_micro_batch() for _ in range(setup.accumulation)] for source in sources]
        waited += world.clock.now - since - (world.sync_seconds - syncs)
        rows = [
            [stream.pack(encoder.encode(batch)) for batch, _ in parts]  # type: ignore[arg-type]
            for stream, encoder, parts in zip(streams, encoders, batches, strict=True)
        ]
        own = [sum(len(batch.requests) for batch, _ in parts) for parts in batches]
        versions = [rollout.version for parts in batches for _, rollouts in parts for rollout in rollouts]
        samples += sum(own)
        behind += sum(step - version for version in versions)
        world.clock.advance_to(world.clock.now + max(own) * constants.correct_sample)
        for source in sources:
            source.ask_ahead()
        tokens = max(sum(len(example) for row in own_rows for example in row) for own_rows in rows)
        training = tokens * constants.train_token + constants.train_overhead
        trained += training
        world.clock.advance_to(world.clock.now + training)
    seconds, count = world.clock.now - began, steps - skipped
    devices_busy = [now - before for now, before in zip(_busy(world), busy_before, strict=True)]
    return Outcome(
        setup,
        seconds / count,
        samples / seconds,
        trained / seconds,
        sum(devices_busy) / len(devices_busy) / seconds,
        (world.sync_seconds - sync_before) / count,
        waited / count,
        behind / samples,
        world.failures,
    )


def _busy(world: World) -> Iterator[float]:
    for server in world.servers:
        for device in server.devices:
            device._advance()
            yield device.busy


def table(rows: Sequence[tuple[str, Outcome]]) -> str:
    lines = [
        "| run | samples a step | step | sync | waited | samples/s | learner busy | servers busy | staleness |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in rows:
        setup = outcome.setup
        lines.append(
            f"| {name} | {setup.ranks * setup.batch * setup.accumulation} | {outcome.step_seconds:.1f} s | "
            f"{outcome.sync:.1f} s | {outcome.waited:.1f} s | {outcome.samples_per_second:.1f} | "
            f"{outcome.learner_busy:.0%} | {outcome.servers_busy:.0%} | {outcome.staleness:.2f} |"
        )
    return "\n".join(lines)


def shipped(constants: Constants) -> list[tuple[str, Outcome]]:
    """The shipped configs, with each bound on the staleness."""
    rows = []
    for name, ranks in (("3v1", 1), ("24v8", 8)):
        file = Path(__file__).parents[1] / f"configs/stage2-server-{name}.yaml"
        setup = Setup.of(load_settings(file).settings, ranks)
        for bound in (0, 1, 2):
            outcome = simulate(replace(setup, max_staleness=bound), constants)
            rows.append((f"{name}, `max_staleness: {bound}`", outcome))
        if ranks > 1:
            senders = min(ranks, len(setup.sizes))
            rows.append(
                (f"{name} as shipped, `senders: {senders}`", simulate(replace(setup, senders=senders), constants))
            )
        failing = replace(constants, failure=300.0)
        rows.append((f"{name} as shipped, a server fails every 5 minutes", simulate(setup, failing)))
    return rows


def scaling(constants: Constants, most: int, one_sender: bool) -> list[tuple[str, Outcome]]:
    """From one server with eight GPUs and four learner ranks to `most` such servers. A rank has 128 samples a
    step. Either one rank sends weights, or one of every node does."""
    rows = []
    for servers in itertools.takewhile(lambda count: count <= most, (2**k for k in range(7))):
        ranks = 4 * servers
        senders = 1 if one_sender else max(1, ranks // NODE)
        # Packing takes long here, and its time is not simulated.
        setup = Setup((8,) * servers, ranks, 4, 32, 32, max_staleness=1, senders=senders, packing=False)
        rows.append((f"{servers} servers, {ranks} ranks, {senders} senders", simulate(setup, constants, steps=6)))
    return rows


def draw(rows: Sequence[tuple[str, Outcome]]) -> str:
    """Return a figure: how throughput and idle time change with the number of servers."""
    outcomes = {float(len(outcome.setup.sizes)): outcome for _, outcome in rows}
    alone = rows[0][1].samples_per_second
    curves = {
        "samples/s of a server": [(n, outcome.samples_per_second / n / alone) for n, outcome in outcomes.items()],
        "learner busy": [(n, outcome.learner_busy) for n, outcome in outcomes.items()],
        "servers busy": [(n, outcome.servers_busy) for n, outcome in outcomes.items()],
    }
    ticks = [n for n in outcomes if n != 2]  # it would touch the 1
    axes = line_chart.Axes(across=ticks, name="servers of eight GPUs, each with four learner ranks")
    return line_chart.draw(list(curves), {"shares; samples/s relative to one server": list(curves.values())}, axes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=64, help="The largest number of servers.")
    parser.add_argument("--draw", type=Path, metavar="FILE.svg")
    options = parser.parse_args()
    constants = Constants()
    print(table(shipped(constants)), flush=True)
    print(f"\n{table(scaling(constants, options.servers, one_sender=True))}", flush=True)
    rows = scaling(constants, options.servers, one_sender=False)
    print(f"\n{table(rows)}")
    if options.draw:
        options.draw.write_text(draw(rows))


if __name__ == "__main__":
    main()
