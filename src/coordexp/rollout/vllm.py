"""Answers of a vLLM engine to pictures: the same prompts, greedy, with the log probability of each token."""

from collections.abc import Sequence
from typing import Any

from coordexp.data import DataError
from coordexp.rollout.generated import FinishReason, Generated, Picture
from coordexp.rollout.prompt import PromptBuilder, open_image


def generate_with_vllm(
    engine: Any, prompts: PromptBuilder, pictures: Sequence[Picture], *, max_new_tokens: int, end_of_turn: int
) -> list[Generated]:
    """Checks that the engine reads a prompt as training does: the same token ids."""
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=max_new_tokens, logprobs=0, ignore_eos=True, stop_token_ids=[end_of_turn]
    )
    requests = [
        {
            "prompt": prompts.text,
            "multi_modal_data": {"image": open_image(picture.path, (picture.width, picture.height))},
        }
        for picture in pictures
    ]
    outputs = engine.generate(requests, greedy, use_tqdm=False)
    found = []
    for picture, output in zip(pictures, outputs, strict=True):
        _check_prompt(picture, list(output.prompt_token_ids), prompts.ids(picture.width, picture.height))
        found.append(_generated(output.outputs[0], end_of_turn))
    return found


def _generated(answer: Any, end_of_turn: int) -> Generated:
    ids = list(answer.token_ids)
    logprobs = [step[id].logprob for step, id in zip(answer.logprobs, ids, strict=True)]
    length = ids.index(end_of_turn) if end_of_turn in ids else len(ids)
    reason: FinishReason = "length" if answer.finish_reason == "length" else "stop"
    return Generated(tuple(ids[:length]), tuple(logprobs[:length]), reason)


def _check_prompt(picture: Picture, engine: list[int], ours: list[int]) -> None:
    if engine != ours:
        pairs = zip(engine, ours, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(engine), len(ours)))
        raise DataError(
            f"{picture.path}: vLLM's prompt ({len(engine)} tokens) is not ours ({len(ours)}), from token {at} on\n"
            "  the record's width and height must be those of the picture: run `coordexp data doctor`"
        )
