"""The HTTP client of one rollout server: health, weights and answers. Several threads may use it. Imports
no torch.

No call outlives its server. While a call is running, the client polls the server's health, and ends the call if
the server has died or has been silent for too long.
"""

import base64
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import httpx

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import TOKEN, RepeatTerminate, ServerEndpoint
from coordexp.data.addresses import is_file
from coordexp.data.images import UNREADABLE, read_image_bytes
from coordexp.errors import EngineError, explain
from coordexp.families import STOP_TOKENS
from coordexp.rollout.backend import Request, Rollout, common_decode
from coordexp.rollout.guard import cut_at_end
from coordexp.servers.protocol import (
    ENGINE_FAULT,
    IMAGE,
    KEEP_ALIVE,
    OWN_KEY,
    ChatMessage,
    InferCall,
    InferItem,
    InferRequest,
    LearnerFields,
    RequestConfig,
    WeightVersion,
    check_form,
    read_error,
    read_json,
    read_response,
    unreadable,
)
from coordexp.tasks import Task

LARGEST = 2**30  # bytes of a response
ALTERNATIVES = (
    "set rollout_matching.vllm.mode: colocate, or rollout_matching.rollout_backend: hf (in Stage 1: "
    "stage1.eval_backend: hf)"
)
OTHERWISE = f"or {ALTERNATIVES}"
Health = Literal["ok", "refused", "silent", "failed"]


class ServerLost(EngineError):
    """The server is gone or has no weights. It may be asked again only after a full sync."""


class ErrorResponse(EngineError):
    """The server answered with an error."""

    def __init__(self, problem: str, fix: str, status: int, code: str = "") -> None:
        super().__init__(problem, fix)
        self.status, self.code = status, code


class ServerFault(ErrorResponse, ServerLost):
    """The server answered with an error of its own (5xx)."""


class RequestRefused(ErrorResponse):
    """The server answered that the request or the setup is wrong (4xx)."""


@dataclass(frozen=True)
class ClientTimeouts:
    """How long the client waits, in seconds."""

    poll: float = 1.0  # between two health checks of a server
    health: float = 2.0  # for the response to a health check
    silence: float = 10.0  # without any response, until a server counts as lost
    call: float = 30.0  # for the response to a call that takes no time on the server


@dataclass(frozen=True)
class ServerFacts:
    """The facts that all ranks know about a server. One of ours reports the version of its weights with each
    answer, and responds to health checks at any time."""

    world_size: int
    max_model_len: int | None = None
    boot: str | None = None
    reports_version: bool = True
    responds_while_busy: bool = True


class ServerClient:
    """Calls one server. `facts` are set when the server has been examined. `infer_timeout_s` limits generation
    calls; without it, or if it is not positive, they have no limit."""

    facts: ServerFacts | None = None
    _health: Health = "ok"

    def __init__(
        self,
        index: int,
        server: ServerEndpoint,
        infer_timeout_s: float | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self.index, self.url, self.group_port = index, server.base_url, server.group_port
        self.timeouts = timeouts or ClientTimeouts()
        self._asking = Lock()
        self._asked = self._responded = -math.inf
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else math.inf
        token = os.environ.get(TOKEN)
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # no proxy stands between a learner and its servers
            follow_redirects=False,
            timeout=None,  # noqa: S113 - a `Call` ends by itself
            transport=httpx.HTTPTransport(
                verify=ssl.create_default_context(),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                socket_options=[*KEEP_ALIVE, (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
            ),
        )

    @property
    def name(self) -> str:
        return f"rollout server {self.index} ({self.url})"

    def health(self) -> Health:
        try:
            with self.http.stream("GET", f"{self.url}/health/", timeout=self.timeouts.health) as response:
                return "ok" if response.status_code == 200 else "failed"
        except httpx.TimeoutException:
            return "silent"
        except httpx.TransportError:
            return "refused"

    def get_if_present(self, path: str) -> bytes | None:
        """Return the response, or None if the server does not have this route."""
        try:
            return self.get(path)
        except RequestRefused as refused:
            if refused.status != 404:
                raise
            return None

    def read(self, form: Any, path: str) -> Any:
        """Return the response of a route in a form of the protocol."""
        return read_response(form, self.get(path), self.name, path)

    def weight_version(self) -> str | None:
        """Return the version that the server reports, or None while it has no whole weights."""
        version: WeightVersion = self.read(WeightVersion, "/version/")
        return version.weight_version

    def get(self, path: str) -> bytes:
        return Call(self, "GET", path).result(time.monotonic() + self.timeouts.call)

    def infer(self, payload: dict[str, Any]) -> bytes:
        """Return the response. `infer_timeout_s` limits this call alone."""
        return Call(self, "POST", "/infer/", payload).result(time.monotonic() + self._infer_timeout)

    def close(self) -> None:
        self.http.close()

    def check_alive(self, path: str, since: float) -> None:
        """Raise ServerLost, for a call to `path` that began at `since`, if the server has ended or has been silent
        for too long. However many calls are open, only one of them asks for the health at a time."""
        if self._asking.acquire(blocking=False):
            try:
                if (now := time.monotonic()) - self._asked >= 0.9 * self.timeouts.poll:
                    self._health, self._asked = self.health(), now
                    self._responded = time.monotonic() if self._health == "ok" else self._responded
            finally:
                self._asking.release()
        silent = time.monotonic() - max(self._responded, since)
        problem = ""
        if self._asked < since:
            return
        if self._health == "refused":
            problem = "it has ended"
        elif self.facts is not None and not self.facts.responds_while_busy:
            return
        elif self._health == "failed":
            problem = "its engine has ended or hangs"
        elif self._health == "silent" and silent >= self.timeouts.silence:
            problem = f"no response for {silent:.0f} s"
        if problem:
            raise ServerLost(f"{self.name}: {problem} (in {path})")

    def to_error(self, status: int, path: str, body: bytes) -> ErrorResponse:
        """Return the error that a response stands for."""
        content: Any = {}
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
        reason, fix, code = read_error(content)
        problem = f"{self.name}: {path} answered {status}" + (f" {code}" if code else "")
        problem += f": {reason}" if reason else ""
        if status >= 500:
            return ServerFault(problem, fix, status, code)
        if status == 401:
            fix = fix or f"set {TOKEN} to the same value for the server and the learner"
        elif 300 <= status < 400:
            fix = "base_url must lead to the server itself, without a redirect"
        return RequestRefused(problem, fix, status, code)


class Call:
    """A request and its response, in a thread of its own, which begins at once. The response to a call that
    `stays_open` is read line by line until the call is cut off or the server ends it. `lines` counts them."""

    def __init__(
        self,
        client: ServerClient,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        stays_open: bool = False,
    ) -> None:
        self.client, self.path, self.since = client, path, time.monotonic()
        self.lines = 0
        self._stream: Any = None
        self._is_cut = False
        self._task = Task(self._run, method, body, stays_open)

    @property
    def has_ended(self) -> bool:
        return self._task.done.is_set()

    def check(self) -> None:
        """Raise the error of the call if it has failed, or if its server is lost."""
        if self.has_ended:
            self.result()
        else:
            self.client.check_alive(self.path, self.since)

    def result(self, until: float = math.inf) -> bytes:
        """Return the response. Raise ServerLost if it has not come at `until`, or if the server is lost."""
        name = self.client.name
        try:
            return self._task.result(deadline=until, check=self.check, interval=self.client.timeouts.poll)
        except TimeoutError:
            raise ServerLost(f"{name}: no answer in {until - self.since:.1f} s (in {self.path})") from None
        except httpx.TransportError as error:
            raise ServerLost(
                f"{name}: the connection failed in {self.path} ({str(error) or type(error).__name__})"
            ) from error
        finally:
            self.cut()

    def cut(self) -> None:
        """End the call by closing its socket, also one that is connected later."""
        self._is_cut = True
        if self._stream is not None and (connection := self._stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self, method: str, body: dict[str, Any] | None, stays_open: bool) -> bytes:
        client, parts = self.client, bytearray()
        content = None if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        headers = {} if content is None else {"Content-Type": "application/json"}
        options: Any = {"content": content, "headers": headers, "extensions": {"trace": self._trace}}
        with client.http.stream(method, f"{client.url}{self.path}", **options) as response:
            for part in response.iter_bytes():
                parts += part
                if len(parts) > LARGEST:
                    raise EngineError(f"{client.name}: its answer has more than {LARGEST >> 20} MiB")
                if stays_open and response.status_code == 200:
                    *lines, parts = parts.split(b"\n")
                    for line in filter(None, lines):
                        self._read_line(line)
        if response.status_code != 200:
            raise client.to_error(response.status_code, self.path, bytes(parts))
        if stays_open and parts:
            self._read_line(parts)
        return bytes(parts)

    def _read_line(self, line: bytearray) -> None:
        if b'"error"' in line:
            raise self.client.to_error(500, self.path, bytes(line))
        self.lines += 1

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]
            if self._is_cut:
                self.cut()


def infer_payload(requests: Sequence[Request], question: str) -> dict[str, Any]:
    """Return the body of one call, whose requests all decode alike. `question` is that of requests without their
    own. The body sets every sampling field, because ms-swift takes missing ones from the model's
    `generation_config.json`."""
    decode = common_decode(requests)
    if decode.mode == "beam":
        raise EngineError("rollout servers have no beam search", "set rollout_backend: hf, or decode_mode: greedy")
    if decode.stop_bias:
        raise EngineError(
            f"rollout servers cannot decode with a stop bias, and this request has {decode.stop_bias:g}",
            "use `coordexp predict --stop-bias`, which asks no server, or a stop bias of 0",
        )
    sampling = decode.mode == "sampling"
    infer_requests = []
    for request in requests:
        own = LearnerFields(seed=request.seed, guard=decode.guard.enabled, size=request.image.size)
        infer_request = InferRequest(
            messages=[ChatMessage(role="user", content=_content(request, question))],
            images=[_name_image(request.image.path)],
            data_dict={OWN_KEY: own.to_json()},
        )
        infer_requests.append(infer_request.to_json())
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


def _content(request: Request, question: str) -> str:
    text = request.question or question
    if IMAGE in text:
        raise EngineError(
            f"{request.image.path}: its prompt contains {IMAGE}, which marks the place of the image in requests "
            "to servers",
            f"write the prompt without {IMAGE}: the image always comes first",
        )
    return IMAGE + text


@dataclass(frozen=True)
class ServerAnswer:
    """An answer as a server returns it: possibly with its stop token, and with the version of the weights, if the
    server reports one."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: str | None


def read_answers(body: bytes, requests: Sequence[Request], server: str) -> list[ServerAnswer]:
    """Return the answers in the order of the requests. Raise an error that names the image of the first request
    that failed: ServerLost if the engine failed at it, and EngineError if the request was wrong."""
    items, count = read_json(body, server, "/infer/"), len(requests)
    if not isinstance(items, list) or len(items) != count:
        actual = f"{len(items)} items" if isinstance(items, list) else f"a {type(items).__name__}"
        raise unreadable(server, "/infer/", f"{actual} where a list of {count} should be")
    for request, item in zip(requests, items, strict=True):
        if isinstance(item, dict) and "error" in item:
            reason, fix, code = read_error(item)
            problem = f"{request.image.path}: {server} could not answer it: {reason or 'it gave no reason'}"
            raise (ServerLost if code == ENGINE_FAULT else EngineError)(problem, fix)
    answers = check_form(list[InferItem], items, server, "/infer/")
    return [_read_answer(item, f"[{index}].response", server) for index, item in enumerate(answers)]


def _read_answer(item: InferItem, at: str, server: str) -> ServerAnswer:
    response = item.response
    if len(response.choices) != 1:
        problem = f"{at}.choices has {len(response.choices)} answers where 1 should be"
        raise unreadable(server, "/infer/", problem)
    choice = response.choices[0]
    if response.prompt_token_ids is None or choice.token_ids is None or choice.logprobs is None:
        raise unreadable(server, "/infer/", f"{at}: prompt_token_ids, token_ids or logprobs is missing")
    logprobs = tuple(token["logprob"] for token in choice.logprobs.content)
    if len(logprobs) != len(choice.token_ids):
        problem = f"{at}.choices[0]: {len(choice.token_ids)} token_ids and {len(logprobs)} logprobs"
        raise unreadable(server, "/infer/", problem)
    version = item.rollout_infos.weight_version if item.rollout_infos else None
    ids = tuple(choice.token_ids)
    return ServerAnswer(tuple(response.prompt_token_ids), ids, logprobs, choice.finish_reason, version)


def to_rollout(
    answer: ServerAnswer, guard: RepeatTerminate, pattern: Sequence[int], table: VocabularyTable, version: int
) -> Rollout:
    """Return the answer as a rollout, without its stop token, which a server may or may not have sent."""
    ids, reason = cut_at_end(answer.ids, table.end_of_turn, guard, pattern)
    if reason == "length" and answer.finish_reason != "length":  # it ended with another token than the end of turn
        reason = "repeat" if answer.finish_reason == "repeat" else "stop"
        other = [table.tokenizer.token_to_id(name) for name in STOP_TOKENS]
        ids = ids[:-1] if ids and ids[-1] in other else ids
    return Rollout.of(table, answer.prompt_ids, ids, answer.logprobs, reason, version)
