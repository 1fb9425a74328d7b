"""The learner's adapter as an engine takes it: what peft would save of it, its config and its weights."""

from enum import Enum
from typing import Any

from accelerate.utils import extract_model_from_parallel
from peft import PeftModel, get_peft_model_state_dict

from coordexp.rollout.backend import AdapterWeights
from coordexp.sharding import is_sharded
from coordexp.train.weights import whole


def learner_adapter(model: Any) -> AdapterWeights:
    """Return the adapter's config and weights, named as in `adapter_config.json` and `adapter_model.safetensors`.
    If the learner is sharded, every rank must iterate over all weights: each is gathered from all ranks."""
    is_sharded(model)  # refuses what cannot be gathered
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    assert isinstance(model, PeftModel)
    config = model.peft_config[model.active_adapter]
    assert not config.trainable_token_indices, "what is trained beside the adapter would be left out"
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    plain = {name: _plain(value) for name, value in config.to_dict().items()}
    return plain, ((name, whole(weight)) for name, weight in weights.items())


def _plain(value: Any) -> Any:
    """For JSON. A set is given in order, so that two are written alike."""
    if isinstance(value, Enum):
        return value.value
    return sorted(value) if isinstance(value, set) else value
