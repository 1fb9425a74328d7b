"""A fake of `swift rollout`, recorded from the source of ms-swift 4.6.0. ms-swift itself is not run.

What was recorded, and is repeated here in our own words:
- `--external_plugins` files are imported when the arguments are read, and again in each process that starts an
  engine. The folder of a file goes to the front of `sys.path`, and the module is named by a hash of its path.
- The engine's arguments are an `EngineArgs` or `AsyncEngineArgs`, made from keywords without `logits_processors`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordexp.config.rollout import RepeatTerminate
from coordexp.servers.swift import TEXT


class FakeSwiftRollout:
    """A process of `swift rollout` with the guard's settings in its environment. At the end of the block, the
    process is as before."""

    def __init__(self, guard: RepeatTerminate | None) -> None:
        self.guard, self._patch = guard, pytest.MonkeyPatch()

    def __enter__(self) -> "FakeSwiftRollout":
        from vllm.engine.arg_utils import EngineArgs

        self._patch.setattr(EngineArgs, "__post_init__", EngineArgs.__post_init__)
        self._patch.setattr(sys, "path", [*sys.path])
        if self.guard is not None:
            self._patch.setenv(TEXT, self.guard.model_dump_json())
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        for name in [name for name in sys.modules if name.startswith("_swift_external_")]:
            del sys.modules[name]

    def import_external_plugins(self, files: Sequence[Path]) -> list[ModuleType]:
        return [self._import(file.expanduser().absolute()) for file in files]

    def _import(self, file: Path) -> ModuleType:
        sys.path.insert(0, str(file.parent))
        name = f"_swift_external_{hashlib.sha256(str(file).encode()).hexdigest()}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception:
            del sys.modules[name]
            raise
        return module

    @staticmethod
    def engine_arguments(folder: Path, use_async_engine: bool, **engine_kwargs: Any) -> Any:
        from vllm import AsyncEngineArgs, EngineArgs

        kind = AsyncEngineArgs if use_async_engine else EngineArgs
        return kind(
            model=str(folder),
            dtype="float32",
            gpu_memory_utilization=0.1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            max_model_len=512,
            max_num_seqs=8,
            disable_log_stats=True,
            disable_custom_all_reduce=True,
            enforce_eager=True,
            trust_remote_code=True,
            distributed_executor_backend=None,
            **engine_kwargs,
        )
