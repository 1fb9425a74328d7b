"""Runs Stage 1 continued and Stage 2 from the same start, with variations and seeds, and prints the tables.

    python tools/stage2_study.py --config configs/demo/stage2-hf.yaml --out runs/study --seeds 3 \
        --variants continued stage2 two-channel

Each run is a folder `VARIANT-SEED` with what `coordexp train` writes; a whole one is not run again. `start` is
the evaluation of the model that all of them start from.
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


def mixed(ratio: float) -> dict[str, Any]:
    return {"custom": {"trainer_variant": "stage2_two_channel"}, "stage2": {"b_ratio": ratio}}


VARIANTS: dict[str, dict[str, Any]] = {
    "start": mixed(0.0) | {"training": {"max_steps": 1, "learning_rate": 0.0, "warmup_steps": 0}},
    "continued": mixed(0.0),
    "stage2": ALIGNED,
    "stage2-lr-1e-4": ALIGNED | {"training": {"learning_rate": 1e-4}},
    "stage2-sampled-1.0": ALIGNED | {"rollout_matching": {"decoding": {"temperature": 1.0}}},
    "stage2-sampled-1.2": ALIGNED | {"rollout_matching": {"decoding": {"temperature": 1.2}}},
    "stage2-desc-0": ALIGNED | {"token_ce": {"desc_ce_weight": 0.0}, "training": {"learning_rate": 1e-4}},
    "two-channel": mixed(0.5),
    "b-0.25": mixed(0.25),
    "b-0.75": mixed(0.75),
    "gate-0.1": mixed(0.5) | {"rollout_matching": {"maskiou_gate": 0.1}},
    "gate-0.5": mixed(0.5) | {"rollout_matching": {"maskiou_gate": 0.5}},
    "desc-0": mixed(0.5) | {"token_ce": {"desc_ce_weight": 0.0}},
    "sampled-0.5": mixed(0.5) | {"rollout_matching": {"decoding": {"temperature": 0.5}}},
    "sampled-1.0": mixed(0.5) | {"rollout_matching": {"decoding": {"temperature": 1.0}}},
    "sampled-1.2": mixed(0.5) | {"rollout_matching": {"decoding": {"temperature": 1.2}}},
    "lr-1e-4": mixed(0.5) | {"training": {"learning_rate": 1e-4}},
    "lr-1e-3": mixed(0.5) | {"training": {"learning_rate": 1e-3}},
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
        "--set", action="append", default=[], metavar="KEY=VALUE", help="For every run, before its variant."
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
        found = [last for seed in seeds if (last := result(options.out / f"{name}-{seed}"))]
        if found:
            rows[name] = found
    print(table(rows))


def run(options: argparse.Namespace, name: str, seed: int) -> None:
    folder = options.out / f"{name}-{seed}"
    if result(folder):
        return
    tree: dict[str, Any] = {"extends": [os.path.relpath(options.config, options.out)], "training": {}}
    for text in options.set:
        merge(tree, nested(*text.split("=", 1)))
    change = deepcopy(VARIANTS[name])
    given = change.pop("token_ce", None)
    merge(tree, change)
    if given:
        tree.setdefault("rollout_matching", {})["pipeline"] = changed_pipeline(options.config, given)
    steps = tree["training"].get("max_steps", resolved(options.config)["training"]["max_steps"])
    last = {"output_dir": str(folder), "seed": 100 + seed, "save_steps": steps, "eval_steps": steps}
    merge(tree, {"training": last | {"report_to": "none", "save_total_limit": 1}})
    file = options.out / f"{name}-{seed}.yaml"
    file.write_text(yaml.safe_dump(tree))
    print(f"{name}, seed {seed}", file=sys.stderr, flush=True)
    with (options.out / f"{name}-{seed}.log").open("w") as log:
        words = [sys.executable, "-m", "coordexp", "train", "--resume", "--config", str(file)]
        subprocess.run(words, check=True, stdout=log, stderr=log)


def resolved(config: Path) -> dict[str, Any]:
    from coordexp.config import World, load_settings

    return load_settings(config, World(1)).settings.model_dump(mode="json")


def changed_pipeline(config: Path, given: dict[str, float]) -> dict[str, Any]:
    pipeline: dict[str, Any] = resolved(config)["rollout_matching"]["pipeline"]
    next(one for one in pipeline["objective"] if one["name"] == "token_ce")["config"] |= given
    return pipeline


def merge(tree: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            merge(tree[key], value)
        else:
            tree[key] = deepcopy(value)


def nested(path: str, value: str) -> dict[str, Any]:
    found: Any = yaml.safe_load(value)
    for key in reversed(path.split(".")):
        found = {key: found}
    return found  # type: ignore[no-any-return]


def result(folder: Path) -> dict[str, float] | None:
    """The last evaluation of a run that is whole."""
    file = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    found = [line for line in lines if "eval_f1_50" in line]
    if not found or not any("train_runtime" in line for line in lines):
        return None
    last: dict[str, float] = found[-1]
    last["class_accuracy"] = last["eval_recall_50"] / max(last["eval_recall_50_any_class"], 1e-9)
    return last


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for name, found in rows.items():
        cells = [spread([run[key] for run in found]) for key in COLUMNS.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    mean = statistics.mean(values)
    return f"{mean:.3f}" if len(values) == 1 else f"{mean:.3f} ± {statistics.stdev(values):.3f}"


if __name__ == "__main__":
    main()
