"""Which backend makes a run's rollouts, and what its weight syncs leave in the run folder (R09)."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from coordexp.config import Settings
from coordexp.config.settings import Adapter
from coordexp.files import BestEffort, append_line, drop_torn_line, write_json
from coordexp.rollout.backend import Decode, RolloutBackend
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.installed import check_vllm
from coordexp.rollout.setup import Setup
from coordexp.train.adapter_weights import learner_adapter
from coordexp.train.callbacks import say
from coordexp.train.encode import Casebook
from coordexp.train.folder import read_starts
from coordexp.train.offload import offloaded
from coordexp.train.trainer import RowTrainer


def backend_for(
    settings: Settings, arguments: TrainingArguments, cases: Casebook, trainer: Callable[[], RowTrainer]
) -> RolloutBackend:
    """What makes rollouts. Without them, only evaluation asks, and the learner answers itself."""
    rollout, prompts, table = settings.rollout_matching_cfg, cases.prompts, cases.table
    learner = HuggingFaceBackend(lambda: trainer().model, prompts, table, rollout.decode_batch_size)
    if not settings.uses_rollouts or rollout.rollout_backend == "hf":
        return learner
    folder, model, dtype = Path(arguments.output_dir), Path(settings.model.path), settings.model.dtype
    precision = "bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else dtype
    tell = say if arguments.process_index == 0 else lambda message: None
    adapter = (lambda: learner_adapter(trainer().model)) if _adapter_suffices(settings.model.adapter) else None
    if rollout.vllm.mode == "server":
        from coordexp.rollout.server_backend import ServerBackend  # httpx is for it alone

        if arguments.device.type == "cuda":
            check_vllm()  # weights go over its NCCL
        return ServerBackend(
            Setup(model, dtype, rollout, table, arguments.device, precision),
            prompts,
            learner,
            probe=cases[0].picture,
            tell=tell,
            record=ServerLog(folder, arguments.process_index),
            adapter=adapter,
        )
    return ColocateBackend(
        Setup(model, dtype, rollout, table, arguments.device, precision),
        prompts,
        learner,
        probe=cases[0].picture,
        room=lambda: offloaded(rollout.offload, trainer().model, trainer().optimizer, folder),
        tell=tell,
        adapter=adapter,
        record=Manifest(folder) if arguments.process_index == 0 else lambda facts: None,
    )


def _adapter_suffices(adapter: Adapter | None) -> bool:
    """Return True if every trained parameter can be expressed as a vLLM LoRA adapter."""
    return adapter is not None and not adapter.train_coord_rows and not adapter.dora


def described(settings: Settings, backend: RolloutBackend) -> dict[str, Any]:
    """For `run.json`. What only the servers know is added when they have been asked."""
    rollout = settings.rollout_matching
    found: dict[str, Any] = {"backend": rollout.rollout_backend, "decode_mode": Decode.of(rollout).mode}
    if rollout.rollout_backend == "vllm":
        found |= {"mode": rollout.vllm.mode, "tensor_parallel_size": rollout.vllm.tensor_parallel_size}
        found |= backend.described()  # type: ignore[attr-defined]
    return found


@dataclass
class ServerLog:
    """Writes `servers.jsonl`: every sync, every call for answers with its seeds, and every retry; for ranks other
    than the first, `servers_1.jsonl` and so on. `run.json` gets the servers as the first sync found them, and the
    sync mode and its fallbacks as the latest one has them. Each event is one write, because several threads may
    record at once. A full disk costs events, not the run."""

    folder: Path
    rank: int
    _recorded: dict[str, Any] = field(default_factory=dict)
    _writes: BestEffort = field(default_factory=lambda: BestEffort("server events", say))

    def __post_init__(self) -> None:
        if drop_torn_line(self._path):
            say(f"note: {self._path}: its last line was torn by a crash and is dropped")

    @property
    def _path(self) -> Path:
        return self.folder / (f"servers_{self.rank}.jsonl" if self.rank else "servers.jsonl")

    def __call__(self, event: dict[str, Any]) -> None:
        self._writes.attempt(lambda: self._append(json.dumps(event)))
        if event["event"] == "sync":
            facts = {"servers": event["servers"]} | self._recorded  # what was recorded of them stays
            facts |= {name: event[name] for name in ("sync_mode", "fallbacks")}
            if facts != self._recorded:
                Manifest(self.folder)(facts)
                self._recorded = facts

    def _append(self, line: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        append_line(self._path, line)


@dataclass(frozen=True)
class Manifest:
    """Adds facts about rollouts to the latest run in `run.json`, if there is one. A full disk costs the facts, not
    the run."""

    folder: Path

    def __call__(self, facts: dict[str, Any]) -> None:
        file = self.folder / "run.json"
        if not file.is_file():
            return
        *before, run = read_starts(file)
        run["rollouts"] = (run["rollouts"] or {}) | facts
        BestEffort("facts about rollouts", say).attempt(lambda: write_json(file, [*before, run]))
