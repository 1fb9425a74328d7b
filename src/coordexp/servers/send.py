"""Sends weights to the servers: one pass over them, bucket by bucket, to all servers at once.

A server that fails is left behind, and the others go on. The pass itself always runs to its end, because other
ranks may take part in gathering the weights.
"""

import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import attrgetter
from queue import SimpleQueue
from threading import Condition, Event
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from coordexp.engine.weights import (
    BUCKET_BYTES,
    GPU_BUCKET_BYTES,
    AdapterRefused,
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
from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig, AdapterWeights
from coordexp.servers.client import (
    ErrorResponse,
    ServerClient,
    ServerFacts,
    ServerLost,
    ServerSession,
)
from coordexp.servers.pool import Loss
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

BUFFERS = 2  # while the servers load one, the next is filled
LATE = 0.5  # seconds in which a thread with the same deadline ends by itself
STRAGGLING = 0.25  # of the deadline: the time that servers wait for one of them to load a bucket
GRACE = 0.5  # seconds in which a delivery reports by itself what it was late with
# A server that refuses an adapter with one of these codes would refuse it again. With any other error, the run
# goes on without the server until it is back.
REFUSED_FOR_GOOD = frozenset(
    {"no_lora", "base_changed", "adapter_refused", "update_failed", "bad_request", "no_route"}
)


class Link:
    """A rank's connection to one server: a session, and a group for weights."""

    def __init__(self, client: ServerClient, session: ServerSession | None, group: WeightGroup) -> None:
        self.client, self.session, self.group = client, session, group
        self.is_torn = False  # the group may still carry weights that the server no longer expects

    @classmethod
    def to(
        cls, client: ServerClient, facts: ServerFacts, device: torch.device, seconds: float, sync: float
    ) -> "Link":
        """Connect to the server within `seconds`. Later, a transfer over the link may take `sync` seconds."""
        with ExitStack() as undo:
            session = ServerSession.open(client, uuid4().hex)
            undo.callback(session.close)
            timeout = max(seconds, sync)
            message = join_message(client, facts).model_copy(
                update={"session": session.identity, "timeout_s": timeout}
            )
            group = join_group(client, message, device, seconds, timeout)
            undo.pop_all()
        return cls(client, session, group)

    @property
    def is_alive(self) -> bool:
        return self.session is None or not self.session.ended.is_set()

    def check_adapter(self) -> None:
        """Raise AdapterRefused if the server cannot be given an adapter alone."""

    def start(self, version: str, until: float, is_adapter: bool) -> None:
        self.post("/start_update/", StartUpdate(version=version, adapter=is_adapter), until)

    def announce(
        self, metadatas: list[Metadata], next_bytes: int, until: float, adapter: AdapterConfig | None
    ) -> None:
        """Send the metadata of a bucket, and return once the server has loaded the bucket."""
        if adapter is not None:
            message = LoadAdapterBucket(peft_config=adapter, metadatas=metadatas)
            self.post("/update_adapter_flattened_param/", message, until)
        else:
            self.post("/update_flattened_params/", LoadBucket(metadatas=metadatas, next_bytes=next_bytes), until)

    def broadcast(self, part: Tensor) -> None:
        if part.device.type == "cuda":
            torch.cuda.set_device(part.device)
        self.group.broadcast(part)

    def finish(self, version: str, until: float, notify: Callable[[str], None]) -> None:
        """Return once the server has put the weights into use, has cleared its caches, and reports the version."""
        route = "/finish_update/"
        body = self.post(route, FinishUpdate(version=version), until)
        reported = read_response(WeightVersion, body, self.client.name, route).weight_version
        if reported == version:
            reported = self.client.weight_version()
        if reported != version:
            raise ServerLost(f"{self.client.name}: version {version} was sent, but it reports version {reported}")

    def close(self) -> Task[None]:
        """Close the link, in whatever state the server is. The task that is returned may wait for a peer that is
        gone."""
        if self.session is not None:
            self.session.close()  # the server notices that by itself
        return Task(self.leave)

    def leave(self) -> None:
        self.group.close()

    def post(self, path: str, message: WeightMessage, until: float) -> bytes:
        if self.session is not None:
            message = message.model_copy(update={"session": self.session.identity})
        return self.client.post(path, message, max(0.0, until - time.monotonic()))


def join_message(client: ServerClient, facts: ServerFacts) -> JoinGroup:
    host = urlsplit(client.url).hostname or "127.0.0.1"
    return JoinGroup(host=host, port=client.group_port, world_size=facts.world_size + 1)


def join_group(
    client: ServerClient, message: JoinGroup, device: torch.device, seconds: float, timeout: float
) -> WeightGroup:
    """Return the group for weights: the server's workers, and this process as the last rank. Raise ServerLost if
    it is not complete in `seconds`. Later, a transfer over it may take `timeout` seconds. A group without a
    session is one with ms-swift."""
    host, port, size = message.host, message.port, message.world_size
    until, changed = time.monotonic() + seconds, Event()
    request = Task(client.post, "/init_communicator/", message, seconds + client.timeouts.call, changed=changed)
    _wait_until_open(client, host, request, until)
    is_plain = message.session is None
    group = Task(join, host, port, size - 1, size, device, timeout, is_plain, changed=changed)
    while not (request.done.is_set() and group.done.is_set()) and not (request.error or group.error):
        if not changed.wait(max(0.0, until + LATE - time.monotonic())):
            raise _no_group(client, f"it was not complete after {seconds:g} s")
        changed.clear()
    for error in (request.error, group.error):
        if isinstance(error, EngineError):
            raise error
        if error is not None:
            raise _no_group(client, str(error).splitlines()[0]) from error
    return group.result()


def _wait_until_open(client: ServerClient, host: str, request: Task[bytes], until: float) -> None:
    """Wait until the group's port is open. An attempt to join before that, which nobody waits for any more, could
    disturb the next one."""
    while True:
        if request.done.is_set():
            request.result()
        with suppress(OSError):
            socket.create_connection((host, client.group_port), timeout=1).close()
            return
        if time.monotonic() >= until:
            raise _no_group(client, "nothing listens there")
        time.sleep(0.02)


def _no_group(client: ServerClient, reason: str) -> ServerLost:
    return ServerLost(
        f"{client.name}: no group for weights at its group_port {client.group_port}: {reason}",
        "the port must be free on the server's machine and open to the learner's",
    )


@dataclass(frozen=True)
class Sent:
    """The result of a pass: the servers that have the weights, why the others do not, and the codes of the errors
    that those answered with."""

    servers: tuple[int, ...]
    failed: dict[int, Loss]
    nbytes: int
    seconds: float
    codes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Load:
    """A bucket in its buffer, and the length of the next one. A server that knows the length receives the next
    bucket while it loads this one."""

    metadatas: list[Metadata]
    part: Tensor
    next_bytes: int


class _Delivery:
    """Sends all buckets to one server, in two threads: one sends the bytes, ahead of the other, which sends the
    metadata. `received` counts the buckets whose bytes the server has received."""

    def __init__(
        self,
        link: Link,
        version: str,
        until: float,
        changed: Condition,
        notify: Callable[[str], None],
        adapter: AdapterConfig | None,
    ) -> None:
        self.link, self.received, self.code = link, 0, ""
        self.loss: Loss | None = None
        self.is_over = False
        self._announcements: SimpleQueue[_Load | None] = SimpleQueue()
        self._bytes: SimpleQueue[_Load | None] = SimpleQueue()
        self._changed, self._until, self._adapter = changed, until, adapter
        self._version, self._notify = version, notify
        Task(self._run, self._announce_all)

    def put(self, load: _Load | None) -> None:
        """Send a bucket. None ends the delivery."""
        self._announcements.put(load)
        self._bytes.put(load)

    def fail(self, loss: Loss) -> None:
        with self._changed:
            if not self.is_over:
                self.loss, self.is_over = loss, True
            self._changed.notify_all()

    def _announce_all(self) -> None:
        if self.link.is_torn:
            raise ServerLost(f"{self.link.client.name}: it refused weights while they were being sent to it")
        self.link.start(self._version, self._until, self._adapter is not None)
        self.link.is_torn = True
        Task(self._run, self._send_all)
        while (load := self._announcements.get()) is not None:
            self._stop_if_over()
            self.link.announce(load.metadatas, load.next_bytes, self._until, self._adapter)
        self._stop_if_over()
        self.link.is_torn = False
        self.link.finish(self._version, self._until, self._notify)
        with self._changed:
            self.is_over = True
            self._changed.notify_all()

    def _send_all(self) -> None:
        while (load := self._bytes.get()) is not None:
            self._stop_if_over()  # the buffer may hold another bucket by now
            self.link.broadcast(load.part)
            with self._changed:
                self.received += 1
                self._changed.notify_all()

    def _run(self, work: Callable[[], None]) -> None:
        """Do the work of a thread. Its error is the loss of this server."""
        try:
            work()
        except TimeoutError:
            self.fail(_too_slow(self.link))
        except Exception as error:  # noqa: BLE001 - kept for the thread that waits
            self.code = self.code or (error.code if isinstance(error, ErrorResponse) else "")
            if isinstance(error, EngineError):
                self.fail(Loss.from_error(error))
            else:
                self.fail(Loss(f"{self.link.client.name}: {error}"))

    def _stop_if_over(self) -> None:
        if self.is_over:
            raise TimeoutError


def send(
    links: Sequence[Link],
    weights: Iterable[tuple[str, Tensor]],
    version: str,
    device: torch.device,
    seconds: float,
    notify: Callable[[str], None] = ignore,
    adapter: AdapterConfig | None = None,
    is_only_sender: bool = True,
) -> Sent:
    """Send the weights to all servers within `seconds`. If there is an `adapter` config, they are the weights of
    that adapter. Raise EngineError if a weight has a NaN or an Inf; its bucket is not sent to any server.

    Unless this is the only sender, others may gather the weights with it and wait for it. So it gives up a slow
    server even if it sends to no other."""
    began = time.monotonic()
    until = began + seconds
    changed, patience = Condition(), seconds * STRAGGLING
    deliveries = [_Delivery(link, version, until, changed, notify, adapter) for link in links]
    memory = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
    most = GPU_BUCKET_BYTES if device.type == "cuda" else BUCKET_BYTES
    total, broken = 0, None
    nothing_after: list[Bucket] = [[]]
    pairs = pairwise(chain(_guard_buckets(weights, most, deliveries), nothing_after))
    for number, (bucket, following) in enumerate(pairs):
        _wait(deliveries, partial(_has_free_buffer, number), changed, until, patience, is_only_sender)
        if all(delivery.loss for delivery in deliveries):
            continue  # other ranks take part in the pass, so it goes on to its end
        if (broken := find_non_finite(bucket)) is not None:
            for delivery in deliveries:
                delivery.fail(Loss.from_error(non_finite_error(broken)))
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
        for delivery in deliveries:
            delivery.put(_Load(metadatas, part, flat_size(following)))
    for delivery in deliveries:
        delivery.put(None)
    _wait(deliveries, attrgetter("is_over"), changed, until, patience=math.inf)
    if broken is not None:
        raise non_finite_error(broken)
    failed = {delivery.link.client.index: delivery.loss for delivery in deliveries if delivery.loss}
    servers = tuple(delivery.link.client.index for delivery in deliveries if not delivery.loss)
    codes = {delivery.link.client.index: delivery.code for delivery in deliveries if delivery.code}
    return Sent(servers, failed, total, time.monotonic() - began, codes)


def send_adapter(
    links: Sequence[Link], adapter: AdapterWeights, version: str, device: torch.device, seconds: float
) -> Sent:
    """Send an adapter to all servers. Raise AdapterRefused if whole weights have to be sent instead."""
    for link in links:
        link.check_adapter()
    config, weights = adapter
    sent = send(links, weights, version, device, seconds, adapter=config)
    for index, code in sent.codes.items():
        if code in REFUSED_FOR_GOOD:
            raise AdapterRefused(sent.failed[index].problem.splitlines()[0])
    return sent


def _guard_buckets(
    weights: Iterable[tuple[str, Tensor]], most: int, deliveries: Sequence[_Delivery]
) -> Iterator[Bucket]:
    """Yield buckets of at most this many bytes, unless one weight has more. If the learner fails to produce
    one, end all deliveries, so that none is left waiting."""
    try:
        yield from buckets(iter(weights), most)
    except Exception:
        for delivery in deliveries:
            delivery.fail(Loss("the learner failed"))
            delivery.put(None)
        raise


def _has_free_buffer(number: int, delivery: _Delivery) -> bool:
    """Return True if the server has received the previous contents of the buffer that bucket `number` will use."""
    return delivery.received > number - BUFFERS


def _wait(
    deliveries: Sequence[_Delivery],
    is_ready: Callable[[_Delivery], bool],
    changed: Condition,
    until: float,
    patience: float,
    is_only_sender: bool = True,
) -> None:
    """Return once each delivery is ready or has failed. Fail those that are not ready at the deadline, and those
    that keep ready ones or another sender waiting for `patience` seconds, so that one slow server does not make
    all of them late."""

    def is_settled() -> bool:
        return all(delivery.loss or is_ready(delivery) for delivery in deliveries)

    with changed:
        while not is_settled() and (left := until + GRACE - time.monotonic()) > 0:
            changed.wait_for(is_settled, min(patience, left))
            if not is_only_sender or any(is_ready(delivery) for delivery in deliveries if not delivery.loss):
                break
    for delivery in deliveries:
        if not delivery.loss and not is_ready(delivery):
            delivery.fail(_too_slow(delivery.link))


def _too_slow(link: Link) -> Loss:
    return Loss(
        f"{link.client.name}: it loaded weights too slowly for rollout_matching.vllm.sync.timeout_s",
        "if the model is large, raise it; otherwise check the memory and load of the server's machine",
    )
