"""Sends weights to the servers: one pass over them, bucket by bucket, to all servers at once.

A server that fails is left behind, and the others go on. The pass itself always runs to its end, because other
ranks may take part in gathering the weights.

At every level, from here to the workers of a server, an update has the same calls: `start`, one `load` for each
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
from coordexp.rollout.weights import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    Bucket,
    Metadata,
    WeightGroup,
    buckets,
    find_non_finite,
    flat_size,
    flatten,
    join,
    non_finite_error,
)
from coordexp.servers.client import Call, ServerClient, ServerLost
from coordexp.servers.protocol import (
    FinishUpdate,
    JoinGroup,
    LoadAdapterBucket,
    LoadBucket,
    StartUpdate,
    WeightMessage,
    WeightVersion,
    read_response,
)
from coordexp.tasks import Task, ignore

BUFFERS = 2  # while the servers receive one bucket, the next is filled
SHARE = 0.5  # of the time that is left: what a server may take for one step while others wait for it
LOOK = 0.02  # seconds between two looks at a group that is not complete
LATE = 0.5  # seconds in which a thread with the same deadline ends by itself


@dataclass(frozen=True)
class FlatBucket:
    """A bucket in its buffer. `following` is the length of the next one, and 0 after the last. `adapter` is the
    config of the adapter whose weights these are."""

    metadatas: list[Metadata]
    part: Tensor
    following: int
    adapter: AdapterConfig | None = None


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
        self.name = uuid4().hex if self.is_ours else None
        self.is_torn = False  # the group may still carry weights that the server no longer expects
        self._loading: Call | None = None  # the load that the server has not answered yet
        host, timeout = urlsplit(client.url).hostname or "127.0.0.1", max(sync, until - time.monotonic())
        message = JoinGroup(host=host, port=client.group_port, world_size=world_size + 1)
        if self.is_ours:
            learner = {"learner": f"{socket.gethostname()}:{os.getpid()}", "timeout_s": timeout}
            message = message.model_copy(update=learner)
        self._joined = Call(client, "POST", "/init_communicator/", self._to_json(message), stays_open=self.is_ours)
        try:
            self.group = self._join(message, device, until, timeout)
        except BaseException:
            self._joined.cut()
            raise

    @property
    def is_alive(self) -> bool:
        return not (self.is_ours and self._joined.has_ended)

    def check(self) -> None:
        """Raise the error of a load that has failed meanwhile, or ServerLost if the server does not respond."""
        if (loading := self._loading) is not None:
            loading.check()

    def start(self, version: str, is_adapter: bool, until: float) -> None:
        if self.is_torn:
            raise ServerLost(f"{self.client.name}: it refused weights while they were being sent to it")
        self.post("/start_update/", StartUpdate(version=version, adapter=is_adapter), until)
        self.is_torn = True

    def load(self, bucket: FlatBucket, until: float) -> None:
        """Send a bucket. Return once the server has received it. A server of ours loads it while it receives the
        next one, whose length it knows."""
        message: WeightMessage
        if bucket.adapter is not None:
            path = "/update_adapter_flattened_param/"
            message = LoadAdapterBucket(peft_config=bucket.adapter, metadatas=bucket.metadatas)
        else:
            path = "/update_flattened_params/"
            more = {"next_bytes": bucket.following} if self.is_ours else {}
            message = LoadBucket(metadatas=bucket.metadatas, **more)
        is_expected = self._loading is not None and self.is_ours and bucket.adapter is None
        if not is_expected:
            self._begin_load(path, message, until)
        if bucket.part.device.type == "cuda":
            torch.cuda.set_device(bucket.part.device)
        try:
            self.group.broadcast(bucket.part)
        except (RuntimeError, ValueError) as error:
            self._wait_for_load(until)  # the server may say why
            raise ServerLost(f"{self.client.name}: {error}") from error
        if is_expected:
            self._begin_load(path, message, until)

    def finish(self, version: str, until: float) -> None:
        """Return once the server has put the weights into use, has cleared its caches, and reports the version."""
        self._wait_for_load(until)
        self.is_torn = False
        route = "/finish_update/"
        body = self.post(route, FinishUpdate(version=version), until)
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

    def post(self, path: str, message: WeightMessage, until: float) -> bytes:
        return Call(self.client, "POST", path, self._to_json(message)).result(until)

    def _to_json(self, message: WeightMessage) -> dict[str, Any]:
        values = message.to_json()
        return values | {"group": self.name} if self.is_ours else values

    def _begin_load(self, path: str, message: WeightMessage, until: float) -> None:
        self._wait_for_load(until)
        self._loading = Call(self.client, "POST", path, self._to_json(message))

    def _wait_for_load(self, until: float) -> None:
        if self._loading is not None:
            self._loading.result(until)
        self._loading = None

    def _join(self, message: JoinGroup, device: torch.device, until: float, timeout: float) -> WeightGroup:
        """Return the group: the server's workers, and this process as the last rank."""
        host, port, size = message.host, message.port, message.world_size
        while True:  # an attempt to join before the port is open could disturb the next one
            self._joined.check()
            if self._joined.lines or not self.is_ours:  # the server has left the group before
                with suppress(OSError):
                    socket.create_connection((host, port), timeout=1).close()
                    break
            if time.monotonic() >= until:
                let_in = self._joined.lines or not self.is_ours
                raise self._no_group("nothing listens there" if let_in else "the server has not let this one in")
            time.sleep(LOOK)
        group = Task(join, host, port, size - 1, size, device, timeout, not self.is_ours)
        while not (group.done.is_set() and self._is_answered) and group.error is None:
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

    @property
    def _is_answered(self) -> bool:
        return self._joined.lines == 2 if self.is_ours else self._joined.has_ended

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
    steps.begin(methodcaller("start", version, adapter is not None, steps.until))
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
            bucket_sent = FlatBucket(metadatas, part, flat_size(following), adapter)
            steps.begin(methodcaller("load", bucket_sent, steps.until))
    finally:
        deque(passing, maxlen=0)  # other ranks take part in the pass, so it goes on to its end also after an error
    if broken is not None:
        raise non_finite_error(broken)
    steps.begin(methodcaller("finish", version, steps.until))
    steps.wait(is_last=True)
    return Sent(steps.errors, total, time.monotonic() - began)
