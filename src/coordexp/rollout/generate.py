"""Rollouts from a vLLM engine of this process, and a backend whose engine keeps the weights of a model folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from coordexp.answers.table import VocabularyTable
from coordexp.config.rollout import RolloutMatching
from coordexp.data.stores import read_ahead
from coordexp.errors import EngineError, explain
from coordexp.rollout import check_vllm
from coordexp.rollout.backend import Decode, Request, Rollout, check_length, check_prompt, common_decode
from coordexp.rollout.guard import cut_at_end, guard_arguments, key_pattern_for
from coordexp.rollout.hugging_face import engine_bias
from coordexp.rollout.prompt import PromptBuilder, load_image
from coordexp.rollout.start import (
    TRAINING_FIX,
    EngineSetup,
    keep_random_numbers,
    start_engine,
    stop_engine,
)

CPU_CACHE = 2**30  # bytes of an engine's KV cache on a CPU; VLLM_CPU_KVCACHE_SPACE overrides it
OR_HF = "or use --backend hf, which needs no engine"
COMMAND_FIX = (
    "lower --max-new-tokens or --batch (max_length or batch of a Detector), or free memory on this device, "
    f"{OR_HF}"
)


class VllmBackend:
    """Generates with an engine that keeps the weights of a model folder. The constructor starts the engine.

    `max_length` limits the tokens of prompt and answer together. At most `batch` sequences are decoded at once. On
    a GPU, the engine takes `gpu_share` of the memory."""

    def __init__(
        self,
        folder: Path,
        prompts: PromptBuilder,
        table: VocabularyTable,
        *,
        max_length: int,
        batch: int = 8,
        dtype: str = "float32",
        gpu_share: float = 0.2,
    ) -> None:
        check_vllm("backend", OR_HF)
        self.prompts, self.table = prompts, table
        on_cuda = torch.cuda.is_available()
        vllm = {
            "gpu_memory_utilization": gpu_share,
            "tensor_parallel_size": 1,
            "max_model_len": max_length,
            "enforce_eager": True,
        }
        setup = EngineSetup(
            folder,
            dtype,
            RolloutMatching.model_validate({"decode_batch_size": batch, "vllm": vllm}),
            table,
            torch.device("cuda" if on_cuda else "cpu"),
            kv_cache_bytes=None if on_cuda else CPU_CACHE,
            fix=COMMAND_FIX,
        )
        self.engine: Any = start_engine(setup)

    def generate(self, requests: Sequence[Request]) -> list[Rollout]:
        return generate_rollouts(self.engine, self.prompts, self.table, requests, fix=COMMAND_FIX)

    def close(self) -> None:
        if self.engine is not None:
            stop_engine(self.engine)
        self.engine = None


def generate_rollouts(
    engine: Any,
    prompts: PromptBuilder,
    table: VocabularyTable,
    requests: Sequence[Request],
    lora_request: Any = None,
    fix: str = TRAINING_FIX,
) -> list[Rollout]:
    """Return one rollout per request, in their order. All requests must decode in the same way.

    Raise DataError if the engine reads a prompt with other token ids than training does. With `lora_request`, the
    engine uses that adapter."""
    if not requests:
        return []
    read_ahead(request.image.path for request in requests)
    decode = common_decode(requests)
    pattern = key_pattern_for(decode.guard, table)
    prompt_ids = [prompts.ids(*request.image.size, request.image.path, request.question) for request in requests]
    for request, ids in zip(requests, prompt_ids, strict=True):
        check_length(request, len(ids), engine.llm_engine.model_config.max_model_len)
    inputs = [
        {"prompt": prompts.text(request.question), "multi_modal_data": {"image": load_image(request.image)}}
        for request in requests
    ]
    guard = guard_arguments(decode.guard, pattern, table.end_of_turn)
    bias = engine_bias(decode, table)
    sampling = [_sampling_params(decode, guard, bias, table.end_of_turn, request.seed) for request in requests]
    with keep_random_numbers(), explain(RuntimeError, "vLLM failed", fix, to=EngineError):
        try:
            outputs = engine.generate(inputs, sampling, use_tqdm=False, lora_request=lora_request)
        except BaseException:  # for example Ctrl-C in a notebook: the next call would get these answers too
            running = engine.llm_engine.output_processor.request_states
            engine.llm_engine.abort_request(list(running), internal=True)
            raise
    rollouts = []
    for request, ids, output in zip(requests, prompt_ids, outputs, strict=True):
        check_prompt(request.image.path, output.prompt_token_ids, ids)
        rollouts.append(_to_rollout(output, decode, pattern, table))
    return rollouts


def _sampling_params(
    decode: Decode, guard: dict[str, Any], bias: dict[int, float], end_of_turn: int, seed: int
) -> Any:
    from vllm import SamplingParams

    sampling = {"temperature": decode.temperature, "top_p": decode.top_p, "top_k": decode.top_k, "seed": seed}
    return SamplingParams(
        **(sampling if decode.mode == "sampling" else {"temperature": 0.0}),
        max_tokens=decode.max_new_tokens,
        logprobs=0,
        ignore_eos=True,
        stop_token_ids=[end_of_turn],
        detokenize=False,
        extra_args=guard or None,
        logit_bias=bias or None,
    )


def _to_rollout(output: Any, decode: Decode, pattern: Sequence[int], table: VocabularyTable) -> Rollout:
    """Return an answer as a rollout. Its version is 0 if the weights that the engine was started with made it."""
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended an answer for a reason of its own: {answer.finish_reason}")
    versions = {span.version for span in answer.weight_versions or ()}
    if len(versions) > 1:
        raise EngineError(f"weights of several versions made one answer: {', '.join(sorted(versions))}")
    version = int(versions.pop()) if versions - {"default"} else 0
    logprobs = [step[id].logprob for step, id in zip(answer.logprobs, answer.token_ids, strict=True)]
    ids, reason = cut_at_end(answer.token_ids, table.end_of_turn, decode.guard, pattern)
    return Rollout.of(table, output.prompt_token_ids, ids, logprobs, reason, version)
