"""The first rank's connections to all servers: made at the first sync, given up with a server that fails, and made
anew when it is back."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from coordexp.config.capacity import requests_per_rank
from coordexp.config.violations import ConfigError
from coordexp.errors import EngineError
from coordexp.rollout.server_check import ALTERNATIVES, OTHERWISE, check_server
from coordexp.rollout.server_client import ServerClient, ServerLost
from coordexp.rollout.server_weights import Link
from coordexp.rollout.setup import Setup
from coordexp.rollout.tasks import Task
from coordexp.rollout.wire import ServerFacts

TOLD_EVERY = 10.0  # seconds
RETURNING = 30.0  # seconds that a server which is back may take to join, while others wait for it
PAUSE = 30.0  # seconds after which a server that could not be had is asked again, while others answer
LEAVING = 2.0  # seconds that the end of a run waits for its groups to be left


@dataclass
class Links:
    """`devices` are those of all learner ranks, of which there are `learners`."""

    clients: Sequence[ServerClient]
    learner: Setup
    learners: int
    tell: Callable[[str], None]
    devices: Sequence[str] = ()
    open: dict[int, Link] = field(default_factory=dict)
    facts: dict[int, ServerFacts] = field(default_factory=dict)
    _tried: dict[int, float] = field(default_factory=dict)
    _leaving: list[Task[None]] = field(default_factory=list)
    _told: dict[int, str] = field(default_factory=dict)

    @property
    def timeout(self) -> float:
        return self.learner.settings.vllm.server.timeout_s

    def connect(self) -> None:
        """All of them, at the beginning of a run: one that is missing ends it."""
        tasks = [Task(partial(self._waited_for, client)) for client in self.clients]
        try:
            for client, task in zip(self.clients, tasks, strict=True):
                self.facts[client.index] = task.result()
            self._check_capacity()
            self._join(self.facts)
        except BaseException:
            self.close()
            raise

    def ended(self) -> dict[int, str]:
        """Servers whose sessions have."""
        return {
            index: f"{link.client.name}: its session has ended"
            for index, link in self.open.items()
            if not link.alive
        }

    def drop(self, index: int) -> None:
        if (link := self.open.pop(index, None)) is not None:
            self._leaving.append(link.close())

    def back(self, out: Sequence[int], until: float, patient: bool) -> dict[int, str]:
        """Those that are back have a connection again; why the others are not. Unless there is nobody else
        (`patient`), one that answered and could not be had is not asked at every step."""
        now = time.monotonic()
        asked = [index for index in out if patient or now - self._tried.get(index, -PAUSE) >= PAUSE]
        tasks = {index: Task(partial(self._again, index, until)) for index in asked}
        failed = {}
        for index, task in tasks.items():
            try:
                self.facts[index], self.open[index] = task.result()
            except EngineError as error:
                failed[index] = str(error)
                if not isinstance(error, ServerLost):
                    self._tell_once(index, str(error))
            else:
                del self._tried[index]
        return failed

    def close(self) -> None:
        """A process must not end while a thread of it leaves a group: gloo would abort it."""
        for index in list(self.open):
            self.drop(index)
        until = time.monotonic() + LEAVING
        for task in self._leaving:
            task.done.wait(max(0.0, until - time.monotonic()))

    def _tell_once(self, index: int, why: str) -> None:
        """Of a server that answers and cannot be taken: somebody has to do something about it."""
        if self._told.get(index) != why:
            self._told[index] = why
            self.tell(f"warning: {why}")

    def _waited_for(self, client: ServerClient) -> ServerFacts:
        began = told = time.monotonic()
        while (health := client.health()) != "ok":
            now = time.monotonic()
            if now - began >= self.timeout:
                raise EngineError(_unreachable(client, health, now - began))
            if now - told >= TOLD_EVERY:
                self.tell(f"waiting for {client.name}: {now - began:.0f} of {self.timeout:g} s")
                told = now
            time.sleep(min(client.patience.poll, max(0.0, began + self.timeout - now)))
        facts = client.facts()
        check_server(client.name, facts, self.learner, self.devices)
        return facts

    def _check_capacity(self) -> None:
        sizes = tuple(self.facts[client.index].world_size for client in self.clients)
        try:
            requests_per_rank(self.learner.settings.decode_batch_size, sizes, self.learners)
        except ConfigError as error:
            raise EngineError(str(error)) from None

    def _join(self, facts: Mapping[int, ServerFacts]) -> None:
        tasks = {
            index: Task(partial(self._linked, self.clients[index], told, self.timeout))
            for index, told in facts.items()
        }
        failed: list[EngineError] = []
        for index, task in tasks.items():
            try:
                self.open[index] = task.result()
            except EngineError as error:
                failed.append(error)
        if failed:
            raise EngineError(f"{failed[0]}\n  without servers: {ALTERNATIVES}") from failed[0]

    def _again(self, index: int, until: float) -> tuple[ServerFacts, Link]:
        client = self.clients[index]
        if (health := client.health()) != "ok":
            raise ServerLost(f"{client.name}: {_WHY[health]}")
        self._tried[index] = time.monotonic()
        facts = client.facts()
        check_server(client.name, facts, self.learner, self.devices)
        seconds = max(1.0, min(self.timeout, RETURNING, until - time.monotonic()))
        return facts, self._linked(client, facts, seconds)

    def _linked(self, client: ServerClient, facts: ServerFacts, seconds: float) -> Link:
        return Link.to(client, facts, self.learner.device, seconds, self.learner.settings.vllm.sync.timeout_s)


_WHY = {
    "refused": "nothing listens there",
    "silent": "it does not answer",
    "failed": "it says that its engine has ended, or hangs",
}


def _unreachable(client: ServerClient, health: str, seconds: float) -> str:
    return (
        f"{client.name}: {_WHY[health]}; {client.url}/health/ was tried for {seconds:.0f} s\n"
        f"  start it with `coordexp serve --config X.yaml --index {client.index}`, correct "
        f"rollout_matching.vllm.server.servers[{client.index}].base_url, raise server.timeout_s, {OTHERWISE}"
    )
