"""Activate the repeat guard in a rollout server of ms-swift: `swift rollout --external_plugins THIS_FILE`.

ms-swift imports this file by its path, in the server's process and again in every process that starts a vLLM
engine. The import reads the guard's settings from the environment, adds the guard to the arguments of every engine
that is created afterwards, and adds a route by which a learner can verify it. An exception here ends the server at
its start, which is what a guard that was asked for and cannot be activated must do.
"""

import atexit
import logging
import os
import shutil
import tempfile
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.wire import GUARD_ROUTE
from coordexp.serve.guard import FILE, LOADED, STARTUP_GUARD, TEXT, check_class, from_environment

LOGGER = logging.getLogger("coordexp")
FIX = (
    f"set {TEXT} to the whole rollout_matching.repeat_terminate of the learner's config as JSON, or {FILE} to a "
    "file with it; or start the server without this plugin"
)


def activate() -> None:
    """Raise EngineError if the guard is enabled and cannot be activated."""
    guard = from_environment(FIX)
    if not guard.enabled:
        LOGGER.warning("the repeat guard is not activated: its settings say enabled: false")
        return
    check_class(STARTUP_GUARD)
    if LOADED not in os.environ:  # in the server's own process; its engines inherit the variable
        os.environ[LOADED] = tempfile.mkdtemp(prefix="coordexp-guard-")
        atexit.register(shutil.rmtree, os.environ[LOADED], ignore_errors=True)
    guard_engines()
    add_route(guard)
    LOGGER.info("the repeat guard is added to every vLLM engine: %s", guard.model_dump_json())


def guard_engines() -> None:
    """Add the guard to the logits processors of all engine arguments that are built from now on."""
    from vllm.engine.arg_utils import EngineArgs

    if "logits_processors" not in {field.name for field in fields(EngineArgs)}:
        raise EngineError(
            "rollout_matching.repeat_terminate is enabled, and this release of vLLM loads no logits processors at "
            "its start (EngineArgs has no logits_processors)\n"
            "  install the release of vLLM that `coordexp doctor` names, or set enabled: false"
        )
    complete = EngineArgs.__post_init__

    @wraps(complete)
    def complete_with_guard(self: EngineArgs) -> None:
        complete(self)
        others = [each for each in self.logits_processors or () if each != STARTUP_GUARD]
        self.logits_processors = [*others, STARTUP_GUARD]

    EngineArgs.__post_init__ = complete_with_guard


def add_route(guard: RepeatTerminate) -> None:
    """Add a route to every FastAPI application that is made from now on. It returns the settings, and how many of
    the engines' running worker processes have loaded the guard."""
    from fastapi import FastAPI

    initialise, folder = FastAPI.__init__, Path(os.environ[LOADED])

    def describe() -> dict[str, Any]:
        running = [file.name for file in folder.iterdir() if Path("/proc", file.name).exists()]
        return {"guard": guard.model_dump(mode="json"), "workers": len(running)}

    @wraps(initialise)
    def initialise_with_route(self: FastAPI, *arguments: Any, **named: Any) -> None:
        initialise(self, *arguments, **named)
        self.add_api_route(GUARD_ROUTE, describe, methods=["GET"])

    FastAPI.__init__ = initialise_with_route  # type: ignore[method-assign]


activate()
