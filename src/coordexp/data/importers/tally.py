"""The account of an import: what was written, and every reason for which something was not, or not as it was."""

from dataclasses import dataclass
from typing import Literal

Effect = Literal["dropped", "changed", "noted"]


@dataclass(frozen=True, slots=True)
class Entry:
    effect: Effect
    reason: str
    count: int
    first: str  # where it was met first, for a person to look


class Tally:
    def __init__(self) -> None:
        self.images = 0
        self.objects = 0
        self.missing = 0  # image files that are not there
        self.first_missing = ""
        self._counts: dict[tuple[Effect, str], int] = {}
        self._firsts: dict[tuple[Effect, str], str] = {}

    def add(self, effect: Effect, reason: str, where: str, count: int = 1) -> None:
        self._counts[effect, reason] = self._counts.get((effect, reason), 0) + count
        self._firsts.setdefault((effect, reason), where)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Dropped before changed before noted, the most frequent first."""
        rank = {"dropped": 0, "changed": 1, "noted": 2}
        keys = sorted(self._counts, key=lambda key: (rank[key[0]], -self._counts[key], key[1]))
        return tuple(Entry(*key, self._counts[key], self._firsts[key]) for key in keys)
