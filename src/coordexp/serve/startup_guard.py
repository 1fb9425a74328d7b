"""The repeat guard for servers whose requests cannot carry its settings, such as those of ms-swift."""

import os
from pathlib import Path
from typing import Any

from coordexp.rollout.engine_guard import RepeatGuard
from coordexp.rollout.guard import EngineGuard, key_pattern
from coordexp.serve.guard import LOADED, read_guard_settings
from coordexp.vocab import VocabularyTable


class StartupRepeatGuard(RepeatGuard):
    """The repeat guard with the settings of the server's environment, applied to every request."""

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        super().__init__(vllm_config, *runner)
        guard = read_guard_settings()
        table = VocabularyTable.from_folder(Path(vllm_config.model_config.model))
        pattern = key_pattern(table) if guard.max_object_keys is not None else ()
        self._default = EngineGuard(
            **guard.model_dump(), key_pattern=tuple(pattern), end_of_turn=table.end_of_turn
        )
        (Path(os.environ[LOADED]) / str(os.getpid())).touch()  # tells the server that this worker has the guard
