"""Small valid configs that tests change, and functions that return what loading them gives."""

from copy import deepcopy
from typing import Any

import pytest

from coordexp.config import ConfigError, Loaded, World, parse_settings

Tree = dict[str, Any]

TOKEN_CE: Tree = {
    "name": "token_ce",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A", "B"],
    "config": {"struct_ce_weight": 1.0, "desc_ce_weight": 0.0, "eos_ce_weight": 1.0},
}
COORD_REG: Tree = {
    "name": "coord_reg",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {
        "coord_ce_weight": 0.02,
        "soft_ce_weight": 1.0,
        "w1_weight": 1.0,
        "coord_gate_weight": 1.0,
        "text_gate_weight": 0.1,
        "temperature": 1.0,
        "target_sigma": 2.0,
        "target_truncate": 8,
    },
}
BBOX_GEO: Tree = {
    "name": "bbox_geo",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
}
CHAT_CE: Tree = {
    "name": "chat_ce",
    "enabled": True,
    "weight": 1.0,
    "channels": ["A"],
    "config": {"answer_ce_weight": 1.0},
}
COORD_DIAG: Tree = {"name": "coord_diag", "enabled": True, "weight": 0.0, "channels": ["B"], "config": {}}
SERVER: Tree = {"base_url": "http://127.0.0.1:8000", "group_port": 51216}


def stage2(**changes: Any) -> Tree:
    """Return a valid Stage 2 config with `changes`: keyword names are paths, with __ for the dots."""
    tree: Tree = {
        "model": {"path": "checkpoints/tiny"},
        "custom": {"trainer_variant": "stage2_rollout_aligned", "train_jsonl": "train.jsonl"},
        "global_max_length": 16000,
        "training": {"output_dir": "runs/test"},
        "rollout_matching": {"pipeline": {"objective": [TOKEN_CE, COORD_REG], "diagnostics": [COORD_DIAG]}},
    }
    return apply_changes(deepcopy(tree), **changes)


def stage1(**changes: Any) -> Tree:
    tree = stage2(custom__trainer_variant="stage1_sft")
    tree["stage1"] = tree.pop("rollout_matching")
    for module in (*tree["stage1"]["pipeline"]["objective"], *tree["stage1"]["pipeline"]["diagnostics"]):
        module["channels"] = ["A"]
    return apply_changes(tree, **changes)


def server_mode(**changes: Any) -> Tree:
    tree = stage2(
        rollout_matching__vllm__mode="server", rollout_matching__vllm__server={"servers": [dict(SERVER)]}
    )
    return apply_changes(tree, **changes)


def apply_changes(tree: Tree, **changes: Any) -> Tree:
    """Write each value at its path, whose dots are written as __, and return the tree."""
    for path, value in changes.items():
        *parents, last = path.split("__")
        here = tree
        for key in parents:
            here = here.setdefault(key, {})
        here[last] = deepcopy(value)
    return tree


def load(tree: Tree, learners: int = 1) -> Loaded:
    return parse_settings(tree, World(learners))


def problems(tree: Tree, learners: int = 1) -> dict[str, str]:
    """Return the problem and the fix of every finding, by its path."""
    with pytest.raises(ConfigError) as caught:
        load(tree, learners)
    messages = {finding.subject: f"{finding.problem}\n{finding.fix}" for finding in caught.value.findings}
    assert len(messages) == len(caught.value.findings), "two messages for one path"
    return messages


def only_problem(tree: Tree, learners: int = 1) -> tuple[str, str]:
    """Return the path and the message of the only finding."""
    messages = problems(tree, learners)
    assert len(messages) == 1, messages
    return next(iter(messages.items()))
