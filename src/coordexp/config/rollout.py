"""Settings under `rollout_matching`: how rollouts are made, read and matched, and what is trained on them.

This section, validated, with derived values filled in and with the packing keys of `training`, is the one object
that rollout-aware trainers receive as `rollout_matching_cfg`: the `RolloutContract` (D27).
"""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from coordexp.config.pipeline import Pipeline
from coordexp.config.section import (
    Fraction,
    NonNegativeFloat,
    Port,
    PositiveFloat,
    PositiveInt,
    Section,
    from_list,
    from_null,
)

TOKEN = "COORDEXP_SERVER_TOKEN"  # noqa: S105 - the variable that holds it, at both ends


def _is_http_prefix(value: str) -> str:
    refusal = "not a URL prefix such as http://127.0.0.1:8000"
    if "@" in value:  # before anything can quote it
        raise ValueError(
            "a URL with a user or a password in it, which would be written into the run folder; remove what is "
            f"before the @ and set {TOKEN} on both ends"
        )
    try:
        url = urlsplit(value)
        port = url.port
    except ValueError as error:
        raise ValueError(f"{refusal} ({error})") from error
    spaced = any(character.isspace() for character in value)
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.fragment or port == 0 or spaced:
        raise ValueError(refusal)
    return value.rstrip("/")


DecodeMode = Literal["greedy", "sampling", "beam"]
BaseUrl = Annotated[str, AfterValidator(_is_http_prefix)]


class Decoding(Section):
    temperature: NonNegativeFloat = Field(0.0, description="Sampling temperature. 0 is greedy.")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus sampling mass.")
    top_k: Literal[-1] | PositiveInt = Field(
        -1, description="Sample among this many best tokens. -1 is all of them."
    )


class RepeatTerminate(Section):
    enabled: bool = Field(False, description="End a sequence that has begun to loop, and only that one.")
    min_new_tokens: Annotated[int, Field(ge=0)] = Field(
        256, description="The guard looks at nothing before this many new tokens."
    )
    max_consecutive_token_repeats: PositiveInt = Field(
        64, description="End after this many repeats of one token in a row."
    )
    ngram_size: PositiveInt = Field(64, description="Length of the token run whose repetition is looked for.")
    ngram_repeats: Annotated[int, Field(ge=2)] = Field(
        2, description="End when the last `ngram_size` tokens stand this many times in a row."
    )
    max_object_keys: PositiveInt | None = Field(
        None, description="End after this many object keys. null sets no limit."
    )


class Offload(Section):
    enabled: bool = Field(False, description="Free training memory while a colocated engine generates.")
    offload_model: bool = Field(False, description="Move the learner's parameters out.")
    offload_optimizer: bool = Field(False, description="Move the optimizer's state out.")


class Server(Section):
    base_url: BaseUrl = Field(
        description="URL prefix of a rollout server.",
        examples=["http://127.0.0.1:8000"],
        json_schema_extra={"pattern": "^https?://[^ ]+$"},
    )
    group_port: Port = Field(
        description="Port for weight transfer to this server; each server needs its own.", examples=[51216]
    )


class ServerPool(Section):
    servers: Annotated[tuple[Server, ...], from_list] = Field(
        (),
        description="The rollout servers, in the order requests are dealt to them. Required in server mode.",
        examples=[[{"base_url": "http://127.0.0.1:8000", "group_port": 51216}]],
    )
    timeout_s: PositiveFloat = Field(
        240.0,
        description="Seconds to wait for a server to be reachable and to join the weight-transfer group.",
    )
    hung_after_s: PositiveFloat = Field(
        60.0,
        description="Seconds without any progress of its engine after which a server says so and ends itself. "
        "Raise it where one step takes longer, such as that of a large model on a CPU.",
    )
    infer_timeout_s: float | None = Field(
        None, description="HTTP timeout of one generation call in seconds. null, 0 or less: none."
    )


class Sync(Section):
    mode: Literal["full", "adapter", "auto"] = Field(
        "full",
        description="What is sent after an update: merged weights, or adapters only (needs `enable_lora`). "
        "`auto` is adapter with `enable_lora`, else full.",
    )
    fallback_to_full: bool = Field(
        True, description="When an adapter sync fails: warn and send full weights from then on, or stop."
    )
    timeout_s: PositiveFloat = Field(
        240.0, description="Seconds that sending weights may take before the run stops."
    )
    canary_every: PositiveInt = Field(
        100,
        description="At the first sync, and at the first one after this many steps, the engine and the learner "
        "answer the same picture, and must agree.",
    )


class VLLM(Section):
    mode: Literal["colocate", "server"] = Field(
        "colocate", description="An engine beside the learner, on its devices, or separate rollout servers."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.45, description="Share of each GPU's memory the engine may take; on a CPU, of the machine's."
    )
    tensor_parallel_size: PositiveInt | None = Field(
        None,
        description="GPUs that share one engine. Unset: with colocate, the greatest common divisor of 4 and the "
        "learner world size; with server, 1.",
        examples=[1],
    )
    data_parallel_size: PositiveInt = Field(
        1,
        description="Engine replicas in one rollout server, each on `tensor_parallel_size` GPUs of its own. The "
        "server deals requests among them. Server mode only.",
        examples=[1],
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Longest prompt plus answer the engine accepts. Unset: `global_max_length`."
    )
    enforce_eager: bool = Field(False, description="Run without compiling: starts faster, generates slower.")
    enable_prefix_caching: bool = Field(True, description="Reuse the computed prompt of a sample seen before.")
    enable_lora: bool = Field(False, description="Load the engine with LoRA support, for adapter sync.")
    max_lora_rank: PositiveInt | None = Field(
        None, description="Largest adapter rank the engine accepts. Unset: `model.adapter.rank`."
    )
    server: Annotated[ServerPool, from_null] = Field(
        default_factory=ServerPool, description="The rollout servers (server mode)."
    )
    sync: Annotated[Sync, from_null] = Field(
        default_factory=Sync, description="How updated weights reach the engine."
    )

    @property
    def devices_per_server(self) -> int:
        """The world size of one rollout server: the devices of all its replicas."""
        return (self.tensor_parallel_size or 1) * self.data_parallel_size


class OptimalTransport(Section):
    cost: Literal["l1", "l2"] = Field("l2", description="Ground cost between vertices, in norm1000 space.")
    epsilon: PositiveFloat = Field(
        0.05, description="Entropic regularisation, relative to the pair's own scale (D18)."
    )
    max_iterations: PositiveInt = Field(200, description="Sinkhorn iterations at most.")
    tolerance: PositiveFloat = Field(1e-5, description="Stop when the marginals are met to this error.")


class RolloutMatching(Section):
    rollout_backend: Literal["vllm", "hf"] = Field("vllm", description="What generates rollouts.")
    decode_batch_size: PositiveInt = Field(
        1,
        description="Sequences decoded at once per rollout device. It alone sets decoding parallelism, in "
        "training and in evaluation.",
        examples=[4],
    )
    max_new_tokens: PositiveInt = Field(2048, description="Tokens an answer may have before it counts as cut off.")
    decode_mode: DecodeMode | None = Field(
        None,
        description="How tokens are chosen. Unset: greedy at temperature 0, else sampling. Beam needs "
        "`rollout_backend: hf`.",
        examples=["greedy"],
    )
    num_beams: Annotated[int, Field(ge=2)] | None = Field(
        None, description="Beams of `decode_mode: beam`; the best one is trained on.", examples=[4]
    )
    decoding: Annotated[Decoding, from_null] = Field(default_factory=Decoding, description="Sampling parameters.")
    candidate_top_k: PositiveInt = Field(
        10, description="True objects considered for each predicted one, by box overlap then distance."
    )
    maskiou_gate: Fraction = Field(0.3, description="A pair below this mask IoU cannot match.")
    maskiou_resolution: Annotated[int, Field(ge=16, le=4096)] = Field(
        256, description="Side of the square canvas for mask IoU. 1000 is exact for boxes."
    )
    fp_cost: NonNegativeFloat = Field(1.0, description="Cost of leaving a predicted object unmatched.")
    fn_cost: NonNegativeFloat = Field(1.0, description="Cost of leaving a true object unmatched.")
    optimal_transport: Annotated[OptimalTransport, from_null] = Field(
        default_factory=OptimalTransport, description="How polygon vertices get their targets."
    )
    vllm: Annotated[VLLM, from_null] = Field(
        default_factory=VLLM, description="The vLLM engine (`rollout_backend: vllm`)."
    )
    repeat_terminate: Annotated[RepeatTerminate, from_null] = Field(
        default_factory=RepeatTerminate, description="The repeat guard, the same for every backend."
    )
    offload: Annotated[Offload, from_null] = Field(
        default_factory=Offload, description="Memory relief during colocated rollouts."
    )
    pipeline: Pipeline | None = Field(
        None,
        description="The declared objective. Required by the stage-2 variants, which have no default one.",
    )

    @property
    def mode_of_decoding(self) -> DecodeMode:
        return self.decode_mode or ("sampling" if self.decoding.temperature > 0 else "greedy")


class RolloutContract(RolloutMatching):
    """All that a rollout-aware trainer reads, wherever a file has it. `Settings.rollout_matching_cfg` makes it; a
    file cannot: it writes the packing keys under `training`, and `packing_length` as `global_max_length`."""

    packing: bool
    packing_buffer: PositiveInt
    packing_min_fill_ratio: Fraction
    packing_drop_last: bool
    packing_length: PositiveInt
