"""The servers that one rank sends weights to: connections, weights and probes. No collectives, except for those
that gathering the weights may need.

A server that fails in a sync is left behind, and the others go on. The pass over the weights itself always runs to
its end, because other ranks may take part in gathering them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import methodcaller

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig, AdapterWeights, Canary, Rollout, Weights
from coordexp.rollout.start import EngineSetup
from coordexp.rollout.weights import DIVERGED, SyncMode, find_non_finite
from coordexp.servers.asking import Asker
from coordexp.servers.client import ALTERNATIVES, OTHERWISE, ErrorResponse, ServerClient, ServerFacts, ServerLost
from coordexp.servers.links import FlatBucket, Link, examine_server
from coordexp.servers.pool import Loss, Pool
from coordexp.servers.transfer import BUCKET_BYTES, GPU_BUCKET_BYTES, Bucket, buckets, flat_size, flatten
from coordexp.tasks import Task

NOTIFY_EVERY = 10.0  # seconds between two messages about a server that is waited for
RETURNING = 30.0  # seconds that a server which is back may take to join, while others wait for it
PAUSE = 30.0  # seconds between two attempts to connect to a server that could not be used, while others answer
LEAVING = 2.0  # seconds that the end of a run waits for its groups to be left
BUFFERS = 2  # while the servers receive one bucket, the next is filled
SHARE = 0.5  # of the time that is left: what a server may take for one step while others wait for it
PROBLEMS = {
    "refused": "nothing listens there",
    "silent": "it does not respond",
    "failed": "it reports that its engine has ended or hangs",
}
# A server that refuses an adapter with one of these codes would refuse it again. With any other error, the run
# goes on without the server until it is back.
REFUSED_FOR_GOOD = frozenset(
    {"no_lora", "base_changed", "adapter_refused", "update_failed", "bad_request", "no_route"}
)


class NotUp(ServerLost):
    """Nothing listens, or the server reports that it cannot work. It may just be starting."""


@dataclass(frozen=True)
class Prospect:
    """A server before a sync, as its sender sees it: whether weights are sent to it, and whether it has just come
    back. `lost` is why it was lost since the last sync, and `failed` why it is not back."""

    facts: ServerFacts
    is_target: bool
    is_back: bool
    lost: Loss | None
    failed: Loss | None


@dataclass(frozen=True)
class Delivery:
    """The result of a sync for one server. Without a `loss`, it has the weights."""

    seconds: float
    nbytes: int
    loss: Loss | None


class Sender:
    """The servers that this rank sends weights to, if there are any. `adapter` returns the learner's adapter, if
    it can be sent alone. `open` are the links by server. They are opened at the first sync, closed when a server
    fails, and opened again when it is back."""

    def __init__(
        self,
        clients: Mapping[int, ServerClient],
        setup: EngineSetup,
        asker: Asker,
        canary: Canary,
        adapter: Callable[[], AdapterWeights] | None,
        notify: Callable[[str], None],
    ) -> None:
        self.clients, self.setup, self.asker, self.canary = clients, setup, asker, canary
        self.adapter, self.notify = adapter, notify
        self.settings = setup.settings.vllm
        self.sync_mode = SyncMode(self.settings.sync, adapter is not None, notify, OTHERWISE)
        self.devices: Sequence[str] = ()  # the GPUs of all learner ranks
        self.open: dict[int, Link] = {}
        self._attempts: dict[int, float] = {}  # when a server was last tried
        self._leaving: list[Task[None]] = []

    # Connections

    def connect_all(self) -> dict[int, ServerFacts]:
        """Connect to all servers, at the beginning of a run, and return their facts. Raise EngineError if one
        cannot be used, or is not up in time."""
        timeout = self.settings.server.timeout_s
        began = notified = time.monotonic()
        while missing := [index for index in self.clients if index not in self.open]:
            errors = self._connect(missing, began + timeout)
            seconds = time.monotonic() - began
            for error in errors.values():
                if not isinstance(error, NotUp) or seconds >= timeout:
                    self.close()
                    fixes = [error.fix, "" if ALTERNATIVES in error.fix else f"without servers: {ALTERNATIVES}"]
                    raise EngineError(error.problem, "; ".join(filter(None, fixes))) from error
            if errors and began + seconds - notified >= NOTIFY_EVERY:
                names = ", ".join(self.clients[index].name for index in errors)
                self.notify(f"waiting for {names}: {seconds:.0f} of {timeout:g} s")
                notified = began + seconds
            if errors:
                time.sleep(min(client.timeouts.poll for client in self.clients.values()))
        return {index: client.facts for index, client in self.clients.items() if client.facts}

    def find_prospects(self, pool: Pool, until: float) -> dict[int, Prospect]:
        """Connect to the servers that are back. Return which servers get weights, and why the others cannot. One
        that responded but could not be used is not tried at every step, unless no other is left."""
        ended = {
            index: Loss(f"{link.client.name}: it has left the group for weights")
            for index, link in self.open.items()
            if not link.is_alive
        }
        for index in ended:
            self.drop(index)
        out = pool.out | ended
        gone = [index for index in self.clients if index not in self.open and index in out]
        now, none_left = time.monotonic(), len(out) == len(pool.states)
        due = [index for index in gone if none_left or now - self._attempts.get(index, -PAUSE) >= PAUSE]
        errors = self._connect(due, min(until, now + RETURNING))
        prospects = {}
        for index, client in self.clients.items():
            assert client.facts is not None, "before the first sync"
            is_target = index in self.open and (index not in pool.usable or index in ended)
            error = errors.get(index)
            failed = Loss.from_error(error) if error else None
            if not isinstance(error, ServerLost | None) and pool.out.get(index) != failed:  # the user has to act
                self.notify(f"warning: {error}")
            prospects[index] = Prospect(client.facts, is_target, index in gone, ended.get(index), failed)
        return prospects

    def drop(self, index: int) -> None:
        """Close the link with a server, if this rank has one."""
        if (link := self.open.pop(index, None)) is not None:
            self._leaving.append(link.close())

    def close(self) -> None:
        """Leave all groups. The process must not end while a thread leaves a group: gloo would abort it."""
        for index in list(self.open):
            self.drop(index)
        until = time.monotonic() + LEAVING
        for task in self._leaving:
            task.done.wait(max(0.0, until - time.monotonic()))

    def _connect(self, indices: Sequence[int], until: float) -> dict[int, EngineError]:
        """Connect to those of these servers that are up, and return the errors of the others."""
        until = max(time.monotonic() + 1.0, until)
        errors = {}
        for index, task in {k: Task(self._open_link, self.clients[k], until) for k in indices}.items():
            if (error := task.failure(EngineError)) is None:
                self.open[index] = task.result()
                self._attempts.pop(index, None)
            else:
                errors[index] = error
        return errors

    def _open_link(self, client: ServerClient, until: float) -> Link:
        if (health := client.health()) != "ok":
            raise NotUp(
                f"{client.name}: {PROBLEMS[health]} ({client.url}/health/)",
                f"start it with `coordexp serve --config X.yaml --index {client.index}`, raise server.timeout_s, "
                f"correct rollout_matching.vllm.server.servers[{client.index}].base_url, {OTHERWISE}",
            )
        self._attempts[client.index] = time.monotonic()
        facts = examine_server(client, self.setup, self.devices)
        return Link(client, facts.world_size, self.setup.device, until, self.settings.sync.timeout_s)

    # Weights

    def deliver(
        self, weights: Weights, version: int, targets: Mapping[int, bool], expected: list[Rollout]
    ) -> dict[int, Delivery]:
        """Send the weights to those of the targets that are this rank's, and probe those whose value is True:
        raise EngineError if one does not answer as `expected`. Return which of them have the weights, and why the
        others do not, whose links are closed. A rank without servers takes part in gathering the weights."""
        own = {index: self.open[index] for index in targets if index in self.open}
        sent = self._send_by_mode(list(own.values()), weights, self.asker.name_version(version))
        errors: dict[int, EngineError] = dict(sent.errors)
        probes = {}
        for index in own:
            if targets[index] and index not in errors:
                # Once for each device, so that each replica answers some.
                requests = self.canary.requests * self.clients[index].world_size
                probes[index] = Task(self.asker.ask, index, requests, version)
        for index, task in probes.items():
            if (lost := task.failure(ServerLost)) is not None:
                errors[index] = lost
                continue
            client = self.clients[index]
            self.canary.compare(client.name, expected * client.world_size, task.result(), OTHERWISE)
        for index in errors:
            self.drop(index)
        losses = {index: Loss.from_error(error) for index, error in errors.items()}
        return {index: Delivery(sent.seconds, sent.nbytes, losses.get(index)) for index in own}

    def _send_by_mode(self, links: Sequence[Link], weights: Weights, version: str) -> "Sent":
        """Send the adapter alone or whole weights, as the mode says. If a server refuses the adapter, all of them
        get whole weights from here on."""
        if not links:
            deque(weights(), maxlen=0)
            return Sent()
        device, seconds = self.setup.device, self.settings.sync.timeout_s
        if self.sync_mode.is_adapter:
            assert self.adapter is not None  # there is one rank, and it gathers no weights with others
            config, tensors = self.adapter()
            sent = send(links, tensors, version, device, seconds, config)
            refusals = [
                error.problem.splitlines()[0]
                for error in sent.errors.values()
                if isinstance(error, ErrorResponse) and error.code in REFUSED_FOR_GOOD
            ]
            if not refusals:
                return sent
            self.sync_mode.fall_back(refusals[0])
        return send(links, weights(), version, device, seconds, others_wait=self.settings.sync.senders > 1)


@dataclass
class Sent:
    """The result of a pass: the errors of the servers that do not have the weights."""

    errors: dict[int, EngineError] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0


def send(
    links: Sequence[Link],
    weights: Iterable[tuple[str, Tensor]],
    version: str,
    device: torch.device,
    seconds: float,
    adapter: AdapterConfig | None = None,
    others_wait: bool = False,
) -> Sent:
    """Send the weights to all servers within `seconds`. If there is an `adapter` config, they are the weights of
    that adapter. Raise EngineError if a weight has a NaN or an Inf; its bucket is not sent to any server.
    `others_wait` says that other ranks gather the weights together with this one."""
    began, total, broken = time.monotonic(), 0, None
    steps = _SharedSteps(links, began + seconds, others_wait or len(links) > 1)
    memory = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
    most = GPU_BUCKET_BYTES if device.type == "cuda" else BUCKET_BYTES
    nothing_after: list[Bucket] = [[]]
    steps.begin(methodcaller("begin", version, adapter, steps.until))
    passing = iter(weights)
    try:
        for number, (bucket, following) in enumerate(pairwise(chain(buckets(passing, most), nothing_after))):
            broken = broken or find_non_finite(bucket)
            if broken or not steps.left:
                continue
            place = number % BUFFERS
            if memory[place].numel() == 0:
                memory[place] = torch.empty(most, dtype=torch.uint8, device=device)
            metadatas, part = flatten(bucket, memory[place])
            if part.numel() > memory[place].numel():
                memory[place] = part
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            total += part.numel()
            steps.begin(methodcaller("load", FlatBucket(metadatas, part, flat_size(following)), steps.until))
    finally:
        deque(passing, maxlen=0)  # other ranks take part in the pass, so it goes on to its end also after an error
    if broken is not None:
        problem = f"the learner's weights were not sent: {broken} has NaN or Inf values"
        raise EngineError(problem, DIVERGED)
    steps.begin(methodcaller("finish", version, steps.until))
    steps.wait(is_last=True)
    return Sent(steps.errors, total, time.monotonic() - began)


class _SharedSteps:
    """The steps that all servers of a pass take at the same time. A server that fails at one is left out of the
    next. With `others_wait`, other servers or senders wait, and one that takes more than half of the time that is
    left is left out, too."""

    def __init__(self, links: Sequence[Link], until: float, others_wait: bool) -> None:
        self.left, self.until, self.others_wait = list(links), until, others_wait
        self.errors: dict[int, EngineError] = {}
        self._running: dict[Link, Task[None]] = {}

    def begin(self, step: Callable[[Link], None]) -> None:
        """Begin a step with every server that is left, once the one before has ended."""
        self.wait()
        self._running = {link: Task(step, link) for link in self.left}

    def wait(self, is_last: bool = False) -> None:
        now = time.monotonic()
        share = 1.0 if is_last or not self.others_wait else SHARE
        deadline = now + share * (self.until - now)
        for link, task in self._running.items():
            name, index = link.client.name, link.client.index
            try:
                task.result(deadline=deadline, check=link.check)
                continue
            except TimeoutError:
                self.errors[index] = ServerLost(
                    f"{name}: it loaded weights too slowly for rollout_matching.vllm.sync.timeout_s",
                    "if the model is large, raise it; otherwise check the memory and load of the server's machine",
                )
            except EngineError as error:
                self.errors[index] = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the other servers go on
                self.errors[index] = ServerLost(f"{name}: {type(error).__name__}: {error}")
            self.left.remove(link)
        self._running = {}
