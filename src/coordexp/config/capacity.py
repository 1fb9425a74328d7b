"""How many requests the rollout devices can take from the learner ranks, and what an evaluation costs.

The first is computed when a config is loaded and again at run time, when the servers have reported their world
sizes.
"""

from math import gcd
from typing import TYPE_CHECKING

from coordexp.config.violations import ConfigError, Violation

if TYPE_CHECKING:
    from coordexp.config.settings import Settings

DEFAULT_TENSOR_PARALLEL = 4


def default_tensor_parallel_size(learner_world_size: int) -> int:
    """Return the largest divisor of the default size that also divides the learner world size."""
    return gcd(DEFAULT_TENSOR_PARALLEL, learner_world_size)


def requests_per_rank(decode_batch_size: int, server_world_sizes: tuple[int, ...], learner_world_size: int) -> int:
    """Return how many requests one learner rank may have in flight.

    With that number, no rollout device decodes more than `decode_batch_size` sequences even if all ranks ask at
    the same time. Raise ConfigError if there are fewer decoding slots than ranks.
    """
    if shortage := capacity_shortage(decode_batch_size, server_world_sizes, learner_world_size):
        raise ConfigError([Violation(("rollout_matching", "decode_batch_size"), *shortage)])
    return decode_batch_size * sum(server_world_sizes) // learner_world_size


def capacity_shortage(
    decode_batch_size: int, server_world_sizes: tuple[int, ...], learner_world_size: int
) -> tuple[str, str] | None:
    """Return the problem and the fix if there are more learner ranks than decoding slots, else None."""
    devices = sum(server_world_sizes)
    slots = decode_batch_size * devices
    if slots >= learner_world_size:
        return None
    least = -(-learner_world_size // max(devices, 1))
    return (
        f"{decode_batch_size} on {devices} rollout devices is {slots} requests at once, and "
        f"{learner_world_size} learner ranks each need one",
        f"set decode_batch_size to at least {least}, add rollout devices, or use at most {slots} learner ranks",
    )


def describe_evaluation(settings: "Settings", records: int | None) -> str | None:
    """Return one line on what an evaluation during training costs, or None if the run does not evaluate.

    A second line says what to change if images are answered one at a time. `records` is the number of held-out
    records, or None if they cannot be counted.
    """
    training, rollout, limit = settings.training, settings.rollout_matching, settings.custom.eval_samples
    if settings.custom.val_jsonl is None or training.eval_strategy == "no":
        return None
    all_images = "all held-out images" if records is None else f"{records:,} image{'s' if records != 1 else ''}"
    is_limited = limit is not None and (records is None or records > limit)
    images = f"{limit:,} of {all_images}" if is_limited else all_images
    at_once = rollout.decode_batch_size
    answered_by = ""
    if not settings.uses_rollouts:
        answered_by = ", answered with transformers"
        if rollout.rollout_backend != "hf":
            answered_by += f" (rollout_backend: {rollout.rollout_backend} has no effect in stage1_sft)"
    line = (
        f"evaluation: {images}, {at_once} at a time{' on each device' if at_once > 1 else ''}, up to "
        f"{rollout.max_new_tokens:,} tokens each, {_when(settings)}{answered_by}"
    )
    if at_once > 1:
        return line
    hint = (
        "  raise rollout_matching.decode_batch_size to answer several images at once, or limit their number with "
    )
    return f"{line}\n{hint}custom.eval_samples"


def _when(settings: "Settings") -> str:
    steps = settings.training.eval_steps
    steps = settings.training.logging_steps if steps is None else steps
    return f"every {steps:,.0f} steps" if steps >= 1 else f"every {steps:g} of all steps"
