"""Make watched runs, one after the other: `python stage2_worker.py PLAN.json`, alone or with torchrun.

The plan is a list of jobs: a name, a config, whether to resume, whether to shard. Each rank writes its
observations to `NAME-RANK.json` beside the plan. Rank 0 writes the gradients of the first step, as the
optimizer gets them, to `NAME.safetensors`. An error ends a job and not the process: if the ranks agree on it,
the next job runs. A job may also be requests to a model that is sharded over the ranks.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from coordexp.config import World, load_settings
from coordexp.logs import show_messages
from coordexp.train import run
from coordexp.train.checkpoints import newest_intact
from coordexp.train.trainer import RowTrainer
from tests.integration.answers import held
from tests.integration.step_worker import shard_layers

RANK, RANKS = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
STARTED: list["WatchedTrainer"] = []


class WatchedTrainer(RowTrainer):
    sharded = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.forwards: list[int] = []  # tokens of each forward pass with a gradient
        self.decoded: list[tuple[int, int]] = []  # the step and the number of images of each generated batch
        self.trained: list[list[tuple[str, str]]] = []  # image and channel of each example, by row
        self.gradients: dict[str, torch.Tensor] = {}
        self.model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        self.add_callback(KeepGradients(self))
        STARTED.append(self)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.sharded:  # accelerate does this by itself for every device but a CPU
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = shard_layers()
            self.is_fsdp_enabled = True

    def _forward_begins(self, model: Any, _: Any, inputs: dict[str, Any]) -> None:
        rows, tokens = inputs["input_ids"].shape
        if torch.is_grad_enabled():
            assert rows == 1
            self.forwards.append(tokens)
        elif tokens > 1:  # a prompt, not the token after it
            self.decoded.append((self.state.global_step, rows))

    def training_step(self, model: Any, inputs: Any, *options: Any) -> Any:
        for row in inputs:
            self.trained.append([(Path(example.image).name, example.channel) for example in row])
        return super().training_step(model, inputs, *options)

    def seen(self) -> dict[str, Any]:
        stream = self.steps.stream
        taken = [stream.order.index(k) for k in range(stream.taken)]
        return {
            "sharded": all(isinstance(weight, DTensor) for weight in self.model.parameters()),
            "forwards": self.forwards,
            "decoded": self.decoded,
            "trained": self.trained,
            "taken": [f"{index:07d}.png" for index in taken],
            "waiting": [Path(example.image).name for example, _ in stream.buffer.waiting] if stream.buffer else [],
        }


class KeepGradients(TrainerCallback):
    def __init__(self, trainer: WatchedTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            for name, weight in self.trainer.model.named_parameters():
                gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                self.trainer.gradients[name] = gradient.clone()


def main(plan: Path) -> None:
    torch.set_num_threads(1)
    run.RowTrainer = WatchedTrainer
    for job in json.loads(plan.read_text()):
        seen = held(**job["held"]) if "held" in job else _trained(job, plan.parent / f"{job['name']}.safetensors")
        (plan.parent / f"{job['name']}-{RANK}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.destroy_process_group()


def _trained(job: dict[str, Any], gradients: Path) -> dict[str, Any]:
    WatchedTrainer.sharded = job["sharded"]
    error = None
    try:
        loaded = load_settings(Path(job["config"]), World(RANKS))
        folder = Path(loaded.settings.training.output_dir)
        checkpoint = newest_intact(folder, print) if job["resume"] and RANK == 0 else None
        run.prepare(loaded, checkpoint).run()
    except Exception as failed:  # noqa: BLE001
        error = f"{type(failed).__name__}: {failed}"
    trainer = STARTED.pop()  # a DDP wrapper that outlives its process group can wait for it forever
    if trainer.gradients and RANK == 0:
        save_file(trainer.gradients, gradients)
    return {"error": error, **trainer.seen()}


if __name__ == "__main__":
    show_messages()
    main(Path(sys.argv[1]))
