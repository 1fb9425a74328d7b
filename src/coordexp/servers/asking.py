"""Asks servers for the rollouts of one rank: calls in threads, and no collectives."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

from coordexp.rollout.backend import Request, Rollout, check_length, check_prompt, common_decode
from coordexp.rollout.guard import key_pattern_for
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import EngineSetup
from coordexp.servers.client import ServerClient, ServerLost, infer_payload, read_answers, to_rollout
from coordexp.servers.pool import Chunk, Loss, Pool, Window
from coordexp.tasks import Task


class Asker:
    """Calls servers, and checks their answers: that they come from the right weights, and answer the prompts that
    training uses. `run` names the learner, and is set before the first call."""

    def __init__(self, clients: Sequence[ServerClient], setup: EngineSetup, prompts: PromptBuilder) -> None:
        self.clients, self.setup, self.prompts = clients, setup, prompts
        self.run = ""
        self._pattern = key_pattern_for(setup.settings.repeat_terminate, setup.table)

    def name_version(self, version: int) -> str:
        """Return the name of a version on the servers. No weights of another learner have the same name."""
        return f"{version}-{self.run}"

    def ask(self, server: int, requests: Sequence[Request], version: int) -> list[Rollout]:
        """Return the rollouts of one call to one server."""
        client, decode = self.clients[server], common_decode(requests)
        assert not decode.guard.enabled or decode.guard == self.setup.settings.repeat_terminate, "another guard"
        prompts = [
            self.prompts.ids(*request.image.size, request.image.path, request.question) for request in requests
        ]
        facts = client.facts
        assert facts is not None, "before the first sync"
        if facts.max_model_len is not None:
            for request, prompt_ids in zip(requests, prompts, strict=True):
                check_length(request, len(prompt_ids), facts.max_model_len)
        answers = read_answers(client.infer(infer_payload(requests, self.prompts.question)), requests, client.name)
        rollouts = []
        for request, prompt_ids, answer in zip(requests, prompts, answers, strict=True):
            if facts.reports_version and answer.version != self.name_version(version):
                raise ServerLost(
                    f"{client.name}: it answered with weights of version {answer.version}, not "
                    f"{self.name_version(version)}: it was restarted, or it serves another learner now"
                )
            check_prompt(request.image.path, answer.prompt_ids, prompt_ids)
            rollouts.append(to_rollout(answer, decode.guard, self._pattern, self.setup.table, version))
        return rollouts


class Generation:
    """Requests of one rank: their rollouts so far, and the calls to servers that were made. Every call has a
    thread of its own, which makes the next calls when it ends."""

    def __init__(self, asker: Asker, requests: Sequence[Request]) -> None:
        self.asker, self.requests = asker, requests
        self.rollouts: dict[int, Rollout] = {}
        self.seconds = 0.0  # from the first call to the newest answer
        self._began = time.monotonic()
        self._calls: dict[int, dict[str, Any]] = {}  # those that have ended, by their numbers
        self._numbers = itertools.count()
        self._lost: dict[int, Loss] = {}
        self._error: BaseException | None = None
        self._changed = Condition()
        self._window: Window | None = None
        self._version = 0

    def take_losses(self, pool: Pool) -> dict[int, Loss]:
        """Return the servers that this rank has lost since the last time. A server that is out already is not
        among them, and neither is one that has received newer weights since: it is back."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return {server: loss for server, loss in lost.items() if pool.states[server] == self._version}

    def ask(self, pool: Pool, rank: int, ranks: int, parts: Sequence[Sequence[int]] | None = None) -> None:
        """Begin to ask the servers of the pool for all rollouts that are missing. The requests of each part are
        dealt to all servers, one part after the other."""
        assert pool.version is not None, "before the first sync"
        self._version = pool.version
        facts = {client.index: client.facts for client in self.asker.clients if client.facts}
        serial = frozenset(index for index, server in facts.items() if not server.responds_while_busy)
        self._window = Window(pool, self.asker.setup.settings.decode_batch_size, rank, ranks, serial)
        for part in parts or [range(len(self.requests))]:
            self._window.add([request for request in part if request not in self.rollouts])
        with self._changed:
            self._make_calls(self._window)

    def wait(self, indices: Sequence[int]) -> None:
        """Wait until these requests are answered, or no server is left. Raise the error of a request that cannot
        be answered."""
        with self._changed:
            for index in indices:
                while index not in self.rollouts and not self._is_over():
                    self._changed.wait()
        if self._error is not None:
            raise self._error

    def wait_until_idle(self) -> None:
        """Wait until no request is open."""
        with self._changed:
            self._changed.wait_for(self._is_over)

    def count_missing(self, indices: Sequence[int]) -> int:
        return sum(index not in self.rollouts for index in indices)

    def take_calls(self) -> list[dict[str, Any]]:
        """Return the calls that ended since the last time, in the order in which they were made."""
        with self._changed:
            calls, self._calls = self._calls, {}
        return [calls[number] for number in sorted(calls)]

    def _is_over(self) -> bool:
        return self._error is not None or self._window is None or self._window.is_idle

    def _make_calls(self, window: Window) -> None:
        """Make the calls that may be made now, each in a thread. If one cannot be started, that is the error of
        the generation."""
        try:
            for call in window.next_calls() if self._error is None else ():
                Task(self._ask_server, window, call, self._version, next(self._numbers))
        except RuntimeError as error:  # the system has no more threads
            self._error = error
        self._changed.notify_all()

    def _ask_server(self, window: Window, call: Chunk, version: int, number: int) -> None:
        server, indices = call
        seed = self.requests[indices[0]].seed
        facts: dict[str, Any] = {"server": server, "count": len(indices), "seed": seed, "version": version}
        rollouts, lost, error = list[Rollout](), None, None
        try:
            rollouts = self.asker.ask(server, [self.requests[k] for k in indices], version)
        except ServerLost as loss:
            lost = Loss.from_error(loss)
        except BaseException as failure:  # noqa: BLE001 - raised in the thread that waits
            error = failure
        with self._changed:
            self._calls[number] = facts | ({"lost": True, "reason": lost.problem} if lost else {})
            self._error = self._error or error
            if lost:
                self._lost.setdefault(server, lost)
                window.lose(server, lost)
            window.close(call)
            for index, rollout in zip(indices, rollouts, strict=False):  # there are none after an error
                self.rollouts.setdefault(index, rollout)
            self.seconds = time.monotonic() - self._began
            self._make_calls(window)


@dataclass(frozen=True)
class Started:
    """The requests of one step: their indices among those of a generation."""

    generation: Generation
    indices: range

    @property
    def rollouts(self) -> list[Rollout | None]:
        return [self.generation.rollouts.get(index) for index in self.indices]

    @property
    def seconds(self) -> float:
        return self.generation.seconds

    def wait(self) -> None:
        self.generation.wait_until_idle()
