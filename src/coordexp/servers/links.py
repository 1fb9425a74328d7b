"""A rank's link with one server: the group that weights travel over, and the check that the server fits.

At every level, from here to the workers of a server, an update has the same calls: `begin`, one `load` for each
bucket, and `finish`, over a group that was joined with `join`.
"""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import torch
from torch import Tensor

from coordexp.errors import EngineError
from coordexp.rollout.backend import AdapterConfig
from coordexp.rollout.start import EngineSetup
from coordexp.servers.client import Call, ServerClient, ServerFacts, ServerLost
from coordexp.servers.protocol import (
    BeginUpdate,
    JoinGroup,
    ServerVersion,
    WeightMessage,
    WeightVersion,
    WorldSize,
    model_difference,
    model_fingerprint,
    read_response,
    read_version,
)
from coordexp.servers.transfer import Metadata, WeightGroup, join
from coordexp.tasks import Task

LOOK = 0.02  # seconds between two looks at a group that is not complete
LATE = 0.5  # seconds in which a thread with the same deadline ends by itself
SAME_CONFIG = "start it with the config that the learner has"


@dataclass(frozen=True)
class FlatBucket:
    """A bucket in its buffer. `following` is the length of the next one, and 0 after the last."""

    metadatas: list[Metadata]
    part: Tensor
    following: int


class Link:
    """A rank's group with one server. The server is this learner's until the connection of the group closes."""

    def __init__(
        self, client: ServerClient, world_size: int, device: torch.device, until: float, sync: float
    ) -> None:
        """Join a group with the server until `until`. Later, a transfer over it may take `sync` seconds."""
        self.client, self.name = client, uuid4().hex
        self.is_torn = False  # the group may still carry weights that the server no longer expects
        self._loading: Call | None = None  # the load that the server has not answered yet
        message = JoinGroup(
            group=self.name,
            learner=f"{socket.gethostname()}:{os.getpid()}",
            port=client.group_port,
            world_size=world_size + 1,
            timeout_s=max(sync, until - time.monotonic()),
        )
        self._joined = Call(client, "POST", "/init_communicator/", message.to_json(), stays_open=True)
        try:
            self.group = self._join(message, device, until)
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
        message = BeginUpdate(group=self.name, version=version, adapter=adapter)
        self.client.post("/begin_update/", message.to_json(), until)
        self.is_torn = True

    def load(self, bucket: FlatBucket, until: float) -> None:
        """Send a bucket. Return once the server has received it: it loads it while it receives the next one, whose
        length it knows."""
        message = {"group": self.name, "metadatas": bucket.metadatas, "next_bytes": bucket.following}
        is_expected = self._loading is not None
        if not is_expected:
            self._begin_load(message, until)
        if bucket.part.device.type == "cuda":
            torch.cuda.set_device(bucket.part.device)
        try:
            self.group.broadcast(bucket.part)
        except (RuntimeError, ValueError) as error:
            self._wait_for_load(until)  # the server may say why
            raise ServerLost(f"{self.client.name}: {error}") from error
        if is_expected:
            self._begin_load(message, until)

    def finish(self, version: str, until: float) -> None:
        """Return once the server has put the weights into use, has cleared its caches, and reports the version."""
        self._wait_for_load(until)
        self.is_torn = False
        name, route = self.client.name, "/finish_update/"
        body = self.client.post(route, WeightMessage(group=self.name).to_json(), until)
        reported = read_response(WeightVersion, body, name, route).weight_version
        if reported == version:
            reported = self.client.read(WeightVersion, "/version/").weight_version
        if reported != version:
            raise ServerLost(f"{name}: version {version} was sent, but it reports version {reported}")

    def close(self) -> Task[None]:
        """Close the link, in whatever state the server is, which notices that by itself. The task that is returned
        may wait for a peer that is gone."""
        self._joined.cut()
        return Task(self.group.close)

    def _begin_load(self, message: dict[str, Any], until: float) -> None:
        self._wait_for_load(until)
        self._loading = Call(self.client, "POST", "/load_bucket/", message)

    def _wait_for_load(self, until: float) -> None:
        if self._loading is not None:
            self._loading.result(until)
        self._loading = None

    def _join(self, message: JoinGroup, device: torch.device, until: float) -> WeightGroup:
        """Return the group: the server's workers, and this process as the last rank."""
        host, port, size = urlsplit(self.client.url).hostname or "127.0.0.1", message.port, message.world_size
        while True:  # an attempt to join before the port is open could disturb the next one
            self._joined.check()
            is_ours = self._joined.lines >= 1  # the server is this learner's, and has left the group before
            if is_ours:
                with suppress(OSError):
                    socket.create_connection((host, port), timeout=1).close()
                    break
            if time.monotonic() >= until:
                raise self._no_group("nothing listens there" if is_ours else "the server has not let this one in")
            time.sleep(LOOK)
        group = Task(join, host, port, size - 1, size, device, message.timeout_s)
        while not (group.done.is_set() and self._joined.lines == 2) and group.error is None:
            self._joined.check()
            if time.monotonic() >= until + LATE:
                raise self._no_group(f"it was not complete after {until - self._joined.since:.1f} s")
            time.sleep(LOOK)
        self._joined.check()
        if group.error is not None:
            raise self._no_group(str(group.error).splitlines()[0]) from group.error
        return group.result()

    def _no_group(self, reason: str) -> ServerLost:
        return ServerLost(
            f"{self.client.name}: no group for weights at its group_port {self.client.group_port}: {reason}",
            "the port must be free on the server's machine and open to the learner's",
        )


def examine_server(client: ServerClient, learner: EngineSetup, devices: Sequence[str]) -> ServerFacts:
    """Set and return the facts of a client. Raise EngineError if its server does not fit the learner.
    `devices` are those of all learner ranks."""
    size = client.read(WorldSize, "/get_world_size/").world_size
    version = read_version(client.get("/version/?full=1"), client.name)
    if version.world_size != size:
        raise EngineError(
            f"{client.name}: /get_world_size/ says {size}, but /version/ says {version.world_size}",
            "this should not happen; start the server again",
        )
    check_server(client.name, version, learner, devices)
    client.facts = ServerFacts(size, version.max_model_len, version.boot)
    return client.facts


def check_server(server: str, version: ServerVersion, learner: EngineSetup, devices: Sequence[str]) -> None:
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
    theirs, ours = version.guard, learner.settings.repeat_terminate.model_dump(mode="json")
    if different := sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name)):
        name = different[0]
        raise EngineError(
            f"{server}: its repeat_terminate.{name} is {theirs.get(name)}, but the learner's is {ours.get(name)}",
            f"a server loads its guard when it starts: {SAME_CONFIG}",
        )
    if shared := set(version.devices) & set(devices):
        raise EngineError(
            f"{server}: it runs on {', '.join(sorted(shared))}, which a learner rank uses too",
            "give them GPUs of their own (CUDA_VISIBLE_DEVICES), or set rollout_matching.vllm.mode: colocate",
        )
