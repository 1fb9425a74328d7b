"""Starts a rollout server and runs it until it ends. Its engine always ends with it."""

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import uvicorn
from transformers import AutoProcessor

from coordexp.config.rollout import RolloutMatching
from coordexp.engine.start import EngineSetup, check_guard_class
from coordexp.servers.answering import AllowedImages, Answering
from coordexp.servers.app import RolloutApp, ServerMetrics
from coordexp.servers.connections import UVICORN, raise_file_limit
from coordexp.servers.engine import ServedEngine, check_devices
from coordexp.servers.protocol import PROTOCOL, SERVER, TOKEN, ServerVersion, model_fingerprint
from coordexp.vocab import VocabularyTable

LOOKS = 1.0  # seconds between two checks of the engine


@dataclass(frozen=True)
class Serving:
    """The server to run: a model folder and its settings, the socket to listen on, and the folders that images may
    be read from."""

    folder: Path
    dtype: str
    settings: RolloutMatching
    listening: socket.socket
    images: tuple[Path, ...]


def serve(serving: Serving, announce: Callable[[int], None]) -> None:
    """Run the server. Call `announce` with the engine's world size once the server accepts requests. Raise
    EngineError if the server cannot start, and Refusal if its engine ends or hangs."""
    raise_file_limit()
    guard = serving.settings.repeat_terminate
    if guard.enabled:
        check_guard_class()
    table = VocabularyTable.from_folder(serving.folder)
    processor = AutoProcessor.from_pretrained(serving.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    setup = EngineSetup(serving.folder, serving.dtype, serving.settings, table, device)
    check_devices(setup, torch.cuda.device_count())
    with closing(ServedEngine(setup)) as engine:
        app = RolloutApp(
            engine,
            Answering(engine, processor, table, guard, AllowedImages(serving.images), engine.most_at_once),
            _describe(setup, engine.max_model_len),
            host=str(serving.listening.getsockname()[0]),
            world_size=setup.world_size,
            token=os.environ.get(TOKEN) or None,
            metrics=ServerMetrics(),
            hung_after_s=serving.settings.vllm.server.hung_after_s,
        )
        server = _QuietServer(uvicorn.Config(app.api, **UVICORN), app.ending)
        asyncio.run(_run(server, serving.listening, app, announce))


class _QuietServer(uvicorn.Server):
    """A signal ends the running requests at once, such as a learner's session, and then the server. It does not
    end the process, which still has an engine to stop."""

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
    await app.engine.ready()
    watching = asyncio.ensure_future(app.watchdog.run())
    work = asyncio.ensure_future(server.serve(sockets=[listening]))
    is_announced = False
    while not work.done():
        if server.started and not is_announced:
            announce(app.world_size)
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
        release=version("coordexp"),
        protocol=PROTOCOL,
        boot=secrets.token_hex(8),
        model=model_fingerprint(setup.folder),
        dtype=setup.dtype,
        world_size=setup.world_size,
        max_model_len=max_model_len,
        guard=setup.settings.repeat_terminate.model_dump(mode="json"),
        lora=setup.settings.vllm.enable_lora,
        devices=_devices(),
    )


def _devices() -> list[str]:
    """Return this machine's GPUs, so that a learner can check that it does not share one."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"{socket.gethostname()}/{torch.cuda.get_device_properties(k).uuid}" for k in range(count)]
