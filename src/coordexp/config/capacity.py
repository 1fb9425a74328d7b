"""Arithmetic between the learner's world and the rollout devices, called at load and again at run time."""

from math import gcd

from coordexp.config.violations import ConfigError, Violation

DEFAULT_TENSOR_PARALLEL = 4


def default_tensor_parallel_size(learner_world_size: int) -> int:
    """The largest part of the default that divides the world (D8)."""
    return gcd(DEFAULT_TENSOR_PARALLEL, learner_world_size)


def requests_per_rank(decode_batch_size: int, server_world_sizes: tuple[int, ...], learner_world_size: int) -> int:
    """How many requests one learner rank may have out at once, so that no rollout device gets more than
    `decode_batch_size` while all ranks ask together (R15). Raises when not even one fits."""
    if shortage := capacity_shortage(decode_batch_size, server_world_sizes, learner_world_size):
        raise ConfigError([Violation(("rollout_matching", "decode_batch_size"), *shortage)])
    return decode_batch_size * sum(server_world_sizes) // learner_world_size


def capacity_shortage(
    decode_batch_size: int, server_world_sizes: tuple[int, ...], learner_world_size: int
) -> tuple[str, str] | None:
    """The problem and the ways out when there are more learner ranks than decoding slots."""
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
