"""Run a plan: start servers, wait for them, start learners, and watch all of them. No process is left behind.

The main thread starts all parts, and Linux kills them if it ends. It handles one event after another: a part has
ended, or a signal has arrived. Parts end in this order: first the learner, which saves, and then the servers,
which it needs for that. A second signal ends all at once.
"""

import logging
import queue
import signal
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import FrameType

import httpx

from coordexp.errors import EngineError
from coordexp.launch.parts import BY_SIGNAL, Log, RunningPart, is_ready
from coordexp.launch.plan import Part, Plan, PlannedServer
from coordexp.tasks import REMIND_EVERY_S

POLL_S = 0.25
ANSWER_S = 2.0  # the time a rollout server has to answer


@dataclass(frozen=True)
class Patience:
    """How long a launch waits for its parts, in seconds."""

    start_s: float = 1800.0  # until all servers answer
    learner_s: float = 900.0  # for the learner to finish its step and save, which may be 70 GB
    server_s: float = 20.0  # for the servers to end in order
    back_off_s: tuple[float, ...] = (1.0, 5.0, 25.0)  # before each restart of a server; there are no more in a row
    stable_s: float = 600.0  # a server that ran so long before it ended starts this row anew


class Interrupted(Exception):
    """A signal asks the launch to end."""

    def __init__(self, number: int) -> None:
        self.number = number


class Launch:
    """One run of a plan. It handles the signals of this process while it lasts."""

    def __init__(self, plan: Plan, log: Log, token: str | None, patience: Patience) -> None:
        self._plan, self._log, self._token, self._patience = plan, log, token, patience
        self._events: queue.SimpleQueue[RunningPart | int] = queue.SimpleQueue()  # that have ended, and signals
        self._running: dict[str, RunningPart] = {}
        self._restarts = dict.fromkeys((server.name for server in plan.servers), 0)
        self._due: dict[str, float] = {}  # when to restart which servers
        self._at_once = False  # after a second signal

    def run(self) -> int:
        """Run the plan and return the exit code: the learner's, 1 if a server fails, or 130 after Ctrl-C."""
        with ExitStack() as cleanup:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores it
                    cleanup.callback(signal.signal, number, signal.signal(number, self._note_signal))
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
        except EngineError as error:
            self._log.say(str(error), logging.ERROR)
            return 1

    # Before the learner starts

    def _await_servers(self) -> None:
        since = reminded = time.monotonic()
        waiting = list(self._plan.servers)
        self._log.say(f"waiting for {_names(waiting)}")
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as client:  # the servers are on our own network
            while waiting:
                for server in list(waiting):
                    self._fail_if_one_ended(POLL_S / len(waiting))
                    if is_ready(client, server.base_url):
                        waiting.remove(server)
                        self._log.say(f"{server.name} answers at {server.base_url}")
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

    def _fail_if_one_ended(self, seconds: float) -> None:
        """Wait so long, and raise if a server ends meanwhile."""
        if part := self._next_end(seconds):
            self._repeat_last_lines(part)
            ending = f"{part.name} ended with exit code {part.code}"
            raise EngineError(f"{ending} before it was ready: nothing was trained")

    # While the learner runs

    def _watch(self) -> int:
        """Restart servers until the learner ends, and return the exit code."""
        while True:
            wait = min(self._due.values(), default=time.monotonic() + 60.0) - time.monotonic()
            part = self._next_end(max(0.0, wait))
            for server in self._plan.local_servers:
                if self._due.get(server.name, time.monotonic() + 1) <= time.monotonic():
                    del self._due[server.name]
                    self._start(server.part)
            if part is None:
                continue
            if part.name == self._plan.learner.name:
                if part.code:
                    self._repeat_last_lines(part)
                level = logging.ERROR if part.code else logging.INFO
                self._log.say(f"the learner ended with exit code {part.code}", level)
                return part.code
            self._schedule_restart(part)
            if not any(s.part is None or s.name in {*self._running, *self._due} for s in self._plan.servers):
                self._log.say("no rollout server is left: the learner is asked to end", logging.ERROR)
                self._end_learner()
                return 1

    def _schedule_restart(self, part: RunningPart) -> None:
        if time.monotonic() - part.began >= self._patience.stable_s:
            self._restarts[part.name] = 0
        number, most = self._restarts[part.name], len(self._patience.back_off_s)
        ending = f"{part.name} ended with exit code {part.code} while the learner runs"
        if number == most:
            self._repeat_last_lines(part)
            self._log.say(f"{ending}; it was restarted {most} times in a row, and is given up", logging.ERROR)
            return
        wait = self._patience.back_off_s[number]
        self._restarts[part.name] = number + 1
        self._due[part.name] = time.monotonic() + wait
        self._log.say(
            f"{ending}; the learner continues with the remaining servers\n"
            f"restart {number + 1} of {most} in {wait:g} s; it gets requests again after a full sync",
            logging.WARNING,
        )

    # The end

    def _end_after_signal(self, number: int) -> int:
        name = signal.Signals(number).name
        self._log.say(f"{name}: ending" + (" (once more: at once)" if number == signal.SIGINT else ""))
        code = self._end_learner()
        return BY_SIGNAL + number if number == signal.SIGINT or code is None else code

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
            self._wait_for([learner], seconds)
        except Interrupted:
            self._at_once = True
            return None
        if learner.name not in self._running:
            return learner.code
        message = f"the learner did not end in {seconds:g} s and is killed; --grace gives it more time"
        self._log.say(message, logging.WARNING)
        learner.kill()
        return None

    def _end_servers(self) -> None:
        """Ask the servers to end, and wait for them."""
        servers = [part for name, part in self._running.items() if name != self._plan.learner.name]
        if not self._at_once:
            for server in servers:
                server.ask_to_end()
            with suppress(Interrupted):
                self._wait_for(servers, self._patience.server_s)

    def _wait_for(self, parts: Iterable[RunningPart], seconds: float) -> None:
        """Wait until these parts have ended, or the time is over."""
        until = time.monotonic() + seconds
        while any(part.name in self._running for part in parts) and time.monotonic() < until:
            self._next_end(until - time.monotonic())

    def _kill_all(self) -> None:
        for part in self._running.values():
            part.kill()
        for part in self._running.values():
            part.wait_until_ended()

    # Processes and events

    def _start(self, part: Part | None) -> None:
        assert part is not None
        running = RunningPart(part, self._token, self._log, self._events.put)
        self._running[part.name] = running
        where = f"GPU {', '.join(map(str, part.gpus))}" if part.gpus else "the CPU"
        self._log.say(f"started {part.name} on {where} (process {running.pid})")

    def _next_end(self, seconds: float) -> RunningPart | None:
        """Return the next part that ends within this time, or None. Raise `Interrupted` after a signal."""
        try:
            event = self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return None
        if isinstance(event, int):
            raise Interrupted(event)
        del self._running[event.name]
        return event

    def _repeat_last_lines(self, part: RunningPart) -> None:
        lines = [line for line in part.last if line.strip()]
        self._log.say(f"the last lines of {part.name}:" if lines else f"{part.name} printed nothing")
        for line in lines:
            self._log.write(part.name, line)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(number)


def _names(servers: list[PlannedServer]) -> str:
    return ", ".join(
        server.name if server.part else f"{server.name} (elsewhere, {server.base_url})" for server in servers
    )
