"""Rollouts by servers that get the learner's weights over the network: what all ranks do together.

Every rank asks the servers itself (`asking`). Only the senders connect to them and send weights, each to its share
of the servers (`sender`): the first rank alone, or `sync.senders` ranks. All collectives are here, on the main
thread: `_on_senders` shares what the senders find out and do with all ranks, so that these always agree on which
servers may be asked.

When a server fails while it answers, `Generation` gives its requests to the other servers of its rank at once. At
the end of the step all ranks hear of it, and leave the server out (`finish`, `_leave_out`). A server that fails
while it gets weights is left out, too, and the others go on. Each later sync tries to find it again
(`_update_pool`). It is asked again once it has all weights of that sync.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import TypeAdapter

from coordexp.config.rollout import capacity_shortage
from coordexp.errors import EngineError
from coordexp.ranks import find_rank, gather_texts, sum_over_ranks, together
from coordexp.rollout.backend import AdapterWeights, Canary, ImageRef, Request, Rollout, RolloutBackend, Weights
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import EngineSetup
from coordexp.servers.asking import Asker, Generation, Started
from coordexp.servers.client import OTHERWISE, ClientTimeouts, ServerClient, ServerFacts
from coordexp.servers.pool import Loss, Pool, sending_rank
from coordexp.servers.sender import Delivery, Prospect, Sender
from coordexp.servers.transfer import gpu_name
from coordexp.tasks import ignore

AGAIN = 1.0  # seconds between two attempts to find a server
WINDOWS = 4  # full windows of requests in one call of a caller that has many
LEFT_OUT = "the run goes on without this server until it is back and has received the current weights"
T = TypeVar("T")


class ServerBackend(RolloutBackend):
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
        self.setup, self.record = setup, record
        self.settings = setup.settings.vllm
        self.rank, self.ranks = find_rank()
        self.notify = notify if self.rank == 0 else ignore
        notify_here = notify if self.rank == 0 else lambda message: notify(f"rank {self.rank}: {message}")
        seconds = self.settings.server.infer_timeout_s
        servers = self.settings.server.servers
        self.clients = [ServerClient(k, server, seconds, timeouts) for k, server in enumerate(servers)]
        senders = [sending_rank(k, self.settings.sync.senders, self.ranks) for k in range(len(servers))]
        own = {k: client for k, client in enumerate(self.clients) if senders[k] == self.rank}
        self.asker = Asker(self.clients, setup, prompts)
        self.canary = Canary(reference, probes, self.settings.sync.canary_every, setup.coarsest_dtype, notify_here)
        self.sender = Sender(own, setup, self.asker, self.canary, adapter, notify_here)
        assert not self.sender.sync_mode.is_adapter or self.ranks == 1, "other ranks gather no adapter"
        self.pool: Pool | None = None
        self._weights: Weights | None = None

    def sync(self, weights: Weights, version: int) -> None:
        """Send the weights as one transaction: all ranks begin it together, and end it with the new version or
        with the same error. A version that the pool already has is sent only to servers that came back."""
        if self.pool is None:
            self.pool = self._connect()
        if version == self.pool.version and not self.pool.out:
            return
        self._weights = weights
        self._update_pool(version, time.monotonic() + self.settings.server.timeout_s)

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
            losses = generation.pop_losses(self.pool)
            own = [index for index in started.indices if index not in generation.rollouts]
            missing, lost = sum_over_ranks([len(own), len(losses)])
            if lost:
                for index, loss in _share(losses, Loss).items():
                    self._leave_out(index, loss)
                    self.sender.drop(index)
            if not missing:
                break
            together(generation.wait_until_idle)  # weights must not change under the requests of another rank
            until = until or time.monotonic() + self.settings.server.timeout_s
            self._update_pool(version, until)
            generation.ask(self.pool, self.rank, self.ranks)
        if started.indices:
            self._record_calls(generation.pop_calls(), generation.seconds)
        return [generation.rollouts[k] for k in started.indices]

    @property
    def requests_per_call(self) -> int:
        assert self.pool is not None, "before the first sync"
        return WINDOWS * self.pool.capacity(self.setup.settings.decode_batch_size, self.ranks)

    def close(self) -> None:
        self.sender.close()
        for client in self.clients:
            client.http.close()

    def describe(self) -> dict[str, Any]:
        """Return the facts that the run's manifest records."""
        servers = []
        for client in self.clients:
            known = {"world_size": client.facts.world_size, "boot": client.facts.boot} if client.facts else {}
            address = {"base_url": client.url, "group_port": client.group_port, "world_size": None, "boot": None}
            servers.append(address | known)
        return {"servers": servers, **self.sender.sync_mode.describe()}

    # Weights

    def _connect(self) -> Pool:
        together(ignore)
        device = self.setup.device
        self.sender.devices = gather_texts(gpu_name(device) if device.type == "cuda" else "")
        self.asker.run = gather_texts(uuid4().hex[:8])[0]
        self.notify(f"connecting to {', '.join(client.name for client in self.clients)}")
        sizes = self._set_facts(self._on_senders(self.sender.connect_all, ServerFacts))
        if shortage := capacity_shortage(self.setup.settings.decode_batch_size, sum(sizes), self.ranks):
            problem, fix = shortage
            raise EngineError(f"rollout_matching.decode_batch_size: {problem}", fix)
        return Pool.of(sizes)

    def _set_facts(self, facts: dict[int, ServerFacts]) -> tuple[int, ...]:
        """Set the facts of all clients, and return the world sizes of the servers."""
        for client in self.clients:
            client.facts = facts[client.index]
        return tuple(client.world_size for client in self.clients)

    def _update_pool(self, version: int, until: float) -> None:
        """Send the weights, which are `version`, to all servers that can be reached and lack them. Return once one
        has them. Raise EngineError if that takes until the deadline."""
        assert self.pool is not None
        self.pool = replace(self.pool, version=version)
        while True:
            prospects = self._on_senders(partial(self._find_prospects, self.pool, until), Prospect)
            sizes = self._set_facts({k: prospect.facts for k, prospect in prospects.items()})
            self.pool = replace(self.pool, world_sizes=sizes)
            for index, prospect in prospects.items():
                if prospect.lost:
                    self._leave_out(index, prospect.lost)  # it may be back already
                if prospect.failed:
                    self.pool = self.pool.mark(index, prospect.failed)
            targets = {k: prospect.is_back for k, prospect in prospects.items() if prospect.is_target}
            if targets:
                self._deliver(targets, version)
            if self.pool.usable:
                return
            if not targets:
                time.sleep(AGAIN)

    def _find_prospects(self, pool: Pool, until: float) -> dict[int, Prospect]:
        if self.rank == 0 and not pool.usable and time.monotonic() >= until:
            reasons = "; ".join(loss.problem.splitlines()[0] for loss in pool.out.values())
            raise EngineError(
                f"no rollout server is left, and none came back in {self.settings.server.timeout_s:g} s "
                f"(rollout_matching.vllm.server.timeout_s): {reasons}",
                f"start them again with `coordexp serve` and continue with --resume, {OTHERWISE}",
            )
        return self.sender.find_prospects(pool, until)

    def _deliver(self, targets: dict[int, bool], version: int) -> None:
        """Send the weights to these servers. A value says that the server has just come back: then it is probed,
        as all are when the canary is due."""
        assert self.pool is not None and self._weights is not None
        is_due = self.canary.is_due(version)
        probed = {index: is_due or is_back for index, is_back in targets.items()}
        expected = self.canary.expected_answers() if any(probed.values()) else []
        work = partial(self.sender.deliver, self._weights, version, probed, expected)
        deliveries = _share(together(work), Delivery)
        for index, delivery in deliveries.items():
            if delivery.loss is None:
                self.pool = self.pool.mark(index, version)
            else:
                self._leave_out(index, delivery.loss)
        if self.rank == 0:
            self._record_sync(deliveries, [index for index in deliveries if probed[index]], version)
        if is_due and self.pool.usable and self.canary.pass_at(version):
            self.notify("the rollout servers answer as the learner does")

    def _on_senders(self, work: Callable[[], dict[int, T]], kind: type[T]) -> dict[int, T]:
        """Do the work on all senders. Return the results by server, on all ranks."""
        return _share(together(lambda: work() if self.sender.clients else {}), kind)

    def _leave_out(self, index: int, loss: Loss) -> None:
        """Take a server out of the pool, on all ranks."""
        assert self.pool is not None
        fix = "; ".join(filter(None, (loss.fix, LEFT_OUT)))
        self.notify(f"warning: {EngineError(loss.problem, fix)}")
        self.pool = self.pool.mark(index, loss)

    # What is recorded

    def _record_sync(self, deliveries: dict[int, Delivery], probed: list[int], version: int) -> None:
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
                "probed": [index for index in probed if losses[index] is None],
            }
            | self.describe()
        )

    def _record_calls(self, calls: list[dict[str, Any]], seconds: float) -> None:
        assert self.pool is not None
        version = max(call.pop("version") for call in calls) if calls else self.pool.version
        mode = self.sender.sync_mode.mode
        addressed = [call | {"base_url": self.clients[call["server"]].url} for call in calls]
        facts = {"version": version, "sync_mode": mode, "seconds": round(seconds, 4), "calls": addressed}
        self.record({"event": "rollouts", **facts})


def _share(own: dict[int, T], kind: type[T]) -> dict[int, T]:
    """Return what all ranks know about servers, on all ranks. Of several facts about one server, the first rank's
    counts."""
    adapter = TypeAdapter(dict[int, kind])  # type: ignore[valid-type]
    shared: dict[int, T] = {}
    for text in gather_texts(adapter.dump_json(own).decode()):
        shared = adapter.validate_json(text) | shared
    return dict(sorted(shared.items()))
