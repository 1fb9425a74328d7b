"""The HTTP application of a rollout server: its routes and metrics, and its run from the start of the engine to
its end. The engine always ends with it.

No handler blocks the event loop: long work is awaited in the engine or runs in a thread. So the server reports its
health at any time.
"""

import asyncio
import json
import os
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import TOKEN, RolloutMatching
from coordexp.config.settings import Model
from coordexp.errors import EngineError, explain
from coordexp.rollout.prompt import load_processor, read_image_size
from coordexp.rollout.start import EngineSetup, check_guard_class
from coordexp.servers.answering import AllowedImages, Answering, Item
from coordexp.servers.connections import MOST_BYTES, UVICORN, AccessControl, to_response, too_large
from coordexp.servers.engine import ServedEngine, Watchdog, check_devices, engine_ended
from coordexp.servers.protocol import (
    MOST_REQUESTS,
    PROTOCOL,
    SERVER,
    BeginUpdate,
    InferCall,
    InferItem,
    JoinGroup,
    LoadBucket,
    Refusal,
    ServerVersion,
    WeightMessage,
    bad_request,
    model_fingerprint,
)
from coordexp.servers.transfer import gpu_name
from coordexp.servers.updates import Updates, no_weights

BEAT = 5.0  # seconds between the empty lines of a response that stays open, which show that the server is alive
READY = 600.0  # seconds for the first answers of an engine, which compiles functions for them
LOOKS = 1.0  # seconds between two checks of the engine
SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)  # the buckets of histograms
CONTRACT = "see the contract in docs/operations.md"
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - then workers use the address that the learner's request came to
Handler = Callable[..., Awaitable[Any]]


class ServerMetrics:
    """The server's own metrics for Prometheus. vLLM's metrics appear beside them under the same route."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.requests = Counter("coordexp_requests", "Requests, by outcome", ["outcome"], registry=registry)
        self.tokens = Counter("coordexp_generated_tokens", "Tokens written", registry=registry)
        self.calls = Histogram("coordexp_infer_seconds", "Time of a call", buckets=SECONDS, registry=registry)
        self.running = Gauge("coordexp_running_requests", "Requests being answered", registry=registry)
        self.updates = Counter("coordexp_updates", "Weight updates, by outcome", ["outcome"], registry=registry)
        self.update_bytes = Counter("coordexp_update_bytes", "Bytes of weights taken", registry=registry)
        self.update_seconds = Histogram(
            "coordexp_update_seconds", "Time of a weight update", buckets=SECONDS, registry=registry
        )

    def count_update(self, outcome: str, seconds: float, size: int) -> None:
        self.updates.labels(outcome).inc()
        self.update_bytes.inc(size)
        self.update_seconds.observe(seconds)


class RolloutApp:
    """The HTTP application of a rollout server. `facts` are returned by `/version/`, together with the state of
    the weights."""

    def __init__(
        self,
        engine: Any,
        answering: Answering,
        facts: ServerVersion,
        *,
        host: str,
        token: str | None,
        metrics: ServerMetrics,
        hung_after_s: float = 60.0,
    ) -> None:
        self.engine, self.answering, self.facts = engine, answering, facts
        self.host, self.metrics = host, metrics
        self.updates = Updates(engine, metrics.count_update)
        self.watchdog = Watchdog(engine.ping, hung_after_s, self.updates.waiting_allowance)
        self.ending = asyncio.Event()
        hidden: dict[str, Any] = {"docs_url": None, "redoc_url": None, "openapi_url": None}
        # A redirect would lead to whatever host a request names.
        self.api = FastAPI(title="coordexp rollout server", redirect_slashes=False, **hidden)
        self.api.exception_handler(Refusal)(_handle_refusal)
        self.api.exception_handler(HTTPException)(_handle_http_error)
        self.api.exception_handler(Exception)(self._handle_unexpected)
        self.api.exception_handler(RequestValidationError)(_handle_invalid_body)
        for method, path, handler in self._routes():
            self.api.add_api_route(path, handler, methods=[method], response_model=None)
        self.api.add_middleware(AccessControl, token=token)

    def _routes(self) -> list[tuple[str, str, Handler]]:
        return [
            ("GET", "/health/", self.health),
            ("GET", "/ready/", self.ready),
            ("GET", "/version/", self.version),
            ("GET", "/metrics", self.get_metrics),
            ("GET", "/get_world_size/", self.get_world_size),
            ("POST", "/infer/", self.infer),
            ("POST", "/init_communicator/", self.join),
            ("POST", "/begin_update/", self.begin),
            ("POST", "/load_bucket/", self.load),
            ("POST", "/finish_update/", self.finish),
        ]

    @property
    def problem(self) -> Refusal | None:
        """The reason why this server cannot go on, if there is one."""
        return engine_ended() if self.engine.has_ended else self.watchdog.problem

    async def health(self) -> Response:
        """Liveness: the server responds, and its engine is running and makes progress."""
        return to_response(self.problem) if self.problem else JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Readiness: a request would be answered now, without waiting for a weight update."""
        waits = _UPDATING if self.updates.update is not None else None
        problem = self.problem or waits or (no_weights() if self.updates.version is None else None)
        return to_response(problem) if problem else JSONResponse({"status": "ready"})

    async def version(self, full: bool = False) -> Response:
        """The state of the weights, and facts about the server. The fingerprint of the model, which is long, only
        with `?full=1`: learners compare it with their own."""
        updates = self.updates
        is_whole = updates.update is None or not updates.update.touched
        state = {
            "weight_version": updates.version if is_whole else None,
            "base": "changed" if updates.base_changed else "original",
            "updating": updates.update is not None,
            "learner": updates.owner.learner if updates.owner else None,
        }
        version = self.facts.model_copy(update=state)
        return JSONResponse(version.model_dump(mode="json", exclude=None if full else {"model"}))

    async def get_metrics(self) -> Response:
        text = await asyncio.to_thread(generate_latest, self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def get_world_size(self) -> dict[str, int]:
        return {"world_size": self.facts.world_size}

    async def infer(self, call: InferCall, request: Request) -> Response:
        """Return answers that were all made with one version of the weights. If the client disconnects or the
        server ends, the generation is cancelled."""
        work = asyncio.ensure_future(self._answer(call))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(request.receive))
        ending = asyncio.ensure_future(self.ending.wait())
        try:
            await asyncio.wait({work, disconnect, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return to_response(self.problem or _ENDING)
            if not work.done():
                return Response(status_code=499)
            body = await asyncio.to_thread(_encode_items, work.result())
            return Response(body, media_type="application/json")
        finally:
            for task in (work, disconnect, ending):
                task.cancel()

    async def _answer(self, call: InferCall) -> list[Item]:
        if not call.infer_requests:
            return []
        items: list[Item] = []
        with self.metrics.calls.time(), self.metrics.running.track_inprogress():
            async with self.updates.answers() as version:
                answer = partial(self.answering.answer, config=call.request_config, version=version)
                # Every answer ends before weights may change, also if another one fails.
                answers = await asyncio.gather(*map(answer, call.infer_requests), return_exceptions=True)
        for result in answers:
            if isinstance(result, BaseException):
                raise result
            item, tokens = result
            failed = isinstance(item, dict) and "error" in item
            self.metrics.requests.labels("failed" if failed else "answered").inc()
            self.metrics.tokens.inc(tokens)
            items.append(item)
        return items

    async def join(self, body: JoinGroup, request: Request) -> Response:
        size = self.facts.world_size + 1
        if body.world_size != size:
            problem = (
                f"the request names a group of {body.world_size}, but this server and the learner make {size}"
            )
            raise Refusal(400, "world_size", problem, f"join with world_size {size}")
        host = request.scope["server"][0] if self.host in EVERYWHERE else self.host
        await self.updates.claim(body)
        return _Joined(self.updates, body, host, self.ending)

    async def begin(self, body: BeginUpdate) -> dict[str, str]:
        await self.updates.begin(body)
        return {"message": "begun"}

    async def load(self, body: LoadBucket) -> dict[str, str]:
        await self.updates.load(body)
        return {"message": "taken"}

    async def finish(self, body: WeightMessage) -> dict[str, str]:
        return {"weight_version": await self.updates.finish(body.group)}

    async def _handle_unexpected(self, _: Request, error: Exception) -> Response:
        """Answer with the server's own problem, if it has one: what vLLM raises after its engine has ended is
        seldom to the point. uvicorn prints the traceback."""
        unexpected = Refusal(
            500, "unexpected", f"{type(error).__name__}: {error}", "see this server's output, and please report it"
        )
        return to_response(self.problem or unexpected)


def _encode_items(items: Sequence[Item]) -> bytes:
    """Encode item by item: encoding holds the GIL until it returns, and other threads must run in between."""
    parts = [
        item.model_dump_json(exclude_none=True) if isinstance(item, InferItem) else json.dumps(item)
        for item in items
    ]
    return f"[{','.join(parts)}]".encode()


async def _wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Joined(Response):
    """The response to a learner that joins. Its first line says that the server is the learner's now, its second
    that the group is complete, or why not. It stays open as long as the learner's connection does. When that
    closes, the server leaves the group."""

    def __init__(self, updates: Updates, learner: JoinGroup, host: str, ending: asyncio.Event) -> None:
        self.updates, self.learner, self.host, self.ending = updates, learner, host, ending
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_line(content: Any = None, more: bool = True) -> None:
            line = (json.dumps(content) + "\n" if content else "\n").encode()
            await send({"type": "http.response.body", "body": line, "more_body": more})

        waits = (_wait_for_disconnect(receive), self.ending.wait())
        ends = {asyncio.ensure_future(wait) for wait in waits}
        try:
            headers = [(b"content-type", b"application/x-ndjson")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send_line({"message": "taken"})
            if (await asyncio.wait(ends, timeout=0))[0]:  # it has left while it waited for another learner
                return
            try:
                await self.updates.join(self.learner, self.host)
            except Refusal as refusal:
                await send_line(refusal.to_json(), more=False)
                return
            await send_line({"message": "joined"})
            while not (await asyncio.wait(ends, timeout=BEAT, return_when=asyncio.FIRST_COMPLETED))[0]:
                await send_line()
            await send_line(more=False)
        finally:
            for end in ends:
                end.cancel()
            await asyncio.shield(asyncio.ensure_future(self.updates.leave(self.learner)))


_UPDATING = Refusal(503, "updating", "weights are being sent to this server", "ask again after the weight update")
_ENDING = Refusal(503, "ending", "this server was asked to stop", "start it again")


async def _handle_refusal(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return to_response(error)


async def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 413:
        return to_response(too_large(f"{MOST_BYTES} bytes"))
    problem = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 400:  # not UTF-8, or JSON that is too deep or has too long a number
        return to_response(bad_request(problem, f"send a body of JSON; {CONTRACT}"))
    return to_response(Refusal(error.status_code, "no_route", problem, CONTRACT))


async def _handle_invalid_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "too_long" and first["loc"][-1] == "infer_requests":
        return to_response(too_large(f"{MOST_REQUESTS} requests"))
    problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return to_response(Refusal(422, "bad_request", problem, CONTRACT))


def serve(
    model: Model,
    settings: RolloutMatching,
    listening: socket.socket,
    images: tuple[Path, ...],
    announce: Callable[[int], None],
) -> None:
    """Run a server on a socket. It may read images from the folders `images`. Call `announce` with the engine's
    world size once the server accepts requests. Raise EngineError if the server cannot start, and Refusal if its
    engine ends or hangs."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    guard, folder, limits = settings.repeat_terminate, Path(model.path), model.image_limits
    if guard.enabled:
        check_guard_class()
    table = VocabularyTable.from_folder(folder, needs_coords=False)  # the learner knows the answer format
    processor = load_processor(folder, limits)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = EngineSetup(
        folder,
        model.dtype,
        settings,
        table,
        device,
        image_size=read_image_size(processor),
        has_image_limits=bool(limits),
    )
    check_devices(setup, torch.cuda.device_count())
    with closing(ServedEngine(setup)) as engine:
        app = RolloutApp(
            engine,
            Answering(engine, processor, table, guard, AllowedImages(images), engine.most_at_once),
            _describe(setup, engine.max_model_len),
            host=str(listening.getsockname()[0]),
            token=os.environ.get(TOKEN) or None,
            metrics=ServerMetrics(),
            hung_after_s=settings.vllm.server.hung_after_s,
        )
        server = _QuietServer(uvicorn.Config(app.api, **UVICORN), app.ending)
        asyncio.run(_run(server, listening, app, announce))


class _QuietServer(uvicorn.Server):
    """A signal ends the running requests at once, and those that stay open, and then the server. It does not end
    the process, which still has an engine to stop."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self.ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.set()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            self._captured_signals.clear()  # uvicorn would send them again


async def _run(
    server: uvicorn.Server, listening: socket.socket, app: RolloutApp, announce: Callable[[int], None]
) -> None:
    with explain(TimeoutError, f"no answer of the engine in {READY:.0f} s", "see its output", to=EngineError):
        await asyncio.wait_for(app.engine.ready(), READY)
    watching = asyncio.ensure_future(app.watchdog.run())
    work = asyncio.ensure_future(server.serve(sockets=[listening]))
    is_announced = False
    while not work.done():
        if server.started and not is_announced:
            announce(app.facts.world_size)
            is_announced = True
        if (problem := app.problem) is not None:
            server.should_exit = True
            await work
            raise problem
        await asyncio.wait({work}, timeout=LOOKS)
    watching.cancel()
    await work


def _describe(setup: EngineSetup, max_model_len: int) -> ServerVersion:
    """Return the facts that `/version/` reports and a learner checks."""
    return ServerVersion(
        server=SERVER,
        release=metadata.version("coordexp"),
        protocol=PROTOCOL,
        boot=secrets.token_hex(8),
        model=model_fingerprint(setup.folder, setup.image_size),
        dtype=setup.dtype,
        world_size=setup.world_size,
        max_model_len=max_model_len,
        guard=setup.settings.repeat_terminate.model_dump(mode="json"),
        lora=setup.settings.vllm.enable_lora,
        devices=[gpu_name(k) for k in range(torch.cuda.device_count())],
    )
