"""Rules between settings: pure functions that take valid settings and world sizes and yield conflicts.

A conflict is an error at the setting to change. Rules that need a world size are skipped while it is not known.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from coordexp.config.legacy import EXAMPLE
from coordexp.config.rollout import capacity_shortage, is_loopback_host
from coordexp.config.sections import ADDED_OBJECTIVES, Channel, Module
from coordexp.config.settings import Settings
from coordexp.config.yaml_tree import Error
from coordexp.errors import Finding


@dataclass(frozen=True)
class World:
    """The number of learner ranks. None: not known yet."""

    learners: int | None = None


Conflicts = Iterator[Finding]
ANSWER_FORMAT = "custom.answer_format"
SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
DECODE_MODE = "rollout_matching.decode_mode"
SERVERS = "rollout_matching.vllm.server.servers"
SYNC = "rollout_matching.vllm.sync.mode"
TENSOR_PARALLEL = "rollout_matching.vllm.tensor_parallel_size"
DATA_PARALLEL = "rollout_matching.vllm.data_parallel_size"
TEMPERATURE = "rollout_matching.decoding.temperature"
LONGEST_MIXTURE = 1_000_000  # samples after which a mixture of data sets repeats itself, at most; 5 bytes each


def uses_vllm(s: Settings, mode: str) -> bool:
    return s.backend == "vllm" and s.rollout_matching.vllm.mode == mode


def sync_mode(s: Settings) -> str:
    vllm = s.rollout_matching.vllm
    automatic = "adapter" if vllm.enable_lora else "full"
    return automatic if vllm.sync.mode == "auto" else vllm.sync.mode


def max_length(s: Settings) -> int | None:
    return s.global_max_length or s.template.max_length


def idle_reason(module: Module, s: Settings) -> str | None:
    """Return why a declared module has no effect in this run, or None if it has one."""
    weights = [value for name, value in module.config if name.endswith("_weight")]
    if not module.enabled:
        return "disabled"
    if not running_channels(module, s):
        own, others = ", ".join(module.channels), ", ".join(sorted(s.channels))
        subject = "chat records are on A" if module.config.trains_chat else f"this run on {others}"
        return f"inactive: it runs on channel {own}, and {subject}"
    if not module.config.is_diagnostic and (module.weight == 0 or not any(weights)):
        return "without effect: its weight is 0"
    return None


def running_channels(module: Module, s: Settings) -> frozenset[Channel]:
    """Return the channels on which a module has something to do. Chat records are on channel A also in a run whose
    other samples are all on channel B."""
    channels = frozenset[Channel]({"A"}) if module.config.trains_chat else s.channels
    return channels & frozenset(module.channels)


def trains_chat(s: Settings) -> bool:
    """Return whether the objective of the run trains on chat records."""
    modules = s.pipeline.objective if s.pipeline is not None else ()
    return any(module.config.trains_chat and not idle_reason(module, s) for module in modules)


def find_conflicts(settings: Settings, world: World) -> Conflicts:
    """Yield what is wrong between settings that are valid by themselves."""
    for rule in (
        _check_modules,
        _check_objective,
        _check_native_answers,
        _check_lengths,
        _check_steps,
        _check_trainer,
        _check_evaluation,
        _check_data,
        _check_prompts,
        _check_decoding,
        _check_several_rollouts,
        _check_adapter_sync,
        _check_engine,
        _check_servers,
    ):
        yield from rule(settings, world)


def _check_modules(s: Settings, world: World) -> Conflicts:
    if s.pipeline is None:
        fix = "declare objective and diagnostics (docs/reference/config.md has the modules; none is a default)"
        yield Error(s.pipeline_path, f"missing, but required by {s.custom.trainer_variant}", fix)
    for section, pipeline in (("rollout_matching", s.rollout_matching.pipeline), ("stage1", s.stage1.pipeline)):
        for part in ("objective", "diagnostics") if pipeline is not None else ():
            names: list[str] = []
            for index, module in enumerate(getattr(pipeline, part)):
                here = f"{section}.pipeline.{part}[{index}]"
                right = "diagnostics" if module.config.is_diagnostic else "objective"
                if right != part:
                    problem = f"{module.name} does not belong in this list"
                    yield Error(f"{here}.name", problem, f"move the entry to {right}")
                elif module.name in names:
                    problem = f"{module.name} is declared twice, first at [{names.index(module.name)}]"
                    yield Error(f"{here}.name", problem, "keep one entry for each module")
                if len(set(module.channels)) < len(module.channels):
                    problem = f"{list(module.channels)} names a channel twice"
                    yield Error(f"{here}.channels", problem, "write each channel once")
                names.append(module.name)


def _check_objective(s: Settings, world: World) -> Conflicts:
    """Refuse an objective that trains nothing, or teaches no part of an answer. One of modules of other packages
    alone is possible if it names an own module that is off: then it is not a list whose other entries were
    forgotten."""
    if s.pipeline is None:
        return
    path, modules = f"{s.pipeline_path}.objective", s.pipeline.objective
    active = [module for module in modules if not module.config.is_diagnostic and not idle_reason(module, s)]
    is_taught = any(getattr(module.config, name) for module in active for name in module.config.teaching)
    has_added = any(module.name in ADDED_OBJECTIVES for module in active)
    if all(idle_reason(module, s) for module in modules):
        reasons = "; ".join(f"{module.name} is {idle_reason(module, s)}" for module in modules)
        fix = "enable at least one module with a weight above 0 on a channel of this run"
        yield Error(path, f"nothing would be trained: {reasons}", fix)
    elif active and not is_taught and not (has_added and any(module.config.teaching for module in modules)):
        names = ", ".join(module.name for module in active)
        fix = "declare token_ce and coord_reg too (configs/stage1.yaml shows them)"
        if has_added:
            fix += "; if modules of other packages are all that you want, declare token_ce with enabled: false"
        problem = f"no weight of {names} supervises structure, names or coordinates of answers"
        yield Error(path, problem, fix)


def _check_native_answers(s: Settings, world: World) -> Conflicts:
    objective, adapter = f"{s.pipeline_path}.objective", s.model.adapter
    modules = () if s.pipeline is None else (*s.pipeline.objective, *s.pipeline.diagnostics)
    numbers = [module for module in modules if module.config.answer_format == "native"]
    if s.custom.answer_format != "native":
        if any(module.enabled for module in numbers):
            problem = "number_ce has no effect: coordinates are tokens of their own, which coord_reg trains"
            yield Error(objective, problem, f"remove or disable the module, or set {ANSWER_FORMAT}: native")
        return
    if s.uses_rollouts:
        problem = f"native, but {s.custom.trainer_variant} corrects rollouts, which needs coordinate tokens"
        fix = "set custom.answer_format: coord_tokens, or custom.trainer_variant: stage1_sft"
        yield Error(ANSWER_FORMAT, problem, fix)
        return
    unusable = [module for module in modules if module.config.answer_format == "coord_tokens" and module.enabled]
    if unusable:
        names = " and ".join(module.name for module in unusable)
        problem = f"{names}: only for coordinate tokens, and native answers have numbers in ordinary tokens"
        fix = f"remove or disable {names}, and declare number_ce, as configs/stage1-native.yaml does"
        yield Error(s.pipeline_path, problem, f"{fix}, or set {ANSWER_FORMAT}: coord_tokens")
    elif s.pipeline is not None and all(idle_reason(module, s) for module in numbers):
        fix = "declare number_ce with a weight above 0 on channel A, as configs/stage1-native.yaml does"
        yield Error(objective, "no module trains the coordinates of native answers", fix)
    if adapter is not None and adapter.train_coord_rows:
        problem = "true, but native answers have no coordinate tokens"
        yield Error("model.adapter.train_coord_rows", problem, "set it to false")
    if s.custom.object_field_order != "desc_first":
        problem = f"{s.custom.object_field_order} has no effect: native answers have bbox_2d first, then label"
        yield Error("custom.object_field_order", problem, "remove it")
    if s.rollout_matching.repeat_terminate.max_object_keys is not None:
        problem = "the keys object_1, object_2, ... are counted, and native answers have none"
        yield Error("rollout_matching.repeat_terminate.max_object_keys", problem, "set it to null")


def _check_lengths(s: Settings, world: World) -> Conflicts:
    length, template, longest = s.global_max_length, s.template.max_length, max_length(s)
    answer, engine = s.rollout_matching.max_new_tokens, s.rollout_matching.vllm.max_model_len
    least, most = s.model.min_pixels, s.model.max_pixels
    if least is not None and most is not None and least > most:
        problem = f"{least} is more than model.max_pixels {most}"
        yield Error("model.min_pixels", problem, f"use at most {most}, or leave it out")
    if longest is None:
        fix = "this is the longest sequence in tokens; add e.g. global_max_length: 16000"
        yield Error("global_max_length", "missing", fix)
        return
    if length is not None and template is not None and length != template:
        problem = f"{template}, but global_max_length is {length}"
        yield Error("template.max_length", problem, "write only one of the two, or the same number in both")
    if (s.uses_rollouts or s.backend == "vllm") and answer >= longest:
        problem = f"{answer} leaves no room for a prompt in {longest} tokens"
        fix = f"use less than {longest}, or raise global_max_length"
        yield Error("rollout_matching.max_new_tokens", problem, fix)
    elif engine is not None and s.backend == "vllm" and engine <= answer:
        problem = f"{engine} leaves no room for a prompt beside max_new_tokens {answer}"
        fix = f"use more than {answer}, leave it out, or lower max_new_tokens"
        yield Error("rollout_matching.vllm.max_model_len", problem, fix)
    elif engine is not None and s.backend == "vllm" and engine > longest:
        problem = f"{engine} allows answers that global_max_length {longest} cannot hold"
        yield Error("rollout_matching.vllm.max_model_len", problem, f"use at most {longest}, or leave it out")


def _check_steps(s: Settings, world: World) -> Conflicts:
    training, steps, epochs = s.training, s.training.max_steps, s.training.num_train_epochs
    buffer, batch = training.packing_buffer, training.per_device_train_batch_size
    if training.packing and not training.packing_drop_last:
        fix = "set packing_drop_last: true; examples that still wait at the end of a run are not trained on"
        yield Error("training.packing_drop_last", "false, but training.packing is true", fix)
    if training.packing and buffer < batch:
        problem = f"{buffer} cannot hold one micro-batch: training.per_device_train_batch_size is {batch}"
        fix = f"use at least {batch}, better several times as many, or lower per_device_train_batch_size"
        yield Error("training.packing_buffer", problem, fix)
    if steps < 1 and steps != -1:
        fix = "use 1 or more, or leave it out (-1) to train for training.num_train_epochs"
        yield Error("training.max_steps", f"{steps} is not a number of steps", fix)
    elif steps == -1 and epochs <= 0:
        yield Error("training.num_train_epochs", f"{epochs:g} trains nothing", "use more, or set max_steps")
    elif training.packing and steps == -1:
        fix = "an epoch has no known number of rows; add e.g. max_steps: 2000, or set packing: false"
        yield Error("training.max_steps", "missing, but required with training.packing: true", fix)


def _check_trainer(s: Settings, world: World) -> Conflicts:
    training, ratio = s.training, s.stage2.b_ratio
    two_channel = s.custom.trainer_variant == "stage2_two_channel"
    if two_channel and ratio is None:
        fix = "stage2_two_channel needs the share of rollout steps; add e.g. b_ratio: 0.5"
        yield Error("stage2.b_ratio", "missing", fix)
    if not two_channel and ratio is not None:
        problem = f"{ratio:g} has no meaning for {s.custom.trainer_variant}"
        yield Error("stage2.b_ratio", problem, "remove it, or set custom.trainer_variant: stage2_two_channel")
    batch, per_sample = training.per_device_train_batch_size, s.rollout_matching.rollouts_per_sample
    samples = f"samples per micro-step{f' with {per_sample} rollouts each' if per_sample > 1 else ''}"
    for name, value, noun, limit in (
        ("training.per_device_train_batch_size", batch, samples, 4095 // per_sample),
        (
            "training.gradient_accumulation_steps",
            training.gradient_accumulation_steps,
            "micro-steps per step",
            512,
        ),
        ("training", world.learners or 1, "learner ranks", 1024),
    ):
        if s.uses_rollouts and value > limit:
            problem = f"{value} {noun} are more than {limit}, so rollouts would share seeds"
            yield Error(name, problem, f"use at most {limit}")
    if training.bf16 and training.fp16:
        yield Error("training.fp16", "true, and so is training.bf16", "keep one of the two")


def _check_evaluation(s: Settings, world: World) -> Conflicts:
    """Refuse an evaluation without data, and settings that follow a metric if the run does not evaluate or names
    no metric of evaluation, which has no loss."""
    training = s.training
    if training.eval_strategy != "no" and s.custom.val_jsonl is None and not s.custom.eval_data:
        fix = "name a file of held-out records, or of questions (custom.eval_data), or set eval_strategy: no"
        yield Error("custom.val_jsonl", f"missing, but training.eval_strategy is {training.eval_strategy}", fix)
    if training.eval_on_start and training.eval_strategy == "no":
        fix = "set eval_strategy: steps with eval_steps, or leave eval_on_start out"
        yield Error("training.eval_on_start", "true, but training.eval_strategy is no", fix)
    fix = "name a metric of evaluation, e.g. metric_for_best_model: f1_50"
    followers = {"lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"), "save_strategy": ("best",)}
    for name, values in followers.items():
        if (value := getattr(training, name)) in values and training.eval_strategy == "no":
            problem = f"{value} follows a metric of evaluation, but training.eval_strategy is no"
            yield Error(f"training.{name}", problem, "set training.eval_strategy: steps, or use another value")
        elif value in values and training.metric_for_best_model is None:
            problem = f"missing, but required with training.{name}: {value}"
            yield Error("training.metric_for_best_model", problem, fix)
    if (metric := training.metric_for_best_model) and metric.removeprefix("eval_") == "loss":
        problem = f"{metric} is not a metric of evaluation, which scores answers and has no loss"
        yield Error("training.metric_for_best_model", problem, fix)


def _check_data(s: Settings, world: World) -> Conflicts:
    custom, weights = s.custom, [data.weight for data in s.custom.train_data]
    if custom.train_jsonl is None and not custom.train_data:
        fix = "name the training records, e.g. train_jsonl: data/train.jsonl; train_data mixes several data sets"
        yield Error("custom.train_jsonl", "missing", fix)
    if custom.train_jsonl is not None and custom.train_data:
        fix = "keep one of the two; train_jsonl: null removes that of an extended file, train_data: [] likewise"
        yield Error("custom.train_data", "given, and so is custom.train_jsonl", fix)
    if len(weights) > 1 and custom.curriculum:
        problem = "given, but custom.train_data has several data sets, and a stage may have no records of one"
        fix = "remove the curriculum, or train on one data set (train_jsonl may list several files)"
        yield Error("custom.curriculum", problem, fix)
    if len(weights) > 1 and (period := sum(custom.shares)) > LONGEST_MIXTURE:
        problem = (
            f"the weights {', '.join(map(str, weights))} are in exact proportion only every {period:,} samples"
        )
        fix = f"round them, e.g. to three digits: at most {LONGEST_MIXTURE:,} samples are possible"
        yield Error("custom.train_data", problem, fix)
    for path, names in (("custom.train_data", custom.set_names), ("custom.eval_data", custom.eval_names)):
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"two data sets are named {twice[0]}, so their metrics would be the same"
            yield Error(path, problem, "give each of them a name of its own")
    own = {"model.path": (s.model.path,), "training.output_dir": (s.training.output_dir,)}
    for setting, paths in (own | custom.data_sets).items():
        for scheme in filter(None, map(SCHEME.match, paths)):
            problem = f"{scheme[0]} is not supported: files are read and written by their paths"
            yield Error(setting, problem, "copy the files to a disk, or mount them, and give the path")


def _check_prompts(s: Settings, world: World) -> Conflicts:
    custom, insertion = s.custom, s.rollout_matching.correction.insertion
    sets = {"custom": custom} | {f"custom.train_data[{k}]": data for k, data in enumerate(custom.train_data)}
    for path, texts in sets.items():
        for name, field in (("prompt", ""), ("class_prompt", "{classes}"), ("expression_prompt", "{expression}")):
            text = getattr(texts, name) or field
            if field not in text:
                problem = f"it has no {field}, so the model would not know what is asked for"
                yield Error(f"{path}.{name}", problem, f"write {field} where the words of the record belong")
            if "{order}" in text and custom.object_order in ("file", "asked", "random"):
                problem = f"{{order}} has no words for custom.object_order: {custom.object_order}"
                fix = "remove {order}, or set custom.object_order: reading, left_to_right or large_first"
                yield Error(f"{path}.{name}", problem, fix)
    if "B" in s.channels and insertion == "reading_order" and custom.object_order not in ("file", "reading"):
        problem = f"reading_order contradicts custom.object_order: {custom.object_order}"
        fix = "set insertion: in_order, which follows custom.object_order, or custom.object_order: reading"
        yield Error("rollout_matching.correction.insertion", problem, fix)


def _check_decoding(s: Settings, world: World) -> Conflicts:
    rollout, temperature = s.rollout_matching, s.rollout_matching.decoding.temperature
    mode, beams = rollout.decode_mode, rollout.num_beams
    if mode == "sampling" and temperature == 0:
        fix = "set rollout_matching.decoding.temperature above 0, or decode_mode: greedy"
        yield Error(DECODE_MODE, "sampling at temperature 0 is greedy", fix)
    if mode in ("greedy", "beam") and temperature > 0:
        problem = f"{temperature:g}, but decode_mode is {mode}"
        yield Error(TEMPERATURE, problem, "set temperature: 0.0, or decode_mode: sampling")
    if rollout.rollout_backend == "vllm" and 0 < temperature < 0.01:
        problem = f"{temperature:g}, which vLLM would raise to 0.01"
        yield Error(TEMPERATURE, problem, "use 0.0 (greedy), 0.01 or more, or rollout_backend: hf")
    if mode == "beam" and beams is None:
        fix = "decode_mode: beam needs the number of beams; add e.g. num_beams: 4"
        yield Error("rollout_matching.num_beams", "missing", fix)
    if mode == "beam" and rollout.rollout_backend == "vllm":
        fix = "set rollout_backend: hf for beam search, or decode_mode: greedy"
        yield Error(DECODE_MODE, "vLLM has no beam search", fix)
    elif mode == "beam" and (beams or 0) > rollout.decode_batch_size:
        problem = f"{beams} beams, but decode_batch_size is {rollout.decode_batch_size}"
        fix = "each beam is one decoded sequence: use fewer, or raise decode_batch_size"
        yield Error("rollout_matching.num_beams", problem, fix)
    if beams is not None and rollout.effective_decode_mode != "beam":
        problem = f"{beams} has no effect with {rollout.effective_decode_mode} decoding"
        yield Error("rollout_matching.num_beams", problem, "remove it, or set decode_mode: beam")


def _check_several_rollouts(s: Settings, world: World) -> Conflicts:
    rollout, choice, name = s.rollout_matching, s.rollout_matching.choice, "rollout_matching.rollouts_per_sample"
    count, mode = rollout.rollouts_per_sample, rollout.effective_decode_mode
    if count > 1 and mode != "sampling":
        problem = f"{count} rollouts of a sample would all be the same with {mode} decoding"
        yield Error(name, problem, "set decoding.temperature, e.g. to 0.7, or rollouts_per_sample: 1")
    if choice.rule == "union" and choice.votes > count:
        problem = f"{choice.votes} answers can never agree: a sample has {count}"
        fix = f"use at most {count}, or raise rollouts_per_sample" if count > 1 else "raise rollouts_per_sample"
        yield Error("rollout_matching.choice.votes", problem, fix)
    if choice.pseudo_labels and choice.rule != "union":
        problem = "true has no effect: only the rule union finds objects to teach"
        yield Error("rollout_matching.choice.pseudo_labels", problem, "set choice.rule: union, or remove it")
    if rollout.noise.enabled and count > 1:
        problem = f"{count} rollouts of a sample are asked for, and noise.enabled replaces rollouts"
        yield Error(name, problem, "set rollouts_per_sample: 1")
    if rollout.noise.enabled and rollout.rollout_backend != "hf":
        problem = "true needs no engine, and rollout_backend: vllm would start one"
        yield Error("rollout_matching.noise.enabled", problem, "set rollout_backend: hf")


def _check_adapter_sync(s: Settings, world: World) -> Conflicts:
    adapter, vllm = s.model.adapter, s.rollout_matching.vllm
    if s.backend != "vllm" or sync_mode(s) != "adapter":
        return
    if not vllm.enable_lora:
        fix = "set rollout_matching.vllm.enable_lora: true, or sync.mode: full"
        yield Error(SYNC, "adapter needs an engine with LoRA support", fix)
    elif adapter is None:
        fix = "set sync.mode: full, or train an adapter (model.adapter)"
        yield Error(SYNC, "sends adapters, but model.adapter is null", fix)
    elif adapter.dora:
        fix = "set sync.mode: full: vLLM cannot load DoRA adapters, only merged weights"
        yield Error(SYNC, "sends adapters, but model.adapter.dora is true", fix)
    elif world.learners is not None and world.learners > 1 and vllm.mode == "server":
        fix = "set sync.mode: full: several learner ranks can only send merged weights to servers"
        yield Error(SYNC, f"sends adapters, but there are {world.learners} learner ranks", fix)
    elif vllm.max_lora_rank is not None and vllm.max_lora_rank < adapter.rank:
        problem = f"{vllm.max_lora_rank} is below model.adapter.rank {adapter.rank}"
        yield Error(
            "rollout_matching.vllm.max_lora_rank", problem, f"use at least {adapter.rank}, or leave it out"
        )


def _check_engine(s: Settings, world: World) -> Conflicts:
    vllm, size, learners = s.rollout_matching.vllm, s.rollout_matching.vllm.tensor_parallel_size, world.learners
    tokens, sequences = vllm.engine_args.max_num_batched_tokens, s.rollout_matching.decode_batch_size * (size or 1)
    idle = "this run trains on no rollouts" if not s.uses_rollouts else ""
    if s.uses_rollouts and s.backend == "hf":
        idle = "with rollout_backend: hf the learner itself makes the rollouts, and then trains"
    if s.uses_rollouts and uses_vllm(s, "colocate"):
        idle = "a colocated engine shares its device with the learner, so one of them must wait"
    if s.stage2.max_staleness and idle:
        servers = ", or use rollout servers (vllm.mode: server)" if s.uses_rollouts else ""
        fix = f"set stage2.max_staleness: 0{servers}"
        yield Error("stage2.max_staleness", f"{s.stage2.max_staleness}, but {idle}", fix)
    if s.backend != "vllm":
        return
    if vllm.mode == "colocate" and size is not None and learners is not None and learners % size:
        divisors = ", ".join(str(n) for n in range(1, learners + 1) if learners % n == 0)
        problem = f"{size} does not divide the learner world size {learners}"
        fix = f"use one of {divisors}, leave it out, start another number of learners, or set rollout_backend: hf"
        yield Error(TENSOR_PARALLEL, problem, fix)
    if vllm.mode == "colocate" and vllm.data_parallel_size != 1:
        problem = f"{vllm.data_parallel_size}, but vllm.mode is colocate: one engine per group of learner ranks"
        fix = "remove it, or set vllm.mode: server and list the servers in vllm.server.servers"
        yield Error(DATA_PARALLEL, problem, fix)
    if vllm.sleep and vllm.mode == "server":
        problem = "true, but vllm.mode is server: the GPUs of a server have no learner to give memory to"
        yield Error("rollout_matching.vllm.sleep", problem, "remove it, or set vllm.mode: colocate")
    elif vllm.sleep and s.training.use_cpu:
        problem = "true, but training.use_cpu is true, and only an engine on GPUs can sleep"
        yield Error("rollout_matching.vllm.sleep", problem, "remove it")
    if tokens is not None and tokens < sequences:
        problem = f"{tokens} tokens in one step, but the engine decodes {sequences} sequences at once"
        fix = f"use at least {sequences}, better 8192, or leave it out"
        yield Error("rollout_matching.vllm.engine_args.max_num_batched_tokens", problem, fix)


def _check_servers(s: Settings, world: World) -> Conflicts:
    vllm, learners = s.rollout_matching.vllm, world.learners
    servers, senders, is_used = vllm.server.servers, vllm.sync.senders, uses_vllm(s, "server")
    at_once, devices = s.rollout_matching.decode_batch_size, len(servers) * vllm.devices_per_server
    # Servers of other machines may have another size. The learner asks them.
    is_local = all(is_loopback_host(urlsplit(server.base_url).hostname or "") for server in servers)
    taken = dict[tuple[str | None, int], str]()
    for index, server in enumerate(servers):
        url = urlsplit(server.base_url)
        ports = {"base_url": url.port or {"http": 80, "https": 443}[url.scheme], "group_port": server.group_port}
        for key, port in ports.items():
            if (url.hostname, port) in taken:
                problem = f"port {port} on {url.hostname} is taken by {taken[url.hostname, port]}"
                fix = "each server needs its own port for HTTP and another for weight transfer"
                yield Error(f"{SERVERS}[{index}].{key}", problem, fix)
            taken.setdefault((url.hostname, port), f"servers[{index}].{key}")
    if is_used and not servers:
        fix = f"list at least one, e.g. {EXAMPLE}, or set vllm.mode: colocate or rollout_backend: hf"
        yield Error(SERVERS, "missing, but required with vllm.mode: server", fix)
    elif is_used and is_local and (shortage := capacity_shortage(at_once, devices, learners or 1)):
        yield Error("rollout_matching.decode_batch_size", *shortage)
    for count, noun, fix in (
        (len(servers), "server", "list more servers in vllm.server.servers"),
        (learners, "learner rank", "start more learner ranks"),
    ):
        if is_used and count and senders > count:
            there = f"is 1 {noun}" if count == 1 else f"are {count} {noun}s"
            problem = f"{senders} senders, but there {there}"
            yield Error("rollout_matching.vllm.sync.senders", problem, f"use at most {count}, or {fix}")
