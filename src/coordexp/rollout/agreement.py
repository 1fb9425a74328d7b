"""Checks that an engine agrees with the learner: on prompts, on the version of the weights, and on answers.

Weights that were not applied, or only in part, raise no error. They lead to other tokens or other probabilities,
so the answers of both to the same image are compared.
"""

import math
from collections.abc import Sequence

from coordexp.errors import DataError, EngineError
from coordexp.rollout.backend import Request, Rollout

PROBE = 16  # tokens of the answers that are compared
# How far the log probability of a token may differ between two implementations of the same model.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


def check_length(request: Request, prompt_length: int, max_length: int) -> None:
    """Raise DataError if the prompt of a request leaves the engine no room for an answer."""
    if prompt_length >= max_length:
        raise DataError(
            f"{request.image.path}: the engine takes at most {max_length} tokens, but the prompt alone has "
            f"{prompt_length}",
            "raise global_max_length (and rollout_matching.vllm.max_model_len, if it is set), or use a smaller "
            "image",
        )


def check_prompt(image: str, engine_ids: Sequence[int], learner_ids: Sequence[int]) -> None:
    """Raise DataError unless the engine read the prompt that training uses, token by token."""
    if tuple(engine_ids) == tuple(learner_ids):
        return
    pairs = zip(engine_ids, learner_ids, strict=False)
    shorter = min(len(engine_ids), len(learner_ids))
    start = next((k for k, (engine_id, learner_id) in enumerate(pairs) if engine_id != learner_id), shorter)
    actual, expected = (list(ids[start : start + 4]) or "the end" for ids in (engine_ids, learner_ids))
    raise DataError(
        f"{image}: the engine's prompt ({len(engine_ids)} tokens) is not the one that is trained on "
        f"({len(learner_ids)}); they differ from token {start} on: {actual} where {expected} should be",
        "the record's width and height must be those of the image (run `coordexp data doctor`), and the engine "
        "must use the same processor",
    )


def check_version(rollout: Rollout, version: int) -> None:
    """Raise EngineError unless weights of this version made the rollout."""
    if rollout.version != version:
        raise EngineError(
            f"a rollout was made by weights of version {rollout.version}, but should be of version {version}",
            "this should not happen; please report it",
        )


def difference(learner: Rollout, engine: Rollout, dtype: str) -> str | None:
    """Describe how two greedy answers to the same prompt differ, or return None if one model can have made both.

    Where the two best tokens are about equally likely, either may be chosen, and nothing is compared after that
    place. Two different tokens that are both too likely for that come from two models."""
    tolerance = TOLERANCE[dtype]
    tokens = zip(learner.ids, engine.ids, learner.logprobs, engine.logprobs, strict=False)
    for place, (learner_id, engine_id, learner_logprob, engine_logprob) in enumerate(tokens):
        if abs(learner_logprob - engine_logprob) > tolerance:
            return (
                f"token {place} of the learner is {learner_id} with log probability {learner_logprob:.4f}, and "
                f"that of the engine is {engine_id} with {engine_logprob:.4f}"
            )
        if learner_id != engine_id:
            if math.exp(learner_logprob) + math.exp(engine_logprob - tolerance) <= 1:
                return None
            return (
                f"token {place} of the learner is {learner_id} with probability {math.exp(learner_logprob):.3f}, "
                f"and that of the engine is {engine_id} with {math.exp(engine_logprob):.3f}: one model cannot be "
                "so sure of both"
            )
    # In half precision, the end of the answer may have been a choice between equals too.
    if len(learner.ids) != len(engine.ids) and dtype == "float32":
        return f"the learner wrote {len(learner.ids)} tokens and the engine {len(engine.ids)}"
    return None
