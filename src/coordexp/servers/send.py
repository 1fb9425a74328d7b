"""Sends weights to the servers: one pass over them, bucket by bucket, to all servers at once.

A server that fails is left behind, and the others go on. The pass itself always runs to its end, because other
ranks may take part in gathering the weights.

At every level, from here to the workers of a server, an update has the same calls: `begin`, one `load` for each
bucket, and `finish`, over a group that was joined with `join`.
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import methodcaller
from typing import Any, ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig
from coordexp.rollout.weights import find_non_finite, non_finite_error
from coordexp.servers.client import Call, ServerClient, ServerLost
from coordexp.servers.protocol import (
    BeginUpdate,
    JoinGroup,
    Message,
    WeightMessage,
    WeightVersion,
    read_response,
)
from coordexp.servers.transfer import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    Bucket,
    Metadata,
    WeightGroup,
    buckets,
    flat_size,
    flatten,
    join,
)
from coordexp.tasks import Task, ignore

BUFFERS = 2  # while the servers receive one bucket, the next is filled
SHARE = 0.5  # of the time that is left: what a server may take for one step while others wait for it
LOOK = 0.02  # seconds between two looks at a group that is not complete
LATE = 0.5  # seconds in which a thread with the same deadline ends by itself


@dataclass(frozen=True)
class FlatBucket:
    """A bucket in its buffer. `following` is the length of the next one, and 0 after the last."""

    metadatas: list[Metadata]
    part: Tensor
    following: int


class Link:
    """A rank's group with one server. The server is this learner's until the connection of the group closes."""

    is_ours: ClassVar[bool] = True  # the server is not one of ms-swift

    def __init__(
        self,
        client: ServerClient,
        world_size: int,
        device: torch.device,
        until: float,
        sync: float,
        notify: Callable[[str], None] = ignore,
    ) -> None:
        """Join a group with the server until `until`. Later, a transfer over it may take `sync` seconds."""
        self.client, self.notify = client, notify
        self.name = uuid4().hex
        self.is_torn = False  # the group may still carry weights that the server no longer expects
        self._loading: Call | None = None  # the load that the server has not answered yet
        timeout = max(sync, until - time.monotonic())
        message = self._join_message(world_size + 1, timeout)
        self._joined = Call(client, "POST", "/init_communicator/", message, stays_open=self.is_ours)
        try:
            self.group = self._join(world_size, device, until, timeout)
        except BaseException:
            self._joined.cut()
            raise

    @property
    def is_alive(self) -> bool:
        return not self._joined.has_ended

    def check(self) -> None:
        """Raise the error of a load that has failed meanwhile, or ServerLost if the server does not respond."""
        if (loading := self._loading) is not None:
            loading.check()

    def begin(self, version: str, adapter: AdapterConfig | None, until: float) -> None:
        """Begin an update of whole weights, or of an adapter with this config."""
        if self.is_torn:
            raise ServerLost(f"{self.client.name}: it refused weights while they were being sent to it")
        self.post("/begin_update/", BeginUpdate(group=self.name, version=version, adapter=adapter), until)
        self.is_torn = True

    def load(self, bucket: FlatBucket, until: float) -> None:
        """Send a bucket. Return once the server has received it: it loads it while it receives the next one, whose
        length it knows."""
        message = {"group": self.name, "metadatas": bucket.metadatas, "next_bytes": bucket.following}
        is_expected = self._loading is not None
        if not is_expected:
            self._begin_load("/load_bucket/", message, until)
        self._broadcast(bucket.part, until)
        if is_expected:
            self._begin_load("/load_bucket/", message, until)

    def finish(self, version: str, until: float) -> None:
        """Return once the server has put the weights into use, has cleared its caches, and reports the version."""
        self._wait_for_load(until)
        self.is_torn = False
        route = "/finish_update/"
        body = self.post(route, WeightMessage(group=self.name), until)
        reported = read_response(WeightVersion, body, self.client.name, route).weight_version
        if reported == version:
            reported = self.client.weight_version()
        if reported != version:
            raise ServerLost(f"{self.client.name}: version {version} was sent, but it reports version {reported}")

    def close(self) -> Task[None]:
        """Close the link, in whatever state the server is, which notices that by itself. The task that is returned
        may wait for a peer that is gone."""
        self._joined.cut()
        return Task(self.leave)

    def leave(self) -> None:
        self.group.close()

    def post(self, path: str, message: Message, until: float) -> bytes:
        """Return the response. Raise ServerLost if the server dies meanwhile, or has not responded at `until`."""
        return Call(self.client, "POST", path, message.to_json()).result(until)

    def _begin_load(self, path: str, message: dict[str, Any], until: float) -> None:
        self._wait_for_load(until)
        self._loading = Call(self.client, "POST", path, message)

    def _wait_for_load(self, until: float) -> None:
        if self._loading is not None:
            self._loading.result(until)
        self._loading = None

    def _broadcast(self, part: Tensor, until: float) -> None:
        if part.device.type == "cuda":
            torch.cuda.set_device(part.device)
        try:
            self.group.broadcast(part)
        except (RuntimeError, ValueError) as error:
            self._wait_for_load(until)  # the server may say why
            raise ServerLost(f"{self.client.name}: {error}") from error

    @property
    def _host(self) -> str:
        return urlsplit(self.client.url).hostname or "127.0.0.1"

    def _join_message(self, size: int, timeout: float) -> dict[str, Any]:
        learner = f"{socket.gethostname()}:{os.getpid()}"
        port = self.client.group_port
        return JoinGroup(group=self.name, learner=learner, port=port, world_size=size, timeout_s=timeout).to_json()

    @property
    def _may_join(self) -> bool:
        """True once the server is this learner's, and has left the group before."""
        return self._joined.lines >= 1

    @property
    def _has_joined(self) -> bool:
        return self._joined.lines == 2

    def _join(self, rank: int, device: torch.device, until: float, timeout: float) -> WeightGroup:
        """Return the group: the server's workers, and this process as the last rank."""
        host, port = self._host, self.client.group_port
        while True:  # an attempt to join before the port is open could disturb the next one
            self._joined.check()
            if self._may_join:
                with suppress(OSError):
                    socket.create_connection((host, port), timeout=1).close()
                    break
            if time.monotonic() >= until:
                reason = "nothing listens there" if self._may_join else "the server has not let this one in"
                raise self._no_group(reason)
            time.sleep(LOOK)
        group = Task(join, host, port, rank, rank + 1, device, timeout, not self.is_ours)
        while not (group.done.is_set() and self._has_joined) and group.error is None:
            self._joined.check()
            if time.monotonic() >= until + LATE:
                raise self._no_group(f"it was not complete after {until - self._joined.since:.1f} s")
            time.sleep(LOOK)
        self._joined.check()
        if isinstance(group.error, EngineError):
            raise group.error
        if group.error is not None:
            raise self._no_group(str(group.error).splitlines()[0]) from group.error
        return group.result()

    def _no_group(self, reason: str) -> ServerLost:
        return ServerLost(
            f"{self.client.name}: no group for weights at its group_port {self.client.group_port}: {reason}",
            "the port must be free on the server's machine and open to the learner's",
        )


@dataclass
class Sent:
    """The result of a pass: the errors of the servers that do not have the weights."""

    errors: dict[int, EngineError] = field(default_factory=dict)
    nbytes: int = 0
    seconds: float = 0.0


class _Steps:
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
    steps = _Steps(links, began + seconds, others_wait or len(links) > 1)
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
        raise non_finite_error(broken)
    steps.begin(methodcaller("finish", version, steps.until))
    steps.wait(is_last=True)
    return Sent(steps.errors, total, time.monotonic() - began)
