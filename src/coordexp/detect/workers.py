"""Several processes on one machine that make the shards of a job: one per GPU, or some on its processors.

The first process gives each of them a shard at a time. A worker that dies is replaced, and its shard, which keeps
what was answered, is made again. Workers end with the first process, however that ends.
"""

import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from coordexp.child_processes import end_with_parent
from coordexp.errors import EngineError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.context import SpawnProcess

    from coordexp.detect.shards import PredictionJob

MOST_DEATHS = 3  # of workers at the same shard: what kills them is then most likely the shard
SECONDS_TO_END = 10.0  # after a worker was asked to end; an engine of vLLM takes a few of them


def run_workers(
    job: "PredictionJob",
    numbers: Sequence[int],
    places: Sequence[Mapping[str, str]],
    notify: Callable[[int], None],
    warn: Callable[[str], None],
) -> None:
    """Make the shards with these numbers. Each worker has the variables of its place in its environment. `notify`
    gets the number of images that are answered. Raise UserError if a shard cannot be made."""
    waiting, deaths = deque(numbers), Counter[int]()
    answered = dict[int, int]()  # images, by shard
    workers = [_Worker(job, place) for place in places[: len(numbers)]]
    try:
        for worker in workers:
            worker.give(waiting)
        while any(worker.shard is not None for worker in workers):
            ready = wait([worker.connection for worker in workers if worker.shard is not None])
            for worker in (worker for worker in workers if worker.connection in ready):
                kind, value = worker.receive()
                assert worker.shard is not None
                if kind == "answered":
                    answered[worker.shard] = max(value, answered.get(worker.shard, 0))
                    notify(sum(answered.values()))
                elif kind == "warning":
                    warn(value)
                elif kind == "failed":
                    raise UserError(*value)
                elif kind == "finished":
                    worker.give(waiting)
                else:
                    deaths[worker.shard] += 1
                    if deaths[worker.shard] == MOST_DEATHS:
                        raise EngineError(
                            f"{MOST_DEATHS} workers ended at shard {worker.shard} of {job.shards}",
                            "what they wrote is above; if memory ran out, use fewer workers or a smaller --batch",
                        )
                    warn(f"a worker ended ({value}) at shard {worker.shard} of {job.shards}; another takes it")
                    waiting.appendleft(worker.shard)
                    worker.end()
                    workers[workers.index(worker)] = successor = _Worker(job, worker.place)
                    successor.give(waiting)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that makes one shard after another, and the connection to it."""

    def __init__(self, job: "PredictionJob", place: Mapping[str, str]) -> None:
        self.place = place
        self.shard: int | None = None  # the one that it makes
        context = multiprocessing.get_context("spawn")  # a fork would share the state of CUDA and of HTTP clients
        self.connection, other_end = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_work, args=(job, other_end, os.getpid()))
        with _environment(place):
            self._process.start()
        other_end.close()

    def give(self, waiting: deque[int]) -> None:
        """Give it the next shard, if there is one."""
        self.shard = waiting.popleft() if waiting else None
        if self.shard is not None:
            self._send(self.shard)

    def receive(self) -> tuple[str, Any]:
        """Return its next message: what kind it is, and its value. The last one says how the process ended."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            return "ended", f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return kind, value

    def end(self) -> None:
        """End the process. A shard that it is at work on keeps its whole batches."""
        if self.shard is None:
            self._send(None)
        else:
            self._process.terminate()
        self._process.join(SECONDS_TO_END)
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _send(self, value: int | None) -> None:
        with suppress(BrokenPipeError):  # it has ended, which `receive` says
            self.connection.send(value)


@contextmanager
def _environment(variables: Mapping[str, str]) -> "Iterator[None]":
    """Change the environment of this process, which those that it starts inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _work(job: "PredictionJob", connection: Connection, parent: int) -> None:
    """Make the shards whose numbers come through the connection, until None comes, or the parent ends."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to all processes; the first one ends the others
    from transformers.utils import logging

    from coordexp.detect.shards import ShardPredictor

    logging.disable_progress_bar()
    predictor = None
    try:
        for number in iter(connection.recv, None):
            predictor = predictor or ShardPredictor(job, lambda problem: connection.send(("warning", problem)))
            predictor(number, lambda answered: connection.send(("answered", answered)))
            connection.send(("finished", number))
    except UserError as error:
        connection.send(("failed", (error.problem, error.fix)))
    finally:
        if predictor is not None:
            predictor.close()
