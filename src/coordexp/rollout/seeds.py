"""The seed of every request (D21): 31 bits, never 0, the same in a repeated run.

Run seed and step are hashed to a start; micro-step, rank and request are a place that is added to it, scrambled,
in the integers modulo a prime. Different places of one step can therefore never share a seed.
"""

import hashlib

_PRIME = 2**31 - 1
_SCRAMBLE = 0x2545F491  # any number that is no multiple of the prime
MICRO_STEPS, RANKS, REQUESTS = 512, 1024, 4095  # a step has at most so many


def request_seed(run: int, step: int, micro: int, rank: int, request: int) -> int:
    for what, value, limit in (("micro-step", micro, MICRO_STEPS), ("rank", rank, RANKS)):
        if not 0 <= value < limit:
            raise ValueError(f"{what} {value}: seeds are told apart for the first {limit} of a step")
    if not 0 <= request < REQUESTS:
        raise ValueError(f"request {request}: seeds are told apart for the first {REQUESTS} of a micro-step")
    digest = hashlib.blake2b(f"{run} {step}".encode(), digest_size=8).digest()
    place = (micro * RANKS + rank) * REQUESTS + request
    return 1 + (int.from_bytes(digest, "big") + place * _SCRAMBLE) % _PRIME
