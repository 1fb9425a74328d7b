"""Activate the repeat guard in a rollout server of ms-swift: `swift rollout --external_plugins THIS_FILE`.

ms-swift imports this file by its path, in the server's process and again in every process that starts a vLLM
engine. The import reads the guard's settings from the environment, and adds the guard and its settings to the
arguments of every engine that is created afterwards. An exception here ends the server at its start: a server must
not run without a guard that was requested.
"""

import logging
from dataclasses import fields
from functools import cache, wraps
from pathlib import Path
from typing import Any

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError
from coordexp.rollout.guard import ENGINE_GUARD, guard_arguments, key_pattern_for
from coordexp.rollout.start import check_guard_class
from coordexp.servers.swift import FILE, TEXT, read_guard_settings

LOGGER = logging.getLogger("coordexp")
FIX = (
    f"set {TEXT} to the whole rollout_matching.repeat_terminate of the learner's config as JSON, or {FILE} to a "
    "file with it; or start the server without this plugin"
)


def activate() -> None:
    """Raise EngineError if the guard is enabled and cannot be activated."""
    guard = read_guard_settings(FIX)
    if not guard.enabled:
        LOGGER.warning("the repeat guard is not activated: its settings say enabled: false")
        return
    check_guard_class()
    guard_engines(guard)
    LOGGER.info("the repeat guard is added to every vLLM engine: %s", guard.model_dump_json())


def guard_engines(guard: RepeatTerminate) -> None:
    """Add the guard and its settings to all engine arguments that are built from now on. vLLM passes them to the
    processes of the engine."""
    from vllm.engine.arg_utils import EngineArgs

    if "logits_processors" not in {field.name for field in fields(EngineArgs)}:
        raise EngineError(
            "rollout_matching.repeat_terminate is enabled, and this release of vLLM loads no logits processors at "
            "its start (EngineArgs has no logits_processors)",
            "install the release of vLLM that `coordexp doctor` names, or set enabled: false",
        )
    complete = EngineArgs.__post_init__

    @cache
    def settings_for(folder: str) -> dict[str, Any]:
        table = VocabularyTable.from_folder(Path(folder))
        return guard_arguments(guard, key_pattern_for(guard, table), table.end_of_turn)

    @wraps(complete)
    def complete_with_guard(self: EngineArgs) -> None:
        complete(self)
        others = [processor for processor in self.logits_processors or () if processor != ENGINE_GUARD]
        self.logits_processors = [*others, ENGINE_GUARD]
        self.additional_config = {**(self.additional_config or {}), **settings_for(self.model)}

    EngineArgs.__post_init__ = complete_with_guard


activate()
