"""Settings under `rollout_matching`: how rollouts are generated, parsed and matched, and the objective for them.

Trainers with rollouts receive one object, `rollout_matching_cfg`: this section with derived values, and packing.
"""

from contextlib import suppress
from functools import reduce
from ipaddress import ip_address
from math import gcd
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from coordexp.config.sections import (
    Fraction,
    NonNegativeFloat,
    Pipeline,
    Port,
    PositiveFloat,
    PositiveInt,
    SettingsSection,
    from_list,
    from_null,
    make_added_module,
)
from coordexp.config.training import Packing
from coordexp.extensions import find_extensions

DEFAULT_TENSOR_PARALLEL = 4
ENGINE_STEP_TOKENS = 8192  # that an engine on GPUs computes in one step, as vLLM's own server does on large ones
TOKEN = "COORDEXP_SERVER_TOKEN"  # noqa: S105 - the environment variable of learner and server


def check_base_url(value: str) -> str:
    """Return the URL without a trailing slash. Raise ValueError if it is not a plain HTTP address."""
    if "@" in value:  # Checked first, before a message can quote the password.
        raise ValueError(
            "a URL with a user or a password, which would be written into the run folder; remove the part before "
            f"the @ and set {TOKEN} for the learner and the server"
        )
    wrong = "not a URL prefix such as http://127.0.0.1:8000"
    try:
        url = urlsplit(value)
        rest = url.query or url.fragment or url.port == 0 or any(map(str.isspace, value))
    except ValueError as error:
        raise ValueError(f"{wrong} ({error})") from error
    if url.scheme not in ("http", "https") or not url.hostname or rest:
        raise ValueError(wrong)
    return value.rstrip("/")


def is_loopback_host(host: str) -> bool:
    """Return True if an address, or the name localhost, can be reached only from this machine."""
    with suppress(ValueError):  # a name
        return ip_address(host).is_loopback
    return host.lower() == "localhost"


DecodeMode = Literal["greedy", "sampling", "beam"]
BaseUrl = Annotated[str, AfterValidator(check_base_url)]


class Decoding(SettingsSection):
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature. 0: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this share (nucleus sampling)."""
    top_k: Literal[-1] | PositiveInt = -1
    """Sample from this many of the most likely tokens. -1: all."""


class RepeatTerminate(SettingsSection):
    enabled: bool = False
    """End a rollout that repeats itself. Other rollouts of the batch go on."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 256
    """Do not check a rollout before it has this many tokens."""
    max_consecutive_token_repeats: PositiveInt = 64
    """End a rollout when one token is repeated this many times in a row."""
    ngram_size: PositiveInt = 64
    """Length of the token sequences that are checked for repetition."""
    ngram_repeats: Annotated[int, Field(ge=2)] = 2
    """End a rollout when its last `ngram_size` tokens occur this many times in a row."""
    max_object_keys: PositiveInt | None = None
    """End a rollout after this many object keys. null: no limit."""


class Offload(SettingsSection):
    enabled: bool = False
    """Free memory of the learner while a colocated engine generates."""
    offload_model: bool = False
    """Offload the parameters of the learner."""
    offload_optimizer: bool = False
    """Offload the state of the optimizer."""


class ServerEndpoint(SettingsSection):
    base_url: BaseUrl = Field(
        examples=["http://127.0.0.1:8000"], json_schema_extra={"pattern": "^https?://[^ ]+$"}
    )
    """URL prefix of a rollout server."""
    group_port: Port = Field(examples=[51216])
    """Port for weight transfer to this server, different for each server."""


class ServerPool(SettingsSection):
    servers: Annotated[tuple[ServerEndpoint, ...], from_list] = Field(
        (), examples=[[{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]]
    )
    """The rollout servers, in the order in which they get requests. Required in server mode."""
    timeout_s: PositiveFloat = 240.0
    """Seconds to wait for a server to be reachable and to join the weight-transfer group."""
    hung_after_s: PositiveFloat = 60.0
    """Seconds without progress of its engine after which a server reports that it hangs and exits. Raise it if one
    engine step takes longer, for example with a large model on a CPU."""
    infer_timeout_s: float | None = None
    """HTTP timeout of one generation call, in seconds. null, 0 or less: no timeout."""


class Sync(SettingsSection):
    mode: Literal["full", "adapter", "auto"] = "full"
    """What a weight sync sends: all weights with adapters merged (full), or adapters only (adapter, which needs
    `enable_lora`). `auto`: adapter with `enable_lora`, else full."""
    fallback_to_full: bool = True
    """If an adapter sync fails, warn and send full weights from then on. false: stop the run."""
    timeout_s: PositiveFloat = 240.0
    """Seconds that a weight sync with servers may take. Server mode only."""
    canary_every: PositiveInt = 100
    """Steps between two canary checks. At the first weight sync, and again after this many steps, the engine and
    the learner answer the same prompt and must agree."""
    senders: PositiveInt = 1
    """Learner ranks that send the weights, each to its share of the rollout servers, all at the same time. 1: the
    first rank sends them to every server. With many servers, use the number of learner nodes. Server mode only."""


class EngineArgs(SettingsSection):
    """Arguments of vLLM's engine that are passed on as they are. Unset ones have vLLM's own defaults."""

    max_num_batched_tokens: PositiveInt | None = Field(None, examples=[8192])
    """Tokens that the engine computes in one step. Unset: 8192 in a server on GPUs, else vLLM's default."""
    mm_processor_cache_gb: NonNegativeFloat | None = None
    """GiB of host memory for the patches of images, twice in a server. Every weight sync drops them. 0: none.
    Unset: vLLM's default, 4."""
    kv_cache_dtype: Literal["auto", "fp8"] | None = Field(None, examples=["auto"])
    """Data type of the KV cache. fp8 takes half the memory of 16 bits, and answers differ slightly from those of
    the learner. Unset: auto, that of the model."""


class VLLM(SettingsSection):
    mode: Literal["colocate", "server"] = "colocate"
    """Where vLLM runs: on the devices of the learner (colocate), or in rollout servers (server)."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.45
    """Share of the memory of each GPU that the engine may use. On a CPU: of the machine's memory."""
    tensor_parallel_size: PositiveInt | None = Field(None, examples=[1])
    """GPUs per engine. Unset: 1 in a server, else the largest of 4, 2 and 1 that divides the learner ranks."""
    data_parallel_size: PositiveInt = Field(1, examples=[1])
    """Engine replicas in one rollout server, each on `tensor_parallel_size` GPUs of its own. The server
    distributes requests among them. Server mode only."""
    max_model_len: PositiveInt | None = None
    """Maximum number of tokens in prompt and answer together. Unset: `global_max_length`."""
    enforce_eager: bool = False
    """Run the engine without compilation: it starts faster and generates more slowly."""
    enable_lora: bool = False
    """Start the engine with LoRA support, which adapter sync needs."""
    max_lora_rank: PositiveInt | None = None
    """Largest adapter rank that the engine accepts. Unset: `model.adapter.rank`."""
    sleep: bool = False
    """Give the GPU memory of a colocated engine to the learner between two rollout phases. The engine's weights
    are moved to host memory, and its KV cache is dropped. Colocate mode on GPUs only."""
    engine_args: Annotated[EngineArgs, from_null] = Field(default_factory=EngineArgs)
    """Further arguments of vLLM's engine."""
    server: Annotated[ServerPool, from_null] = Field(default_factory=ServerPool)
    """The rollout servers (server mode)."""
    sync: Annotated[Sync, from_null] = Field(default_factory=Sync)
    """How updated weights reach the engine."""

    @property
    def devices_per_server(self) -> int:
        """Return the world size of one rollout server: the devices of all its replicas."""
        return (self.tensor_parallel_size or 1) * self.data_parallel_size


class OptimalTransport(SettingsSection):
    cost: Literal["l1", "l2"] = "l2"
    """Distance between vertices: the L1 or the L2 norm."""
    epsilon: PositiveFloat = 0.05
    """Entropic regularisation, relative to the longer side of the smaller shape."""


class AddedPolicySpec(SettingsSection, use_attribute_docstrings=False):  # those made from it have no source
    """A correction policy that another package adds: its name and its settings."""


_added = find_extensions("correction_policies", taken=frozenset())
if TYPE_CHECKING:
    AddedPolicy = Any
elif _added:
    _policies = [make_added_module(entry, AddedPolicySpec, SettingsSection) for entry in _added.values()]
    AddedPolicy = Annotated[reduce(or_, _policies, None), Field(discriminator="name")]
else:
    AddedPolicy = None


class CorrectionPolicy(SettingsSection):
    """How an answer is corrected. The defaults are the specified target: the answer is kept as it is, and missed
    objects are appended. Under every other policy the answer is written anew from its first change on: its objects
    are renumbered, and those that are not valid are left out. `closing_weight` changes no answer."""

    duplicates: Literal["keep", "remove"] = "keep"
    """Objects that repeat an earlier one of the same answer: keep them, or remove them."""
    duplicate_iou: Annotated[float, Field(gt=0, le=1)] = 0.5
    """The IoU with an earlier object of the same answer that makes an object a duplicate, unless it matches a true
    object."""
    extras: Literal["keep", "remove_exhaustive", "remove"] = "keep"
    """Objects that match no true object and are not duplicates: keep them without supervision, remove those of
    classes that their record lists as `exhaustive`, or remove them all. With `choice.rule: union`, `remove` keeps
    those that `choice.votes` answers have."""
    insertion: Literal["append", "in_order", "reading_order"] = "append"
    """Where missed objects go. `append`: at the end of the answer. `in_order`: where the ground truth has them.
    `reading_order`: the same for data in that order; extras go to their place by top edge, then left edge."""
    supervise: Literal["missed", "matched", "matched_with_desc"] = "missed"
    """The text that is supervised. `missed`: that of missed objects. `matched`: also the structure of matched
    objects. `matched_with_desc`: also their `desc`, which is replaced by the true one."""
    closing_weight: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weight of the loss on the closing brace of an answer, in Stage 1 too. With incomplete labels, the share of
    labelled objects balances what answers teach about going on and closing."""
    added_policy: AddedPolicy = None
    """A correction policy of another installed package, with its name and its settings (docs/extending.md)."""

    @property
    def is_specified(self) -> bool:
        """Return whether the answer is kept as it is and only continued, as specified."""
        policy = (self.duplicates, self.extras, self.insertion, self.supervise, self.added_policy)
        return policy == ("keep", "keep", "append", "missed", None)


class RolloutChoice(SettingsSection):
    """The choice among several rollouts of a sample."""

    rule: Literal["best", "union"] = "best"
    """`best`: the answer with the highest F1 against the labels, by shapes alone. `union`: the same answer, and
    with it the objects that several answers agree on and that no label has."""
    votes: Annotated[int, Field(ge=2)] = 2
    """Answers that must have an object before `union` takes it."""
    pseudo_labels: bool = False
    """Teach the objects of `union` like labels. false: they are context without supervision."""


class NoiseAnswers(SettingsSection):
    """Answers that are made from the labels in place of rollouts, as a control."""

    enabled: bool = False
    """Train on answers made from the labels with random mistakes, instead of rollouts. A control experiment: it
    shows what is gained without generation. Needs `rollout_backend: hf`."""
    drop: Fraction = 0.3
    """Probability that a true object is left out."""
    repeat: Fraction = 0.1
    """Probability that an object is followed by a copy of it."""
    random: Fraction = 0.1
    """Probability that a random box follows a true object."""
    jitter: Fraction = 0.1
    """How far a coordinate may be moved, as a share of the object's width or height."""


BACKENDS = ("vllm", "hf")
if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[(*BACKENDS, *find_extensions("rollout_backends", taken=frozenset(BACKENDS)))]


class RolloutMatching(SettingsSection):
    rollout_backend: BackendName = "vllm"
    """Engine that generates rollouts: vLLM, or transformers (hf)."""
    decode_batch_size: PositiveInt = Field(1, examples=[4])
    """Sequences that each rollout device decodes at once, in training and in evaluation."""
    max_new_tokens: PositiveInt = 2048
    """Maximum number of tokens in an answer. A longer answer is cut off."""
    rollouts_per_sample: Annotated[int, Field(ge=1, le=16)] = 1
    """Rollouts of each training sample. More than one needs sampling, and `choice` says what is trained on."""
    choice: Annotated[RolloutChoice, from_null] = Field(default_factory=RolloutChoice)
    """What is trained on if there are several rollouts per sample."""
    decode_mode: DecodeMode | None = Field(None, examples=["greedy"])
    """How tokens are chosen. Unset: greedy at temperature 0, else sampling. beam needs `rollout_backend: hf`."""
    num_beams: Annotated[int, Field(ge=2)] | None = Field(None, examples=[4])
    """Number of beams of `decode_mode: beam`. The best beam is trained on."""
    decoding: Annotated[Decoding, from_null] = Field(default_factory=Decoding)
    """Sampling parameters."""
    candidate_top_k: PositiveInt = 10
    """True objects that are considered for each prediction, chosen by box overlap, then by distance."""
    maskiou_gate: Fraction = 0.3
    """Minimum mask IoU of a matched pair."""
    match_classes: Literal["any", "prefer", "same"] = "any"
    """Whether classes count when objects are compared. `any`: only shapes do. `prefer`: objects of one class are
    matched first, then the rest. `same`: only objects of one class are matched. With the last two, duplicates are
    of one class, too."""
    maskiou_resolution: Annotated[int, Field(ge=16, le=4096)] = 256
    """Side of the square canvas for mask IoU, in pixels. 1000 is exact for boxes."""
    fp_cost: NonNegativeFloat = 1.0
    """Matching cost of a prediction without a true object."""
    fn_cost: NonNegativeFloat = 1.0
    """Matching cost of a true object without a prediction."""
    optimal_transport: Annotated[OptimalTransport, from_null] = Field(default_factory=OptimalTransport)
    """Optimal transport, which sets the targets of polygon vertices."""
    correction: Annotated[CorrectionPolicy, from_null] = Field(default_factory=CorrectionPolicy)
    """How answers are corrected. The defaults are the specified target."""
    noise: Annotated[NoiseAnswers, from_null] = Field(default_factory=NoiseAnswers)
    """Answers made from the labels in place of rollouts, as a control."""
    vllm: Annotated[VLLM, from_null] = Field(default_factory=VLLM)
    """The vLLM engine (`rollout_backend: vllm`)."""
    repeat_terminate: Annotated[RepeatTerminate, from_null] = Field(default_factory=RepeatTerminate)
    """The repeat guard, the same for every backend."""
    offload: Annotated[Offload, from_null] = Field(default_factory=Offload)
    """Offloading of the learner during colocated rollouts."""
    pipeline: Pipeline | None = None
    """The declared objective. Required in Stage 2: there is no default."""

    @property
    def effective_decode_mode(self) -> DecodeMode:
        """Return the decoding mode, also if it is unset and follows from the temperature."""
        return self.decode_mode or ("sampling" if self.decoding.temperature > 0 else "greedy")


class RolloutContract(RolloutMatching, Packing):
    """All settings that a trainer with rollouts reads. It is not a section of a file: a file has the packing keys
    under `training`, and `packing_length` is its `global_max_length`."""

    packing_length: PositiveInt


def default_tensor_parallel_size(learner_world_size: int) -> int:
    """Return the largest divisor of the default size that also divides the learner world size."""
    return gcd(DEFAULT_TENSOR_PARALLEL, learner_world_size)


def capacity_shortage(decode_batch_size: int, devices: int, learner_world_size: int) -> tuple[str, str] | None:
    """Return the problem and the fix if there are more learner ranks than decoding slots, else None."""
    slots = decode_batch_size * devices
    if slots >= learner_world_size:
        return None
    least = -(-learner_world_size // max(devices, 1))
    return (
        f"{decode_batch_size} on {devices} rollout devices is {slots} requests at once, and "
        f"{learner_world_size} learner ranks each need one",
        f"set decode_batch_size to at least {least}, add rollout devices, or use at most {slots} learner ranks",
    )
