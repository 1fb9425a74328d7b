"""Rules between settings: pure functions that take settings and world sizes and yield conflicts.

A conflict names the setting to change and the other settings that it conflicts with. The loader drops a conflict
if one of these settings is wrong itself, so rules may assume valid values. Rules on the real world sizes of
servers, which are known only at run time, are functions in `rollout` and are checked here if the sizes are given.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from coordexp.config.rollout import capacity_shortage
from coordexp.config.sections import ADDED_OBJECTIVES, DIAGNOSTICS, OBJECTIVES, Module
from coordexp.config.settings import Settings
from coordexp.extensions import find_extensions


@dataclass(frozen=True)
class World:
    """The number of learner ranks and of devices of each rollout server.

    Rules that need a number are skipped while it is None, that is, not known yet.
    """

    learners: int | None = None
    server_world_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Conflict:
    """A problem between settings.

    `path` is the setting to change, `others` are the settings that it depends on.
    """

    path: str
    problem: str
    fix: str
    others: tuple[str, ...] = ()


Rule = Callable[[Settings, World], Iterator[Conflict]]

VARIANT = "custom.trainer_variant"
ANSWER_FORMAT = "custom.answer_format"
COORD_MODULES = ("coord_reg", "bbox_geo", "coord_diag")  # they read distributions over coordinate tokens
# The weights that supervise a part of an answer. The others bound, or end, what these teach.
TEACHING = {
    "token_ce": ("struct_ce_weight", "desc_ce_weight"),
    "coord_reg": ("coord_ce_weight", "soft_ce_weight", "w1_weight"),
    "bbox_geo": ("smoothl1_weight", "ciou_weight"),
    "number_ce": ("ce_weight",),
    "chat_ce": ("answer_ce_weight",),
}
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
UNSET_STEPS = -1  # the default of training.max_steps
BACKEND = "rollout_matching.rollout_backend"
DECODE_MODE = "rollout_matching.decode_mode"
PER_SAMPLE = "rollout_matching.rollouts_per_sample"
DUPLICATES = "rollout_matching.correction.duplicates"
MODE = "rollout_matching.vllm.mode"
SERVERS = "rollout_matching.vllm.server.servers"
SYNC = "rollout_matching.vllm.sync.mode"
SENDERS = "rollout_matching.vllm.sync.senders"
ENABLE_LORA = "rollout_matching.vllm.enable_lora"
TENSOR_PARALLEL = "rollout_matching.vllm.tensor_parallel_size"
DATA_PARALLEL = "rollout_matching.vllm.data_parallel_size"
SLEEP = "rollout_matching.vllm.sleep"
BATCHED_TOKENS = "rollout_matching.vllm.engine_args.max_num_batched_tokens"
TEMPERATURE = "rollout_matching.decoding.temperature"
LONGEST_MIXTURE = 1_000_000  # samples after which a mixture of data sets repeats itself, at most; 5 bytes each
METRIC_FIX = "name a metric of evaluation, e.g. metric_for_best_model: f1_50"
# The values of `accelerator_config` that have an effect.
SYNC_EACH_BATCH = tuple({"gradient_accumulation_kwargs": {"sync_each_batch": flag}} for flag in (True, False))


def uses_vllm(s: Settings, mode: str) -> bool:
    return s.backend == "vllm" and s.rollout_matching.vllm.mode == mode


def sync_mode(s: Settings) -> str:
    vllm = s.rollout_matching.vllm
    if vllm.sync.mode != "auto":
        return vllm.sync.mode
    return "adapter" if vllm.enable_lora else "full"


def max_length(s: Settings) -> int | None:
    return s.global_max_length or s.template.max_length


def idle_reason(module: Module, s: Settings) -> str | None:
    """Return why a declared module has no effect in this run, or None if it has one."""
    weights = [value for name, value in module.config if name.endswith("_weight")]
    if not module.enabled:
        return "disabled"
    if module.name == "chat_ce" and "A" not in module.channels:
        return "inactive: chat records are on channel A, and it runs on channel B"
    if module.name != "chat_ce" and not s.channels & set(module.channels):
        own, others = ", ".join(module.channels), ", ".join(sorted(s.channels))
        return f"inactive: it runs on channel {own}, and this run on {others}"
    if module.name in OBJECTIVES and (module.weight == 0 or not any(weights)):
        return "without effect: its weight is 0"
    return None


def trains_chat(s: Settings) -> bool:
    """Return whether the objective of the run trains on chat records."""
    modules = s.pipeline.objective if s.pipeline is not None else ()
    return any(module.name == "chat_ce" and not idle_reason(module, s) for module in modules)


def _pipeline_is_declared(s: Settings, world: World) -> Iterator[Conflict]:
    if s.pipeline is None:
        fix = (
            "there is no default objective: declare objective and diagnostics (coordexp config reference lists "
            "the modules)"
        )
        yield Conflict(s.pipeline_path, f"missing, but required by {s.custom.trainer_variant}", fix, (VARIANT,))


def _modules_are_in_the_right_list(s: Settings, world: World) -> Iterator[Conflict]:
    for path, pipeline in (
        ("rollout_matching.pipeline", s.rollout_matching.pipeline),
        ("stage1.pipeline", s.stage1.pipeline),
    ):
        if pipeline is not None:
            yield from _check_module_list(f"{path}.objective", pipeline.objective, DIAGNOSTICS, "diagnostics")
            yield from _check_module_list(f"{path}.diagnostics", pipeline.diagnostics, OBJECTIVES, "objective")


def _check_module_list(
    path: str, modules: tuple[Module, ...], misplaced: frozenset[str], right_list: str
) -> Iterator[Conflict]:
    seen: dict[str, int] = {}
    for index, module in enumerate(modules):
        here = f"{path}[{index}]"
        if module.name in misplaced:
            yield Conflict(
                f"{here}.name", f"{module.name} does not belong in this list", f"move the entry to {right_list}"
            )
        elif module.name in seen:
            problem = f"{module.name} is declared twice, first at [{seen[module.name]}]"
            yield Conflict(f"{here}.name", problem, "keep one entry for each module")
        if len(set(module.channels)) < len(module.channels):
            problem = f"{list(module.channels)} names a channel twice"
            yield Conflict(f"{here}.channels", problem, "write each channel once")
        seen.setdefault(module.name, index)


def _something_is_trained(s: Settings, world: World) -> Iterator[Conflict]:
    if s.pipeline is not None and all(idle_reason(module, s) for module in s.pipeline.objective):
        reasons = "; ".join(f"{module.name} is {idle_reason(module, s)}" for module in s.pipeline.objective)
        fix = "enable at least one module with a weight above 0 on a channel of this run"
        others = (VARIANT, "stage2.b_ratio")
        yield Conflict(f"{s.pipeline_path}.objective", f"nothing would be trained: {reasons}", fix, others)


def _answers_are_taught(s: Settings, world: World) -> Iterator[Conflict]:
    """Refuse an objective that teaches no part of an answer. One of modules of other packages alone is possible if
    it names an own module that is off: then it is not a list whose other entries were forgotten."""
    modules = s.pipeline.objective if s.pipeline is not None else ()
    active = [module for module in modules if module.name in OBJECTIVES and not idle_reason(module, s)]
    weights = {(module.name, name) for module in active for name, value in module.config if value}
    is_taught = any((module, name) in weights for module, names in TEACHING.items() for name in names)
    has_added = any(module.name in ADDED_OBJECTIVES for module in active)
    is_meant = has_added and any(module.name in TEACHING for module in modules)
    if active and not is_taught and not is_meant:
        names = ", ".join(module.name for module in active)
        fix = "declare token_ce and coord_reg too (configs/stage1.yaml shows them)"
        if has_added:
            fix += "; if modules of other packages are all that you want, declare token_ce with enabled: false"
        problem = f"no weight of {names} supervises structure, names or coordinates of answers"
        yield Conflict(f"{s.pipeline_path}.objective", problem, fix, (VARIANT, "stage2.b_ratio"))


def _unlikelihood_has_its_loss(s: Settings, world: World) -> Iterator[Conflict]:
    if s.pipeline is None:
        return
    modules = [module for module in s.pipeline.objective if module.name == "duplicate_ul"]
    is_active = any("B" in module.channels and not idle_reason(module, s) for module in modules)
    is_asked_for = "B" in s.channels and s.rollout_matching.correction.duplicates == "unlikelihood"
    objective = f"{s.pipeline_path}.objective"
    if is_asked_for and not is_active:
        fix = f"declare duplicate_ul with a weight above 0 on channel B in {objective}, or set duplicates: remove"
        problem = "unlikelihood needs the module duplicate_ul, and no active one is declared"
        yield Conflict(DUPLICATES, problem, fix, (VARIANT, objective))
    if any(module.enabled for module in modules) and not is_asked_for:
        problem = "duplicate_ul has no effect: no token is marked as unlikely"
        fix = f"remove or disable the module, or set {DUPLICATES}: unlikelihood in a run with rollouts"
        yield Conflict(objective, problem, fix, (VARIANT, DUPLICATES))


def _native_answers_can_be_trained(s: Settings, world: World) -> Iterator[Conflict]:
    objective, adapter = f"{s.pipeline_path}.objective", s.model.adapter
    modules = () if s.pipeline is None else (*s.pipeline.objective, *s.pipeline.diagnostics)
    numbers = [module for module in modules if module.name == "number_ce"]
    if s.custom.answer_format != "native":
        if any(module.enabled for module in numbers):
            problem = "number_ce has no effect: coordinates are tokens of their own, which coord_reg trains"
            fix = f"remove or disable the module, or set {ANSWER_FORMAT}: native"
            yield Conflict(objective, problem, fix, (ANSWER_FORMAT,))
        return
    if s.uses_rollouts:
        problem = f"native, but {s.custom.trainer_variant} corrects rollouts, which needs coordinate tokens"
        fix = "set custom.answer_format: coord_tokens, or custom.trainer_variant: stage1_sft"
        yield Conflict(ANSWER_FORMAT, problem, fix, (VARIANT,))
        return
    if unusable := [module.name for module in modules if module.name in COORD_MODULES and module.enabled]:
        names = " and ".join(unusable)
        problem = f"{names}: only for coordinate tokens, and native answers have numbers in ordinary tokens"
        fix = (
            f"remove or disable {names}, and train numbers with number_ce (configs/stage1-native.yaml shows it), "
            f"or set {ANSWER_FORMAT}: coord_tokens"
        )
        yield Conflict(s.pipeline_path, problem, fix, (ANSWER_FORMAT,))
    elif s.pipeline is not None and all(idle_reason(module, s) for module in numbers):
        problem = "no module trains the coordinates of native answers"
        fix = "declare number_ce with a weight above 0 on channel A, as configs/stage1-native.yaml does"
        yield Conflict(objective, problem, fix, (ANSWER_FORMAT,))
    if adapter is not None and adapter.train_coord_rows:
        problem = "true, but native answers have no coordinate tokens"
        yield Conflict("model.adapter.train_coord_rows", problem, "set it to false", (ANSWER_FORMAT,))
    if s.custom.object_field_order != "desc_first":
        problem = f"{s.custom.object_field_order} has no effect: native answers have bbox_2d first, then label"
        yield Conflict("custom.object_field_order", problem, "remove it", (ANSWER_FORMAT,))
    if s.rollout_matching.repeat_terminate.max_object_keys is not None:
        problem = "the keys object_1, object_2, ... are counted, and native answers have none"
        path = "rollout_matching.repeat_terminate.max_object_keys"
        yield Conflict(path, problem, "set it to null", (ANSWER_FORMAT,))


def _length_is_known(s: Settings, world: World) -> Iterator[Conflict]:
    length, template = s.global_max_length, s.template.max_length
    if length is None and template is None:
        fix = "this is the longest sequence in tokens; add e.g. global_max_length: 16000"
        yield Conflict("global_max_length", "missing", fix, ("template.max_length",))
    elif length is not None and template is not None and length != template:
        problem = f"{template}, but global_max_length is {length}"
        yield Conflict("template.max_length", problem, "write only one of the two, or the same number in both")


def _answers_fit_in_length(s: Settings, world: World) -> Iterator[Conflict]:
    longest, answer, engine = (
        max_length(s),
        s.rollout_matching.max_new_tokens,
        s.rollout_matching.vllm.max_model_len,
    )
    lengths = ("global_max_length", "template.max_length")
    if longest is not None and (s.uses_rollouts or s.backend == "vllm") and answer >= longest:
        problem = f"{answer} leaves no room for a prompt in {longest} tokens"
        fix = f"use less than {longest}, or raise global_max_length"
        yield Conflict("rollout_matching.max_new_tokens", problem, fix, (*lengths, VARIANT))
    elif engine is not None and s.backend == "vllm":
        path = "rollout_matching.vllm.max_model_len"
        if engine <= answer:
            problem = f"{engine} leaves no room for a prompt beside max_new_tokens {answer}"
            fix = f"use more than {answer}, leave it out, or lower max_new_tokens"
            yield Conflict(path, problem, fix, ("rollout_matching.max_new_tokens", BACKEND))
        elif longest is not None and engine > longest:
            problem = f"{engine} allows answers that global_max_length {longest} cannot hold"
            yield Conflict(path, problem, f"use at most {longest}, or leave it out", (*lengths, BACKEND))


def _image_limits_agree(s: Settings, world: World) -> Iterator[Conflict]:
    least, most = s.model.min_pixels, s.model.max_pixels
    if least is not None and most is not None and least > most:
        problem = f"{least} is more than model.max_pixels {most}"
        yield Conflict("model.min_pixels", problem, f"use at most {most}, or leave it out", ("model.max_pixels",))


def _packing_can_work(s: Settings, world: World) -> Iterator[Conflict]:
    if s.training.packing and not s.training.packing_drop_last:
        problem = "false, but training.packing is true"
        fix = "set packing_drop_last: true; examples that still wait at the end of a run are not trained on"
        yield Conflict("training.packing_drop_last", problem, fix, ("training.packing",))
    buffer, batch = s.training.packing_buffer, s.training.per_device_train_batch_size
    if s.training.packing and buffer < batch:
        problem = f"{buffer} cannot hold one micro-batch: training.per_device_train_batch_size is {batch}"
        fix = f"use at least {batch}, better several times as many, or lower per_device_train_batch_size"
        others = ("training.packing", "training.per_device_train_batch_size")
        yield Conflict("training.packing_buffer", problem, fix, others)


def _number_of_steps_is_known(s: Settings, world: World) -> Iterator[Conflict]:
    steps, epochs = s.training.max_steps, s.training.num_train_epochs
    if steps < 1 and steps != UNSET_STEPS:
        fix = f"use 1 or more, or leave it out ({UNSET_STEPS}) to train for training.num_train_epochs"
        yield Conflict("training.max_steps", f"{steps} is not a number of steps", fix)
    elif steps == UNSET_STEPS and epochs <= 0:
        yield Conflict("training.num_train_epochs", f"{epochs:g} trains nothing", "use more, or set max_steps")
    elif s.training.packing and steps == UNSET_STEPS:
        problem = "missing, but required with training.packing: true"
        fix = (
            "the number of rows per epoch is not known in advance; add e.g. max_steps: 2000, or set packing: false"
        )
        yield Conflict("training.max_steps", problem, fix, ("training.packing",))


def _trainer_supports_values(s: Settings, world: World) -> Iterator[Conflict]:
    """Refuse single values that the trainer does not support, of arguments that it supports otherwise."""
    training = s.training
    if training.optim in ("lomo", "adalomo"):
        problem = f"{training.optim} updates weights during every backward pass, so rows cannot be accumulated"
        yield Conflict("training.optim", problem, "use another optimizer, e.g. adamw_torch_fused or adafactor")
    if training.train_sampling_strategy not in ("random", "sequential"):
        problem = f"{training.train_sampling_strategy} is not supported"
        yield Conflict(
            "training.train_sampling_strategy", problem, "use random, or sequential for the file's order"
        )
    for name in ("eval_strategy", "save_strategy", "logging_strategy"):
        if getattr(training, name) == "epoch":
            fix = f"use steps with {name.replace('strategy', 'steps')}: rows are not counted in epochs"
            yield Conflict(f"training.{name}", "epoch is not supported", fix)
    if training.accelerator_config not in (None, {}, *SYNC_EACH_BATCH):
        problem = "only gradient_accumulation_kwargs.sync_each_batch has an effect: there is no DataLoader"
        fix = "write accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}, or leave it out"
        yield Conflict("training.accelerator_config", problem, fix)
    if "tpu_metrics_debug" in training.debug:
        problem = "tpu_metrics_debug has no effect: it belongs to an evaluation that coordexp does not use"
        yield Conflict("training.debug", problem, "use underflow_overflow, or leave it out")


def _best_metric_is_evaluated(s: Settings, world: World) -> Iterator[Conflict]:
    """Refuse settings that follow a metric if the run does not evaluate or names no metric of evaluation.

    Evaluation has no loss.
    """
    training, others = (
        s.training,
        ("training.eval_strategy", "training.save_strategy", "training.lr_scheduler_type"),
    )
    followers = {"lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"), "save_strategy": ("best",)}
    for name, values in followers.items():
        if (value := getattr(training, name)) not in values:
            continue
        if training.eval_strategy == "no":
            problem = f"{value} follows a metric of evaluation, but training.eval_strategy is no"
            yield Conflict(
                f"training.{name}", problem, "set training.eval_strategy: steps, or use another value", others
            )
        elif training.metric_for_best_model is None:
            problem = f"missing, but required with training.{name}: {value}"
            yield Conflict("training.metric_for_best_model", problem, METRIC_FIX, others)
    if (metric := training.metric_for_best_model) and metric.removeprefix("eval_") == "loss":
        problem = f"{metric} is not a metric of evaluation, which scores answers and has no loss"
        yield Conflict("training.metric_for_best_model", problem, METRIC_FIX)


def _seeds_are_unique(s: Settings, world: World) -> Iterator[Conflict]:
    training = s.training
    per_sample = s.rollout_matching.rollouts_per_sample
    for name, limit in (("gradient_accumulation_steps", 512), ("per_device_train_batch_size", 4095 // per_sample)):
        if s.uses_rollouts and (value := getattr(training, name)) > limit:
            fix = f"use at most {limit}: with more, rollouts of one step would share seeds"
            if per_sample > 1 and limit < 512:
                fix += f" (rollouts_per_sample is {per_sample})"
            others = (VARIANT, PER_SAMPLE)
            yield Conflict(f"training.{name}", f"{value} is too many for rollouts", fix, others)
    if s.uses_rollouts and world.learners is not None and world.learners > 1024:
        problem = f"{world.learners} learner ranks are too many for rollouts"
        yield Conflict("training", problem, "use at most 1024: with more, ranks would share seeds", (VARIANT,))


def _share_of_rollouts_is_set(s: Settings, world: World) -> Iterator[Conflict]:
    two_channel = s.custom.trainer_variant == "stage2_two_channel"
    if two_channel and s.stage2.b_ratio is None:
        fix = "stage2_two_channel needs the share of rollout steps; add e.g. b_ratio: 0.5"
        yield Conflict("stage2.b_ratio", "missing", fix, (VARIANT,))
    if not two_channel and s.stage2.b_ratio is not None:
        problem = f"{s.stage2.b_ratio:g} has no meaning for {s.custom.trainer_variant}"
        fix = "remove it, or set custom.trainer_variant: stage2_two_channel"
        yield Conflict("stage2.b_ratio", problem, fix, (VARIANT,))


def _training_data_is_named_once(s: Settings, world: World) -> Iterator[Conflict]:
    if s.custom.train_jsonl is None and not s.custom.train_data:
        fix = (
            "name the training records: add e.g. train_jsonl: data/train.jsonl; train_data mixes several data sets"
        )
        yield Conflict("custom.train_jsonl", "missing", fix, ("custom.train_data",))
    if s.custom.train_jsonl is not None and s.custom.train_data:
        fix = "keep one of the two; train_jsonl: null removes that of an extended file, train_data: [] likewise"
        yield Conflict("custom.train_data", "given, and so is custom.train_jsonl", fix, ("custom.train_jsonl",))


def _files_have_paths(s: Settings, world: World) -> Iterator[Conflict]:
    own = {"model.path": s.model.path, "training.output_dir": s.training.output_dir}
    for setting, names in ({name: (path,) for name, path in own.items()} | s.custom.data_sets).items():
        for scheme in filter(None, (SCHEME.match(name or "") for name in names)):
            problem = f"{scheme[0]} is not supported: files are read and written by their paths"
            yield Conflict(setting, problem, "copy the files to a disk, or mount them, and give the path")


def _prompts_have_their_fields(s: Settings, world: World) -> Iterator[Conflict]:
    custom = s.custom
    sets = {"custom": custom} | {f"custom.train_data[{k}]": data for k, data in enumerate(custom.train_data)}
    for path, texts in sets.items():
        for name, field in (("class_prompt", "{classes}"), ("expression_prompt", "{expression}")):
            if field not in (getattr(texts, name) or field):
                problem = f"it has no {field}, so the model would not know what is asked for"
                yield Conflict(f"{path}.{name}", problem, f"write {field} where the words of the record belong")
        for name in ("prompt", "class_prompt", "expression_prompt"):
            if "{order}" in (getattr(texts, name) or "") and custom.object_order in ("file", "asked", "random"):
                problem = f"{{order}} has no words for custom.object_order: {custom.object_order}"
                fix = "remove {order}, or set custom.object_order: reading, left_to_right or large_first"
                yield Conflict(f"{path}.{name}", problem, fix)


def _data_sets_have_names_of_their_own(s: Settings, world: World) -> Iterator[Conflict]:
    for path, names in (("custom.train_data", s.custom.set_names), ("custom.eval_data", s.custom.eval_names)):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            problem = f"two data sets are named {twice}, so their metrics would be the same"
            yield Conflict(path, problem, "give each of them a name of its own")


def _objects_have_one_order(s: Settings, world: World) -> Iterator[Conflict]:
    insertion = s.rollout_matching.correction.insertion
    if "B" in s.channels and insertion == "reading_order" and s.custom.object_order not in ("file", "reading"):
        yield Conflict(
            "rollout_matching.correction.insertion",
            f"reading_order contradicts custom.object_order: {s.custom.object_order}",
            "set insertion: in_order, which follows custom.object_order, or custom.object_order: reading",
        )


def _checkpoint_hook_is_installed(s: Settings, world: World) -> Iterator[Conflict]:
    name, hooks = s.custom.on_checkpoint, find_extensions("checkpoint_hooks", taken=frozenset())
    if name is not None and name not in hooks:
        problem = f"{name}: no installed package adds it to coordexp.checkpoint_hooks"
        fix = f"install the package that does (docs/extending.md), or use one of: {', '.join(hooks) or 'none'}"
        yield Conflict("custom.on_checkpoint", problem, fix)


def _data_can_be_mixed(s: Settings, world: World) -> Iterator[Conflict]:
    if len(s.custom.train_data) > 1 and s.custom.curriculum:
        problem = "given, but custom.train_data has several data sets, and a stage may have no records of one"
        fix = "remove the curriculum, or train on one data set (train_jsonl may list several files)"
        yield Conflict("custom.curriculum", problem, fix, ("custom.train_data",))
    if len(s.custom.train_data) > 1 and (period := sum(s.custom.shares)) > LONGEST_MIXTURE:
        weights = ", ".join(str(data.weight) for data in s.custom.train_data)
        problem = f"the weights {weights} are in exact proportion only every {period:,} samples"
        fix = f"round them, e.g. to three digits: at most {LONGEST_MIXTURE:,} samples are possible"
        yield Conflict("custom.train_data", problem, fix)


def _evaluation_has_data(s: Settings, world: World) -> Iterator[Conflict]:
    if s.training.eval_strategy != "no" and s.custom.val_jsonl is None and not s.custom.eval_data:
        problem = f"missing, but training.eval_strategy is {s.training.eval_strategy}"
        fix = "name a file of held-out records, or of questions (custom.eval_data), or set eval_strategy: no"
        yield Conflict("custom.val_jsonl", problem, fix, ("training.eval_strategy",))
    if s.training.eval_on_start and s.training.eval_strategy == "no":
        problem = "true, but training.eval_strategy is no"
        fix = "set eval_strategy: steps with eval_steps, or leave eval_on_start out"
        yield Conflict("training.eval_on_start", problem, fix, ("training.eval_strategy",))


def _one_precision_is_set(s: Settings, world: World) -> Iterator[Conflict]:
    if s.training.bf16 and s.training.fp16:
        yield Conflict("training.fp16", "true, and so is training.bf16", "keep one of the two", ("training.bf16",))


def _decoding_settings_agree(s: Settings, world: World) -> Iterator[Conflict]:
    rollout, temperature = s.rollout_matching, s.rollout_matching.decoding.temperature
    if rollout.decode_mode == "sampling" and temperature == 0:
        fix = "set rollout_matching.decoding.temperature above 0, or decode_mode: greedy"
        yield Conflict(DECODE_MODE, "sampling at temperature 0 is greedy", fix, (TEMPERATURE,))
    if rollout.decode_mode in ("greedy", "beam") and temperature > 0:
        problem = f"{temperature:g}, but decode_mode is {rollout.decode_mode}"
        fix = "set temperature: 0.0, or decode_mode: sampling"
        yield Conflict(TEMPERATURE, problem, fix, (DECODE_MODE,))
    if rollout.rollout_backend == "vllm" and 0 < temperature < 0.01:
        problem = f"{temperature:g}, which vLLM would raise to 0.01"
        yield Conflict(TEMPERATURE, problem, "use 0.0 (greedy), 0.01 or more, or rollout_backend: hf", (BACKEND,))
    if rollout.decode_mode == "beam" and rollout.num_beams is None:
        fix = "decode_mode: beam needs the number of beams; add e.g. num_beams: 4"
        yield Conflict("rollout_matching.num_beams", "missing", fix, (DECODE_MODE,))


def _several_rollouts_can_differ(s: Settings, world: World) -> Iterator[Conflict]:
    rollout = s.rollout_matching
    count, choice = rollout.rollouts_per_sample, rollout.choice
    if count > 1 and rollout.effective_decode_mode != "sampling":
        problem = (
            f"{count} rollouts of a sample would all be the same with {rollout.effective_decode_mode} decoding"
        )
        fix = "set decoding.temperature, e.g. to 0.7, or rollouts_per_sample: 1"
        yield Conflict(PER_SAMPLE, problem, fix, (DECODE_MODE, TEMPERATURE))
    if choice.rule == "union" and choice.votes > count:
        problem = f"{choice.votes} answers can never agree: a sample has {count}"
        fix = f"use at most {count}, or raise rollouts_per_sample" if count > 1 else "raise rollouts_per_sample"
        yield Conflict("rollout_matching.choice.votes", problem, fix, (PER_SAMPLE, "rollout_matching.choice.rule"))
    if rollout.noise.enabled and count > 1:
        problem = f"{count} rollouts of a sample are asked for, and noise.enabled replaces rollouts"
        yield Conflict(PER_SAMPLE, problem, "set rollouts_per_sample: 1", ("rollout_matching.noise.enabled",))
    if rollout.noise.enabled and rollout.rollout_backend != "hf":
        problem = "true needs no engine, and rollout_backend: vllm would start one"
        yield Conflict("rollout_matching.noise.enabled", problem, "set rollout_backend: hf", (BACKEND,))
    if choice.pseudo_labels and choice.rule != "union":
        problem = "true has no effect: only the rule union finds objects to teach"
        fix = "set choice.rule: union, or remove it"
        yield Conflict("rollout_matching.choice.pseudo_labels", problem, fix, ("rollout_matching.choice.rule",))


def _beams_are_supported(s: Settings, world: World) -> Iterator[Conflict]:
    rollout = s.rollout_matching
    if rollout.decode_mode == "beam" and rollout.rollout_backend == "vllm":
        fix = "set rollout_backend: hf for beam search, or decode_mode: greedy"
        yield Conflict(DECODE_MODE, "vLLM has no beam search", fix, (BACKEND,))
    elif rollout.decode_mode == "beam" and (rollout.num_beams or 0) > rollout.decode_batch_size:
        problem = f"{rollout.num_beams} beams, but decode_batch_size is {rollout.decode_batch_size}"
        fix = "each beam is one decoded sequence: use fewer, or raise decode_batch_size"
        others = ("rollout_matching.decode_batch_size", DECODE_MODE, BACKEND)
        yield Conflict("rollout_matching.num_beams", problem, fix, others)
    if rollout.num_beams is not None and rollout.effective_decode_mode != "beam":
        problem = f"{rollout.num_beams} has no effect with {rollout.effective_decode_mode} decoding"
        fix = "remove it, or set decode_mode: beam"
        yield Conflict("rollout_matching.num_beams", problem, fix, (DECODE_MODE, TEMPERATURE))


def _adapter_sync_is_possible(s: Settings, world: World) -> Iterator[Conflict]:
    adapter, vllm = s.model.adapter, s.rollout_matching.vllm
    if s.backend != "vllm" or sync_mode(s) != "adapter":
        return
    others = (BACKEND, ENABLE_LORA, "model.adapter")
    if not vllm.enable_lora:
        fix = "set rollout_matching.vllm.enable_lora: true, or sync.mode: full"
        yield Conflict(SYNC, "adapter needs an engine with LoRA support", fix, others)
    elif adapter is None:
        fix = "set sync.mode: full, or train an adapter (model.adapter)"
        yield Conflict(SYNC, "sends adapters, but model.adapter is null", fix, others)
    elif adapter.dora:
        fix = "set sync.mode: full: vLLM cannot load DoRA adapters, only merged weights"
        yield Conflict(SYNC, "sends adapters, but model.adapter.dora is true", fix, others)
    elif world.learners is not None and world.learners > 1 and vllm.mode == "server":
        problem = f"sends adapters, but there are {world.learners} learner ranks"
        fix = "set sync.mode: full: several learner ranks can only send merged weights to servers"
        yield Conflict(SYNC, problem, fix, (*others, MODE))
    elif vllm.max_lora_rank is not None and vllm.max_lora_rank < adapter.rank:
        problem = f"{vllm.max_lora_rank} is below model.adapter.rank {adapter.rank}"
        fix = f"use at least {adapter.rank}, or leave it out"
        yield Conflict("rollout_matching.vllm.max_lora_rank", problem, fix, (*others, SYNC))


def _tensor_parallel_divides_world(s: Settings, world: World) -> Iterator[Conflict]:
    size, learners = s.rollout_matching.vllm.tensor_parallel_size, world.learners
    if uses_vllm(s, "colocate") and size is not None and learners is not None and learners % size:
        divisors = ", ".join(str(n) for n in range(1, learners + 1) if learners % n == 0)
        problem = f"{size} does not divide the learner world size {learners}"
        fix = f"use one of {divisors}, leave it out, start another number of learners, or set rollout_backend: hf"
        yield Conflict(TENSOR_PARALLEL, problem, fix, (MODE, BACKEND))


def _replicas_are_in_servers(s: Settings, world: World) -> Iterator[Conflict]:
    replicas = s.rollout_matching.vllm.data_parallel_size
    if uses_vllm(s, "colocate") and replicas != 1:
        problem = f"{replicas}, but vllm.mode is colocate, which has one engine per group of learner ranks"
        fix = "remove it, or set vllm.mode: server and list the servers in vllm.server.servers"
        yield Conflict(DATA_PARALLEL, problem, fix, (MODE, BACKEND))


def _rollouts_can_be_made_ahead(s: Settings, world: World) -> Iterator[Conflict]:
    if not s.stage2.max_staleness:
        return
    name, value, otherwise = "stage2.max_staleness", s.stage2.max_staleness, "set stage2.max_staleness: 0"
    if not s.uses_rollouts:
        problem = f"{value}, but this run trains on no rollouts"
        yield Conflict(name, problem, otherwise, ("custom.trainer_variant",))
    elif s.rollout_matching.rollout_backend == "hf":
        problem = f"{value}, but with rollout_backend: hf the learner itself makes the rollouts, and then trains"
        yield Conflict(name, problem, f"{otherwise}, or use rollout servers (vllm.mode: server)", (BACKEND,))
    elif uses_vllm(s, "colocate"):
        problem = f"{value}, but a colocated engine shares its device with the learner, so one of them must wait"
        yield Conflict(name, problem, f"{otherwise}, or vllm.mode: server", (MODE, BACKEND))


def _engine_can_sleep(s: Settings, world: World) -> Iterator[Conflict]:
    if not s.rollout_matching.vllm.sleep or s.backend != "vllm":
        return
    if s.rollout_matching.vllm.mode == "server":
        problem = "true, but vllm.mode is server: the GPUs of a server have no learner to give memory to"
        yield Conflict(SLEEP, problem, "remove it, or set vllm.mode: colocate", (MODE, BACKEND))
    elif s.training.use_cpu:
        problem = "true, but training.use_cpu is true, and only an engine on GPUs can sleep"
        yield Conflict(SLEEP, problem, "remove it", (MODE, BACKEND, "training.use_cpu"))


def _engine_steps_hold_a_batch(s: Settings, world: World) -> Iterator[Conflict]:
    tokens = s.rollout_matching.vllm.engine_args.max_num_batched_tokens
    sequences = s.rollout_matching.decode_batch_size * (s.rollout_matching.vllm.tensor_parallel_size or 1)
    if s.backend == "vllm" and tokens is not None and tokens < sequences:
        problem = f"{tokens} tokens in one step, but the engine decodes {sequences} sequences at once"
        others = (BACKEND, "rollout_matching.decode_batch_size", TENSOR_PARALLEL)
        yield Conflict(BATCHED_TOKENS, problem, f"use at least {sequences}, better 8192, or leave it out", others)


def _servers_are_listed(s: Settings, world: World) -> Iterator[Conflict]:
    servers = s.rollout_matching.vllm.server.servers
    if uses_vllm(s, "server") and not servers:
        fix = (
            "list at least one, e.g. servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}], or set "
            "vllm.mode: colocate or rollout_backend: hf"
        )
        yield Conflict(SERVERS, "missing, but required with vllm.mode: server", fix, (MODE, BACKEND))
    taken: dict[tuple[str | None, int], str] = {}
    for index, server in enumerate(servers):
        url = urlsplit(server.base_url)
        for key, port in (
            ("base_url", url.port or {"http": 80, "https": 443}[url.scheme]),
            ("group_port", server.group_port),
        ):
            here = f"{SERVERS}[{index}].{key}"
            if (url.hostname, port) in taken:
                problem = f"port {port} on {url.hostname} is taken by {taken[url.hostname, port]}"
                fix = "each server needs its own port for HTTP and another for weight transfer"
                yield Conflict(here, problem, fix, (SERVERS,))
            taken.setdefault((url.hostname, port), f"servers[{index}].{key}")


def _senders_have_servers(s: Settings, world: World) -> Iterator[Conflict]:
    vllm = s.rollout_matching.vllm
    senders, servers = vllm.sync.senders, len(vllm.server.servers)
    if not uses_vllm(s, "server") or senders == 1:
        return
    if senders > servers > 0:
        problem = f"{senders} senders, but there {'is 1 server' if servers == 1 else f'are {servers} servers'}"
        fix = f"use at most {servers}, or list more servers in vllm.server.servers"
        yield Conflict(SENDERS, problem, fix, (MODE, BACKEND, SERVERS))
    if world.learners is not None and senders > world.learners:
        ranks = "is 1 learner rank" if world.learners == 1 else f"are {world.learners} learner ranks"
        fix = f"use at most {world.learners}, or start more learner ranks"
        yield Conflict(SENDERS, f"{senders} senders, but there {ranks}", fix, (MODE, BACKEND))


def _requests_fit_devices(s: Settings, world: World) -> Iterator[Conflict]:
    sizes, servers = world.server_world_sizes, s.rollout_matching.vllm.server.servers
    if sizes is None:
        return
    if not uses_vllm(s, "server"):
        problem = "world sizes of rollout servers are given, but this run has no rollout servers"
        fix = f"leave --server-world-sizes out, or set {s.backend_setting}: vllm and vllm.mode: server"
        yield Conflict(MODE, problem, fix, (BACKEND,))
    elif len(sizes) != len(servers):
        problem = f"{len(servers)} servers, but {len(sizes)} world sizes are given"
        yield Conflict(SERVERS, problem, "give one world size for each server", (MODE, BACKEND))
    elif shortage := capacity_shortage(s.rollout_matching.decode_batch_size, sizes, world.learners or 1):
        yield Conflict("rollout_matching.decode_batch_size", *shortage, (MODE, BACKEND, SERVERS))


RULES: tuple[Rule, ...] = (
    _pipeline_is_declared,
    _modules_are_in_the_right_list,
    _something_is_trained,
    _answers_are_taught,
    _unlikelihood_has_its_loss,
    _native_answers_can_be_trained,
    _length_is_known,
    _answers_fit_in_length,
    _image_limits_agree,
    _packing_can_work,
    _number_of_steps_is_known,
    _trainer_supports_values,
    _best_metric_is_evaluated,
    _share_of_rollouts_is_set,
    _seeds_are_unique,
    _training_data_is_named_once,
    _files_have_paths,
    _prompts_have_their_fields,
    _data_sets_have_names_of_their_own,
    _objects_have_one_order,
    _data_can_be_mixed,
    _checkpoint_hook_is_installed,
    _evaluation_has_data,
    _one_precision_is_set,
    _decoding_settings_agree,
    _several_rollouts_can_differ,
    _beams_are_supported,
    _adapter_sync_is_possible,
    _tensor_parallel_divides_world,
    _replicas_are_in_servers,
    _rollouts_can_be_made_ahead,
    _engine_can_sleep,
    _engine_steps_hold_a_batch,
    _servers_are_listed,
    _senders_have_servers,
    _requests_fit_devices,
)


def find_conflicts(settings: Settings, world: World) -> Iterator[Conflict]:
    for rule in RULES:
        yield from rule(settings, world)
