"""The files of an examination: a tiny model with random weights, drawn scenes, and configs with free ports."""

import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from coordexp.config import Settings, load_settings
from coordexp.data import RecordFile
from coordexp.demo.model import make_model
from coordexp.demo.scenes import SceneSettings, write_scenes
from coordexp.doctor.machine import Machine
from coordexp.rollout.backend import ImageRef

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


@dataclass(frozen=True)
class Workspace:
    """A folder with a model and images, and the machine that they are for."""

    folder: Path
    machine: Machine

    @classmethod
    def make(cls, folder: Path, machine: Machine) -> "Workspace":
        """Write the model and the images to an empty folder."""
        make_model(folder / "model", "small", spread=SPREAD)
        write_scenes(folder / "data", SceneSettings(), train=1, val=IMAGES, seed=3, advance=_ignore)
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
            "sync": {"timeout_s": machine.deadlines.check / 2},
        }
        if mode == "server":
            http, group = _free_ports(2)
            server = {"base_url": f"http://127.0.0.1:{http}", "group_port": group}
            vllm["server"] = {"servers": [server], "timeout_s": machine.deadlines.back}
        file = self.folder / f"{mode}.yaml"
        file.write_text(yaml.safe_dump(self._tree(vllm)))
        return file

    def _tree(self, vllm: dict[str, Any]) -> dict[str, Any]:
        """Return the config of a run. Nothing is trained with it; engines and backends are started from it."""
        weights = {"struct_ce_weight": 1.0, "desc_ce_weight": 0.0, "eos_ce_weight": 1.0}
        objective = {"name": "token_ce", "enabled": True, "weight": 1.0, "channels": ["A", "B"], "config": weights}
        return {
            "model": {"path": str(self.model), "dtype": self.machine.dtype},
            "custom": {
                "trainer_variant": "stage2_rollout_aligned",
                "train_jsonl": str(self.folder / "data/train.jsonl"),
                "val_jsonl": str(self.folder / "data/val.jsonl"),
            },
            "global_max_length": SEQUENCE,
            "rollout_matching": {
                "rollout_backend": "vllm",
                "decode_batch_size": IMAGES,
                "max_new_tokens": 64,
                "repeat_terminate": GUARD,
                "vllm": vllm,
                "pipeline": {"objective": [objective], "diagnostics": []},
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
