"""Weights in portions of a size that fits a buffer."""

from collections.abc import Iterator

from torch import Tensor

from coordexp.rollout.memory_file import ALIGNMENT

BUCKET_BYTES = 64 * 2**20
Bucket = list[tuple[str, Tensor]]


def buckets(weights: Iterator[tuple[str, Tensor]], size: int) -> Iterator[Bucket]:
    """In their order. One has more than `size` bytes only if its only tensor has."""
    bucket: Bucket = []
    room = size
    for name, weight in weights:
        if bucket and weight.nbytes > room:
            yield bucket
            bucket, room = [], size
        bucket.append((name, weight))
        room -= weight.nbytes + ALIGNMENT
    if bucket:
        yield bucket
