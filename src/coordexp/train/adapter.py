"""LoRA and DoRA by peft. The rows of the coordinate tokens, which no adapter reaches, are trained beside it, if
they are to be."""

import shutil
from pathlib import Path
from typing import Any

from coordexp.config.settings import Adapter
from coordexp.data import BINS


def with_adapter(model: Any, adapter: Adapter | None, first_coord: int) -> Any:
    if adapter is None:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        target_modules=adapter.targets,
        trainable_token_indices=_rows(model, first_coord) if adapter.train_coord_rows else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _rows(model: Any, first_coord: int) -> dict[str, list[int]]:
    rows = list(range(first_coord, first_coord + BINS))
    return {"embed_tokens": rows} | ({} if model.config.tie_word_embeddings else {"lm_head": rows})


def merge_adapter(base: Path, adapter: Path, to: Path) -> None:
    """A whole checkpoint in which the adapter's update is part of the weights: for vLLM, and to predict with."""
    import torch
    from peft import PeftModel
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    model = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter, torch_dtype=torch.float32).merge_and_unload()
    merged.save_pretrained(to)
    AutoProcessor.from_pretrained(adapter).save_pretrained(to)
    if (adapter / "coordexp.json").is_file():
        shutil.copyfile(adapter / "coordexp.json", to / "coordexp.json")
