"""LoRA and DoRA adapters, made with peft. The rows of the coordinate tokens, which no adapter covers, can be
trained beside the adapter."""

import shutil
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from coordexp.config.settings import Adapter
from coordexp.data import BINS
from coordexp.ranks import is_sharded
from coordexp.rollout.backend import AdapterWeights
from coordexp.train.weights import gather_weight


def with_adapter(model: Any, adapter: Adapter | None, first_coord: int) -> Any:
    """Return the model with a new adapter, or the model itself if the settings have none."""
    if adapter is None:
        return model
    config = LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        target_modules=adapter.targets,
        trainable_token_indices=_coord_rows(model, first_coord) if adapter.train_coord_rows else None,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _coord_rows(model: Any, first_coord: int) -> dict[str, list[int]]:
    rows = list(range(first_coord, first_coord + BINS))
    return {"embed_tokens": rows} | ({} if model.config.tie_word_embeddings else {"lm_head": rows})


def learner_adapter(model: Any) -> AdapterWeights:
    """Return the adapter's config and weights, named as in `adapter_config.json` and `adapter_model.safetensors`.
    If the learner is sharded, every rank must iterate over all weights: each is gathered from all ranks."""
    is_sharded(model)  # raises if the weights cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    assert isinstance(model, PeftModel)
    config = model.peft_config[model.active_adapter]
    assert not config.trainable_token_indices, "rows that are trained beside the adapter would be left out"
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    plain = {name: _to_json_value(value) for name, value in config.to_dict().items()}
    return plain, ((name, gather_weight(weight)) for name, weight in weights.items())


def _to_json_value(value: Any) -> Any:
    """Return a JSON value. A set becomes a sorted list, so that equal sets are written alike."""
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value


def merge_adapter(base: Path, adapter: Path, to: Path) -> None:
    """Write a whole checkpoint whose weights include the adapter's update, for vLLM and for `coordexp predict`."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype="auto")
    merged = PeftModel.from_pretrained(model, adapter, torch_dtype=torch.float32).merge_and_unload()
    merged.save_pretrained(to)
    AutoProcessor.from_pretrained(adapter).save_pretrained(to)
    if (adapter / "coordexp.json").is_file():
        shutil.copyfile(adapter / "coordexp.json", to / "coordexp.json")
