"""The HTTP client of one rollout server: health, session, weights and answers. Several threads may use it. Imports
no torch.

No call outlives its server. While a call is running, the client polls the server's health, and ends the call if
the server has died or has been silent for too long.
"""

import hashlib
import json
import math
import os
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any, Literal

import httpx

from coordexp.config.rollout import TOKEN, RepeatTerminate, ServerEndpoint
from coordexp.errors import EngineError
from coordexp.families import STOP_TOKENS
from coordexp.rollout.backend import Request, Rollout, common_decode
from coordexp.rollout.guard import cut_at_end
from coordexp.servers.protocol import (
    DAMAGED,
    DIGEST,
    IMAGE,
    KEEP_ALIVE,
    OWN_KEY,
    ChatMessage,
    InferCall,
    InferItem,
    InferRequest,
    LearnerFields,
    Message,
    OpenSession,
    RequestConfig,
    WeightVersion,
    check_form,
    format_digest,
    is_damaged,
    read_error,
    read_json,
    read_response,
    unreadable,
)
from coordexp.tasks import Task
from coordexp.vocab import VocabularyTable

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
    """The server answered with an error of its own (5xx), or the request or the answer was damaged on the way."""


class RequestRefused(ErrorResponse):
    """The server answered that the request or the setup is wrong (4xx)."""


@dataclass(frozen=True)
class ClientTimeouts:
    """How long the client waits, in seconds."""

    poll: float = 1.0  # between two health checks of a server
    health: float = 2.0  # for the response to a health check
    silence: float = 10.0  # without any response, until a server counts as lost
    session: float = 30.0  # without a line in the session's stream, until the session counts as ended
    taken: float = 15.0  # for the session of a learner that has died to end
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

    def __init__(
        self,
        index: int,
        server: ServerEndpoint,
        infer_timeout_s: float | None = None,
        timeouts: ClientTimeouts | None = None,
    ) -> None:
        self.index, self.url, self.group_port = index, server.base_url, server.group_port
        self.timeouts = timeouts or ClientTimeouts()
        self._liveness = _Liveness(self)
        self._infer_timeout = infer_timeout_s if infer_timeout_s and infer_timeout_s > 0 else None
        token = os.environ.get(TOKEN)
        self.http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,  # no proxy stands between a learner and its servers
            follow_redirects=False,
            timeout=None,  # noqa: S113 - `_call` ends a call
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
        return self._call("GET", path, None, self.timeouts.call)

    def post(self, path: str, message: Message, seconds: float | None = None) -> bytes:
        """Return the response. Raise ServerLost if the server dies meanwhile, or needs more than `seconds`."""
        return self._call("POST", path, message.to_json(), seconds)

    def infer(self, payload: dict[str, Any]) -> bytes:
        """Return the response. `infer_timeout_s` limits this call alone."""
        return self._call("POST", "/infer/", payload, self._infer_timeout)

    def close(self) -> None:
        self.http.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None) -> bytes:
        exchange, since = _Exchange(self), time.monotonic()
        deadline = since + seconds if seconds is not None else math.inf
        try:
            task = Task(exchange.run, method, path, body)
            check = partial(self._liveness.check, path, since)
            return task.result(deadline=deadline, check=check, interval=self.timeouts.poll)
        except TimeoutError:
            raise ServerLost(f"{self.name}: no answer in {seconds:.1f} s (in {path})") from None
        except httpx.TransportError as error:
            raise ServerLost(f"{self.name}: the connection failed in {path} ({_describe(error)})") from error
        finally:
            exchange.cut()

    def to_error(self, status: int, path: str, body: bytes) -> ErrorResponse:
        """Return the error that a response stands for."""
        content: Any = {}
        with suppress(ValueError, RecursionError):
            content = json.loads(body)
        reason, fix, code = read_error(content)
        problem = f"{self.name}: {path} answered {status}" + (f" {code}" if code else "")
        problem += f": {reason}" if reason else ""
        if status >= 500 or code == DAMAGED:
            return ServerFault(problem, fix, status, code)
        if status == 401:
            fix = fix or f"set {TOKEN} to the same value for the server and the learner"
        elif 300 <= status < 400:
            fix = "base_url must lead to the server itself, without a redirect"
        return RequestRefused(problem, fix, status, code)


class _Liveness:
    """The health of a server, for all calls that are open on it. Only one of them asks, so that the number of
    health checks does not grow with that of the calls."""

    def __init__(self, client: "ServerClient") -> None:
        self.client = client
        self._asking = Lock()
        self._health: Health = "ok"
        self._asked = self._responded = -math.inf

    def check(self, path: str, since: float) -> None:
        """Raise ServerLost, for a call to `path` that began at `since`, if the server has ended or has been silent
        for too long."""
        if self._asking.acquire(blocking=False):
            try:
                self._ask_if_due()
            finally:
                self._asking.release()
        if self._asked < since:
            return
        if self._health == "refused":
            raise self._lost("it has ended", path)
        if self._is_patient:
            return
        if self._health == "failed":
            raise self._lost("its engine has ended or hangs", path)
        silent = time.monotonic() - max(self._responded, since)
        if self._health == "silent" and silent >= self.client.timeouts.silence:
            raise self._lost(f"no response for {silent:.0f} s", path)

    @property
    def _is_patient(self) -> bool:
        facts = self.client.facts
        return facts is not None and not facts.responds_while_busy

    def _ask_if_due(self) -> None:
        if time.monotonic() - self._asked < 0.9 * self.client.timeouts.poll:
            return
        began = time.monotonic()
        self._health = self.client.health()
        self._asked = began
        if self._health == "ok":
            self._responded = time.monotonic()

    def _lost(self, problem: str, path: str) -> ServerLost:
        return ServerLost(f"{self.client.name}: {problem} (in {path})")


class _Exchange:
    """One request and its response. Another thread may cut it off."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._stream: Any = None

    def run(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        """Return the body of the response. Raise the error that it stands for, if it is one."""
        with self._send(method, path, body, None) as response:
            content = bytearray()
            for part in response.iter_bytes():
                content += part
                if len(content) > LARGEST:
                    raise EngineError(f"{self._client.name}: its answer has more than {LARGEST >> 20} MiB")
        if is_damaged(response.headers.get(DIGEST), hashlib.sha256(content).digest()):
            problem = f"{self._client.name}: its answer to {path} was damaged on the way ({DIGEST} differs)"
            raise ServerFault(problem, "", response.status_code, DAMAGED)
        if response.status_code != 200:
            raise self._client.to_error(response.status_code, path, bytes(content))
        return bytes(content)

    def hold(self, path: str, body: dict[str, Any], begun: Event) -> None:
        """Read a response that stays open, until it ends or is silent for too long. Set `begun` at its first
        line."""
        with self._send("POST", path, body, self._client.timeouts.session) as response:
            if response.status_code != 200:
                raise self._client.to_error(response.status_code, path, response.read())
            for _ in response.iter_lines():
                begun.set()

    def cut(self) -> None:
        """End the exchange by closing its socket."""
        if self._stream is not None and (connection := self._stream.get_extra_info("socket")) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _send(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        content = None if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        headers = {}
        if content is not None:
            digest = format_digest(hashlib.sha256(content).digest())
            headers = {"Content-Type": "application/json", DIGEST: digest}
        extensions = {"trace": self._trace}
        url = f"{self._client.url}{path}"
        return self._client.http.stream(
            method, url, content=content, headers=headers, timeout=timeout, extensions=extensions
        )

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._stream = info["return_value"]


class ServerSession:
    """This learner's right to send weights to a server. It lasts as long as its connection stays open."""

    def __init__(self, client: ServerClient, identity: str) -> None:
        self.identity, self.ended = identity, Event()
        self._client, self._begun = client, Event()
        self._exchange = _Exchange(client)
        opening = OpenSession(session=identity, learner=f"{socket.gethostname()}:{os.getpid()}")
        self._task = Task(self._hold, opening.to_json())

    @classmethod
    def open(cls, client: ServerClient, identity: str) -> "ServerSession":
        """Open a session. If another learner holds the server, retry for a while: that learner may have just
        died."""
        until = time.monotonic() + client.timeouts.taken
        while True:
            session = cls(client, identity)
            try:
                session._wait_until_open()
                return session
            except RequestRefused as refused:
                if refused.code != "session_taken" or time.monotonic() >= until:
                    raise
            time.sleep(min(1.0, client.timeouts.poll))

    def close(self) -> None:
        self._exchange.cut()

    def _hold(self, body: dict[str, Any]) -> None:
        try:
            self._exchange.hold("/session/", body, self._begun)
        finally:
            self.ended.set()
            self._begun.set()

    def _wait_until_open(self) -> None:
        if not self._begun.wait(self._client.timeouts.call):
            self.close()
            raise ServerLost(f"{self._client.name}: it did not begin a session")
        if self.ended.is_set():
            self._task.done.wait(1)
            error = self._task.error
            if isinstance(error, EngineError):
                raise error
            raise ServerLost(f"{self._client.name}: the session ended at once ({_describe(error)})")


def _describe(error: BaseException | None) -> str:
    return str(error) or type(error).__name__ if error is not None else "without an error"


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
            images=[str(Path(request.image.path).absolute())],
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


def _content(request: Request, question: str) -> str:
    text = request.question or question
    if IMAGE in text:
        raise EngineError(
            f"{request.image.path}: its prompt contains {IMAGE}, which marks the place of the image in requests "
            "to servers",
            f"write the prompt without {IMAGE}: the image always comes first",
        )
    return IMAGE + text


class RequestFailed(EngineError):
    """One request of a call failed. The others may have succeeded."""

    def __init__(self, index: int, problem: str, fix: str, code: str = "") -> None:
        super().__init__(problem, fix)
        self.index, self.code = index, code


@dataclass(frozen=True)
class ServerAnswer:
    """An answer as a server returns it: possibly with its stop token, and with the version of the weights, if the
    server reports one."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    version: str | None


def read_answers(body: bytes, count: int, server: str) -> list[ServerAnswer]:
    """Return the answers in the order of the requests. Raise RequestFailed for the first request that failed."""
    items = read_json(body, server, "/infer/")
    if not isinstance(items, list) or len(items) != count:
        actual = f"{len(items)} items" if isinstance(items, list) else f"a {type(items).__name__}"
        raise unreadable(server, "/infer/", f"{actual} where a list of {count} should be")
    for index, item in enumerate(items):
        if isinstance(item, dict) and "error" in item:
            problem, fix, code = read_error(item)
            raise RequestFailed(index, problem or "it failed without a reason", fix, code)
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
