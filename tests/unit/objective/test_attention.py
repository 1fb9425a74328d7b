"""Which attention a learner uses. The attention itself is tested on packed rows, in tests/integration."""

import pytest
import torch

from coordexp.objective import attention


@pytest.mark.parametrize(
    ("device", "precision", "is_flash"),
    [
        ("cuda", "bfloat16", True),
        ("cuda", "float16", True),
        ("cuda", "float32", False),
        ("cpu", "bfloat16", False),
    ],
)
def test_flash_attention_is_used_on_gpus_that_compute_with_16_bits(device, precision, is_flash, monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    chosen = attention.attention_for(torch.device(device), precision)
    assert (chosen == "flash_attention_2") == is_flash
