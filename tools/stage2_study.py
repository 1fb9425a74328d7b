"""Continue Stage 1 and run Stage 2 from the same model, with variations and seeds, and print a table of results.

    python tools/stage2_study.py --config configs/demo/stage2-hf.yaml --out runs/study --seeds 3 \
        --variants continued stage2 two-channel

Each run is a folder `VARIANT-SEED`, written by `coordexp train`. A complete run is not repeated. The variant
`start` evaluates the model that all runs start from.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

ALIGNED = {"custom": {"trainer_variant": "stage2_rollout_aligned"}, "stage2": {"b_ratio": None}}


def mix_channels(ratio: float) -> dict[str, Any]:
    return {"custom": {"trainer_variant": "stage2_two_channel"}, "stage2": {"b_ratio": ratio}}


VARIANTS: dict[str, dict[str, Any]] = {
    "start": mix_channels(0.0) | {"training": {"max_steps": 1, "learning_rate": 0.0, "warmup_steps": 0}},
    "continued": mix_channels(0.0),
    "stage2": ALIGNED,
    "stage2-lr-1e-4": ALIGNED | {"training": {"learning_rate": 1e-4}},
    "stage2-sampled-1.0": ALIGNED | {"rollout_matching": {"decoding": {"temperature": 1.0}}},
    "stage2-sampled-1.2": ALIGNED | {"rollout_matching": {"decoding": {"temperature": 1.2}}},
    "stage2-desc-0": ALIGNED | {"token_ce": {"desc_ce_weight": 0.0}, "training": {"learning_rate": 1e-4}},
    "two-channel": mix_channels(0.5),
    "b-0.25": mix_channels(0.25),
    "b-0.75": mix_channels(0.75),
    "gate-0.1": mix_channels(0.5) | {"rollout_matching": {"maskiou_gate": 0.1}},
    "gate-0.5": mix_channels(0.5) | {"rollout_matching": {"maskiou_gate": 0.5}},
    "desc-0": mix_channels(0.5) | {"token_ce": {"desc_ce_weight": 0.0}},
    "sampled-0.5": mix_channels(0.5) | {"rollout_matching": {"decoding": {"temperature": 0.5}}},
    "sampled-1.0": mix_channels(0.5) | {"rollout_matching": {"decoding": {"temperature": 1.0}}},
    "sampled-1.2": mix_channels(0.5) | {"rollout_matching": {"decoding": {"temperature": 1.2}}},
    "lr-1e-4": mix_channels(0.5) | {"training": {"learning_rate": 1e-4}},
    "lr-1e-3": mix_channels(0.5) | {"training": {"learning_rate": 1e-3}},
}
COLUMNS = {
    "F1@0.5": "eval_f1_50",
    "recall": "eval_recall_50",
    "precision": "eval_precision_50",
    "recall, any class": "eval_recall_50_any_class",
    "precision, any class": "eval_precision_50_any_class",
    "class accuracy": "class_accuracy",
    "duplicates": "eval_duplicates",
    "truncated": "eval_truncated",
    "early stop": "eval_early_stop",
    "over count": "eval_over_count",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variants", nargs="+", default=["start", "continued", "stage2", "two-channel"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="A setting for every run, which its variant may override.",
    )
    parser.add_argument("--table-only", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name in options.variants:
        seeds = range(1) if name == "start" else range(options.seeds)
        if not options.table_only:
            for seed in seeds:
                run(options, name, seed)
        results = [last for seed in seeds if (last := read_result(options.out / f"{name}-{seed}"))]
        if results:
            rows[name] = results
    print(write_table(rows))


def run(options: argparse.Namespace, name: str, seed: int) -> None:
    folder = options.out / f"{name}-{seed}"
    if read_result(folder):
        return
    tree: dict[str, Any] = {"extends": [os.path.relpath(options.config, options.out)], "training": {}}
    for text in options.set:
        merge(tree, nest(*text.split("=", 1)))
    change = deepcopy(VARIANTS[name])
    token_ce = change.pop("token_ce", None)
    merge(tree, change)
    if token_ce:
        tree.setdefault("rollout_matching", {})["pipeline"] = change_pipeline(options.config, token_ce)
    steps = tree["training"].get("max_steps", resolve(options.config)["training"]["max_steps"])
    training = {"output_dir": str(folder), "seed": 100 + seed, "save_steps": steps, "eval_steps": steps}
    merge(tree, {"training": training | {"report_to": "none", "save_total_limit": 1}})
    file = options.out / f"{name}-{seed}.yaml"
    file.write_text(yaml.safe_dump(tree))
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    with (options.out / f"{name}-{seed}.log").open("w") as log:
        command = [sys.executable, "-m", "coordexp", "train", "--resume", "--config", str(file)]
        subprocess.run(command, check=True, stdout=log, stderr=log)


def resolve(config: Path) -> dict[str, Any]:
    """Return all settings of a config, with their defaults."""
    from coordexp.config import World, load_settings

    return load_settings(config, World(1)).settings.model_dump(mode="json")


def change_pipeline(config: Path, token_ce: dict[str, float]) -> dict[str, Any]:
    """Return the pipeline of a config with other settings for its token_ce."""
    pipeline: dict[str, Any] = resolve(config)["rollout_matching"]["pipeline"]
    next(module for module in pipeline["objective"] if module["name"] == "token_ce")["config"] |= token_ce
    return pipeline


def merge(tree: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def nest(path: str, value: str) -> dict[str, Any]:
    """Return the tree of settings that has `value` at the dotted `path`."""
    tree: Any = yaml.safe_load(value)
    for key in reversed(path.split(".")):
        tree = {key: tree}
    return tree  # type: ignore[no-any-return]


def read_result(folder: Path) -> dict[str, float] | None:
    """Return the last evaluation of a complete run, or None."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    evaluations = [line for line in lines if "eval_f1_50" in line]
    if not evaluations or not any("train_runtime" in line for line in lines):
        return None
    last: dict[str, float] = evaluations[-1]
    last["class_accuracy"] = last["eval_recall_50"] / max(last["eval_recall_50_any_class"], 1e-9)
    return last


def write_table(rows: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for name, results in rows.items():
        cells = [spread([result[key] for result in results]) for key in COLUMNS.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {statistics.stdev(values):.3f}"


if __name__ == "__main__":
    main()
