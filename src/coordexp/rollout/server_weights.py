"""Weights on their way to the servers: one pass over them, bucket by bucket, to all servers at once (D23).

A server that fails on the way is left behind, and the others go on. The pass itself always goes to its end, since
other ranks may take part in gathering the weights.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Condition
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig
from coordexp.rollout.broadcast import Metadata, WeightGroup, flat_bytes, flattened
from coordexp.rollout.buckets import BUCKET_BYTES, Bucket, buckets, non_finite, not_sent
from coordexp.rollout.server_client import Refused, ServerClient, ServerFault, ServerLost, Session
from coordexp.rollout.tasks import Task
from coordexp.rollout.wire import ServerFacts, read_field

BUFFERS = 2  # while the servers take one in, the next is filled
SLACK = 2**20  # bytes, for what lies between the weights in a buffer
# What a server of ms-swift is told after the weights, and whether older ones may do without.
FOREIGN_ENDING = (
    ("/process_weights_after_loading/", True),
    ("/reset_prefix_cache/", False),
    ("/reset_mm_cache/", True),
    ("/reset_encoder_cache/", True),
)


class Link:
    """The first rank's connection to one server: a session, and a group for weights."""

    def __init__(
        self, client: ServerClient, facts: ServerFacts, session: Session | None, group: WeightGroup
    ) -> None:
        self.client, self.facts, self.session, self.group = client, facts, session, group
        self.torn = False  # weights may be on their way that the server does not expect any more

    @classmethod
    def to(
        cls, client: ServerClient, facts: ServerFacts, device: torch.device, seconds: float, sync: float
    ) -> "Link":
        """In `seconds`. What goes over it later may take as long as a `sync`."""
        session = None if facts.foreign else Session.open(client, uuid4().hex)
        try:
            identity = session.identity if session else None
            return cls(client, facts, session, client.join(facts.world_size, identity, device, seconds, sync))
        except BaseException:
            if session is not None:
                session.close()
            raise

    @property
    def alive(self) -> bool:
        return self.session is None or not self.session.ended.is_set()

    def start(self, version: str, until: float, adapter: bool) -> None:
        if self.torn:
            raise ServerLost(f"{self.client.name}: it has refused what was on its way to it")
        if not self.facts.foreign:
            self._post("/start_update/", {"version": version} | ({"adapter": True} if adapter else {}), until)

    def announce(self, told: list[Metadata], next_bytes: int, until: float, adapter: AdapterConfig | None) -> None:
        """What comes, or has come. The answer is there when the server has loaded it."""
        if adapter is not None:
            body = {"peft_config": adapter, "metadatas": told}
            self._post("/update_adapter_flattened_param/", body, until)
            return
        ahead = {} if self.facts.foreign else {"next_bytes": next_bytes}
        self._post("/update_flattened_params/", {"metadatas": told} | ahead, until)

    def broadcast(self, part: Tensor) -> None:
        if part.device.type == "cuda":
            torch.cuda.set_device(part.device)
        self.group.broadcast(part)

    def finish(self, version: str, until: float, tell: Callable[[str], None]) -> None:
        """The server has all weights, has forgotten what it computed with the old ones, and says so."""
        if self.facts.foreign:
            self._finish_foreign(until, tell)
            return
        body = self._post("/finish_update/", {"version": version}, until)
        said = read_field(body, self.client.name, "/finish_update/", "weight_version", str)
        found = said if said != version else self.client.weight_version()
        if found != version:
            raise ServerLost(f"{self.client.name}: version {version} was sent, and it says it has {found}")

    def close(self) -> Task[None]:
        """Whatever state the server is in. What comes back may wait for a peer that is gone."""
        if self.session is not None:
            self.session.close()  # which the server notices by itself
        return Task(self._left)

    def _left(self) -> None:
        if self.session is None:
            with suppress(EngineError):
                self.client.post("/close_communicator/", {}, self.client.patience.health)
        self.group.close()

    def _post(self, path: str, body: dict[str, Any], until: float) -> bytes:
        if self.session is not None:
            body = body | {"session": self.session.identity}
        return self.client.post(path, body, max(0.0, until - time.monotonic()))

    def _finish_foreign(self, until: float, tell: Callable[[str], None]) -> None:
        for path, optional in FOREIGN_ENDING:
            try:
                self._post(path, {}, until)
            except Refused as refused:
                if refused.status != 404 or not optional:
                    raise
                tell(f"warning: {self.client.name} has no {path}: it may answer from what it computed before")


@dataclass(frozen=True)
class Sent:
    """What came of a pass: the servers that have the weights, and why the others do not; and the codes of those
    that have answered why."""

    servers: tuple[int, ...]
    failed: dict[int, str]
    nbytes: int
    seconds: float
    codes: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Load:
    """A bucket in its buffer, and how long the next one is: a server that knows has it while it loads this one."""

    told: list[Metadata]
    part: Tensor
    next_bytes: int


class _Delivery:
    """To one server, in threads of its own: the bytes go ahead of what is told of them. `taken` counts the buckets
    whose bytes the server has."""

    def __init__(
        self,
        link: Link,
        version: str,
        until: float,
        changed: Condition,
        tell: Callable[[str], None],
        adapter: AdapterConfig | None,
    ) -> None:
        self.link, self.taken, self.error, self.code = link, 0, "", ""
        self.over = False
        self._told: SimpleQueue[_Load | None] = SimpleQueue()
        self._bytes: SimpleQueue[_Load | None] = SimpleQueue()
        self._changed, self._until, self._adapter = changed, until, adapter
        Task(lambda: self._guarded(lambda: self._tell_all(version, tell)))

    def put(self, load: _Load | None) -> None:
        self._told.put(load)
        self._bytes.put(load)

    def fail(self, why: str) -> None:
        with self._changed:
            if not self.over:
                self.error, self.over = why, True
            self._changed.notify_all()

    def _tell_all(self, version: str, tell: Callable[[str], None]) -> None:
        self.link.start(version, self._until, self._adapter is not None)
        self.link.torn = True
        Task(lambda: self._guarded(self._send_all))
        while (load := self._told.get()) is not None:
            self._unless_over()
            self.link.announce(load.told, load.next_bytes, self._until, self._adapter)
        self._unless_over()
        self.link.torn = False
        self.link.finish(version, self._until, tell)
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def _send_all(self) -> None:
        while (load := self._bytes.get()) is not None:
            self._unless_over()  # what lies in the buffer may be another bucket by now
            self.link.broadcast(load.part)
            with self._changed:
                self.taken += 1
                self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except TimeoutError:
            self.fail(_late(self.link))
        except Exception as error:  # noqa: BLE001 - told to the one that waits
            self.code = self.code or (error.code if isinstance(error, Refused | ServerFault) else "")
            self.fail(str(error) if isinstance(error, EngineError) else f"{self.link.client.name}: {error}")

    def _unless_over(self) -> None:
        if self.over:
            raise TimeoutError


def send(
    links: Sequence[Link],
    weights: Iterable[tuple[str, Tensor]],
    version: str,
    device: torch.device,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
    adapter: AdapterConfig | None = None,
) -> Sent:
    """To all of them, in `seconds`. With the config of an `adapter`, the weights are an adapter's. Raise
    EngineError if a weight has a NaN or an Inf: its bucket is sent to nobody."""
    began = time.monotonic()
    until = began + seconds
    changed, keep = Condition(), seconds * STRAGGLING
    going = [_Delivery(link, version, until, changed, tell, adapter) for link in links]
    memory = [torch.empty(0, dtype=torch.uint8, device=device)] * BUFFERS
    total, broken = 0, None
    for number, (bucket, following) in enumerate(_with_next(_told_of(weights, going))):
        _wait(going, partial(_has_room, number), changed, until, keep)
        if all(one.error for one in going):
            continue  # to its end, for the other ranks
        if (broken := non_finite(bucket)) is not None:
            for one in going:
                one.fail(str(not_sent(broken)))
            continue
        place = number % BUFFERS
        if memory[place].numel() == 0:
            memory[place] = torch.empty(BUCKET_BYTES + SLACK, dtype=torch.uint8, device=device)
        told, part = flattened(bucket, memory[place])
        if part.numel() > memory[place].numel():
            memory[place] = part
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        total += part.numel()
        for one in going:
            one.put(_Load(told, part, flat_bytes(following)))
    for one in going:
        one.put(None)
    _wait(going, lambda one: one.over, changed, until, keep=math.inf)
    if broken is not None:
        raise not_sent(broken)
    failed = {one.link.client.index: one.error for one in going if one.error}
    servers = tuple(one.link.client.index for one in going if not one.error)
    codes = {one.link.client.index: one.code for one in going if one.code}
    return Sent(servers, failed, total, time.monotonic() - began, codes)


def _told_of(weights: Iterable[tuple[str, Tensor]], going: Sequence[_Delivery]) -> Iterator[Bucket]:
    """If the learner itself fails at them, no delivery is left waiting."""
    try:
        yield from buckets(iter(weights), BUCKET_BYTES)
    except Exception:
        for one in going:
            one.fail("the learner failed")
            one.put(None)
        raise


def _with_next(all_of_them: Iterator[Bucket]) -> Iterator[tuple[Bucket, Bucket]]:
    """Each with the one after it, which is empty after the last."""
    bucket = next(all_of_them, None)
    while bucket is not None:
        following = next(all_of_them, None)
        yield bucket, following or []
        bucket = following


def _has_room(number: int, delivery: _Delivery) -> bool:
    """What lay where this bucket will, the server has."""
    return delivery.taken > number - BUFFERS


def _wait(
    going: Sequence[_Delivery],
    ready: Callable[[_Delivery], bool],
    changed: Condition,
    until: float,
    keep: float,
) -> None:
    """Until each server is ready or has failed; one that is neither at the deadline has. So has one that keeps
    others waiting for `keep` seconds: they shall not come too late with it."""

    def settled() -> bool:
        return all(one.error or ready(one) for one in going)

    with changed:
        while not settled() and (left := until + GRACE - time.monotonic()) > 0:
            changed.wait_for(settled, min(keep, left))
            if any(ready(one) for one in going if not one.error):
                break
    for one in going:
        if not one.error and not ready(one):
            one.fail(_late(one.link))


STRAGGLING = 0.25  # of the deadline: for so long, servers wait for one of them to take in a bucket
GRACE = 0.5  # seconds, in which a delivery says by itself what it was late with


def _late(link: Link) -> str:
    return (
        f"{link.client.name}: it took in weights too slowly for rollout_matching.vllm.sync.timeout_s\n"
        "  if the model is large, raise it; else look at the memory and load of the server's machine"
    )


def take_part(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Of a rank that sends nothing, where weights are gathered from all."""
    for _ in weights:
        pass
