"""Answers of a vLLM engine to pictures, whose prompts must be those that training uses, token by token."""

from collections.abc import Sequence
from typing import Any

from coordexp.errors import DataError, EngineError
from coordexp.rollout.backend import Decode, Request, Rollout, one_decode
from coordexp.rollout.guard import ended, guard_arguments, key_pattern
from coordexp.rollout.prompt import PromptBuilder, check_prompt, open_image
from coordexp.vocab import VocabularyTable


def answers(
    engine: Any,
    prompts: PromptBuilder,
    table: VocabularyTable,
    requests: Sequence[Request],
    lora_request: Any = None,
) -> list[Rollout]:
    """In the order of the requests, all of which decode alike. The engine must read each prompt as training does:
    the same token ids. It answers with the adapter of `lora_request`, if there is one."""
    if not requests:
        return []
    decode = one_decode(requests)
    pattern = key_pattern(table) if decode.guard.enabled and decode.guard.max_object_keys is not None else ()
    wanted = [prompts.ids(*one.picture.size, one.picture.path) for one in requests]
    for one, ids in zip(requests, wanted, strict=True):
        check_length(one, len(ids), engine.llm_engine.model_config.max_model_len)
    asked = [
        {
            "prompt": prompts.text,
            "multi_modal_data": {"image": open_image(one.picture.path, one.picture.size)},
        }
        for one in requests
    ]
    guard = guard_arguments(decode.guard, pattern, table.end_of_turn)
    sampling = [_sampling(decode, guard, table.end_of_turn, one.seed) for one in requests]
    outputs = engine.generate(asked, sampling, use_tqdm=False, lora_request=lora_request)
    found = []
    for one, ids, output in zip(requests, wanted, outputs, strict=True):
        check_prompt(one.picture.path, output.prompt_token_ids, ids)
        found.append(_rollout(output, decode, pattern, table))
    return found


def check_length(request: Request, prompt: int, most: int) -> None:
    if prompt >= most:
        raise DataError(
            f"{request.picture.path}: the engine takes {most} tokens, and its prompt alone has {prompt}\n"
            "  raise global_max_length (and rollout_matching.vllm.max_model_len, if it is set), or use a smaller "
            "picture"
        )


def _sampling(decode: Decode, guard: dict[str, Any], end_of_turn: int, seed: int) -> Any:
    from vllm import SamplingParams

    drawn = {"temperature": decode.temperature, "top_p": decode.top_p, "top_k": decode.top_k, "seed": seed}
    return SamplingParams(
        **(drawn if decode.mode == "sampling" else {"temperature": 0.0}),
        max_tokens=decode.max_new_tokens,
        logprobs=0,
        ignore_eos=True,
        stop_token_ids=[end_of_turn],
        detokenize=False,
        extra_args=guard or None,
    )


def _rollout(output: Any, decode: Decode, pattern: Sequence[int], table: VocabularyTable) -> Rollout:
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended an answer by itself ({answer.finish_reason})")
    logprobs = [step[id].logprob for step, id in zip(answer.logprobs, answer.token_ids, strict=True)]
    ids, reason = ended(answer.token_ids, table.end_of_turn, decode.guard, pattern)
    return Rollout.of(table, output.prompt_token_ids, ids, logprobs, reason, _version(answer.weight_versions))


def _version(spans: Sequence[Any] | None) -> int:
    """Of the weights that made an answer; 0 for those that the engine was started with."""
    versions = {span.version for span in spans or ()}
    if len(versions) > 1:
        raise RuntimeError(f"an answer was made by weights of versions {', '.join(sorted(versions))}")
    return int(versions.pop()) if versions - {"default"} else 0
