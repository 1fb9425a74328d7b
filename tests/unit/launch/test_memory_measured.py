"""The formulas of `launch.memory` against the tensors that real training steps hold, on a CPU.

Small models of several shapes are trained with and without gradient checkpointing, in float32, in 16 bits on
float32 weights, and with an adapter on 16-bit weights. A dispatch mode counts the bytes of all live tensors.
`tests/integration/test_memory_of_4b.py` does the same at real size.
"""

import weakref
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import Qwen3VLForConditionalGeneration

from coordexp.config import World, load_settings
from coordexp.config.settings import Adapter
from coordexp.demo.model import make_config
from coordexp.launch.memory import Learner, Model, RowSize, total_bytes
from coordexp.objective.attention import attention_for
from coordexp.shapes import (
    PUBLISHED,
    ModelShape,
    TextShape,
    VisionShape,
    count_parameters,
    expected_weights,
    read_shape,
    read_weights,
)
from coordexp.train.learner import freeze_parts, with_adapter

IMAGE, START, END, TEXT = 5, 7, 8, 9  # token ids
SUPERVISED = 8


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that exist, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._storages = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def remove(_):
            del self._storages[key]
            self.now -= size

        self._storages[key] = weakref.ref(storage, remove)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self.add(value)
        return result


@dataclass(frozen=True)
class Images:
    """A row of several segments, each with one square image and some text."""

    count: int
    side: int
    text: int


SPECIAL_TOKENS = {
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": IMAGE + 1,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
}


class FakeTokenizer:
    """Has the ids of special tokens that a config names, in a vocabulary of any size."""

    eos_token_id = pad_token_id = 0

    def convert_tokens_to_ids(self, token):
        return SPECIAL_TOKENS[token]


def build_config(shape):
    return make_config(FakeTokenizer(), shape, rope_theta=1e4, max_positions=1024)


def build_row(model, images):
    tokens, patches = (images.side // 32) ** 2, (images.side // 16) ** 2
    ids = torch.tensor([[START, *[IMAGE] * tokens, END, *[TEXT] * images.text]])
    types = (ids == IMAGE).int()
    grid = torch.tensor([[1, images.side // 16, images.side // 16]])
    positions, _ = model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grid)
    positions = torch.cat((torch.arange(ids.shape[1])[None, None], positions))
    length = ids.shape[1] * images.count
    inputs = {
        "input_ids": ids.repeat(1, images.count),
        "position_ids": positions.repeat(1, 1, images.count),
        "mm_token_type_ids": types.repeat(1, images.count),
        "image_grid_thw": grid.repeat(images.count, 1),
        "pixel_values": torch.randn(patches * images.count, 3 * 2 * 16 * 16),
        "logits_to_keep": torch.arange(length - SUPERVISED, length),
        "use_cache": False,
    }
    return inputs, RowSize(length, tokens * images.count, SUPERVISED)


def measure(shape, images, kind, checkpointing, adapter, frozen=()):
    """Return the bytes that are always live, those at the peak of a forward and backward pass, and the row. The
    model has gradients and optimizer states from the step before."""
    torch.manual_seed(0)
    base = Qwen3VLForConditionalGeneration._from_config(
        build_config(shape), attn_implementation=attention_for(torch.device("cpu"), "float32")
    )
    freeze_parts(base, frozen)
    model = base if adapter is None else with_adapter(base.to(torch.bfloat16), adapter, 0, frozen)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    live = LiveBytes()
    inputs, row = build_row(base, images)
    for weight in model.parameters():
        live.add(weight)
    with live:
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(trained, fused=True)
        optimizer.step()
        kept = live.now
        live.add(inputs["pixel_values"])
        live.peak = 0
        with nullcontext() if kind == "float32" else torch.autocast("cpu", torch.bfloat16):
            logits = model(**inputs).logits
        loss = logits.float().logsumexp(-1).mean()
        del logits
        loss.backward()
    return kept, live.peak - kept, row


def estimate(model, row, kind, checkpointing, adapter, frozen=()):
    settings = load_settings("configs/stage1.yaml", World(1)).settings
    changed = {"bf16": kind != "float32", "gradient_checkpointing": checkpointing, "optim": "adamw_torch_fused"}
    training = settings.training.model_copy(update=changed)
    learner = settings.model.model_copy(update={"adapter": adapter, "freeze": frozen})
    return Learner(settings.model_copy(update={"training": training, "model": learner}), model, row)


def tower(hidden, depth, heads, intermediate, deepstack):
    return VisionShape(hidden, depth, heads, intermediate, deepstack, positions=64)


SMALL = ModelShape(TextShape(96, 3, 4, 2, 24, 288, 1088), tower(48, 3, 2, 192, (1,)), tied=True)
OTHER = ModelShape(TextShape(128, 5, 4, 1, 48, 320, 1088), tower(64, 4, 2, 256, (0, 2)), tied=False)
SHORT, WIDE = Images(3, 96, 90), Images(2, 192, 40)
LORA = Adapter(rank=8, alpha=16, train_coord_rows=False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["float32", "autocast", "adapter"])
@pytest.mark.parametrize(
    ("shape", "images", "frozen"),
    [
        (SMALL, SHORT, ()),
        (OTHER, WIDE, ()),
        (OTHER, WIDE, ("vision",)),
        (OTHER, WIDE, ("vision", "aligner")),
    ],
    ids=["small", "other", "frozen vision", "frozen vision and aligner"],
)
def test_the_formulas_are_within_a_tenth_of_what_a_step_holds(shape, images, kind, checkpointing, frozen):
    adapter = LORA if kind == "adapter" else None
    check_step(shape, images, kind, checkpointing, adapter, frozen)


def check_step(shape, images, kind, checkpointing, adapter, frozen=()):
    """Compare the estimate with what a step holds."""
    kept, peak, row = measure(shape, images, kind, checkpointing, adapter, frozen)
    learner = estimate(Model(shape, expected_weights(shape)), row, kind, checkpointing, adapter, frozen)
    least = total_bytes(learner.least())
    assert least == pytest.approx(kept, rel=0.01)
    assert total_bytes(learner.parts()) - least == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("size", "parameters"), [("2b", 2_127_532_032), ("4b", 4_437_815_808), ("8b", 8_767_123_696)]
)
def test_the_published_shapes_have_the_weights_of_the_published_checkpoints(size, parameters):
    shape = PUBLISHED[size]
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(build_config(shape))
    weights = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert expected_weights(shape) == weights
    assert count_parameters(expected_weights(shape)) == parameters


def test_the_shape_and_the_weights_of_a_checkpoint_are_read_from_its_files(tmp_path):
    base = Qwen3VLForConditionalGeneration(build_config(OTHER))
    base.save_pretrained(tmp_path)
    assert read_shape(tmp_path) == OTHER
    assert read_weights(tmp_path) == expected_weights(OTHER)
