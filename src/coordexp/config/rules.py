"""Rules between settings: pure functions from settings and world to conflicts.

A conflict names the setting to change and the others it clashes with. The loader drops a conflict when one
of those settings is itself in error, so rules need not be defensive. What can be known only while running
(a server's real world size) is a function in `capacity`, called here when the number is given.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from coordexp.config.capacity import requests_per_rank
from coordexp.config.settings import Settings
from coordexp.config.violations import ConfigError


@dataclass(frozen=True)
class World:
    """Processes a run will have. `server_world_sizes` is None while nobody has asked the servers."""

    learners: int = 1
    server_world_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Conflict:
    path: str
    problem: str
    fix: str
    others: tuple[str, ...] = ()


Rule = Callable[[Settings, World], Iterator[Conflict]]

VARIANT = "custom.trainer_variant"
BACKEND = "rollout_matching.rollout_backend"
DECODE_MODE = "rollout_matching.decode_mode"
MODE = "rollout_matching.vllm.mode"
SERVERS = "rollout_matching.vllm.server.servers"
SYNC = "rollout_matching.vllm.sync.mode"
ENABLE_LORA = "rollout_matching.vllm.enable_lora"
TENSOR_PARALLEL = "rollout_matching.vllm.tensor_parallel_size"
TEMPERATURE = "rollout_matching.decoding.temperature"


def uses_vllm(s: Settings, mode: str) -> bool:
    return s.rollout_matching.rollout_backend == "vllm" and s.rollout_matching.vllm.mode == mode


def uses_rollouts(s: Settings) -> bool:
    return s.custom.trainer_variant != "stage1_sft"


def sync_mode(s: Settings) -> str:
    vllm = s.rollout_matching.vllm
    if vllm.sync.mode != "auto":
        return vllm.sync.mode
    return "adapter" if vllm.enable_lora else "full"


def decode_mode(s: Settings) -> str:
    rollout = s.rollout_matching
    return rollout.decode_mode or ("sampling" if rollout.decoding.temperature > 0 else "greedy")


def max_length(s: Settings) -> int | None:
    return s.global_max_length or s.template.max_length


def _pipeline_is_declared(s: Settings, world: World) -> Iterator[Conflict]:
    path = "rollout_matching.pipeline" if uses_rollouts(s) else "stage1.pipeline"
    declared = s.rollout_matching.pipeline if uses_rollouts(s) else s.stage1.pipeline
    if declared is None:
        variant = s.custom.trainer_variant
        fix = f"{variant} has no default objective: declare objective and diagnostics, as in configs/"
        yield Conflict(path, "required, and missing", fix, (VARIANT,))


def _pipeline_modules_are_distinct(s: Settings, world: World) -> Iterator[Conflict]:
    for path, pipeline in (
        ("rollout_matching.pipeline", s.rollout_matching.pipeline),
        ("stage1.pipeline", s.stage1.pipeline),
    ):
        if pipeline is None:
            continue
        for part in ("objective", "diagnostics"):
            seen: dict[str, int] = {}
            for index, module in enumerate(getattr(pipeline, part)):
                here = f"{path}.{part}[{index}]"
                if module.name in seen:
                    problem = f"{module.name} is declared twice, first at [{seen[module.name]}]"
                    yield Conflict(f"{here}.name", problem, "keep one entry for each module")
                if len(set(module.channels)) < len(module.channels):
                    problem = f"{list(module.channels)} names a channel twice"
                    yield Conflict(f"{here}.channels", problem, "write each channel once")
                seen.setdefault(module.name, index)


def _something_is_trained(s: Settings, world: World) -> Iterator[Conflict]:
    path = "rollout_matching.pipeline" if uses_rollouts(s) else "stage1.pipeline"
    pipeline = s.rollout_matching.pipeline if uses_rollouts(s) else s.stage1.pipeline
    if pipeline is None:
        return
    if not any(module.enabled and module.weight > 0 for module in pipeline.objective):
        fix = "enable at least one module with a weight above 0"
        yield Conflict(f"{path}.objective", "no module is enabled with a weight above 0", fix, (VARIANT,))


def _length_is_known(s: Settings, world: World) -> Iterator[Conflict]:
    ours, theirs = s.global_max_length, s.template.max_length
    if ours is None and theirs is None:
        fix = "the longest sequence, in tokens; add e.g. global_max_length: 16000"
        yield Conflict("global_max_length", "missing", fix, ("template.max_length",))
    elif ours is not None and theirs is not None and ours != theirs:
        problem = f"{theirs}, and global_max_length is {ours}"
        yield Conflict("template.max_length", problem, "write one of the two, or the same number in both")


def _answers_fit(s: Settings, world: World) -> Iterator[Conflict]:
    longest, answer = max_length(s), s.rollout_matching.max_new_tokens
    if uses_rollouts(s) and longest is not None and answer >= longest:
        problem = f"{answer} leaves no room for a prompt in {longest} tokens"
        fix = f"use less than {longest}, or raise global_max_length"
        others = ("global_max_length", "template.max_length", VARIANT)
        yield Conflict("rollout_matching.max_new_tokens", problem, fix, others)


def _packing_carries_over(s: Settings, world: World) -> Iterator[Conflict]:
    if s.training.packing and not s.training.packing_drop_last:
        problem = "false, and training.packing is true"
        fix = "set packing_drop_last: true; segments that still wait at the end get no extra step"
        yield Conflict("training.packing_drop_last", problem, fix, ("training.packing",))


def _mix_is_stated(s: Settings, world: World) -> Iterator[Conflict]:
    two_channel = s.custom.trainer_variant == "stage2_two_channel"
    if two_channel and s.stage2.b_ratio is None:
        fix = "stage2_two_channel needs the share of rollout steps; add e.g. b_ratio: 0.5"
        yield Conflict("stage2.b_ratio", "missing", fix, (VARIANT,))
    if not two_channel and s.stage2.b_ratio is not None:
        problem = f"{s.stage2.b_ratio:g} has no meaning for {s.custom.trainer_variant}"
        fix = "remove it, or set custom.trainer_variant: stage2_two_channel"
        yield Conflict("stage2.b_ratio", problem, fix, (VARIANT,))


def _evaluation_has_data(s: Settings, world: World) -> Iterator[Conflict]:
    if s.training.eval_strategy != "no" and s.custom.val_jsonl is None:
        problem = f"missing, and training.eval_strategy is {s.training.eval_strategy}"
        fix = "name a file of held-out records, or set eval_strategy: no"
        yield Conflict("custom.val_jsonl", problem, fix, ("training.eval_strategy",))


def _decoding_agrees(s: Settings, world: World) -> Iterator[Conflict]:
    rollout, decoding = s.rollout_matching, s.rollout_matching.decoding
    if decode_mode(s) == "sampling" and decoding.temperature == 0:
        fix = "set rollout_matching.decoding.temperature above 0, or decode_mode: greedy"
        yield Conflict(DECODE_MODE, "sampling at temperature 0 is greedy", fix, (TEMPERATURE,))
    if decode_mode(s) == "sampling":
        return
    neutral = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    for name, value in neutral.items():
        if getattr(decoding, name) != value:
            problem = f"{getattr(decoding, name):g} has no effect with {decode_mode(s)} decoding"
            fix = f"set {name}: {value}, or decode_mode: sampling with a temperature above 0"
            yield Conflict(f"rollout_matching.decoding.{name}", problem, fix, (DECODE_MODE, TEMPERATURE))
    if decode_mode(s) == "beam" and rollout.num_beams is None:
        fix = "decode_mode: beam needs it; add e.g. num_beams: 4"
        yield Conflict("rollout_matching.num_beams", "missing", fix, (DECODE_MODE,))


def _beams_are_hugging_face(s: Settings, world: World) -> Iterator[Conflict]:
    rollout = s.rollout_matching
    if rollout.decode_mode == "beam" and rollout.rollout_backend == "vllm":
        fix = "set rollout_backend: hf for beam search, or decode_mode: greedy"
        yield Conflict(DECODE_MODE, "vLLM has no beam search", fix, (BACKEND,))
    if rollout.num_beams is not None and decode_mode(s) != "beam":
        problem = f"{rollout.num_beams} has no effect with {decode_mode(s)} decoding"
        fix = "remove it, or set decode_mode: beam"
        yield Conflict("rollout_matching.num_beams", problem, fix, (DECODE_MODE, TEMPERATURE))


def _adapter_sync_is_possible(s: Settings, world: World) -> Iterator[Conflict]:
    if s.rollout_matching.rollout_backend != "vllm" or sync_mode(s) != "adapter":
        return
    if not s.rollout_matching.vllm.enable_lora:
        fix = "set rollout_matching.vllm.enable_lora: true, or sync.mode: full"
        yield Conflict(SYNC, "adapter needs an engine with LoRA support", fix, (ENABLE_LORA, BACKEND))
    if s.model.adapter is None and uses_rollouts(s):
        fix = "set sync.mode: full, or train an adapter (model.adapter)"
        yield Conflict(
            SYNC, "adapter, and model.adapter is null", fix, ("model.adapter", VARIANT, BACKEND, ENABLE_LORA)
        )
    if s.model.adapter is not None and s.model.adapter.dora:
        fix = "set sync.mode: full: vLLM loads no DoRA adapter, merged weights it does"
        yield Conflict(
            SYNC, "adapter, and model.adapter.dora is true", fix, ("model.adapter", BACKEND, ENABLE_LORA)
        )


def _ranks_sync_full_weights(s: Settings, world: World) -> Iterator[Conflict]:
    if uses_vllm(s, "server") and world.learners > 1 and sync_mode(s) == "adapter":
        given = s.rollout_matching.vllm.sync.mode
        problem = f"{given} sends adapters, and there are {world.learners} learner ranks"
        fix = "set sync.mode: full: with several learner ranks the servers get merged weights"
        yield Conflict(SYNC, problem, fix, (MODE, BACKEND, ENABLE_LORA))


def _tensor_parallel_divides_world(s: Settings, world: World) -> Iterator[Conflict]:
    size = s.rollout_matching.vllm.tensor_parallel_size
    if uses_rollouts(s) and uses_vllm(s, "colocate") and size is not None and world.learners % size:
        problem = f"{size} does not divide the learner world size {world.learners}"
        divisors = [str(n) for n in range(1, world.learners + 1) if world.learners % n == 0]
        fix = f"use one of {', '.join(divisors)}, leave it out, or set rollout_backend: hf"
        yield Conflict(TENSOR_PARALLEL, problem, fix, (MODE, BACKEND, VARIANT))


def _servers_are_listed(s: Settings, world: World) -> Iterator[Conflict]:
    servers = s.rollout_matching.vllm.server.servers
    if uses_vllm(s, "server") and not servers:
        fix = (
            "list at least one, e.g. servers: [{base_url: http://127.0.0.1:8000, group_port: 51216}], or set "
            "vllm.mode: colocate or rollout_backend: hf"
        )
        yield Conflict(SERVERS, "missing, and vllm.mode is server", fix, (MODE, BACKEND))
    urls = Counter(server.base_url for server in servers)
    ports = Counter((urlsplit(server.base_url).hostname, server.group_port) for server in servers)
    for index, server in enumerate(servers):
        url = urlsplit(server.base_url)
        if urls[server.base_url] > 1:
            fix = "list each server once"
            yield Conflict(f"{SERVERS}[{index}].base_url", f"{server.base_url} is listed twice", fix, (SERVERS,))
        if ports[url.hostname, server.group_port] > 1:
            fix = "each server needs its own port for weight transfer"
            problem = f"{server.group_port} is used by two servers on {url.hostname}"
            yield Conflict(f"{SERVERS}[{index}].group_port", problem, fix, (SERVERS,))
        if server.group_port == url.port:
            fix = "weight transfer needs a port of its own, beside the one for HTTP"
            yield Conflict(f"{SERVERS}[{index}].group_port", f"{url.port} is also the port of base_url", fix)


def _requests_fit_devices(s: Settings, world: World) -> Iterator[Conflict]:
    sizes = world.server_world_sizes
    if sizes is None or not uses_vllm(s, "server"):
        return
    if len(sizes) != len(s.rollout_matching.vllm.server.servers):
        problem = f"{len(s.rollout_matching.vllm.server.servers)} servers, and {len(sizes)} world sizes given"
        yield Conflict(SERVERS, problem, "give one world size for each server", (MODE, BACKEND))
        return
    try:
        requests_per_rank(s.rollout_matching.decode_batch_size, sizes, world.learners)
    except ConfigError as error:
        for violation in error.violations:
            path = "rollout_matching.decode_batch_size"
            yield Conflict(path, violation.problem, violation.fix, (MODE, BACKEND, SERVERS))


RULES: tuple[Rule, ...] = (
    _pipeline_is_declared,
    _pipeline_modules_are_distinct,
    _something_is_trained,
    _length_is_known,
    _answers_fit,
    _packing_carries_over,
    _mix_is_stated,
    _evaluation_has_data,
    _decoding_agrees,
    _beams_are_hugging_face,
    _adapter_sync_is_possible,
    _ranks_sync_full_weights,
    _tensor_parallel_divides_world,
    _servers_are_listed,
    _requests_fit_devices,
)


def conflicts(settings: Settings, world: World) -> Iterator[Conflict]:
    for rule in RULES:
        yield from rule(settings, world)
