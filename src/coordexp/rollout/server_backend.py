"""Rollouts by servers beside the learner, which get its weights over the network (R07, D20 to D24).

Every rank asks the servers itself. The first one alone connects them and sends weights; all ranks are told what it
finds, so that they always agree on which servers may be asked.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from uuid import uuid4

from torch import distributed as dist

from coordexp.errors import EngineError
from coordexp.ranks import gather_texts, sum_over_ranks, together
from coordexp.rollout.adapter_fallback import AdapterRefused, SyncMode
from coordexp.rollout.backend import (
    AdapterWeights,
    Decode,
    Picture,
    Request,
    Rollout,
    RolloutBackend,
    Weights,
    one_decode,
)
from coordexp.rollout.canary import PROBE, difference
from coordexp.rollout.guard import key_pattern
from coordexp.rollout.pool import Chunk, Out, Pool, Up, answered
from coordexp.rollout.prompt import PromptBuilder, check_prompt
from coordexp.rollout.server_adapter import send_adapter
from coordexp.rollout.server_check import OTHERWISE, own_device
from coordexp.rollout.server_client import Patience, ServerClient, ServerFault, ServerLost
from coordexp.rollout.server_links import Links
from coordexp.rollout.server_weights import Sent, send, take_part
from coordexp.rollout.setup import Setup
from coordexp.rollout.tasks import Task
from coordexp.rollout.vllm import check_length
from coordexp.rollout.wire import ENGINE, Answer, RequestFailed, infer_payload, read_answers, rollout

AGAIN = 1.0  # seconds between two attempts to find a server
WAVES = 4  # of requests in a call that is one of many
HTTP_FAULT = "http_500"  # the kind of a retry after an HTTP error of the server


class ServerBackend:
    """`learner` answers with the learner's own model, and `probe` is the picture that it and each server are asked
    to see that they have the same weights. `tell` hears what a person should, and `record` gets what is needed to
    repeat the run (R09). `adapter` gives the learner's adapter, where it can be sent alone."""

    def __init__(
        self,
        about: Setup,
        prompts: PromptBuilder,
        learner: RolloutBackend,
        probe: Picture,
        tell: Callable[[str], None] = lambda _: None,
        record: Callable[[dict[str, Any]], None] = lambda _: None,
        adapter: Callable[[], AdapterWeights] | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.about, self.prompts, self.learner, self.probe = about, prompts, learner, probe
        self.tell, self.record, self.adapter = tell, record, adapter
        self.settings = about.settings.vllm
        self.sync_mode = SyncMode(self.settings.sync, adapter is not None, tell, OTHERWISE)
        pool = self.settings.server
        self.clients = [ServerClient(k, one, pool.infer_timeout_s, patience) for k, one in enumerate(pool.servers)]
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.links = Links(self.clients, about, self.ranks, tell)
        self.pool: Pool | None = None
        self._run = ""
        self._weights: Weights | None = None
        self._probed: int | None = None
        self._lengths: list[int | None] = [None] * len(self.clients)
        self._boots: list[str | None] = [None] * len(self.clients)
        guard = about.settings.repeat_terminate
        self._pattern = key_pattern(about.table) if guard.enabled and guard.max_object_keys is not None else ()

    def session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, weights: Weights, version: int) -> None:
        """A transaction (D23): all ranks begin it together, and end it with the new version or the same error. A
        version that the servers have is sent only to those that came back."""
        if self.pool is None:
            self._connect()
        assert self.pool is not None
        if version == self.pool.version and not self.pool.out:
            return
        self._weights = weights
        self.pool = self.pool.at(version)
        self._deliver(time.monotonic() + self.settings.server.timeout_s)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        """While no server is left, all ranks wait for one, for `server.timeout_s`."""
        began, until = time.monotonic(), 0.0
        found: dict[int, Rollout] = {}
        calls: list[dict[str, Any]] = []
        while True:
            agreed = self.pool
            found = together(partial(self._round, requests, found, calls))
            assert agreed is not None and self.pool is not None
            losses = {k: why for k, why in self.pool.out.items() if k not in agreed.out}
            missing, lost = sum_over_ranks([len(requests) - len(found), len(losses)])
            if lost:
                self._agree(agreed, losses)
            if not missing:
                break
            until = until or time.monotonic() + self.settings.server.timeout_s
            self._deliver(until)
        if requests:
            self._recorded(calls, time.monotonic() - began)
        return [found[place] for place in range(len(requests))]

    @property
    def requests_per_call(self) -> int:
        assert self.pool is not None, "before the first sync"
        return WAVES * self.pool.capacity(self.about.settings.decode_batch_size, self.ranks)

    def close(self) -> None:
        self.links.close()
        for client in self.clients:
            client.close()

    def described(self) -> dict[str, Any]:
        """For the run's manifest."""
        sizes = self.pool.world_sizes if self.pool else (None,) * len(self.clients)
        return {
            "servers": [
                {"base_url": one.url, "group_port": one.group_port, "world_size": size, "boot": boot}
                for one, size, boot in zip(self.clients, sizes, self._boots, strict=True)
            ],
            **self.sync_mode.described(),
        }

    # Weights

    def _connect(self) -> None:
        together(lambda: None)
        self.links.devices = gather_texts(own_device(self.about.device))
        self.tell(f"connecting to {', '.join(client.name for client in self.clients)}")
        self._run, sizes = self._by_first(self._connected)
        self.pool = Pool.of(sizes)

    def _connected(self) -> tuple[str, list[int]]:
        self.links.connect()
        return uuid4().hex[:8], [self.links.facts[client.index].world_size for client in self.clients]

    def _named(self, version: int) -> str:
        """As servers know it. No other learner's weights are called so, whatever step it is at."""
        return f"{version}-{self._run}"

    def _deliver(self, until: float) -> None:
        """The current weights to all servers that can be had and do not have them, until one has."""
        while True:
            plan = self._by_first(lambda: self._plan(until))
            self._take(plan["facts"], plan["pool"])
            if plan["targets"]:
                self._send(plan["targets"], plan["fresh"])
            assert self.pool is not None
            if self.pool.usable:
                return

    def _plan(self, until: float) -> dict[str, Any]:
        """By the first rank: who gets weights, and who of them is new. If there is nobody, it waits."""
        pool = self.pool
        assert pool is not None
        for index, why in self.links.ended().items():
            self._left_out(index, why)
            pool = pool.failed(index, why)
        while True:
            if not pool.usable and time.monotonic() >= until:
                raise EngineError(_nobody(pool, self.settings.server.timeout_s))
            gone = [k for k in pool.out if k not in self.links.open]
            for index, why in self.links.back(gone, until, patient=len(pool.out) == len(self.clients)).items():
                pool = pool.failed(index, why)
            targets = [k for k in pool.behind if k in self.links.open]
            if targets or pool.usable:
                break
            time.sleep(AGAIN)
        facts = [self.links.facts[client.index] for client in self.clients]
        told = [[one.world_size, one.foreign, one.max_model_len, one.boot] for one in facts]
        fresh = [k for k in targets if k in gone]
        return {"targets": targets, "fresh": fresh, "facts": told, "pool": _plain(pool)}

    def _take(self, facts: list[list[Any]], states: list[Any]) -> None:
        assert self.pool is not None
        self.pool = Pool(tuple(one[0] for one in facts), _states(states), self.pool.version)
        self._lengths, self._boots = [one[2] for one in facts], [one[3] for one in facts]
        for client, one in zip(self.clients, facts, strict=True):
            client.foreign = one[1]

    def _send(self, targets: list[int], fresh: list[int]) -> None:
        assert self.pool is not None and self.pool.version is not None
        version = self.pool.version
        due = self._probed is None or version - self._probed >= self.settings.sync.canary_every
        own = self.learner.generate([self._probe]) if due or fresh else []
        sent = together(lambda: self._pass(targets, version))
        outcome = self._by_first(lambda: self._committed(sent, own, fresh if not due else targets))
        for index in outcome["synced"]:
            self.pool = self.pool.synced(index, version)
        for index, why in outcome["failed"].items():
            self.pool = self.pool.failed(int(index), why)
        if due and outcome["synced"]:
            if self._probed is None:
                self.tell("the rollout servers answer as the learner does")
            self._probed = version

    def _pass(self, targets: list[int], version: int) -> Sent | None:
        assert self._weights is not None
        if self.rank != 0:
            take_part(self._weights())
            return None
        links, seconds = [self.links.open[k] for k in targets], self.settings.sync.timeout_s
        if self.sync_mode.is_adapter:
            assert self.adapter is not None and self.ranks == 1  # other ranks take no part in gathering it
            try:
                return send_adapter(links, self.adapter(), self._named(version), self.about.device, seconds)
            except AdapterRefused as error:
                self.sync_mode.fall_back(str(error))
        return send(links, self._weights(), self._named(version), self.about.device, seconds, self.tell)

    def _committed(self, sent: Sent | None, own: list[Rollout], probed: Sequence[int]) -> dict[str, Any]:
        """By the first rank. Those that are to be probed must answer as the learner does. A server gets the probe
        once for each of its devices, so that each of its replicas answers it."""
        assert sent is not None and self.pool is not None and self.pool.version is not None
        version, failed = self.pool.version, dict(sent.failed)
        asked = {
            k: Task(partial(self._answers, k, [self._probe] * self.pool.world_sizes[k], version))
            for k in sent.servers
            if own and k in probed
        }
        for index, task in asked.items():
            try:
                theirs = task.result()
            except ServerLost as lost:
                failed[index] = str(lost)
                continue
            for answer in theirs:
                if told := difference(own[0], answer, self.about.precision or self.about.dtype):
                    raise EngineError(
                        f"{self.clients[index].name} does not have the learner's weights: to {self.probe.path}, "
                        f"with version {version}, {told}\n  this should not happen; please report it, {OTHERWISE}"
                    )
        for index, why in failed.items():
            self._left_out(index, why)
        synced = [k for k in sent.servers if k not in failed]
        self.record(
            {"event": "sync", "version": version, "seconds": round(sent.seconds, 4), "bytes": sent.nbytes}
            | {"synced": synced, "failed": {str(k): why for k, why in failed.items()}, "probed": list(asked)}
            | self.described()
        )
        return {"synced": synced, "failed": failed}

    @property
    def _probe(self) -> Request:
        """The run's guard applies to it: a server of ms-swift guards every answer."""
        return Request(self.probe, Decode(PROBE, guard=self.about.settings.repeat_terminate))

    # Answers

    def _round(
        self, requests: Sequence[Request], found: dict[int, Rollout], calls: list[dict[str, Any]]
    ) -> dict[int, Rollout]:
        """All that can be answered by the servers that are left to this rank."""
        pool = self.pool
        if pool is None or pool.version is None:
            raise EngineError("answers were asked for before any weights were sent")
        version = pool.version

        def ask(chunks: list[Chunk]) -> tuple[dict[int, Rollout], dict[int, str]]:
            tasks = [
                Task(partial(self._answers, server, [requests[k] for k in places], version))
                for server, places in chunks
            ]
            answers: dict[int, Rollout] = {}
            losses: dict[int, str] = {}
            for (server, places), task in zip(chunks, tasks, strict=True):
                call = {"server": server, "count": len(places), "seed": requests[places[0]].seed}
                try:
                    answers |= dict(zip(places, task.result(), strict=True))
                    calls.append(call)
                except ServerLost as lost:
                    losses[server] = str(lost)
                    calls.append(call | {"lost": True})
            return answers, losses

        batch = self.about.settings.decode_batch_size
        self.pool, found = answered(pool, len(requests), batch, ask, self.rank, self.ranks, found)
        return found

    def _answers(self, server: int, requests: Sequence[Request], version: int) -> list[Rollout]:
        """Of one call to one server: whole, of the right version, and to the prompts that training uses."""
        client, decode = self.clients[server], one_decode(requests)
        assert not decode.guard.enabled or decode.guard == self.about.settings.repeat_terminate, "another guard"
        wanted = [self.prompts.ids(*one.picture.size, one.picture.path) for one in requests]
        if (most := self._lengths[server]) is not None:
            for one, ids in zip(requests, wanted, strict=True):
                check_length(one, len(ids), most)
        answers = self._read(client, requests, version)
        found = []
        for one, ids, answer in zip(requests, wanted, answers, strict=True):
            if not client.foreign and answer.version != self._named(version):
                raise ServerLost(
                    f"{client.name}: it answered with weights of version {answer.version}, not "
                    f"{self._named(version)}: it was started anew, or has another learner"
                )
            check_prompt(one.picture.path, answer.prompt_ids, ids)
            found.append(rollout(answer, decode.guard, self._pattern, self.about.table, version))
        return found

    def _read(self, client: ServerClient, requests: Sequence[Request], version: int) -> list[Answer]:
        """Return the answers of one call. A failure of the server itself (HTTP 500, or an `engine` error of one
        request) is retried with the same requests, once for each of the two kinds, and every retry is recorded."""
        payload = infer_payload(requests, self.prompts.question)
        retried: set[str] = set()
        while True:
            try:
                return read_answers(client.infer(payload), len(requests), client.name)
            except ServerFault as fault:
                if fault.status != 500 or HTTP_FAULT in retried:  # other codes: it has no weights, or no engine
                    raise
                kind, reason = HTTP_FAULT, str(fault)
            except RequestFailed as failed:
                image = requests[failed.index].picture.path
                if failed.code != ENGINE or ENGINE in retried:
                    raise EngineError(f"{image}: {client.name} could not answer it: {failed}") from failed
                kind, reason = ENGINE, f"{image}: {failed}"
            retried.add(kind)
            self._record_retry(client, requests, version, kind, reason)

    def _record_retry(
        self, client: ServerClient, requests: Sequence[Request], version: int, kind: str, reason: str
    ) -> None:
        """Record which requests are sent a second time. Their seeds stay the same."""
        sent = [{"image": request.picture.path, "seed": request.seed} for request in requests]
        place = {"server": client.index, "base_url": client.url, "version": version}
        self.record({"event": "retry", **place, "kind": kind, "reason": reason, "requests": sent})

    def _agree(self, agreed: Pool, losses: dict[int, str]) -> None:
        """A server that one rank has lost, all leave out."""
        union: dict[int, str] = {}
        for text in gather_texts(json.dumps(losses)):
            for index, why in json.loads(text).items():
                union.setdefault(int(index), why)
        for index, why in union.items():
            self._left_out(index, why)
        self.pool = agreed.without(union)

    # What all ranks know

    def _by_first(self, work: Callable[[], Any]) -> Any:
        """What the first rank finds, on all ranks."""
        text = together(lambda: json.dumps(work()) if self.rank == 0 else "")
        return json.loads(gather_texts(text)[0])

    def _left_out(self, index: int, why: str) -> None:
        self.tell(f"warning: {why}\n  the server is left out until it is back and has the weights")
        self.links.drop(index)

    def _recorded(self, calls: list[dict[str, Any]], seconds: float) -> None:
        assert self.pool is not None
        told = [call | {"base_url": self.clients[call["server"]].url} for call in calls]
        about = {"version": self.pool.version, "sync_mode": self.sync_mode.mode, "seconds": round(seconds, 4)}
        self.record({"event": "rollouts", **about, "calls": told})


def _plain(pool: Pool) -> list[Any]:
    return [state.version if isinstance(state, Up) else state.reason for state in pool.states]


def _states(plain: list[Any]) -> tuple[Up | Out, ...]:
    return tuple(Up(one) if isinstance(one, int) else Out(one) for one in plain)


def _nobody(pool: Pool, seconds: float) -> str:
    told = "\n  ".join(why.splitlines()[0] for why in pool.out.values())
    return (
        f"no rollout server is left, and none came back in {seconds:g} s "
        f"(rollout_matching.vllm.server.timeout_s)\n  {told}\n"
        f"  start them again with `coordexp serve` and go on with --resume, {OTHERWISE}"
    )
