"""Whether an engine has the learner's weights, seen from what both answer to the same picture (D23).

Weights that were not applied, or only in part, make no error: they make other tokens, or other probabilities.
"""

import math

from coordexp.rollout.backend import Rollout

PROBE = 16  # tokens
# By which the log probability of a token may differ between two implementations of the same model.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


def difference(learner: Rollout, engine: Rollout, dtype: str) -> str | None:
    """What is not the same in two greedy answers, if anything is. Where the first two choices were as good as
    equal, either may be taken, and what follows is not compared; two tokens that are both likelier than that are
    of two models."""
    allowed = TOLERANCE[dtype]
    pairs = zip(learner.ids, engine.ids, learner.logprobs, engine.logprobs, strict=False)
    for at, (own, other, probable, there) in enumerate(pairs):
        if abs(probable - there) > allowed:
            return (
                f"token {at} is {own} with log probability {probable:.4f} by the learner, and {other} with "
                f"{there:.4f} by the engine"
            )
        if own != other:
            if math.exp(probable) + math.exp(there - allowed) <= 1:
                return None
            return (
                f"token {at} is {own} with probability {math.exp(probable):.3f} by the learner, and {other} with "
                f"{math.exp(there):.3f} by the engine: one model cannot be so sure of both"
            )
    if len(learner.ids) != len(engine.ids) and dtype == "float32":  # else it may be a close choice too
        return f"the learner wrote {len(learner.ids)} tokens and the engine {len(engine.ids)}"
    return None
