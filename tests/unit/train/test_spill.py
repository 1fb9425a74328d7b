"""Memory that a checkpoint's mapped file has goes too."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from coordexp.train.spill import SMALL, gone


def test_a_small_tensor_of_a_mapped_file_does_not_hold_the_memory_of_all_others(tmp_path):
    """A bias, say: it would be as much memory as the whole checkpoint, for good."""
    saved = {"large": torch.randn(1000, 1000), "small": torch.randn(SMALL // 8)}
    save_file(saved, tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    held = {name: torch.nn.Parameter(loaded.pop(name), requires_grad=False) for name in saved}
    held["large"].add_(1)  # as a step does
    assert str(tmp_path / "model.safetensors") in Path("/proc/self/maps").read_text()
    with gone(held.values(), tmp_path):
        assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text()
    assert torch.equal(held["large"], saved["large"] + 1)
    assert torch.equal(held["small"], saved["small"])
    assert str(tmp_path / "model.safetensors") not in Path("/proc/self/maps").read_text()
