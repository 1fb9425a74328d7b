"""The settings of the repeat guard in a server's environment, from which our plugin for `swift rollout` reads them
(`coordexp.servers.SWIFT_REPEAT_GUARD`)."""

import json
import os
from pathlib import Path

from pydantic import ValidationError

from coordexp.config.rollout import RepeatTerminate
from coordexp.errors import EngineError

TEXT, FILE = "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON", "COORDEXP_VLLM_REPEAT_TERMINATE_CONFIG_JSON_PATH"
UNSET = "unset it: `coordexp serve` takes the guard from rollout_matching.repeat_terminate"


def check_guard_environment(guard: RepeatTerminate) -> None:
    """Raise EngineError if the environment has other guard settings than the config. A server takes those of
    its config, and ignoring the others silently would be wrong."""
    if TEXT not in os.environ and FILE not in os.environ:
        return
    if (exported := read_guard_settings()) != guard:
        raise EngineError(
            f"{TEXT if TEXT in os.environ else FILE} is {exported.model_dump_json()}, but "
            f"rollout_matching.repeat_terminate is {guard.model_dump_json()}",
            UNSET,
        )


def read_guard_settings(fix: str = UNSET) -> RepeatTerminate:
    """Return the settings in the environment. Raise EngineError if one is missing: its default might not be what
    the learner uses. `fix` says what to do then."""
    name = TEXT if TEXT in os.environ else FILE
    try:
        text = os.environ[TEXT] if name == TEXT else Path(os.environ[FILE]).read_text(encoding="utf-8")
        values = json.loads(text)
        missing = sorted(set(RepeatTerminate.model_fields) - set(values))
        if missing:
            raise ValueError(f"{', '.join(missing)}: missing")
        return RepeatTerminate.model_validate(values)
    except (KeyError, OSError, TypeError, ValueError, ValidationError) as error:
        reason = "it is not set" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{name}: the repeat guard cannot be loaded ({reason})", fix) from error
