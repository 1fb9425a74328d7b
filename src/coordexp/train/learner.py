"""The learner of one rank: the model that is trained, its optimizer, and what others may read of them."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration, TrainingArguments

from coordexp.config import Settings
from coordexp.config.rollout import Offload
from coordexp.pack.attention import attention_for
from coordexp.rollout.backend import AdapterWeights
from coordexp.train.offload import OffloadedStorages, offload_learner
from coordexp.train.weights import learner_adapter, learner_weights, with_adapter


@dataclass
class Learner:
    """Made before the rollout backend and the trainer, which both refer to it. `base` is the Qwen3-VL model,
    inside peft's wrapper if there is an adapter. accelerate wraps model and optimizer when training begins; the
    trainer then sets them here. `dtype` is the one that the weights are loaded in, `precision` the one that
    forward passes compute in. `offload_folder` is where a learner on the CPU is offloaded to."""

    base: Any
    model: Any
    device: torch.device
    dtype: str
    precision: str
    has_plain_adapter: bool  # every trained parameter can be expressed as a vLLM LoRA adapter
    offload_settings: Offload
    offload_folder: Path
    optimizer: Any = None

    @classmethod
    def load(cls, settings: Settings, arguments: TrainingArguments, first_coord: int) -> "Learner":
        """Load the model of the settings and add a new adapter, if they have one."""
        dtype, adapter = settings.model.dtype, settings.model.adapter
        base = Qwen3VLForConditionalGeneration.from_pretrained(
            Path(settings.model.path),
            dtype=getattr(torch, dtype),
            attn_implementation=attention_for(arguments.device),
        )
        return cls(
            base=base,
            model=with_adapter(base, adapter, first_coord),
            device=arguments.device,
            dtype=dtype,
            precision="bfloat16" if arguments.bf16 else "float16" if arguments.fp16 else dtype,
            has_plain_adapter=adapter is not None and not adapter.train_coord_rows and not adapter.dora,
            offload_settings=settings.rollout_matching.offload,
            offload_folder=Path(arguments.output_dir),
        )

    def current_model(self) -> Any:
        return self.model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights, merged with the adapter. If they are sharded, every rank must iterate over all of
        them."""
        return learner_weights(self.model)

    def adapter_weights(self) -> AdapterWeights:
        """Return the config and the weights of the adapter alone."""
        return learner_adapter(self.model)

    def offload(self) -> AbstractContextManager[OffloadedStorages]:
        """Return a context in which model and optimizer are out of device memory, as the settings say."""
        return offload_learner(self.offload_settings, self.model, self.optimizer, self.offload_folder)
