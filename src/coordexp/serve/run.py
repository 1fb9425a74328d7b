"""Starts a rollout server and runs it to its end. Its engine ends with it, however that is."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers import AutoProcessor

from coordexp.config.rollout import RolloutMatching
from coordexp.errors import EngineError
from coordexp.rollout.guard import ENGINE_GUARD
from coordexp.rollout.setup import Setup
from coordexp.rollout.wire import PROTOCOL, TOKEN, model_fingerprint
from coordexp.serve.answering import Answering
from coordexp.serve.app import RolloutApp
from coordexp.serve.connections import UVICORN, raise_file_limit
from coordexp.serve.engine import ServedEngine, check_devices
from coordexp.serve.guard import check_class, from_environment
from coordexp.serve.metrics import Metrics
from coordexp.serve.requests import Pictures
from coordexp.vocab import VocabularyTable

LOOKS = 1.0  # seconds between looks at the engine


@dataclass(frozen=True)
class Serving:
    """What is served, the socket that it is asked at, and below which folders pictures may lie."""

    folder: Path
    dtype: str
    settings: RolloutMatching
    listening: socket.socket
    images: tuple[Path, ...]


def serve(about: Serving, ready: Callable[[int], None]) -> None:
    """`ready` hears the engine's world size when the server can be asked. Raises `EngineError` if it cannot start,
    or if its engine ends before it."""
    raise_file_limit()
    guard = from_environment()
    if guard.enabled:
        check_class(ENGINE_GUARD)
    table = VocabularyTable.from_folder(about.folder)
    processor = AutoProcessor.from_pretrained(about.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = Setup(about.folder, about.dtype, about.settings, table, device)
    check_devices(setup, torch.cuda.device_count())
    engine = ServedEngine(setup)
    try:
        app = RolloutApp(
            engine,
            Answering(engine, processor, table, guard, Pictures(about.images), engine.most_at_once),
            _described(about, engine, guard.model_dump(mode="json")),
            host=str(about.listening.getsockname()[0]),
            world_size=engine.about.world_size,
            token=os.environ.get(TOKEN) or None,
            metrics=Metrics(),
            hung_after_s=about.settings.vllm.server.hung_after_s,
        )
        config = uvicorn.Config(app.api, **UVICORN)
        asyncio.run(
            _served(_Server(config, app.ending), about.listening, app, lambda: ready(engine.about.world_size))
        )
    finally:
        engine.close()


class _Server(uvicorn.Server):
    """A signal ends at once what goes on, such as a learner's session, and then the server, but not the process:
    that has an engine to stop."""

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


async def _served(
    server: uvicorn.Server, listening: socket.socket, app: RolloutApp, ready: Callable[[], None]
) -> None:
    await app.engine.ready()
    watching = asyncio.ensure_future(app.watchdog.run())
    work = asyncio.ensure_future(server.serve(sockets=[listening]))
    while not work.done():
        if server.started and ready is not None:
            ready()
            ready = None  # type: ignore[assignment]
        if (problem := app.problem) is not None:
            server.should_exit = True
            await work
            raise EngineError(f"{problem.message}\n  {problem.fix}")
        await asyncio.wait({work}, timeout=LOOKS)
    watching.cancel()
    await work


def _described(about: Serving, engine: ServedEngine, guard: dict[str, Any]) -> dict[str, Any]:
    return {
        "server": "coordexp",
        "release": version("coordexp"),
        "protocol": PROTOCOL,
        "boot": secrets.token_hex(8),
        "model": model_fingerprint(about.folder),
        "dtype": about.dtype,
        "world_size": engine.about.world_size,
        "max_model_len": engine.max_model_len,
        "guard": guard,
        "lora": about.settings.vllm.enable_lora,
        "devices": _devices(),
    }


def _devices() -> list[str]:
    """So that a learner can see that it is not on one of them."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"{socket.gethostname()}/{torch.cuda.get_device_properties(k).uuid}" for k in range(count)]
