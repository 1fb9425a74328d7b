"""Asks servers for the rollouts of one rank: calls in threads, and no collectives."""

import base64
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition
from typing import Any

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.data.addresses import is_file
from coordexp.data.images import UNREADABLE, read_image_bytes
from coordexp.errors import EngineError, explain
from coordexp.families import STOP_TOKENS
from coordexp.rollout.backend import Request, Rollout, check_length, check_prompt, common_decode
from coordexp.rollout.guard import cut_at_end, key_pattern_for
from coordexp.rollout.prompt import PromptBuilder
from coordexp.rollout.start import EngineSetup
from coordexp.servers.client import ServerClient, ServerLost
from coordexp.servers.pool import Chunk, Loss, Pool, Window
from coordexp.servers.protocol import (
    ENGINE_FAULT,
    IMAGE,
    OWN_KEY,
    ChatMessage,
    InferCall,
    InferItem,
    InferRequest,
    LearnerFields,
    RequestConfig,
    check_form,
    read_error,
    read_json,
    unreadable,
)
from coordexp.tasks import Task


def infer_payload(requests: Sequence[Request], question: str) -> dict[str, Any]:
    """Return the body of one call, whose requests all decode alike. `question` is that of requests without their
    own. The body sets every sampling field, because a server takes missing ones from the model's
    `generation_config.json`."""
    decode = common_decode(requests)
    if decode.mode == "beam":
        raise EngineError("rollout servers have no beam search", "set rollout_backend: hf, or decode_mode: greedy")
    if decode.stop_bias:
        raise EngineError(
            f"rollout servers cannot decode with a stop bias, and this request has {decode.stop_bias:g}",
            "use `coordexp predict --stop-bias`, which asks no server, or a stop bias of 0",
        )
    infer_requests = []
    for request in requests:
        text = request.question or question
        if IMAGE in text:
            raise EngineError(
                f"{request.image.path}: its prompt contains {IMAGE}, which marks the place of the image in "
                "requests to servers",
                f"write the prompt without {IMAGE}: the image always comes first",
            )
        own = LearnerFields(seed=request.seed, guard=decode.guard.enabled, size=request.image.size)
        infer_request = InferRequest(
            messages=[ChatMessage(role="user", content=IMAGE + text)],
            images=[_name_image(request.image.path)],
            data_dict={OWN_KEY: own.to_json()},
        )
        infer_requests.append(infer_request.to_json())
    sampling = decode.mode == "sampling"
    config = RequestConfig(
        max_tokens=decode.max_new_tokens,
        temperature=decode.temperature if sampling else 0.0,
        top_k=decode.top_k if sampling else -1,
        top_p=decode.top_p if sampling else 1.0,
        repetition_penalty=1.0,
        stop=[],
        seed=requests[0].seed,
        n=1,
        return_details=True,
        logprobs=True,
    )
    return InferCall(infer_requests=infer_requests, request_config=config).to_json()


def _name_image(address: str) -> str:
    """Return an image in the form of a request: the path of a file, which a server reads itself, or else its bytes
    in base64."""
    if is_file(address):
        return str(Path(address).absolute())
    with explain(OSError, f"{address}: not a readable image", UNREADABLE):
        content = read_image_bytes(address)
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode('ascii')}"


def read_answers(body: bytes, requests: Sequence[Request], server: str) -> list[InferItem]:
    """Return the answers in the order of the requests, each with one choice that has token ids and log
    probabilities. Raise an error that names the image of the first request that failed: ServerLost if the engine
    failed at it, and EngineError if the request was wrong."""
    items, count = read_json(body, server, "/infer/"), len(requests)
    if not isinstance(items, list) or len(items) != count:
        actual = f"{len(items)} items" if isinstance(items, list) else f"a {type(items).__name__}"
        raise unreadable(server, "/infer/", f"{actual} where a list of {count} should be")
    for request, item in zip(requests, items, strict=True):
        if isinstance(item, dict) and "error" in item:
            reason, fix, code = read_error(item)
            problem = f"{request.image.path}: {server} could not answer it: {reason or 'it gave no reason'}"
            raise (ServerLost if code == ENGINE_FAULT else EngineError)(problem, fix)
    answers: list[InferItem] = check_form(list[InferItem], items, server, "/infer/")
    for index, answer in enumerate(answers):
        if fault := _find_problem(answer):
            raise unreadable(server, "/infer/", f"[{index}].response: {fault}")
    return answers


def _find_problem(answer: InferItem) -> str | None:
    choices = answer.response.choices
    if len(choices) != 1:
        return f"{len(choices)} choices where 1 should be"
    ids, logprobs = choices[0].token_ids, choices[0].logprobs
    if answer.response.prompt_token_ids is None or ids is None or logprobs is None:
        return "prompt_token_ids, token_ids or logprobs is missing"
    if len(ids) != len(logprobs.content):
        return f"{len(ids)} token_ids and {len(logprobs.content)} logprobs"
    return None


def to_rollout(
    item: InferItem, guard: RepeatTerminate, pattern: Sequence[int], table: VocabularyTable, version: int
) -> Rollout:
    """Return an answer as a rollout, without its stop token, which a server may or may not have sent."""
    (choice,) = item.response.choices
    assert choice.token_ids is not None and choice.logprobs is not None
    ids, reason = cut_at_end(choice.token_ids, table.end_of_turn, guard, pattern)
    if reason == "length" and choice.finish_reason != "length":  # it ended with another token than the end of turn
        reason = choice.finish_reason
        other = [table.tokenizer.token_to_id(name) for name in STOP_TOKENS]
        ids = ids[:-1] if ids and ids[-1] in other else ids
    logprobs = [token["logprob"] for token in choice.logprobs.content]
    return Rollout.of(table, item.response.prompt_token_ids or (), ids, logprobs, reason, version)


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
        client, guard = self.clients[server], common_decode(requests).guard
        assert not guard.enabled or guard == self.setup.settings.repeat_terminate, "another guard"
        assert client.facts is not None, "before the first sync"
        prompts = [
            self.prompts.ids(*request.image.size, request.image.path, request.question) for request in requests
        ]
        for request, prompt_ids in zip(requests, prompts, strict=True):
            check_length(request, len(prompt_ids), client.facts.max_model_len)
        answers = read_answers(client.infer(infer_payload(requests, self.prompts.question)), requests, client.name)
        rollouts, expected = [], self.name_version(version)
        for request, prompt_ids, answer in zip(requests, prompts, answers, strict=True):
            actual = answer.rollout_infos and answer.rollout_infos.weight_version
            if actual != expected:
                raise ServerLost(
                    f"{client.name}: it answered with weights of version {actual}, not {expected}: it was "
                    "restarted, or it serves another learner now"
                )
            check_prompt(request.image.path, answer.response.prompt_token_ids or (), prompt_ids)
            rollouts.append(to_rollout(answer, guard, self._pattern, self.setup.table, version))
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

    def ask(self, pool: Pool, rank: int, ranks: int, parts: Sequence[Sequence[int]] | None = None) -> None:
        """Begin to ask the servers of the pool for all rollouts that are missing. The requests of each part are
        dealt to all servers, one part after the other."""
        assert pool.version is not None, "before the first sync"
        self._version = pool.version
        self._window = Window(pool, self.asker.setup.settings.decode_batch_size, rank, ranks)
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

    def pop_losses(self, pool: Pool) -> dict[int, Loss]:
        """Return the servers that this rank has lost since the last time. A server that is out already is not
        among them, and neither is one that has received newer weights since: it is back."""
        with self._changed:
            lost, self._lost = self._lost, {}
        return {server: loss for server, loss in lost.items() if pool.states[server] == self._version}

    def pop_calls(self) -> list[dict[str, Any]]:
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
