"""Run optimizer steps of the real objective: `python step_worker.py JOB.json`, alone or with torchrun.

The job has steps by name, each with its mode (none, ddp or fsdp2) and the micro-steps of each rank. A micro-step
is a list of example seeds that make one row. Seeds from 100 on stand for chat records; a step with any has a loss
for them. For each step, rank 0 writes the gradients before and after clipping, and the report.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from coordexp.objective.carry import Example
from coordexp.objective.pipeline import LossTally, gradient_scale, reduce_counts
from tests.rows import Tiny, chat_settings


def main(job: dict) -> None:
    torch.set_num_threads(1)
    for name, (mode, ranks) in job["steps"].items():
        run_step(job, mode, ranks, Path(job["out"]) / name)
    make_accelerator(sharded=False).end_training()


def run_step(job: dict, mode: str, ranks: list[list[list[int]]], out: Path) -> None:
    accelerator = make_accelerator(sharded=mode == "fsdp2")
    has_chat = any(seed >= 100 for rows in ranks for seeds in rows for seed in seeds)
    tiny = Tiny(Path(job["model"]), chat_settings() if has_chat else None)
    rows = [
        tiny.collate([make_example(tiny, seed) for seed in seeds]) for seeds in ranks[accelerator.process_index]
    ]
    model = tiny.model.train()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert (mode == "fsdp2") == all(isinstance(weight, DTensor) for weight in model.parameters())
    counts = reduce_counts([sum(span.counts for span in row.spans) for row in rows], accelerator.device)
    tally = LossTally(tiny.objective)
    for row in rows:
        logits = model(**row.inputs).logits[0]
        measures = tiny.measure(logits, row.supervision)
        accelerator.backward(tiny.objective.loss(measures, counts) * gradient_scale())
        tally.add(measures, counts)
    before = _gradients(model)
    norm = accelerator.clip_grad_norm_(model.parameters(), job["clip"])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    after, report = _gradients(model), tally.report()
    if accelerator.is_main_process:
        out.mkdir()
        save_file(before, out / "before.safetensors")
        save_file(after, out / "after.safetensors")
        (out / "report.json").write_text(json.dumps({"norm": norm.item(), "losses": report}))
    del model, logits, measures  # a DDP wrapper that outlives its process group can wait for it forever


def make_example(tiny: Tiny, seed: int) -> Example:
    """Return the example of a seed: from 100 on, a question about an image, from 200 on, one without an image."""
    if seed >= 100:
        return tiny.chat(seed, has_image=seed < 200)
    return tiny.example(seed, "AB"[seed % 2])


def make_accelerator(sharded: bool) -> Accelerator:
    accelerator = Accelerator(cpu=True)
    if sharded:  # accelerate does this itself for every device except a CPU
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = shard_layers()
    return accelerator


def shard_layers() -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
        reshard_after_forward=True,
    )


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the whole gradients, on every rank."""
    gradients = {}
    for name, weight in model.named_parameters():
        gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        gradients[name.removeprefix("module.")] = gradient.clone()
    return gradients


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
