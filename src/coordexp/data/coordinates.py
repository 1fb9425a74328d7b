"""The one place where pixels become bins and bins become pixels (D10).

A coordinate is a continuous edge in `[0, size]`; bin 0 is the first edge and bin 999 the last. A round trip
moves an edge by at most half a bin.
"""

BINS = 1000
_LAST = BINS - 1


def to_bin(value: float, size: float) -> int:
    return min(_LAST, max(0, round(value / size * _LAST)))


def to_pixels(bin: float, size: float) -> float:
    return bin / _LAST * size
