"""Keys and values of older versions of the specification, each with what to do now.

A legacy key is an error, never an alias. For the sake of the other checks its value is moved to where it belongs
now, so that one old name gives one message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from coordexp.config.paths import Key, Path, keys_of, move, value_at
from coordexp.config.violations import Violation

Tree = dict[str, Any]


@dataclass(frozen=True)
class Removed:
    """`also` goes away with `old`, without a message of its own. The value, or `stand_in`, goes to `new`."""

    old: str
    advice: str
    new: str | None = None
    also: str | None = None
    stand_in: Any = None


def _moved(old: str, new: str) -> Removed:
    return Removed(old, f"use {new} instead", new)


_SERVER = "rollout_matching.vllm.server"
_SERVERS = [{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]
_LIST_SERVERS = (
    f"list each server under {_SERVER}.servers, e.g. "
    "servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}]"
)

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
    Removed(f"{_SERVER}.base_url", _LIST_SERVERS, f"{_SERVER}.servers", f"{_SERVER}.group_port", _SERVERS),
    Removed(f"{_SERVER}.group_port", _LIST_SERVERS, f"{_SERVER}.servers", None, _SERVERS),
    Removed(
        "custom.coord_soft_ce_w1",
        "declare a coord_reg module under rollout_matching.pipeline.objective (stage1.pipeline.objective in "
        "stage 1); its config has soft_ce_weight and w1_weight",
    ),
    # What other tools call them.
    _moved("training.lr", "training.learning_rate"),
    _moved("training.batch_size", "training.per_device_train_batch_size"),
    _moved("training.epochs", "training.num_train_epochs"),
    _moved("model.adapter.r", "model.adapter.rank"),
    _moved("model.adapter.lora_alpha", "model.adapter.alpha"),
    _moved("model.adapter.lora_dropout", "model.adapter.dropout"),
    # Names of transformers 4 that transformers 5 has no more.
    _moved("training.evaluation_strategy", "training.eval_strategy"),
    Removed(
        "training.warmup_ratio",
        "use training.warmup_steps: a number below 1 is a share of all steps",
        "training.warmup_steps",
    ),
    _moved("training.no_cuda", "training.use_cpu"),
    Removed(
        "training.group_by_length", "remove it: samples are not grouped by length; training.packing fills rows"
    ),
    Removed("training.overwrite_output_dir", "remove it: transformers 5 has no such argument"),
    Removed("training.save_safetensors", "remove it: checkpoints are always safetensors"),
    Removed("training.logging_dir", "remove it: transformers 5 logs below training.output_dir"),
    Removed("training.push_to_hub_token", "set the HF_TOKEN environment variable: settings are logged"),
)

# Old names of module weights: they mean something only in their own module.
ALIASES = {
    "bbox_geo": {"bbox_smoothl1_weight": "smoothl1_weight", "bbox_ciou_weight": "ciou_weight"},
    "coord_reg": {"coord_soft_ce_weight": "soft_ce_weight", "coord_w1_weight": "w1_weight"},
}

OLD_HOME: Path = ("custom", "extra", "rollout_matching")

OLD_VARIANTS = {"rollout_matching_sft": "stage2_rollout_aligned"}


@dataclass(frozen=True)
class Found:
    """A legacy key: the violation, and the (old, new) paths of what was moved for the sake of other checks."""

    violation: Violation
    moves: tuple[tuple[Path, Path], ...] = ()


def take_out(tree: Tree) -> Iterator[Found]:
    """Removes every legacy key from `tree`, moving values to their new place, and says so."""
    yield from _take_out_old_home(tree)
    for removed in TABLE:
        yield from _take_out_one(tree, removed)
    yield from _take_out_aliases(tree)
    yield from _rename_variant(tree)


def _take_out_old_home(tree: Tree) -> Iterator[Found]:
    extra = value_at(tree, OLD_HOME[:2])
    if not isinstance(extra, dict) or "rollout_matching" not in extra:
        return
    old = extra.pop("rollout_matching")
    if not extra:
        del tree["custom"]["extra"]
    if not isinstance(old, dict) or not old:
        advice = "write these settings under rollout_matching, at the top level"
        yield Found(Violation(OLD_HOME, "moved", advice))
        return
    successors = {removed.old: removed for removed in TABLE}
    for key, value in old.items():
        removed = successors.get(f"rollout_matching.{key}", _moved("", f"rollout_matching.{key}"))
        here = (*OLD_HOME, key)
        problem = "moved" if removed.new else "removed"
        yield Found(Violation(here, problem, removed.advice), _moves(tree, value, here, removed.new))


def _take_out_one(tree: Tree, removed: Removed) -> Iterator[Found]:
    path = keys_of(removed.old)
    container = value_at(tree, path[:-1])
    if not isinstance(container, dict) or path[-1] not in container:
        return
    value = container.pop(path[-1])
    if removed.also:
        container.pop(keys_of(removed.also)[-1], None)
    problem = "renamed" if removed.new and removed.stand_in is None else "removed"
    violation = Violation(path, problem, removed.advice)
    if removed.stand_in is not None:
        value = removed.stand_in
    yield Found(violation, _moves(tree, value, path, removed.new))


def _take_out_aliases(tree: Tree) -> Iterator[Found]:
    for path in (("rollout_matching", "pipeline"), ("stage1", "pipeline")):
        modules = value_at(tree, (*path, "objective"))
        for index, module in enumerate(modules if isinstance(modules, list) else []):
            config = value_at(module, ("config",))
            name = value_at(module, ("name",))
            for alias, new in ALIASES.get(name, {}).items() if isinstance(name, str) else ():
                if isinstance(config, dict) and alias in config:
                    here: Path = (*path, "objective", index, "config", alias)
                    moves = _moves(tree, config.pop(alias), here, (*here[:-1], new))
                    yield Found(Violation(here, "renamed", f"use {new} instead"), moves)


def _rename_variant(tree: Tree) -> Iterator[Found]:
    variant = value_at(tree, ("custom", "trainer_variant"))
    if isinstance(variant, str) and variant in OLD_VARIANTS:
        new = tree["custom"]["trainer_variant"] = OLD_VARIANTS[variant]
        path: tuple[Key, ...] = ("custom", "trainer_variant")
        yield Found(Violation(path, f"{variant} is the old name", f"write trainer_variant: {new}"))


def _moves(tree: Tree, value: Any, old: Path, new: str | Path | None) -> tuple[tuple[Path, Path], ...]:
    if new is None:
        return ()
    target = keys_of(new) if isinstance(new, str) else new
    return tuple(((*old, *filled[len(target) :]), filled) for filled in move(tree, value, target))
