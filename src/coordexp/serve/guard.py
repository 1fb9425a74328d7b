"""The repeat guard's settings as a server gets them when it starts (R33): whole, from its environment."""

import json
import os
from importlib import import_module
from pathlib import Path

from pydantic import ValidationError

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError

TEXT, FILE = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON", "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
STARTUP_GUARD = "coordexp.serve.startup_guard:StartupRepeatGuard"  # for requests that carry no settings
# A folder in which each worker that has loaded STARTUP_GUARD leaves a file.
LOADED = "COORDEXP_REPEAT_GUARD_LOADED"
UNSET = "unset it: `coordexp serve` sets it from rollout_matching.repeat_terminate"


def hand_over(guard: RepeatTerminate) -> None:
    """What the YAML says is what the server gets; an environment that says otherwise is an error."""
    if TEXT not in os.environ and FILE not in os.environ:
        os.environ[TEXT] = guard.model_dump_json()
    if (found := from_environment()) != guard:
        raise EngineError(
            f"{TEXT if TEXT in os.environ else FILE}: {found.model_dump_json()}, and "
            f"rollout_matching.repeat_terminate is {guard.model_dump_json()}\n  unset it: the command sets it"
        )


def check_class(qualified: str) -> None:
    """Raise EngineError if vLLM's workers could not import the guard by this name."""
    module, _, name = qualified.partition(":")
    try:
        getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineError(
            f"rollout_matching.repeat_terminate is enabled, and {qualified} cannot be loaded: {error}\n"
            "  `coordexp doctor` says whether vLLM's release is the one that is needed; or set enabled: false"
        ) from error


def from_environment(fix: str = UNSET) -> RepeatTerminate:
    """All of it must be there: a guard that is read by half would be another guard."""
    name = TEXT if TEXT in os.environ else FILE
    try:
        text = os.environ[TEXT] if name == TEXT else Path(os.environ[FILE]).read_text()
        given = json.loads(text)
        missing = sorted(set(RepeatTerminate.model_fields) - set(given))
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return RepeatTerminate.model_validate(given)
    except (KeyError, OSError, TypeError, ValueError, ValidationError) as error:
        raise EngineError(f"{name}: the repeat guard cannot be loaded ({_told(error)})\n  {fix}") from error


def _told(error: Exception) -> str:
    return "it is not set" if isinstance(error, KeyError) else str(error)
