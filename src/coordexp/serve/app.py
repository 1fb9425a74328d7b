"""The routes of a rollout server: ms-swift's contract, and what that leaves open: sessions, versions, updates.

No handler blocks: what takes long is awaited in the engine or done in a thread, so health is told at any time.
"""

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from coordexp.serve.answering import Answering
from coordexp.serve.connections import CONNECTION
from coordexp.serve.engine import engine_ended
from coordexp.serve.metrics import Metrics
from coordexp.serve.refusal import Refusal, bad_request
from coordexp.serve.requests import MOST_BYTES, MOST_REQUESTS, InferCall
from coordexp.serve.updates import TIMEOUT, Session, Updates, no_weights
from coordexp.serve.watchdog import Watchdog

LEAVING = 0.5  # seconds; what a session leaves is cleared by workers that may wait for weights
BEAT = 5.0  # seconds between the signs of life in a session's stream
Port = Annotated[int, Field(ge=1, le=65535)]
PROBES = ("/health", "/ready")  # routes without a token
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - there, workers are met at the address that was asked
T = TypeVar("T")
Handler = Callable[..., Awaitable[Any]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore")
    session: str | None = None


class Communicator(_Body):
    host: str = ""
    port: Port
    world_size: Annotated[int, Field(ge=2)]
    timeout_s: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] = TIMEOUT


class Opening(_Body):
    session: Annotated[str, Field(min_length=1, max_length=200)]
    learner: Annotated[str, Field(max_length=200)] = "unknown"


class Versioned(_Body):
    version: Annotated[str, Field(min_length=1, max_length=200)]


class Beginning(Versioned):
    adapter: bool = False


class FlattenedAdapter(_Body):
    peft_config: dict[str, Any]
    metadatas: list[dict[str, Any]]


class Flattened(_Body):
    metadatas: list[dict[str, Any]]
    next_bytes: Annotated[int, Field(ge=0)] = 0


class Named(_Body):
    name: str
    dtype: str
    shape: list[int]


class RolloutApp:
    """`about` is what `/version/` tells of the server besides its state; `world_size` that of its engine."""

    def __init__(
        self,
        engine: Any,
        answering: Answering,
        about: dict[str, Any],
        *,
        host: str,
        world_size: int,
        token: str | None,
        metrics: Metrics,
        hung_after_s: float = 60.0,
    ) -> None:
        self.engine, self.answering, self.about = engine, answering, about
        self.host, self.world_size, self.metrics = host, world_size, metrics
        self.updates = Updates(engine, metrics.updated)
        self.watchdog = Watchdog(engine.ping, hung_after_s, lambda: self.updates.patience)
        self.ending = asyncio.Event()
        self.api = FastAPI(title="coordexp rollout server", docs_url=None, redoc_url=None, openapi_url=None)
        self.api.exception_handler(Refusal)(_refused)
        self.api.exception_handler(HTTPException)(_unknown)
        self.api.exception_handler(Exception)(self._unexpected)
        self.api.exception_handler(RequestValidationError)(_unreadable)
        for method, path, handler in self._routes():
            self.api.add_api_route(path, handler, methods=[method], response_model=None)
        self.api.add_middleware(_Door, token=token, ending=self.ending, why=lambda: self.problem or _ENDING)

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/health/", self.health),
            ("GET", "/ready/", self.ready),
            ("GET", "/version/", self.version),
            ("GET", "/metrics", self.told_metrics),
            ("GET", "/get_world_size/", self.told_world_size),
            ("GET", "/get_model_state_keys/", self.state_keys),
            ("POST", "/get_engine_type/", self.engine_type),
            ("POST", "/infer/", self.infer),
            ("POST", "/session/", self.session),
            ("POST", "/init_communicator/", self.join),
            ("POST", "/close_communicator/", self.leave),
            ("POST", "/start_update/", self.begin),
            ("POST", "/update_flattened_params/", self.take),
            ("POST", "/update_named_param/", self.take_named),
            ("POST", "/update_adapter_flattened_param/", self.take_adapter),
            ("POST", "/finish_update/", self.finish),
            ("POST", "/abandon_update/", self.abandon),
            ("POST", "/process_weights_after_loading/", self.finish_plain),
            ("POST", "/reset_prefix_cache/", self.forget),
            ("POST", "/reset_mm_cache/", self.forget),
            ("POST", "/reset_encoder_cache/", self.forget),
        ]

    @property
    def problem(self) -> Refusal | None:
        """The reason why this server cannot go on, if there is one."""
        return engine_ended() if self.engine.has_ended else self.watchdog.problem

    async def health(self) -> Response:
        """Liveness: the server answers, and its engine is there and makes progress."""
        return _refusal(self.problem) if self.problem else JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Readiness: a request that came now would be answered at once, since no update of the weights runs."""
        problem = self.problem
        if problem is None and self.updates.update is not None:
            problem = _UPDATING
        if problem is None and self.updates.version is None:
            problem = no_weights()
        return _refusal(problem) if problem else JSONResponse({"status": "ready"})

    async def version(self) -> dict[str, Any]:
        updates = self.updates
        return self.about | {
            "weight_version": updates.version if updates.update is None or not updates.update.touched else None,
            "base": "changed" if updates.base_changed else "original",
            "updating": updates.update is not None,
            "session": _hash(updates.session.id) if updates.session else None,  # by the id, it could be used
        }

    async def told_metrics(self) -> Response:
        return Response(await asyncio.to_thread(self.metrics.text), media_type="text/plain; version=0.0.4")

    async def told_world_size(self) -> dict[str, int]:
        return {"world_size": self.world_size}

    async def state_keys(self) -> dict[str, list[str]]:
        return {"keys": await self.engine.state_keys()}

    async def engine_type(self) -> dict[str, Any]:
        return {"engine_type": "AsyncLLMEngine", "enable_multi_turn": False}

    async def infer(self, call: InferCall, request: Request) -> Response:
        """Answers of one version. If the client goes away, they are not made to their end."""
        work = asyncio.ensure_future(self._answered(call))
        gone = asyncio.ensure_future(_disconnected(request.receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            unfinished = work.cancel()
        if unfinished:
            return Response(status_code=499)
        # One by one, since `dumps` lets no other thread in.
        items = await asyncio.to_thread(lambda: [json.dumps(item, allow_nan=False) for item in work.result()])
        body = f"[{','.join(items)}]".encode()
        return Response(body, media_type="application/json")

    async def _answered(self, call: InferCall) -> list[dict[str, Any]]:
        if not call.infer_requests:
            return []
        with self.metrics.calls.time(), self.metrics.running.track_inprogress():
            async with self.updates.answers() as version:
                asked = [self.answering.one(one, call.request_config, version) for one in call.infer_requests]
                found = await _all(asked)  # no answer outlives the gate
        for item, written in found:
            self.metrics.requests.labels("failed" if "error" in item else "answered").inc()
            self.metrics.tokens.inc(written)
        return [item for item, _ in found]

    async def session(self, opening: Opening) -> Response:
        session = Session(opening.session, opening.learner)
        await self.updates.claim(session)
        return _Held(json.dumps({"session": session.id}), lambda: self.updates.release(session))

    async def join(self, body: Communicator, request: Request) -> dict[str, str]:
        if body.world_size != self.world_size + 1:
            told = (
                f"a group of {body.world_size}, and this server's {self.world_size} with the learner are one more"
            )
            raise Refusal(400, "world_size", told, f"join with world_size {self.world_size + 1}")
        host = request.scope["server"][0] if self.host in EVERYWHERE else self.host
        await self.updates.join(body.session, host, body.port, body.world_size, body.timeout_s)
        return {"message": "joined"}

    async def leave(self, body: _Body | None = None) -> dict[str, str]:
        await self.updates.leave(body.session if body else None)
        return {"message": "left"}

    async def begin(self, body: Beginning) -> dict[str, str]:
        await self.updates.begin(body.session, body.version, body.adapter)
        return {"message": "begun"}

    async def take(self, body: Flattened) -> dict[str, str]:
        await self.updates.take(body.session, body.metadatas, body.next_bytes)
        return {"message": "taken"}

    async def take_named(self, body: Named) -> dict[str, str]:
        await self.updates.take(body.session, [_alone(body)])
        return {"message": "taken"}

    async def take_adapter(self, body: FlattenedAdapter) -> dict[str, str]:
        await self.updates.take_adapter(body.session, body.peft_config, body.metadatas)
        return {"message": "taken"}

    async def finish(self, body: Versioned) -> dict[str, str]:
        return {"weight_version": await self.updates.finish(body.session, body.version)}

    async def abandon(self, body: _Body) -> dict[str, str]:
        await self.updates.abandon(body.session)
        return {"message": "abandoned"}

    async def finish_plain(self) -> dict[str, str]:
        await self.updates.finish_plain()
        return {"message": "done"}

    async def _unexpected(self, _: Request, error: Exception) -> Response:
        """The server prints it, with its traceback. What vLLM says of an engine that has ended is seldom to the
        point."""
        told = f"{type(error).__name__}: {error}"
        unexpected = Refusal(500, "unexpected", told, "see this server's output, and please report it")
        return _refusal(self.problem or unexpected)

    async def forget(self) -> dict[str, str]:
        await self.updates.finish_plain()
        async with self.updates.answers():
            await self.engine.forget()
        return {"message": "done"}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _alone(body: Named) -> dict[str, Any]:
    """A tensor that comes by itself, as a bucket of one."""
    import torch

    dtype = getattr(torch, body.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise Refusal(400, "bad_request", f"dtype: {body.dtype} is not one of torch's")
    count = torch.Size(body.shape).numel()
    place = {"start_idx": 0, "end_idx": count * dtype.itemsize, "numel": count}
    return {"name": body.name, "shape": body.shape, "dtype": body.dtype} | place


async def _all(works: Sequence[Awaitable[T]]) -> list[T]:
    """What they give, when all have ended; the first error after that."""
    found = await asyncio.gather(*works, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found  # type: ignore[return-value]


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Held(Response):
    """A response that ends only with its connection: as long as it is open, so is the session."""

    def __init__(self, first: str, released: Callable[[], Awaitable[None]]) -> None:
        self.first, self.released = first, released
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            headers = [(b"content-type", b"application/x-ndjson")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send(_chunk(f"{self.first}\n"))
            gone = asyncio.ensure_future(_disconnected(receive))
            while not (await asyncio.wait({gone}, timeout=BEAT))[0]:
                await send(_chunk("\n"))
        finally:
            await asyncio.shield(asyncio.ensure_future(self.released()))


def _chunk(text: str, last: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": not last}


class _Door:
    """Refuses requests without the token, if there is one, and bodies that are too large. When the server is
    `ending`, it refuses every request."""

    def __init__(self, app: Any, token: str | None, ending: asyncio.Event, why: Callable[[], Refusal]) -> None:
        self.app, self.token, self.ending, self.why = app, token, ending, why

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        is_known = self._is_known(headers)
        if refusal := self._refusal(scope["path"], headers, is_known):
            await _refusal(refusal)(scope, receive, send)
            return
        if is_known and CONNECTION in scope:
            scope[CONNECTION].is_known = True
        left = MOST_BYTES

        async def limited() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413)
            return message

        await self._until_ending(scope, limited, send)

    async def _until_ending(self, scope: Any, receive: Any, send: Any) -> None:
        sent: list[Any] = []

        async def noted(message: Any) -> None:
            sent[:] = [message]
            await send(message)

        work = asyncio.ensure_future(self.app(scope, receive, noted))
        ending = asyncio.ensure_future(self.ending.wait())
        try:
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
        finally:
            ending.cancel()
            work.cancel()
        await asyncio.wait({work}, timeout=LEAVING)
        if not sent:
            await _refusal(self.why())(scope, receive, send)
        elif sent[0]["type"] == "http.response.start" or sent[0].get("more_body"):
            await send(_chunk("", last=True))

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        given, expected = headers.get(b"authorization", b""), f"Bearer {self.token}".encode()
        return bool(self.token) and hmac.compare_digest(given, expected)

    def _refusal(self, path: str, headers: dict[bytes, bytes], is_known: bool) -> Refusal | None:
        if self.token and path.rstrip("/") not in PROBES and not is_known:
            return Refusal(401, "no_token", "this server wants a token", "set COORDEXP_SERVER_TOKEN on both ends")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MOST_BYTES:
            return _too_large(f"{MOST_BYTES} bytes")
        return None


_UPDATING = Refusal(503, "updating", "weights are being sent to this server", "ask again when they are there")
_ENDING = Refusal(503, "ending", "this server was asked to end", "start it again")


def _too_large(what: str) -> Refusal:
    return Refusal(413, "too_large", f"more than {what} in one call", "send fewer requests in a call, or paths")


def _refusal(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.told(), refusal.status)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return _refusal(error)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 413:
        return _refusal(_too_large(f"{MOST_BYTES} bytes"))
    told = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 400:  # bytes that are no UTF-8, or JSON that is too deep or has too long a number
        return _refusal(bad_request(told, "send a body of JSON; see the contract in docs/operations.md"))
    return _refusal(Refusal(error.status_code, "no_route", told, "see the contract in docs/operations.md"))


async def _unreadable(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "too_long" and first["loc"][-1] == "infer_requests":
        return _refusal(_too_large(f"{MOST_REQUESTS} requests"))
    told = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return _refusal(Refusal(422, "bad_request", told, "see the contract in docs/operations.md"))
