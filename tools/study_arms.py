"""The arms of the study (`tools/study.py`): what each one changes in a shipped demo config.

Every arm begins with the start of its seed and takes the same number of steps, with the same learning rate, unless
its settings here say otherwise.

    continued          Stage 1 goes on
    closing            the same, with a smaller weight of the closing brace
    equal-time         the same as `continued`, with as many steps as Stage 2 has time for
    self-training-1    the same as `continued`, on labels that the start completed; -2 and -3 begin with the start
                       again, on labels that the result of the round before completed
    interpolated       the mean of the weights of `continued` and of the model before the start
    recommended        Stage 2 with the policy of docs/correction.md
    no-extras          the same, and objects without a label are removed
    offline            the same as `recommended`, with all rollouts made by the start
    agreement          the same, with four sampled rollouts; of the objects without a label, those that two have
    grpo               TRL's GRPO (tools/grpo.py) with as many answers as Stage 2; unmatched objects do not count
    long               `recommended` for 1,000 steps with a constant learning rate; only if it is asked for
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from study_data import REGIMES

from coordexp.errors import UserError
from coordexp.files import write_whole

Settings = dict[str, Any]  # by dotted key

COMPLETE_ARMS = ("start", "continued", "recommended")  # of the regime with complete labels, the first to be made
SELF_TRAINING = ("self-training-1", "self-training-2", "self-training-3")
ARMS = (
    *COMPLETE_ARMS,
    *("self-training-1", "closing", "no-extras", "offline", "equal-time"),
    *("self-training-2", "self-training-3", "agreement", "interpolated", "grpo"),
)
OPTIONAL_ARMS = ("long",)
# The arm whose result an arm takes besides the start. Its costs count, too.
BUILDS_ON = {
    "self-training-2": "self-training-1",
    "self-training-3": "self-training-2",
    "interpolated": "continued",
}
TIME_OF_STAGE_2 = 2.75  # of a step, in steps of Stage 1 (docs/results.md)

CORRECTION = "rollout_matching.correction"
CONTINUED: Settings = {
    "custom.trainer_variant": "stage2_two_channel",
    "stage2.b_ratio": 0.0,
    "training.learning_rate": 1e-3,
}
RECOMMENDED: Settings = {
    "custom.trainer_variant": "stage2_rollout_aligned",
    "stage2.b_ratio": None,
    "training.learning_rate": 1e-3,
    f"{CORRECTION}.duplicates": "remove",
    f"{CORRECTION}.insertion": "reading_order",
    f"{CORRECTION}.supervise": "matched_with_desc",
}
AGREEMENT: Settings = {
    "rollout_matching.decoding.temperature": 0.7,
    "rollout_matching.rollouts_per_sample": 4,
    "rollout_matching.choice.rule": "union",
    f"{CORRECTION}.extras": "remove",  # those that enough answers agree on stay
}
LONG: Settings = {"training.max_steps": 1000, "training.lr_scheduler_type": "constant_with_warmup"}

EXPONENT = re.compile(r"[-+]?\d+e[-+]?\d+")  # a number for us, but text for PyYAML


def describe_arms(regime: str, steps: int) -> dict[str, Settings]:
    """Return the settings of all arms that `coordexp train` trains. They know the share of labelled objects."""
    share = REGIMES[regime].labelled_share
    closing = {f"{CORRECTION}.closing_weight": share}
    recommended = RECOMMENDED | closing | {f"{CORRECTION}.extras": "remove" if share == 1 else "keep"}
    return dict.fromkeys(("continued", *SELF_TRAINING), CONTINUED) | {
        "closing": CONTINUED | closing,
        "equal-time": CONTINUED | {"training.max_steps": round(TIME_OF_STAGE_2 * steps)},
        "recommended": recommended,
        "no-extras": recommended | {f"{CORRECTION}.extras": "remove"},
        "offline": recommended | {"rollout_matching.rollout_backend": "frozen"},
        "agreement": recommended | AGREEMENT,
        "long": recommended | LONG,
    }


def write_config(file: Path, base: Path, settings: Settings) -> Path:
    """Write a config that extends another one. Raise UserError if it has been written with other settings."""
    tree: Settings = {}
    for key, value in settings.items():
        put(tree, key, value)
    if file.is_file():
        before = yaml.safe_load(file.read_text())
        before.pop("extends")
        if before != tree:
            changed = ", ".join(list_differences(before, tree))
            raise UserError(
                f"{file.parent} has begun with other settings ({changed})",
                "give the options of before, or another --name, or remove that folder",
            )
    write_whole(file, yaml.safe_dump({"extends": [os.path.relpath(base, file.parent)]} | tree))
    return file


def put(tree: Settings, key: str, value: Any) -> None:
    """Set the value at a dotted key of a tree of settings."""
    *path, last = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[last] = value


def list_differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys at which two trees of settings differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            yield from list_differences(before.get(key), after.get(key), f"{path}.{key}".strip("."))
    elif before != after:
        yield path


def parse_setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: no value", "write KEY=VALUE, e.g. training.learning_rate=3e-4")
    return key, float(value) if EXPONENT.fullmatch(value) else yaml.safe_load(value)
