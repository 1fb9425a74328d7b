"""Measure how much memory a process frees while its learner is offloaded. Prints megabytes, seconds, and what
was restored."""

import ctypes
import gc
import hashlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from coordexp.config.rollout import Offload
from coordexp.train.offload import offload_learner


def resident() -> float:
    """Return the resident memory of this process in megabytes."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024


def digest(tensors: list[torch.Tensor]) -> str:
    sha256 = hashlib.sha256()
    for tensor in tensors:
        sha256.update(memoryview(tensor.detach().clone().view(-1).view(torch.uint8).numpy()))
    return sha256.hexdigest()


def main(layers: int) -> None:
    torch.manual_seed(0)
    # Of many sizes, since the C library keeps small pieces, and large ones if it has freed larger.
    sizes = [width for _ in range(layers) for width in (20, 60, 200, 700, 2000)]
    model = nn.ModuleList(nn.Linear(width, 1024) for width in sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    weights = list(model.parameters())
    slots = [slot[name] for slot in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    size = sum(tensor.nbytes for tensor in weights + slots) / 2**20
    before, of_weights = digest(weights + slots), digest(weights)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before shall not count
    full = resident()
    settings = Offload(enabled=True, offload_model=True, offload_optimizer=True)
    report: dict[str, object] = {"megabytes": size, "full": full}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        with offload_learner(settings, model, optimizer, Path(folder)) as offloaded:
            report["seconds out"] = time.perf_counter() - started
            report["away"] = {"resident": resident(), "freed": full - resident()}
            report["readable"] = digest(list(model.parameters())) == of_weights
            report["after reading"] = {"resident": resident(), "freed": full - resident()}
            offloaded.drop()
            report["read and dropped"] = {"resident": resident(), "freed": full - resident()}
            started = time.perf_counter()
        report["seconds back"] = time.perf_counter() - started
    report["back"] = resident()
    report["restored"] = digest(weights + slots) == before
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 11)
