"""Run a plan: start servers, wait for them, start learners, and watch all of them. No process is left behind.

The main thread starts all parts, and Linux kills them if it ends. It handles one event after another: a part has
ended, or a signal has arrived. Parts end in this order: first the learner, which saves, and then the servers,
which it needs for that. A second signal ends all at once.
"""

import queue
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType

from coordexp.config import ConfigError, requests_per_rank
from coordexp.errors import EngineError
from coordexp.launch.parts import BY_SIGNAL, Log, RunningPart, health_client, is_ready, read_world_size
from coordexp.launch.plan import Part, Plan, PlannedServer
from coordexp.tasks import REMIND_EVERY_S

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.25


@dataclass(frozen=True)
class Patience:
    """How long a launch waits for its parts, in seconds."""

    start_s: float = 1800.0  # until all servers answer
    learner_s: float = 900.0  # for the learner to finish its step and save, which may be 70 GB
    server_s: float = 20.0  # for the servers to end in order
    back_off_s: tuple[float, ...] = (1.0, 5.0, 25.0)  # before each restart of a server; there are no more restarts


@dataclass(frozen=True)
class PartEnded:
    """The event that a part has ended."""

    running: RunningPart
    code: int


@dataclass(frozen=True)
class SignalReceived:
    """The event that a signal has arrived."""

    number: int


class Interrupted(Exception):
    """A signal asks the launch to end."""

    def __init__(self, number: int) -> None:
        self.number = number


class Launch:
    """One run of a plan. It handles the signals of this process while it lasts."""

    def __init__(self, plan: Plan, log: Log, token: str | None, patience: Patience) -> None:
        self._plan, self._log, self._token, self._patience = plan, log, token, patience
        self._events: queue.SimpleQueue[PartEnded | SignalReceived] = queue.SimpleQueue()
        self._running: dict[str, RunningPart] = {}
        self._restarts: dict[str, int] = {}
        self._due: dict[str, float] = {}  # when to restart which servers
        self._at_once = False  # after a second signal

    def run(self) -> int:
        """Run the plan and return the exit code: the learner's, 1 if a server fails, or 130 after Ctrl-C."""
        with ExitStack() as cleanup:
            self._handle_signals(cleanup)
            cleanup.callback(self._kill_all)
            code = self._run()
            self._end_servers()
            return code

    def _run(self) -> int:
        try:
            for server in self._plan.local_servers:
                self._start(server.part)
            self._await_servers()
            self._start(self._plan.learner)
            return self._watch()
        except Interrupted as interruption:
            return self._end_after_signal(interruption.number)
        except (EngineError, ConfigError) as error:
            self._log.say(str(error), "error")
            return 2 if isinstance(error, ConfigError) else 1

    # Before the learner starts

    def _await_servers(self) -> None:
        since = reminded = time.monotonic()
        waiting = list(self._plan.servers)
        self._log.say(f"waiting for {_names(waiting)}")
        with health_client(self._token) as client:
            while waiting:
                self._fail_if_one_ended(POLL_S)
                for server in list(waiting):
                    if is_ready(client, server.base_url):
                        waiting.remove(server)
                        self._log.say(f"{server.name} answers at {server.base_url}")
                    self._fail_if_one_ended(0)
                now = time.monotonic()
                if waiting and now - since > self._patience.start_s:
                    raise EngineError(
                        f"after {self._patience.start_s:g} s there is no answer from {_names(waiting)}",
                        "large models take minutes to load: give them more time with --start-timeout; if a server "
                        "is started elsewhere, check its base_url",
                    )
                if waiting and now - reminded > REMIND_EVERY_S:
                    reminded = now
                    self._log.say(f"waiting for {_names(waiting)} ({now - since:.0f} s)")
            self._compare_sizes([read_world_size(client, server.base_url) for server in self._plan.servers])

    def _fail_if_one_ended(self, seconds: float) -> None:
        """Wait so long, and raise if a server ends meanwhile."""
        if event := self._next_end(seconds):
            self._repeat_last_lines(event)
            name = event.running.part.name
            raise EngineError(f"{name} ended with exit code {event.code} before it was ready: nothing was trained")

    def _compare_sizes(self, sizes: list[int]) -> None:
        for server, size in zip(self._plan.servers, sizes, strict=True):
            if server.world_size is not None and size != server.world_size:
                raise EngineError(
                    f"{server.name} at {server.base_url} has world size {size}, and the plan {server.world_size}",
                    "another server answers there, or it has another config: end it, and launch again",
                )
        requests_per_rank(self._plan.decode_batch_size, tuple(sizes), self._plan.learners)  # raises if too few
        self._log.say(f"world sizes of the servers: {', '.join(map(str, sizes))}")

    # While the learner runs

    def _watch(self) -> int:
        """Restart servers until the learner ends, and return the exit code."""
        while True:
            wait = min(self._due.values(), default=time.monotonic() + 60.0) - time.monotonic()
            event = self._next_end(max(0.0, wait))
            for name in [name for name, at in self._due.items() if at <= time.monotonic()]:
                del self._due[name]
                self._start(next(server.part for server in self._plan.servers if server.name == name))
            if event is None:
                continue
            if event.running.part is self._plan.learner:
                if event.code:
                    self._repeat_last_lines(event)
                self._log.say(f"the learner ended with exit code {event.code}", "error" if event.code else "info")
                return event.code
            self._schedule_restart(event)
            if not self._has_server():
                self._log.say("no rollout server is left: the learner is asked to end", "error")
                self._end_learner()
                return 1

    def _schedule_restart(self, event: PartEnded) -> None:
        name = event.running.part.name
        number, most = self._restarts.get(name, 0), len(self._patience.back_off_s)
        ending = f"{name} ended with exit code {event.code} while the learner runs"
        if number >= most:
            self._repeat_last_lines(event)
            self._log.say(f"{ending}; it was restarted {most} times, and is given up", "error")
            return
        wait = self._patience.back_off_s[number]
        self._restarts[name] = number + 1
        self._due[name] = time.monotonic() + wait
        self._log.say(
            f"{ending}; the learner continues with the remaining servers\n"
            f"restart {number + 1} of {most} in {wait:g} s; it gets requests again after a full sync",
            "warning",
        )

    def _has_server(self) -> bool:
        """Return True if a server runs, is about to be restarted, or was started elsewhere."""
        return bool(self._due) or any(
            server.part is None or server.name in self._running for server in self._plan.servers
        )

    # The end

    def _end_after_signal(self, number: int) -> int:
        name = signal.Signals(number).name
        self._log.say(f"{name}: ending" + (" (once more: at once)" if number == signal.SIGINT else ""))
        self._due.clear()
        code = self._end_learner()
        if number == signal.SIGINT or code is None:
            return BY_SIGNAL + number
        return code

    def _end_learner(self) -> int | None:
        """Ask the learner to end, and kill it if it does not end in time. Return its exit code unless it was
        killed."""
        learner = self._running.get(self._plan.learner.name)
        if learner is None:
            return None
        seconds = self._patience.learner_s
        self._log.say(f"the learner finishes its step and saves (at most {seconds:g} s)")
        learner.ask_to_end()
        try:
            for event in self._ends_within(seconds, [learner]):
                if event.running is learner:
                    return event.code
            self._log.say(
                f"the learner did not end in {seconds:g} s and is killed; --grace gives it more time", "warning"
            )
        except Interrupted:
            self._at_once = True
        learner.kill()
        return None

    def _end_servers(self) -> None:
        """Ask the servers to end, and wait for them."""
        self._due.clear()
        servers = [running for name, running in self._running.items() if name != self._plan.learner.name]
        if self._at_once:
            return
        for server in servers:
            server.ask_to_end()
        with suppress(Interrupted):
            list(self._ends_within(self._patience.server_s, servers))

    def _ends_within(self, seconds: float, parts: Iterable[RunningPart]) -> Iterator[PartEnded]:
        """Yield the parts that end until all of `parts` have ended, or the time is over."""
        until = time.monotonic() + seconds
        while any(running in self._running.values() for running in parts):
            left = until - time.monotonic()
            if left <= 0:
                return
            if event := self._next_end(left):
                yield event

    def _kill_all(self) -> None:
        for running in self._running.values():
            running.kill()
        for running in self._running.values():
            running.wait_until_ended()

    # Processes and events

    def _start(self, part: Part | None) -> None:
        assert part is not None
        running = RunningPart(part, self._token, self._log, self._note_end)
        self._running[part.name] = running
        where = f"GPU {', '.join(map(str, part.gpus))}" if part.gpus else "the CPU"
        self._log.say(f"started {part.name} on {where} (process {running.pid})")

    def _note_end(self, running: RunningPart, code: int) -> None:
        self._events.put(PartEnded(running, code))

    def _next_end(self, seconds: float) -> PartEnded | None:
        """Return the next part that ends within this time, or None. Raise `Interrupted` after a signal."""
        try:
            event = self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, SignalReceived):
            raise Interrupted(event.number)
        del self._running[event.running.part.name]
        return event

    def _repeat_last_lines(self, event: PartEnded) -> None:
        name = event.running.part.name
        lines = [line for line in event.running.last if line.strip()]
        self._log.say(f"the last lines of {name}:" if lines else f"{name} printed nothing")
        for line in lines:
            self._log.write(name, line)

    def _handle_signals(self, cleanup: ExitStack) -> None:
        """Turn signals into events, until the handlers are restored by `cleanup`."""
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
                cleanup.callback(signal.signal, number, signal.signal(number, self._note_signal))

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(SignalReceived(number))


def _names(servers: list[PlannedServer]) -> str:
    return ", ".join(
        server.name if server.part else f"{server.name} (elsewhere, {server.base_url})" for server in servers
    )
