"""The files of an examination (a tiny model with random weights, drawn scenes, configs with free ports), and a
learner of one process, as in training: the model on its device, its own answers, and the backends that get its
weights."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from coordexp.answers.table import VocabularyTable
from coordexp.config import Settings, load_settings
from coordexp.data import RecordFile
from coordexp.demo.model import make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.doctor.machine import Machine
from coordexp.doctor.outcome import Agreement
from coordexp.families import load_model
from coordexp.rollout.backend import PROBED_IMAGES, Decode, ImageRef, Request, Rollout, RolloutBackend
from coordexp.rollout.colocate import ColocateBackend
from coordexp.rollout.hugging_face import HuggingFaceBackend
from coordexp.rollout.prompt import PromptBuilder, load_processor, read_image_size
from coordexp.rollout.start import EngineSetup
from coordexp.servers.backend import ServerBackend
from coordexp.train.learner import learner_weights
from coordexp.train.offload import OffloadedStorages

NOISE = 0.5  # in standard deviations of each matrix
TOKENS = 16  # of the answers that are compared
IMAGES = 8
SEQUENCE = 512  # tokens, with the prompt
SPREAD = 6.0  # of the random weights, so that answers depend on the image
GUARD = {
    "enabled": True,
    "min_new_tokens": 8,
    "max_consecutive_token_repeats": 8,
    "ngram_size": 8,
    "ngram_repeats": 4,
    "max_object_keys": 100,
}


# All terms that the shipped configs use, so that training is checked with all of them.
OBJECTIVE = {
    "token_ce": {"struct_ce_weight": 1.0, "desc_ce_weight": 1.0, "eos_ce_weight": 1.0},
    "coord_reg": {
        "coord_ce_weight": 0.02,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "coord_gate_weight": 1.0,
        "text_gate_weight": 0.1,
        "temperature": 1.0,
        "target_sigma": 2.0,
        "target_truncate": 8,
    },
}


@dataclass(frozen=True)
class Workspace:
    """A folder with a model and images, and the machine that they are for."""

    folder: Path
    machine: Machine

    @classmethod
    def make(cls, folder: Path, machine: Machine) -> "Workspace":
        """Write the model and the images to an empty folder."""
        make_model(folder / "model", "small", spread=SPREAD)
        write_scenes(folder / "data", SceneSettings(), train=IMAGES, val=IMAGES, seed=3, advance=_ignore)
        return cls(folder, machine)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def images(self) -> list[ImageRef]:
        """Return the images that learner and engine answer."""
        records = RecordFile(self.folder / "data/val.jsonl")
        return [ImageRef.of(records, records[k]) for k in range(IMAGES)]

    def write_config(self, mode: Literal["server", "colocate"]) -> Path:
        """Write the config of a run with servers or with a colocated engine, and return its path."""
        machine = self.machine
        vllm: dict[str, Any] = {
            "mode": mode,
            "gpu_memory_utilization": 0.1 if machine.kind == "cpu" else 0.2,
            "tensor_parallel_size": max(1, len(machine.server_gpus)) if mode == "server" else 1,
            "enforce_eager": machine.eager,
        }
        if mode == "server":
            http, group = _free_ports(2)
            server = {"base_url": f"http://127.0.0.1:{http}", "group_port": group}
            vllm["server"] = {"servers": [server], "timeout_s": machine.deadlines.back}
            vllm["sync"] = {"timeout_s": machine.deadlines.check / 2}
        return self._write(mode, self._tree({"rollout_backend": "vllm", "vllm": vllm}))

    def write_training_config(self, name: str, *, steps: int, stage: Literal[1, 2]) -> Path:
        """Write the config of a run that trains, and return its path: Stage 1 with whole weights and deterministic
        operations, or Stage 2 with an adapter, trained coordinate rows and rollouts with transformers."""
        is_16_bit = self.machine.dtype == "bfloat16"
        tree = self._tree({"rollout_backend": "hf"})
        tree["training"] |= {
            "output_dir": str(self.folder / name),
            "max_steps": steps,
            "save_steps": 1,
            "logging_steps": 1,
            "per_device_train_batch_size": IMAGES // 2,
            "packing": True,
            "gradient_checkpointing": True,
            "bf16": is_16_bit,
            "use_cpu": self.machine.kind == "cpu",
            "report_to": "none",
        }
        if stage == 1:
            tree["custom"]["trainer_variant"] = "stage1_sft"
            tree["stage1"] = {"pipeline": tree["rollout_matching"].pop("pipeline")}
            tree["training"]["full_determinism"] = True
        else:
            tree["model"]["adapter"] = {"rank": 8, "alpha": 16}
        return self._write(name, tree)

    def _write(self, name: str, tree: dict[str, Any]) -> Path:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        return file

    def _tree(self, rollouts: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a run. `rollouts` says how they are made."""
        objective = [
            {"name": name, "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": config}
            for name, config in OBJECTIVE.items()
        ]
        return {
            "model": {"path": str(self.model), "dtype": self.machine.dtype},
            "custom": {
                "trainer_variant": "stage2_rollout_aligned",
                "train_jsonl": str(self.folder / "data/train.jsonl"),
                "val_jsonl": str(self.folder / "data/val.jsonl"),
            },
            "global_max_length": SEQUENCE,
            "rollout_matching": {
                "decode_batch_size": IMAGES,
                "max_new_tokens": 64,
                "repeat_terminate": GUARD,
                "pipeline": {"objective": objective, "diagnostics": []},
                **rollouts,
            },
            "training": {"output_dir": str(self.folder / "run"), "max_steps": 1},
        }


def read_settings(file: Path) -> Settings:
    """Return the settings of a config that `Workspace.write_config` wrote."""
    return load_settings(file).settings


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in sockets]


def _ignore() -> None:
    pass


class TinyLearner:
    """A tiny model, and the backend (`own`) that answers with it."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.dtype = workspace, workspace.machine.dtype
        self.device = torch.device("cuda:0" if workspace.machine.kind == "cuda" else "cpu")
        self.model: Any = self._load().to(self.device)
        self.prompts = PromptBuilder(load_processor(workspace.model), "Detect all objects.")
        self.table = VocabularyTable.from_folder(workspace.model)
        self.images = workspace.images()
        self.probes = self.images[:PROBED_IMAGES]
        self.own = HuggingFaceBackend(lambda: self.model, self.prompts, self.table, len(self.images))

    def _load(self) -> Any:
        dtype = getattr(torch, self.dtype)
        return load_model(self.workspace.model, dtype=dtype)

    def connect_servers(
        self, config: Any, notify: Callable[[str], None], record: Callable[[dict[str, Any]], None]
    ) -> ServerBackend:
        """Return the backend for the rollout servers of a config."""
        return ServerBackend(self._setup(config), self.prompts, self.own, self.probes, notify, record)

    def start_colocated(self, config: Any) -> ColocateBackend:
        """Return the backend for an engine on the learner's own device."""
        return ColocateBackend(self._setup(config), self.prompts, self.own, self.probes, _keep_in_memory)

    def _setup(self, config: Any) -> EngineSetup:
        rollout = read_settings(config).rollout_matching
        size = read_image_size(self.prompts.processor)
        return EngineSetup(self.workspace.model, self.dtype, rollout, self.table, self.device, image_size=size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights as an engine gets them."""
        return learner_weights(self.model)

    def requests(self, decode: Decode | None = None, times: int = 1) -> list[Request]:
        """Return one request per image, each of them `times` times."""
        return [Request(image, decode or Decode.greedy(TOKENS)) for image in self.images * times]

    def compare(self, backend: RolloutBackend) -> Agreement:
        """Compare the learner's answers to all images with those of a backend."""
        return Agreement.of(*self._ask_both(backend), self.dtype)

    def compare_by_image(self, backend: RolloutBackend) -> list[Agreement]:
        """Return one agreement per image."""
        pairs = zip(*self._ask_both(backend), strict=True)
        return [Agreement.of([own], [theirs], self.dtype) for own, theirs in pairs]

    def _ask_both(self, backend: RolloutBackend) -> tuple[Sequence[Rollout], Sequence[Rollout]]:
        requests = self.requests()
        return self.own.generate(requests), backend.generate(requests)

    @torch.no_grad()
    def change(self, seed: int) -> None:
        """Change the weights so much that the answers change."""
        draws = torch.Generator().manual_seed(seed)
        for weight in self.model.parameters():
            if weight.ndim >= 2:
                noise = torch.randn(weight.shape, generator=draws).to(weight)
                weight.add_(NOISE * weight.std() * noise)

    @torch.no_grad()
    def make_repetitive(self) -> None:
        """Change the weights so that the model repeats its last token with near certainty.

        No layer adds anything to the embedding of that token any more, and the output head is the embedding."""
        for name, weight in self.model.model.language_model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the weights of the checkpoint."""
        for weight, first in zip(self.model.parameters(), self._load().parameters(), strict=True):
            weight.copy_(first)


def _keep_in_memory() -> AbstractContextManager[OffloadedStorages]:
    """Offload nothing while the engine generates."""
    return nullcontext(OffloadedStorages())
