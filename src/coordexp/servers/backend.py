"""Rollouts by servers that get the learner's weights over the network.

Every rank asks the servers itself (`asking`). Only the senders connect to them and send weights, each to its share
of the servers: the first rank alone, or `sync.senders` ranks. They share their results with all ranks, so that
these always agree on which servers may be asked. All collectives are here, on the main thread.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter
from torch import distributed as dist

from coordexp.config.rollout import capacity_shortage
from coordexp.errors import EngineError
from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.rollout.backend import (
    PROBE,
    AdapterWeights,
    Decode,
    ImageRef,
    Request,
    Rollout,
    RolloutBackend,
    Weights,
    compare_answers,
)
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import EngineSetup
from coordexp.rollout.weights import AdapterRefused, SyncMode
from coordexp.servers.asking import Asker, Generation, Started
from coordexp.servers.client import (
    OTHERWISE,
    ClientTimeouts,
    ErrorResponse,
    ServerClient,
    ServerFacts,
    ServerLost,
)
from coordexp.servers.links import RETURNING, Links, own_device
from coordexp.servers.pool import Loss, Pool, sending_rank
from coordexp.servers.send import Sent, send
from coordexp.tasks import Task, ignore

AGAIN = 1.0  # seconds between two attempts to find a server
WINDOWS = 4  # full windows of requests in one call of a caller that has many
LEFT_OUT = "the run goes on without this server until it is back and has received the current weights"
# A server that refuses an adapter with one of these codes would refuse it again. With any other error, the run
# goes on without the server until it is back.
REFUSED_FOR_GOOD = frozenset(
    {"no_lora", "base_changed", "adapter_refused", "update_failed", "bad_request", "no_route"}
)
T = TypeVar("T")


@dataclass(frozen=True)
class Prospect:
    """A server before a sync, as its sender sees it: whether weights are sent to it, and whether it has just come
    back. `lost` is why it was lost since the last sync, and `failed` why it is not back. `responds` is True
    for a server that answers, but cannot be used for that reason."""

    facts: ServerFacts
    is_target: bool
    is_back: bool
    lost: Loss | None
    failed: Loss | None
    responds: bool


@dataclass(frozen=True)
class Delivery:
    """The result of a sync for one server. Without a `loss`, it has the weights."""

    seconds: float
    nbytes: int
    was_probed: bool = False
    loss: Loss | None = None


class ServerBackend:
    """The backend that asks rollout servers.

    `reference` answers with the learner's own model. It and each server are asked about the images `probes`, to
    check that they have the same weights. `notify` gets messages for people: those of the first rank, and those of
    another sender about its own servers. `record` gets the events that are needed to repeat the run. `adapter`
    returns the learner's adapter, if it can be sent alone."""

    def __init__(
        self,
        setup: EngineSetup,
        prompts: PromptBuilder,
        reference: RolloutBackend,
        probes: Sequence[ImageRef],
        notify: Callable[[str], None] = ignore,
        record: Callable[[dict[str, Any]], None] = ignore,
        adapter: Callable[[], AdapterWeights] | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self.setup, self.prompts, self.reference, self.probes = setup, prompts, reference, probes
        self.record, self.adapter = record, adapter
        self.settings = setup.settings.vllm
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._notify_here = notify if self.rank == 0 else lambda message: notify(f"rank {self.rank}: {message}")
        self.notify = notify if self.rank == 0 else ignore
        self.sync_mode = SyncMode(self.settings.sync, adapter is not None, self.notify, OTHERWISE)
        seconds = self.settings.server.infer_timeout_s
        self.clients = [
            ServerClient(k, server, seconds, timeouts) for k, server in enumerate(self.settings.server.servers)
        ]
        owners = [sending_rank(k, self.settings.sync.senders, self.ranks) for k in range(len(self.clients))]
        own = {k: client for k, client in enumerate(self.clients) if owners[k] == self.rank}
        self.links = Links(own, setup, self._notify_here)
        self.pool: Pool | None = None
        self.asker = Asker(self.clients, setup, prompts)
        self._weights: Weights | None = None
        self._probed: int | None = None  # the version at which all servers were last probed

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Weights, version: int) -> None:
        """Send the weights as one transaction: all ranks begin it together, and end it with the new version or
        with the same error. A version that the pool already has is sent only to servers that came back."""
        if self.pool is None:
            self._connect()
        assert self.pool is not None
        if version == self.pool.version and not self.pool.out:
            return
        self._weights = weights
        self.pool = self.pool.advance_to(version)
        self._deliver(time.monotonic() + self.settings.server.timeout_s)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """Return the rollouts of the requests. While no server is left, all ranks wait for one, for up to
        `server.timeout_s`."""
        if self.pool is None or self.pool.version is None:
            raise EngineError("answers were asked for before any weights were sent")
        return self.finish(self.start([requests])[0], self.pool.version)

    def start(self, steps: Sequence[Sequence[Request]]) -> list[Started]:
        """Begin to ask for the rollouts of one or several steps, in this order, and return at once. There are no
        collectives in it."""
        assert self.pool is not None, "before the first sync"
        generation = Generation(self.asker, [request for requests in steps for request in requests])
        ends = list(itertools.accumulate(map(len, steps)))
        started = [
            Started(generation, range(end - len(requests), end)) for requests, end in zip(steps, ends, strict=True)
        ]
        generation.ask(self.pool, self.rank, self.ranks, [part.indices for part in started])
        return started

    def finish(self, started: Started, version: int) -> list[Rollout]:
        """Wait for the rollouts of a step, on all ranks. If no server is left to one of them, all wait for one,
        for up to `server.timeout_s`. It gets the learner's weights of now, which are `version`, and what is
        missing is made with these."""
        generation, until = started.generation, 0.0
        while True:
            together(partial(generation.wait, started.indices))
            assert self.pool is not None
            losses = generation.take_losses(self.pool)
            missing, lost = sum_over_ranks([generation.count_missing(started.indices), len(losses)])
            if lost:
                self._agree(losses)
            if not missing:
                break
            together(generation.wait_until_idle)  # weights must not change under the requests of another rank
            until = until or time.monotonic() + self.settings.server.timeout_s
            self.pool = self.pool.advance_to(version)
            self._deliver(until)
            generation.ask(self.pool, self.rank, self.ranks)
        if started.indices:
            self._record_calls(generation.take_calls(), generation.seconds)
        return [generation.rollouts[k] for k in started.indices]

    @property
    def requests_per_call(self) -> int:
        assert self.pool is not None, "before the first sync"
        return WINDOWS * self.pool.capacity(self.setup.settings.decode_batch_size, self.ranks)

    def close(self) -> None:
        self.links.close()
        for client in self.clients:
            client.close()

    def describe(self) -> dict[str, Any]:
        """Return the facts that the run's manifest records."""
        servers = []
        for client in self.clients:
            known = {"world_size": client.facts.world_size, "boot": client.facts.boot} if client.facts else {}
            address = {"base_url": client.url, "group_port": client.group_port, "world_size": None, "boot": None}
            servers.append(address | known)
        return {"servers": servers, **self.sync_mode.describe()}

    # Weights

    def _connect(self) -> None:
        together(ignore)
        self.links.devices = gather_texts(own_device(self.setup.device))
        self.asker.run = gather_texts(uuid4().hex[:8])[0]
        self.notify(f"connecting to {', '.join(client.name for client in self.clients)}")
        sizes = self._take_facts(self._on_senders(self.links.connect_all, ServerFacts))
        if shortage := capacity_shortage(self.setup.settings.decode_batch_size, sizes, self.ranks):
            problem, fix = shortage
            raise EngineError(f"rollout_matching.decode_batch_size: {problem}", fix)
        self.pool = Pool.of(sizes)

    def _take_facts(self, facts: dict[int, ServerFacts]) -> tuple[int, ...]:
        """Set the facts of all clients, and return the world sizes of the servers."""
        for client in self.clients:
            client.facts = facts[client.index]
        return tuple(facts[client.index].world_size for client in self.clients)

    def _deliver(self, until: float) -> None:
        """Send the current weights to all servers that can be reached and lack them. Return once one has them.
        Raise EngineError if that takes until the deadline."""
        while True:
            prospects = self._on_senders(partial(self._find_prospects, until), Prospect)
            self._take_losses(prospects)
            assert self.pool is not None
            targets = {k: prospect.is_back for k, prospect in prospects.items() if prospect.is_target}
            if targets:
                self._send(targets)
            if self.pool.usable:
                return
            if not targets:
                time.sleep(AGAIN)

    def _find_prospects(self, until: float) -> dict[int, Prospect]:
        """Connect to the servers of this sender that are back. Return which of its servers get weights, and why
        the others cannot."""
        pool = self.pool
        assert pool is not None
        if self.rank == 0 and not pool.usable and time.monotonic() >= until:
            raise _none_left(pool, self.settings.server.timeout_s)
        ended = self.links.drop_ended()
        gone = [k for k in self.links.clients if k not in self.links.open and (k in pool.out or k in ended)]
        is_last_hope = len(pool.out | ended) == len(self.clients)
        errors = self.links.connect(gone, min(until, time.monotonic() + RETURNING), at_once=is_last_hope)
        prospects = {}
        for index, client in self.links.clients.items():
            assert client.facts is not None, "before the first sync"
            is_open = index in self.links.open
            is_target = is_open and (index in pool.behind or index in ended)
            error = errors.get(index)
            failed = Loss.from_error(error) if error else None
            responds = not isinstance(error, ServerLost)
            prospects[index] = Prospect(client.facts, is_target, index in gone, ended.get(index), failed, responds)
        return prospects

    def _take_losses(self, prospects: dict[int, Prospect]) -> None:
        assert self.pool is not None
        self.pool = replace(
            self.pool, world_sizes=self._take_facts({k: prospect.facts for k, prospect in prospects.items()})
        )
        for index, prospect in prospects.items():
            if prospect.lost:
                self.pool = self.pool.mark_failed(index, prospect.lost)
                self._warn_left_out(prospect.lost)  # it may be back already
            if prospect.failed:
                if prospect.responds and self.pool.out.get(index) != prospect.failed:  # the user has to act
                    self.notify(f"warning: {EngineError(*prospect.failed)}")
                self.pool = self.pool.mark_failed(index, prospect.failed)

    def _send(self, targets: dict[int, bool]) -> None:
        """Send the current weights to these servers. A value says that the server has just come back: then it is
        probed."""
        assert self.pool is not None and self.pool.version is not None
        version = self.pool.version
        is_due = self._probed is None or version - self._probed >= self.settings.sync.canary_every
        probed = [k for k, is_back in targets.items() if is_due or is_back]
        own = self.reference.generate(self._probe_requests) if probed else []
        sent = together(partial(self._send_share, targets, version))
        deliveries = self._on_senders(partial(self._probe, targets, sent, own, probed), Delivery)
        for index, delivery in deliveries.items():
            if delivery.loss is None:
                self.pool = self.pool.mark_synced(index, version)
            else:
                self._leave_out(index, delivery.loss)
                self.pool = self.pool.mark_failed(index, delivery.loss)
        if self.rank == 0:
            self._record_sync(deliveries, version)
        if is_due and self.pool.usable:
            if self._probed is None:
                self.notify("the rollout servers answer as the learner does")
            self._probed = version

    def _send_share(self, targets: dict[int, bool], version: int) -> Sent:
        """Send the weights to those of the targets that are this rank's."""
        assert self._weights is not None
        links = [self.links.open[k] for k in targets if k in self.links.open]
        if not links:
            deque(self._weights(), maxlen=0)  # it takes part in gathering them
            return Sent()
        name, device, seconds = self.asker.name_version(version), self.setup.device, self.settings.sync.timeout_s
        if self.sync_mode.is_adapter:
            assert self.adapter is not None and self.ranks == 1  # other ranks take no part in gathering it
            config, weights = self.adapter()
            sent = send(links, weights, name, device, seconds, config)
            if (reason := _refusal_of_adapter(sent.errors)) is None:
                return sent
            self.sync_mode.fall_back(reason)
        return send(links, self._weights(), name, device, seconds, others_wait=self.settings.sync.senders > 1)

    def _probe(
        self, targets: dict[int, bool], sent: Sent, own: list[Rollout], probed: Sequence[int]
    ) -> dict[int, Delivery]:
        """Return which servers of this sender have the weights, and why the others do not. Raise EngineError if a
        server that is to be probed does not answer as the learner does. A server gets the probes once for each of
        its devices, so that each of its replicas answers some."""
        assert self.pool is not None and self.pool.version is not None
        errors: dict[int, EngineError] = dict(sent.errors)
        probes = {
            k: Task(self.asker.ask, k, self._probe_requests * self.pool.world_sizes[k], self.pool.version)
            for k in targets
            if k in self.links.clients and k in probed and k not in errors
        }
        for index, task in probes.items():
            if (lost := task.failure(ServerLost)) is not None:
                errors[index] = lost
            else:
                self._compare(index, own * self.pool.world_sizes[index], task.result())
        return {
            k: Delivery(
                sent.seconds, sent.nbytes, k in probes, Loss.from_error(errors[k]) if k in errors else None
            )
            for k in targets
            if k in self.links.clients
        }

    def _record_sync(self, deliveries: dict[int, Delivery], version: int) -> None:
        """Record the sync of all senders as one event. Each of them has sent the same bytes to each server."""
        losses = {index: delivery.loss for index, delivery in deliveries.items()}
        self.record(
            {
                "event": "sync",
                "version": version,
                "seconds": round(max(delivery.seconds for delivery in deliveries.values()), 4),
                "bytes": max(delivery.nbytes for delivery in deliveries.values()),
                "synced": [index for index, loss in losses.items() if loss is None],
                "failed": {str(index): str(EngineError(*loss)) for index, loss in losses.items() if loss},
                "probed": [index for index, delivery in deliveries.items() if delivery.was_probed],
            }
            | self.describe()
        )

    def _compare(self, index: int, own: Sequence[Rollout], answers: Sequence[Rollout]) -> None:
        fix = f"this should not happen; please report it, {OTHERWISE}"
        warning = compare_answers(self.clients[index].name, own, answers, self.setup.coarsest_dtype, fix)
        if warning:
            self._notify_here(warning)

    @property
    def _probe_requests(self) -> list[Request]:
        """The probes have the run's guard, because a server of ms-swift guards every answer."""
        decode = Decode(PROBE, guard=self.setup.settings.repeat_terminate)
        return [Request(image, decode) for image in self.probes]

    def _record_calls(self, calls: list[dict[str, Any]], seconds: float) -> None:
        assert self.pool is not None
        version = max(call.pop("version") for call in calls) if calls else self.pool.version
        facts = {"version": version, "sync_mode": self.sync_mode.mode, "seconds": round(seconds, 4)}
        addressed = [call | {"base_url": self.clients[call["server"]].url} for call in calls]
        self.record({"event": "rollouts", **facts, "calls": addressed})

    def _agree(self, losses: dict[int, Loss]) -> None:
        """Leave out, on all ranks, every server that one rank has lost."""
        assert self.pool is not None
        for index, loss in _share(losses, Loss).items():
            self._leave_out(index, loss)
            self.pool = self.pool.mark_lost(index, loss)

    def _on_senders(self, work: Callable[[], dict[int, T]], kind: type[T]) -> dict[int, T]:
        """Do the work on all senders. Return the results by server, on all ranks."""
        return _share(together(lambda: work() if self.links.clients else {}), kind)

    def _leave_out(self, index: int, loss: Loss) -> None:
        self._warn_left_out(loss)
        self.links.drop(index)

    def _warn_left_out(self, loss: Loss) -> None:
        fix = "; ".join(filter(None, (loss.fix, LEFT_OUT)))
        self.notify(f"warning: {EngineError(loss.problem, fix)}")


def _share(own: dict[int, T], kind: type[T]) -> dict[int, T]:
    """Return what all ranks know about servers, on all ranks. Of several facts about one server, the first rank's
    counts."""
    adapter = TypeAdapter(dict[int, kind])  # type: ignore[valid-type]
    shared: dict[int, T] = {}
    for text in gather_texts(adapter.dump_json(own).decode()):
        shared = adapter.validate_json(text) | shared
    return dict(sorted(shared.items()))


def _refusal_of_adapter(errors: dict[int, EngineError]) -> str | None:
    """Return why a server will never take an adapter, if one of these errors says so."""
    for error in errors.values():
        is_final = isinstance(error, ErrorResponse) and error.code in REFUSED_FOR_GOOD
        if is_final or isinstance(error, AdapterRefused):
            return error.problem.splitlines()[0]
    return None


def _none_left(pool: Pool, seconds: float) -> EngineError:
    reasons = "; ".join(loss.problem.splitlines()[0] for loss in pool.out.values())
    return EngineError(
        f"no rollout server is left, and none came back in {seconds:g} s "
        f"(rollout_matching.vllm.server.timeout_s): {reasons}",
        f"start them again with `coordexp serve` and continue with --resume, {OTHERWISE}",
    )
