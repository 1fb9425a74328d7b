"""Keys and values of older versions of the specification, each with what to do now.

A legacy key is an error, never an alias. For the sake of the other checks its value is moved to where it
belongs now, so that one old name gives one message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordexp.config.violations import Key, Violation

Tree = dict[str, Any]


@dataclass(frozen=True)
class Removed:
    """`old` and `also` are dotted paths in which `*` is any key or index; `new` is where the value goes now."""

    old: str
    advice: str
    new: str | None = None
    also: tuple[str, ...] = ()


def _moved(old: str, new: str) -> Removed:
    return Removed(old, f"use {new} instead", new)


_LIST_SERVERS = (
    "list each server under rollout_matching.vllm.server.servers, e.g. "
    "servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}]"
)
_MODULES = ("rollout_matching.pipeline", "stage1.pipeline")
_ALIASES = {
    "bbox_smoothl1_weight": "smoothl1_weight",
    "bbox_ciou_weight": "ciou_weight",
    "coord_soft_ce_weight": "soft_ce_weight",
    "coord_w1_weight": "w1_weight",
}

TABLE: tuple[Removed, ...] = (
    _moved("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    _moved("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
    _moved("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
    _moved("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    Removed(
        "rollout_matching.post_rollout_pack_scope",
        "remove it: packing always works on one micro-step; training.packing turns it on",
    ),
    Removed("rollout_matching.rollout_buffer", "remove it: every step trains on fresh rollouts"),
    Removed(
        "rollout_matching.vllm.server.base_url",
        _LIST_SERVERS,
        also=("rollout_matching.vllm.server.group_port",),
    ),
    Removed("rollout_matching.vllm.server.group_port", _LIST_SERVERS),
    Removed(
        "custom.coord_soft_ce_w1",
        "declare a coord_reg module under rollout_matching.pipeline.objective (stage1.pipeline.objective in "
        "stage 1); its config has soft_ce_weight and w1_weight",
    ),
    *(
        Removed(f"{pipeline}.objective.*.config.{alias}", f"use {name} instead", f"..{name}")
        for pipeline in _MODULES
        for alias, name in _ALIASES.items()
    ),
    # Names of transformers 4 that transformers 5 has no more.
    _moved("training.evaluation_strategy", "training.eval_strategy"),
    Removed(
        "training.warmup_ratio",
        "use training.warmup_steps: a number below 1 is a share of all steps",
        "training.warmup_steps",
    ),
    # Arguments that a file cannot or should not hold.
    Removed(
        "training.hub_token", "set the HF_TOKEN environment variable: settings are logged, tokens must not be"
    ),
    Removed("training.local_rank", "remove it: torchrun tells each process its rank"),
    Removed("training.parallelism_config", "remove it: use training.fsdp or training.deepspeed"),
)

OLD_HOME = ("custom", "extra", "rollout_matching")

OLD_VARIANTS = {"rollout_matching_sft": "stage2_rollout_aligned"}


def take_out(tree: Tree) -> Iterator[Violation]:
    """Removes every legacy key from `tree`, moving values to their new place, and says so."""
    yield from _take_out_old_home(tree)
    for removed in TABLE:
        yield from _take_out_one(tree, removed)
    yield from _rename_variant(tree)


def _take_out_old_home(tree: Tree) -> Iterator[Violation]:
    extra = _get(tree, OLD_HOME[:2])
    if not isinstance(extra, dict) or "rollout_matching" not in extra:
        return
    old = extra.pop("rollout_matching")
    if not extra:
        del tree["custom"]["extra"]
    if not isinstance(old, dict) or not old:
        yield Violation(OLD_HOME, "moved", "write these settings under rollout_matching, at the top level")
        return
    successors = {removed.old: removed for removed in TABLE}
    for key, value in old.items():
        removed = successors.get(f"rollout_matching.{key}", _moved("", f"rollout_matching.{key}"))
        yield Violation((*OLD_HOME, key), "moved", removed.advice)
        if removed.new:
            _put(tree, tuple(removed.new.split(".")), value)


def _take_out_one(tree: Tree, removed: Removed) -> Iterator[Violation]:
    for path in list(_matches(tree, tuple(removed.old.split(".")), ())):
        value = _pop(tree, path)
        yield Violation(path, "removed" if removed.new is None else "renamed", removed.advice)
        if removed.new and removed.new.startswith(".."):
            _put(tree, (*path[:-1], removed.new[2:]), value)
        elif removed.new:
            _put(tree, tuple(removed.new.split(".")), value)
        for other in removed.also:
            for path in list(_matches(tree, tuple(other.split(".")), ())):
                _pop(tree, path)


def _rename_variant(tree: Tree) -> Iterator[Violation]:
    variant = _get(tree, ("custom", "trainer_variant"))
    if isinstance(variant, str) and variant in OLD_VARIANTS:
        new = OLD_VARIANTS[variant]
        tree["custom"]["trainer_variant"] = new
        yield Violation(
            ("custom", "trainer_variant"), f"{variant} is the old name", f"write trainer_variant: {new}"
        )


def _matches(tree: Any, pattern: tuple[str, ...], path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    if not pattern:
        yield path
    elif isinstance(tree, dict):
        for key in tree if pattern[0] == "*" else [pattern[0]]:
            if key in tree:
                yield from _matches(tree[key], pattern[1:], (*path, key))
    elif isinstance(tree, list) and pattern[0] == "*":
        for index, item in enumerate(tree):
            yield from _matches(item, pattern[1:], (*path, index))


def _get(tree: Any, path: tuple[Key, ...]) -> Any:
    for key in path:
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def _pop(tree: Any, path: tuple[Key, ...]) -> Any:
    for key in path[:-1]:
        tree = tree[key]
    return tree.pop(path[-1])


def _put(tree: Any, path: tuple[Key, ...], value: Any) -> None:
    """Only where nothing stands: what is written under the new name wins."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key]
        if not isinstance(tree, (dict, list)):
            return
    tree.setdefault(path[-1], value)
