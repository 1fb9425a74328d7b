"""The model card: README.md in the folder of a merged checkpoint, for its next user and for the Hugging Face hub.

It says what the model was trained from and how, what was measured, and how to use it. It names no folder of this
machine.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coordexp import __version__
from coordexp.answers.formats import read_note
from coordexp.files import json_object, write_whole

FILE = "README.md"
SETTINGS = (
    *("custom.trainer_variant", "custom.answer_format", "custom.object_field_order"),
    *("training.learning_rate", "training.lr_scheduler_type", "training.max_steps", "training.num_train_epochs"),
    *("training.per_device_train_batch_size", "training.gradient_accumulation_steps", "training.seed"),
    *("rollout_matching.rollout_backend", "rollout_matching.correction"),
)
SPEEDS = ("_runtime", "_per_second")


def write_card(folder: Path, base: str, adapter: Path) -> bool:
    """Write the card of a model that was merged from the model named `base` and the checkpoint `adapter`. Return
    False, and change nothing, if the folder has a card already."""
    file = folder / FILE
    if file.exists():
        return False
    write_whole(file, make_card(base, adapter))
    return True


def make_card(base: str, adapter: Path) -> str:
    """Return the text of the card."""
    hub_name = find_hub_name(base)
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "image-text-to-text"}
    header |= {"tags": ["coordexp", "object-detection"]} | ({"base_model": hub_name} if hub_name else {})
    state = _read(adapter / "trainer_state.json")
    step = state.get("global_step")
    trained = f"It was trained for {step:,} steps." if isinstance(step, int) else ""
    source = f"[{hub_name}](https://huggingface.co/{hub_name})" if hub_name else f"`{Path(base).name}`"
    prompt = read_note(adapter).get("prompt")
    question = f"\nIt was trained with this question: {prompt}\n" if isinstance(prompt, str) else ""
    return f"""---
{yaml.safe_dump(header, sort_keys=False).strip()}
---

# A detector from {hub_name or Path(base).name}

This model detects objects in an image by writing them. It was made from {source} with
coordexp {__version__}, by merging an adapter into it. {trained}
{question}
## Use it

```python
from coordexp import Detector

detector = Detector("path/to/this/folder")
for item in detector("photo.jpg"):
    print(item.name, item.box, f"{{item.score:.2f}}")
```

vLLM serves it without coordexp, and `Detector` can ask that server:

```bash
vllm serve path/to/this/folder --host 127.0.0.1 --port 8000
coordexp predict --model path/to/this/folder --server http://127.0.0.1:8000 --images photos --out preds.json
```

## How it was trained

{_table("setting", "value", _settings(adapter))}

## What was measured

{_table("metric", "value", _metrics(state)) or "Nothing was measured while it was trained."}

## Limits

It knows the kinds of objects and images that it was trained on. Measure it on your own images before you rely on
it (`coordexp evaluate`). The license of the base model holds for this one too.
"""


def find_hub_name(base: str) -> str | None:
    """Return the name of a base model on the Hugging Face hub, also if it is given as a folder of the hub's cache.
    Return None for another folder."""
    if cached := re.search(r"models--([^/]+?)--([^/]+)/snapshots/", f"{base}/"):
        return f"{cached[1]}/{cached[2]}"
    return base if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", base) and not Path(base).exists() else None


def _settings(adapter: Path) -> Iterator[tuple[str, Any]]:
    config = _read(adapter / "adapter_config.json")
    for name, key in (("rank", "r"), ("alpha", "lora_alpha"), ("DoRA", "use_dora")):
        if key in config:
            yield f"adapter: {name}", config[key]
    file = adapter.parent / "resolved.yaml"
    run = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for name in SETTINGS:
        section, key = name.split(".")
        if (value := (run.get(section) or {}).get(key)) is not None:
            yield name, value


def _metrics(state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the numbers of the latest evaluation, and its step."""
    evaluations = [line for line in state.get("log_history", ()) if any(key.startswith("eval_") for key in line)]
    for key, value in evaluations[-1].items() if evaluations else ():
        if (key.startswith("eval_") and not key.endswith(SPEEDS)) or key == "step":
            yield key, f"{value:.4g}" if isinstance(value, float) else value


def _table(name: str, value: str, rows: Iterator[tuple[str, Any]]) -> str:
    lines = [f"| `{key}` | {str(item).replace('|', ' ')} |" for key, item in rows]
    return "\n".join([f"| {name} | {value} |", "| --- | --- |", *lines]) if lines else ""


def _read(file: Path) -> dict[str, Any]:
    return json_object(file.read_bytes(), str(file)) if file.is_file() else {}
