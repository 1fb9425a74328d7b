"""Which data set each sample of a mixture comes from.

After any number of samples, each set has had its share of them to within one sample. This is a schedule with
deadlines: if a set has the share w of all samples, its sample j (from 0) may not come before position j / w, and
must have come before position (j + 1) / w, rounded up. Of the sets that may come, the one with the earliest
deadline is taken. This always succeeds, because the shares add up to 1.

Shares are ratios of whole numbers, so the schedule repeats itself. One period of it is computed, and then every
position is looked up: a resumed run needs no other state than its number of samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """Data sets that are mixed. Of each `sum(shares)` samples, `shares[k]` come from set k, which has `sizes[k]`
    records."""

    shares: tuple[int, ...]
    sizes: tuple[int, ...]

    def locate(self, position: int) -> tuple[int, int]:
        """Return the set that the sample at a position comes from, and how many samples of it came before."""
        periods, offset = divmod(position, len(self._period[0]))
        chosen = int(self._period[0][offset])
        return chosen, periods * self.shares[chosen] + int(self._period[1][offset])

    @cached_property
    def _period(self) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint32]]:
        return _schedule(self.shares)


def _schedule(shares: Sequence[int]) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint32]]:
    """Return one period: the set of each position, and how many samples of that set came before."""
    period = sum(shares)
    sets = np.zeros(period, dtype=np.min_scalar_type(len(shares)))
    before = np.zeros(period, dtype=np.uint32)
    taken = [0] * len(shares)
    waiting = [(0, chosen) for chosen in range(len(shares))]  # with the position from which on a set may be taken
    heapify(waiting)
    ready: list[tuple[int, int]] = []  # with the position at which a set must have been taken
    for position in range(period):
        while waiting and waiting[0][0] <= position:
            _, chosen = heappop(waiting)
            heappush(ready, (-(-(taken[chosen] + 1) * period // shares[chosen]), chosen))
        _, chosen = heappop(ready)
        sets[position], before[position] = chosen, taken[chosen]
        taken[chosen] += 1
        heappush(waiting, (taken[chosen] * period // shares[chosen], chosen))
    return sets, before
