"""Runs a plan: servers, their health and world sizes, learners, until the end. Leaves no process behind.

The main thread takes events one after another: a part ended, a signal came. Parts end in this order: the learner,
which saves, then the servers, which it needs for that. A second signal ends all at once.
"""

import os
import queue
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import psutil

from coordexp.config import ConfigError
from coordexp.errors import EngineError
from coordexp.launch import health
from coordexp.launch.log import Log
from coordexp.launch.part import Running
from coordexp.launch.plan import Part, Plan, PlannedServer
from coordexp.launch.tether import BY_SIGNAL, UNKILLABLE_S, adopt_orphans
from coordexp.rollout.wire import TOKEN

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MARK = "COORDEXP_LAUNCH"  # in the environment of all processes of one launch
POLL_S = 0.25
TELL_EVERY_S = 15.0  # while servers start


@dataclass(frozen=True)
class Patience:
    start_s: float = 1800.0  # until all servers answer
    learner_s: float = 120.0  # to finish its step and save
    server_s: float = 20.0  # to end in order
    back_off_s: tuple[float, ...] = (1.0, 5.0, 25.0)  # before each restart of a server; no more of them
    forgiven_s: float = 3600.0  # a server that ran so long has all its restarts again


@dataclass(frozen=True)
class Ended:
    running: Running
    code: int


@dataclass(frozen=True)
class Told:
    number: int


class Interrupted(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


class Launch:
    """One run of a plan. Signals of this process are its own while it lasts."""

    def __init__(
        self,
        plan: Plan,
        log: Log,
        token: str | None,
        patience: Patience | None = None,
        check_sizes: Callable[[tuple[int, ...]], None] = lambda sizes: None,
    ) -> None:
        self._plan, self._log, self._token = plan, log, token
        self._patience = patience or Patience()
        self._check_sizes = check_sizes
        self._events: queue.SimpleQueue[Ended | Told] = queue.SimpleQueue()
        self._running: dict[str, Running] = {}
        self._restarts: dict[str, int] = {}
        self._due: dict[str, float] = {}  # servers to start again, and when
        self._mark = secrets.token_hex(8)
        self._at_once = False  # it was told a second time

    def run(self) -> int:
        """The exit code: the learner's, or 1 for a server's failure, 130 after Ctrl-C."""
        adopt_orphans()
        with self._listening():
            try:
                code = self._run()
                self._end_servers()
                return code
            finally:
                self._kill_all()

    def _run(self) -> int:
        try:
            for server in self._plan.started:
                self._start(server.part)
            self._await_servers()
            self._start(self._plan.learner)
            return self._watch()
        except Interrupted as told:
            return self._interrupted(told.number)
        except (EngineError, ConfigError) as error:
            self._log.say(str(error))
            return 2 if isinstance(error, ConfigError) else 1

    # Before the learner

    def _await_servers(self) -> None:
        since, told = time.monotonic(), time.monotonic()
        waiting = list(self._plan.servers)
        self._log.say(f"waiting for {_listed(waiting)}")
        with health.asking(self._token) as client:
            while waiting:
                self._nothing_ended(POLL_S)
                for server in list(waiting):
                    if health.is_ready(client, server.base_url):
                        waiting.remove(server)
                        self._log.say(f"{server.name} answers at {server.base_url}")
                    self._nothing_ended(0)
                now = time.monotonic()
                if waiting and now - since > self._patience.start_s:
                    raise EngineError(_late(waiting, self._patience.start_s))
                if waiting and now - told > TELL_EVERY_S:
                    told = now
                    self._log.say(f"waiting for {_listed(waiting)} ({now - since:.0f} s)")
            self._compare_sizes([health.world_size(client, server.base_url) for server in self._plan.servers])

    def _nothing_ended(self, seconds: float) -> None:
        event = self._next(seconds)
        if isinstance(event, Ended):
            self._tell_again(event)
            name = event.running.part.name
            raise EngineError(f"{name} ended with exit code {event.code} before it was ready: nothing was trained")

    def _compare_sizes(self, sizes: list[int]) -> None:
        for server, size in zip(self._plan.servers, sizes, strict=True):
            if server.world_size is not None and size != server.world_size:
                raise EngineError(
                    f"{server.name} at {server.base_url} has world size {size}, and the plan {server.world_size}\n"
                    "  another server answers there, or its config is another: end it, and launch again"
                )
        self._check_sizes(tuple(sizes))
        self._log.say(f"world sizes of the servers: {', '.join(map(str, sizes))}")

    # While the learner runs

    def _watch(self) -> int:
        while True:
            wait = min(self._due.values(), default=time.monotonic() + 60.0) - time.monotonic()
            event = self._next(max(0.0, wait))
            for name in [name for name, at in self._due.items() if at <= time.monotonic()]:
                del self._due[name]
                self._start(next(server.part for server in self._plan.servers if server.name == name))
            if event is None:
                continue
            if event.running.part is self._plan.learner:
                if event.code:
                    self._tell_again(event)
                self._log.say(f"the learner ended with exit code {event.code}")
                return event.code
            self._server_ended(event)
            if not self._any_server():
                self._log.say("no rollout server is left: the learner is asked to end")
                self._end_learner()
                return 1

    def _server_ended(self, event: Ended) -> None:
        name = event.running.part.name
        if time.monotonic() - event.running.since > self._patience.forgiven_s:
            self._restarts[name] = 0
        number, most = self._restarts.get(name, 0), len(self._patience.back_off_s)
        ending = f"{name} ended with exit code {event.code} while the learner runs"
        if number >= most:
            self._tell_again(event)
            self._log.say(f"{ending}; it was restarted {most} times, and is given up")
            return
        wait = self._patience.back_off_s[number]
        self._restarts[name] = number + 1
        self._due[name] = time.monotonic() + wait
        self._log.say(
            f"{ending}; the learner goes on with the servers that are left\n"
            f"restart {number + 1} of {most} in {wait:g} s; it gets requests again after a full sync"
        )

    def _any_server(self) -> bool:
        """That runs, will run again, or is elsewhere."""
        return bool(self._due) or any(
            server.part is None or server.name in self._running for server in self._plan.servers
        )

    # The end

    def _interrupted(self, number: int) -> int:
        name = signal.Signals(number).name
        self._log.say(f"{name}: ending" + (" (once more: at once)" if number == signal.SIGINT else ""))
        self._due.clear()
        code = self._end_learner()
        if number == signal.SIGINT or code is None:
            return BY_SIGNAL + number
        return code

    def _end_learner(self) -> int | None:
        """Its exit code, if it ended in time. Else it is killed."""
        learner = self._running.get(self._plan.learner.name)
        if learner is None:
            return None
        seconds = self._patience.learner_s
        self._log.say(f"the learner finishes its step and saves (at most {seconds:g} s)")
        learner.ask_to_end()
        try:
            for event in self._until(seconds, lambda: learner.part.name in self._running):
                if event.running is learner:
                    return event.code
            self._log.say(f"the learner did not end in {seconds:g} s: it is killed; see --grace")
        except Interrupted:
            self._at_once = True
        learner.release()
        return None

    def _end_servers(self) -> None:
        """In order, if they do it in time."""
        self._due.clear()
        servers = [running for name, running in self._running.items() if name != self._plan.learner.name]
        if self._at_once:
            return
        for server in servers:
            server.ask_to_end()
        with suppress(Interrupted):
            for _ in self._until(self._patience.server_s, lambda: any(server.alive for server in servers)):
                pass

    def _until(self, seconds: float, wanted: Callable[[], bool]) -> Iterator[Ended]:
        until = time.monotonic() + seconds
        while wanted() and (left := until - time.monotonic()) > 0:
            if event := self._next(left):
                yield event

    def _kill_all(self) -> None:
        for running in self._running.values():
            running.release()
        for running in self._running.values():
            running.wait_killed()
        self._running.clear()
        self._kill_strays()

    # Processes and events

    def _start(self, part: Part | None) -> None:
        assert part is not None
        extra = {MARK: self._mark} | ({TOKEN: self._token} if self._token else {})
        running = Running(part, extra)
        self._running[part.name] = running
        where = f"GPU {', '.join(map(str, part.gpus))}" if part.gpus else "the CPU"
        self._log.say(f"started {part.name} on {where} (process {running.pid})")
        running.watch(self._log, lambda code: self._events.put(Ended(running, code)))

    def _next(self, seconds: float) -> Ended | None:
        try:
            event = self._events.get(timeout=seconds) if seconds > 0 else self._events.get_nowait()
        except queue.Empty:
            return None
        if isinstance(event, Told):
            raise Interrupted(event.number)
        del self._running[event.running.part.name]
        self._kill_strays()
        return event

    def _kill_strays(self) -> None:
        """What a part left behind whose tether was killed: it has become a child of this process."""
        until = time.monotonic() + UNKILLABLE_S
        while (strays := list(self._strays())) and time.monotonic() < until:
            for stray in strays:
                with suppress(psutil.NoSuchProcess):
                    stray.kill()
            while any(map(_is_alive, strays)) and time.monotonic() < until:
                time.sleep(0.005)

    def _strays(self) -> Iterator[psutil.Process]:
        """By the mark of this launch: other children may be what a shell started before it became a launcher."""
        tethers = {running.pid for running in self._running.values()}
        for child in psutil.Process().children():
            if child.pid not in tethers:
                with suppress(psutil.NoSuchProcess):
                    yield from (one for one in (*child.children(recursive=True), child) if self._is_marked(one))
                if not _is_alive(child):
                    with suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return bool(process.environ().get(MARK) == self._mark)
        except psutil.Error:  # it has just ended
            return False

    def _tell_again(self, event: Ended) -> None:
        name = event.running.part.name
        lines = [line for line in event.running.last if line.strip()]
        self._log.say(f"the last lines of {name}:" if lines else f"{name} said nothing")
        for line in lines:
            self._log.write(name, line)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._events.put(Told(number))

        before: dict[int, Any] = {}
        for number in SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for heard, handler in before.items():
                signal.signal(heard, handler)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _listed(servers: list[PlannedServer]) -> str:
    return ", ".join(
        server.name if server.part else f"{server.name} (elsewhere, {server.base_url})" for server in servers
    )


def _late(waiting: list[PlannedServer], seconds: float) -> str:
    return (
        f"after {seconds:g} s there is no answer from {_listed(waiting)}\n"
        "  large models take minutes to load: give them more by --start-timeout; for a server that is started "
        "elsewhere, check its base_url"
    )
