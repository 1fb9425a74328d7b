"""The connections of a rank to the servers that it sends weights to. They are opened at the first sync, closed
when a server fails, and opened again when it is back."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from coordexp.errors import EngineError
from coordexp.rollout.start import EngineSetup
from coordexp.servers import swift_servers
from coordexp.servers.client import ALTERNATIVES, OTHERWISE, ServerClient, ServerFacts, ServerLost
from coordexp.servers.pool import Loss
from coordexp.servers.protocol import (
    ServerVersion,
    WorldSize,
    model_difference,
    model_fingerprint,
    read_version,
)
from coordexp.servers.send import Link
from coordexp.tasks import Task

NOTIFY_EVERY = 10.0  # seconds between two messages about a server that is waited for
RETURNING = 30.0  # seconds that a server which is back may take to join, while others wait for it
PAUSE = 30.0  # seconds between two attempts to connect to a server that could not be used, while others answer
LEAVING = 2.0  # seconds that the end of a run waits for its groups to be left
SAME_CONFIG = "start it with the config that the learner has"
PROBLEMS = {
    "refused": "nothing listens there",
    "silent": "it does not respond",
    "failed": "it reports that its engine has ended or hangs",
}


class NotUp(ServerLost):
    """Nothing listens, or the server reports that it cannot work. It may just be starting."""


@dataclass
class Links:
    """The open links by server. `clients` are those of the servers that this rank sends weights to, and `devices`
    are those of all learner ranks."""

    clients: Mapping[int, ServerClient]
    setup: EngineSetup
    notify: Callable[[str], None]
    devices: Sequence[str] = ()
    open: dict[int, Link] = field(default_factory=dict)
    _attempts: dict[int, float] = field(default_factory=dict)  # when a server was last tried
    _leaving: list[Task[None]] = field(default_factory=list)

    @property
    def timeout(self) -> float:
        return self.setup.settings.vllm.server.timeout_s

    def connect_all(self) -> dict[int, ServerFacts]:
        """Connect to all servers, at the beginning of a run, and return their facts. Raise EngineError if one
        cannot be used, or is not up in time."""
        began = notified = time.monotonic()
        while missing := [index for index in self.clients if index not in self.open]:
            errors = self.connect(missing, began + self.timeout, at_once=True)
            now = time.monotonic()
            for error in errors.values():
                if isinstance(error, NotUp) and now - began < self.timeout:
                    continue
                self.close()
                fixes = [error.fix, "" if ALTERNATIVES in error.fix else f"without servers: {ALTERNATIVES}"]
                raise EngineError(error.problem, "; ".join(filter(None, fixes))) from error
            for index in errors if now - notified >= NOTIFY_EVERY else ():
                name, notified = self.clients[index].name, now
                self.notify(f"waiting for {name}: {now - began:.0f} of {self.timeout:g} s")
            if errors:
                time.sleep(min(client.timeouts.poll for client in self.clients.values()))
        return {index: client.facts for index, client in self.clients.items() if client.facts}

    def connect(self, indices: Sequence[int], until: float, at_once: bool) -> dict[int, EngineError]:
        """Connect to those of these servers that are up, and return the errors of the others. A server that
        responded but could not be used is not tried at every step, except with `at_once`."""
        now = time.monotonic()
        due = [index for index in indices if at_once or now - self._attempts.get(index, -PAUSE) >= PAUSE]
        until = max(now + 1.0, until)
        errors = {}
        for index, task in {k: Task(self._connect, self.clients[k], until) for k in due}.items():
            if (error := task.failure(EngineError)) is None:
                self.open[index] = task.result()
                self._attempts.pop(index, None)
            else:
                errors[index] = error
        return errors

    def drop_ended(self) -> dict[int, Loss]:
        """Drop the links that their servers have closed, and return the losses of these servers."""
        ended = {
            index: Loss(f"{link.client.name}: it has left the group for weights")
            for index, link in self.open.items()
            if not link.is_alive
        }
        for index in ended:
            self.drop(index)
        return ended

    def drop(self, index: int) -> None:
        if (link := self.open.pop(index, None)) is not None:
            self._leaving.append(link.close())

    def close(self) -> None:
        """Leave all groups. The process must not end while a thread leaves a group: gloo would abort it."""
        for index in list(self.open):
            self.drop(index)
        until = time.monotonic() + LEAVING
        for task in self._leaving:
            task.done.wait(max(0.0, until - time.monotonic()))

    def _connect(self, client: ServerClient, until: float) -> Link:
        if (health := client.health()) != "ok":
            raise NotUp(
                f"{client.name}: {PROBLEMS[health]} ({client.url}/health/)",
                f"start it with `coordexp serve --config X.yaml --index {client.index}`, raise server.timeout_s, "
                f"correct rollout_matching.vllm.server.servers[{client.index}].base_url, {OTHERWISE}",
            )
        self._attempts[client.index] = time.monotonic()
        facts = examine_server(client, self.setup, self.devices)
        kind = Link if facts.reports_version else swift_servers.SwiftLink
        sync = self.setup.settings.vllm.sync.timeout_s
        return kind(client, facts.world_size, self.setup.device, until, sync, self.notify)


def examine_server(client: ServerClient, learner: EngineSetup, devices: Sequence[str]) -> ServerFacts:
    """Set and return the facts of a client. Raise EngineError if its server does not fit the learner.
    `devices` are those of all learner ranks. A server without our version route is one of ms-swift."""
    size = client.read(WorldSize, "/get_world_size/").world_size
    body = client.get_if_present("/version/?full=1")
    if body is None:
        client.facts, guard = swift_servers.read_facts(client, size, learner.settings.repeat_terminate)
        if guard is not None:
            _check_guard(client.name, guard, learner)
        return client.facts
    version = read_version(body, client.name)
    if version.world_size != size:
        raise EngineError(
            f"{client.name}: /get_world_size/ says {size}, but /version/ says {version.world_size}",
            "this should not happen; start the server again",
        )
    _check_version(client.name, version, learner, devices)
    client.facts = ServerFacts(size, version.max_model_len, version.boot)
    return client.facts


def _check_version(server: str, version: ServerVersion, learner: EngineSetup, devices: Sequence[str]) -> None:
    """Raise EngineError unless the server has the learner's model, dtype, length and guard, on other devices."""
    if difference := model_difference(model_fingerprint(learner.folder, learner.image_size), version.model):
        raise EngineError(
            f"{server}: it serves another model than {learner.folder}: {difference}",
            f"{SAME_CONFIG} (model.path, max_pixels and min_pixels)",
        )
    if version.dtype != learner.dtype:
        raise EngineError(
            f"{server}: its weights are {version.dtype}, but model.dtype is {learner.dtype}", SAME_CONFIG
        )
    length = learner.settings.vllm.max_model_len
    if length is not None and version.max_model_len != length:
        raise EngineError(
            f"{server}: its max_model_len is {version.max_model_len}, but the learner's is {length}", SAME_CONFIG
        )
    _check_guard(server, version.guard, learner)
    if shared := set(map(normalise_device, version.devices)) & set(map(normalise_device, filter(None, devices))):
        raise EngineError(
            f"{server}: it runs on {', '.join(sorted(shared))}, which a learner rank uses too",
            "give them GPUs of their own (CUDA_VISIBLE_DEVICES), or set rollout_matching.vllm.mode: colocate",
        )


def _check_guard(server: str, theirs: dict[str, Any], learner: EngineSetup) -> None:
    ours = learner.settings.repeat_terminate.model_dump(mode="json")
    if different := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
        name = different[0]
        raise EngineError(
            f"{server}: its repeat_terminate.{name} is {theirs.get(name)}, but the learner's is {ours.get(name)}",
            f"a server loads its guard when it starts: {SAME_CONFIG}",
        )


def own_device(device: torch.device) -> str:
    """Return the GPU of this process, with the name of its machine. Return an empty text without a GPU."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def normalise_device(device: str) -> str:
    """Return the device with the id of its GPU in one form, since ids are written in several."""
    host, _, identity = device.rpartition("/")
    return f"{host}/{identity.removeprefix('GPU-').lower()}"
