"""Keys and values of older versions, or of other tools, each with what to write instead.

A legacy key is an error, never an alias. Its value is still moved to the key that replaces it, so that the other
checks see it and one old name gives one message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordexp.config.paths import KeyPath, fill, parse_path, value_at
from coordexp.config.violations import Violation

Tree = dict[str, Any]


@dataclass(frozen=True)
class LegacyKey:
    """A key that no longer exists. Its value, or `replacement` if given, moves to the key `new`.

    The key `also` is removed together with `old`, without a message of its own.
    """

    old: str
    fix: str
    new: str | None = None
    also: str | None = None
    replacement: Any = None


def _rename(old: str, new: str) -> LegacyKey:
    return LegacyKey(old, f"use {new} instead", new)


_SERVER = "rollout_matching.vllm.server"
_SERVERS = [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]
_LIST_SERVERS = (
    f"list each server under {_SERVER}.servers, e.g. "
    "servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}]"
)

LEGACY_KEYS: tuple[LegacyKey, ...] = (
    _rename("rollout_matching.rollout_generate_batch_size", "rollout_matching.decode_batch_size"),
    _rename("rollout_matching.rollout_infer_batch_size", "rollout_matching.decode_batch_size"),
    _rename("rollout_matching.temperature", "rollout_matching.decoding.temperature"),
    _rename("rollout_matching.top_p", "rollout_matching.decoding.top_p"),
    _rename("rollout_matching.top_k", "rollout_matching.decoding.top_k"),
    LegacyKey(
        "rollout_matching.post_rollout_pack_scope",
        "remove it: packing always works on one micro-step; training.packing turns it on",
    ),
    LegacyKey(
        "rollout_matching.rollout_buffer",
        "remove it: rollouts are never reused; each is trained on at most once",
    ),
    LegacyKey(f"{_SERVER}.base_url", _LIST_SERVERS, f"{_SERVER}.servers", f"{_SERVER}.group_port", _SERVERS),
    LegacyKey(f"{_SERVER}.group_port", _LIST_SERVERS, f"{_SERVER}.servers", None, _SERVERS),
    LegacyKey(
        "custom.coord_soft_ce_w1",
        "declare a coord_reg module under rollout_matching.pipeline.objective (stage1.pipeline.objective in "
        "Stage 1); its config has soft_ce_weight and w1_weight",
    ),
    # Names that other tools use.
    _rename("training.lr", "training.learning_rate"),
    _rename("training.batch_size", "training.per_device_train_batch_size"),
    _rename("training.epochs", "training.num_train_epochs"),
    _rename("model.adapter.r", "model.adapter.rank"),
    _rename("model.adapter.lora_alpha", "model.adapter.alpha"),
    _rename("model.adapter.lora_dropout", "model.adapter.dropout"),
    # Names of transformers 4 that transformers 5 does not have.
    _rename("training.evaluation_strategy", "training.eval_strategy"),
    LegacyKey(
        "training.warmup_ratio",
        "use training.warmup_steps: a number below 1 is a share of all steps",
        "training.warmup_steps",
    ),
    _rename("training.no_cuda", "training.use_cpu"),
    LegacyKey(
        "training.group_by_length", "remove it: samples are not grouped by length; training.packing fills rows"
    ),
    LegacyKey("training.overwrite_output_dir", "remove it: transformers 5 has no such argument"),
    LegacyKey("training.save_safetensors", "remove it: checkpoints are always safetensors"),
    LegacyKey("training.logging_dir", "remove it: transformers 5 logs below training.output_dir"),
    LegacyKey("training.push_to_hub_token", "set the HF_TOKEN environment variable: settings are logged"),
)

# Old names of module weights. Each is an alias in its own module only.
ALIASES = {
    "bbox_geo": {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"},
    "coord_reg": {"coord_soft_ce_weight": "soft_ce_weight", "coord_w1_weight": "w1_weight"},
}

OLD_SECTION: KeyPath = ("custom", "extra", "rollout_matching")

OLD_VARIANTS = {"rollout_matching_sft": "stage2_rollout_aligned"}


@dataclass(frozen=True)
class RejectedKey:
    """A key that was taken out of the tree: the violation, and the (old, new) paths of values that were moved."""

    violation: Violation
    moves: tuple[tuple[KeyPath, KeyPath], ...] = ()


def take_out_legacy(tree: Tree) -> Iterator[RejectedKey]:
    """Remove every legacy key from `tree`, move its value to the key that replaces it, and yield the violation."""
    yield from _take_out_old_section(tree)
    for legacy in LEGACY_KEYS:
        yield from _take_out_key(tree, legacy)
    yield from _take_out_aliases(tree)
    yield from _rename_variant(tree)


def _take_out_old_section(tree: Tree) -> Iterator[RejectedKey]:
    extra = value_at(tree, OLD_SECTION[:2])
    if not isinstance(extra, dict) or "rollout_matching" not in extra:
        return
    old = extra.pop("rollout_matching")
    if not extra:
        del tree["custom"]["extra"]
    if not isinstance(old, dict) or not old:
        fix = "write these settings under rollout_matching, at the top level"
        yield RejectedKey(Violation(OLD_SECTION, "moved", fix))
        return
    legacy_keys = {legacy.old: legacy for legacy in LEGACY_KEYS}
    for key, value in old.items():
        legacy = legacy_keys.get(f"rollout_matching.{key}", _rename("", f"rollout_matching.{key}"))
        here = (*OLD_SECTION, key)
        problem = "moved" if legacy.new else "removed"
        yield RejectedKey(Violation(here, problem, legacy.fix), _move(tree, value, here, legacy.new))


def _take_out_key(tree: Tree, legacy: LegacyKey) -> Iterator[RejectedKey]:
    path = parse_path(legacy.old)
    container = value_at(tree, path[:-1])
    if not isinstance(container, dict) or path[-1] not in container:
        return
    value = container.pop(path[-1])
    if legacy.also:
        container.pop(parse_path(legacy.also)[-1], None)
    problem = "renamed" if legacy.new and legacy.replacement is None else "removed"
    violation = Violation(path, problem, legacy.fix)
    if legacy.replacement is not None:
        value = legacy.replacement
    yield RejectedKey(violation, _move(tree, value, path, legacy.new))


def _take_out_aliases(tree: Tree) -> Iterator[RejectedKey]:
    for path in (("rollout_matching", "pipeline"), ("stage1", "pipeline")):
        modules = value_at(tree, (*path, "objective"))
        for index, module in enumerate(modules if isinstance(modules, list) else []):
            config = value_at(module, ("config",))
            name = value_at(module, ("name",))
            for alias, new in ALIASES.get(name, {}).items() if isinstance(name, str) else ():
                if isinstance(config, dict) and alias in config:
                    here: KeyPath = (*path, "objective", index, "config", alias)
                    moves = _move(tree, config.pop(alias), here, (*here[:-1], new))
                    yield RejectedKey(Violation(here, "renamed", f"use {new} instead"), moves)


def _rename_variant(tree: Tree) -> Iterator[RejectedKey]:
    variant = value_at(tree, ("custom", "trainer_variant"))
    if isinstance(variant, str) and variant in OLD_VARIANTS:
        new = tree["custom"]["trainer_variant"] = OLD_VARIANTS[variant]
        path: KeyPath = ("custom", "trainer_variant")
        yield RejectedKey(Violation(path, f"{variant} is the old name", f"write trainer_variant: {new}"))


def _move(tree: Tree, value: Any, old: KeyPath, new: str | KeyPath | None) -> tuple[tuple[KeyPath, KeyPath], ...]:
    """Write the value at `new` unless that has a value already. Return the (old, new) paths of moved values."""
    if new is None:
        return ()
    target = parse_path(new) if isinstance(new, str) else new
    return tuple(((*old, *filled[len(target) :]), filled) for filled in fill(tree, value, target))
