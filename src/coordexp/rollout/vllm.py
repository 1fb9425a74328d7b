"""Answers of a vLLM engine to pictures: the same prompts, greedy, with the log probability of each token."""

from collections.abc import Sequence
from typing import Any

from coordexp.rollout.backend import FinishReason, Picture, Rollout
from coordexp.rollout.prompt import PromptBuilder, check_prompt, open_image


def generate_with_vllm(
    engine: Any, prompts: PromptBuilder, pictures: Sequence[Picture], *, max_new_tokens: int, end_of_turn: int
) -> list[Rollout]:
    """Checks that the engine reads a prompt as training does: the same token ids."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=max_new_tokens, logprobs=0, ignore_eos=True, stop_token_ids=[end_of_turn]
    )
    requests = [
        {
            "prompt": prompts.text,
            "multi_modal_data": {"image": open_image(picture.path, picture.size)},
        }
        for picture in pictures
    ]
    outputs = engine.generate(requests, greedy, use_tqdm=False)
    found = []
    for picture, output in zip(pictures, outputs, strict=True):
        check_prompt(picture.path, output.prompt_token_ids, prompts.ids(*picture.size))
        found.append(_rollout(output.prompt_token_ids, output.outputs[0], end_of_turn))
    return found


def _rollout(prompt: Sequence[int], answer: Any, end_of_turn: int) -> Rollout:
    ids = list(answer.token_ids)
    logprobs = [step[id].logprob for step, id in zip(answer.logprobs, ids, strict=True)]
    length = ids.index(end_of_turn) if end_of_turn in ids else len(ids)
    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
    return Rollout(tuple(prompt), tuple(ids[:length]), tuple(logprobs[:length]), reason)
