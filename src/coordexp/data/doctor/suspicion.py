"""Mistakes that only many records together reveal: boxes as x, y, width, height; x and y swapped; a wrong space.

Each check needs two observations: some of the shapes are impossible as they are written, and nearly all of them
are possible under another reading. Either observation alone proves nothing. `add` counts, `problems` concludes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from coordexp.data.doctor.checks import Problem
from coordexp.data.geometry import BINS
from coordexp.data.records import SPACES, Record, RecordObject, Space

SLACK = 1.005  # times the extent, so that shapes may touch the border
FITS = 0.99  # share of shapes that must be possible under the other reading
BREAKS = 0.05  # share of shapes that must be impossible as written
FEW = 3  # impossible shapes that are needed at least


@dataclass
class BoxOrder:
    """Counts how many boxes are possible as two corners, as corner and size, or as centre and size."""

    boxes: int = 0
    inverted: int = 0
    as_size: int = 0
    as_centre: int = 0

    def add(self, record: Record) -> None:
        width, height = (side * SLACK for side in record.extent)
        for item in record.objects:
            if item.kind == "bbox_2d":
                a, b, c, d = item.coords
                sizes = c > 0 and d > 0
                self.boxes += 1
                self.inverted += c < a or d < b
                self.as_size += sizes and a >= 0 and b >= 0 and a + c <= width and b + d <= height
                slack = (SLACK - 1) * width, (SLACK - 1) * height
                starts = a - c / 2 >= -slack[0] and b - d / 2 >= -slack[1]
                self.as_centre += sizes and starts and a + c / 2 <= width and b + d / 2 <= height

    def problems(self) -> Iterator[Problem]:
        if self.boxes < 10 or self.inverted < max(FEW, BREAKS * self.boxes):
            return
        for code, fit in (("suspect-xywh", self.as_size), ("suspect-centre", self.as_centre)):
            if fit >= FITS * self.boxes:
                detail = f"{self.inverted} of {self.boxes} boxes are inverted; read this way, {fit} are valid"
                yield Problem(code, detail)
                return


@dataclass
class AxisOrder:
    """Counts the shapes in images that are not square, and those that fit when x and y are exchanged."""

    shapes: int = 0
    outside: int = 0
    inside_swapped: int = 0

    def add(self, record: Record) -> None:
        width, height = record.extent
        if record.space != "pixel" or max(width, height) < 1.1 * min(width, height):
            return
        for item in record.objects:
            x, y = _largest([item])
            self.shapes += 1
            self.outside += x > width * SLACK or y > height * SLACK
            self.inside_swapped += x <= height * SLACK and y <= width * SLACK

    def problems(self) -> Iterator[Problem]:
        enough = self.shapes >= 10 and self.outside >= max(FEW, BREAKS * self.shapes)
        if enough and self.inside_swapped >= FITS * self.shapes:
            yield Problem(
                "suspect-swapped",
                f"{self.outside} of {self.shapes} objects exceed their images; swapped, {self.inside_swapped} fit",
            )


@dataclass
class SpaceUse:
    """Counts, for the records that state one space, how many fit each space and how far they reach in it."""

    stated: Space
    records: int = 0
    fits: dict[Space, int] = field(default_factory=lambda: dict.fromkeys(SPACES, 0))
    reach: dict[Space, list[float]] = field(default_factory=lambda: {space: [0.0, 0.0] for space in SPACES})

    def add(self, record: Record) -> None:
        x, y = _largest(record.objects)
        self.records += 1
        for space in SPACES:
            width, height = _extent(record, space)
            self.fits[space] += x <= width * SLACK and y <= height * SLACK
            self.reach[space][0] = max(self.reach[space][0], x / width)
            self.reach[space][1] = max(self.reach[space][1], y / height)

    def problems(self) -> Iterator[Problem]:
        others = [space for space in SPACES if not _are_alike(space, self.stated)]
        fitting = [space for space in others if self.fits[space] >= FITS * self.records]
        if not fitting or self.records < 5:
            return
        best = max(fitting, key=lambda space: min(self.reach[space]))
        name = "norm1000 or bin" if best in ("norm1000", "bin") else best
        breaks = self.records - self.fits[self.stated]
        if breaks >= max(FEW, 0.2 * self.records):
            yield Problem(
                "suspect-space",
                f"stated {self.stated}: {breaks} of {self.records} records exceed it; as {name}, "
                f"{self.fits[best]} fit",
            )
        elif best == "unit":
            yield Problem("suspect-space", f"stated {self.stated}: no coordinate is above 1; they look like unit")
        elif self._stays_within(best):
            reach = " x ".join(f"{share:.0%}" for share in self.reach[self.stated])
            yield Problem(
                "maybe-space",
                f"stated {self.stated}: the objects of {self.records} records never go beyond {reach} of it, and "
                f"just fill {name}",
            )

    def _stays_within(self, other: Space) -> bool:
        """Return True if no shape reaches the far part of the stated space, while the other one is used to its
        edges."""
        fills = min(self.reach[other]) >= 0.9
        return self.records >= 30 and fills and min(self.reach[self.stated]) <= 0.9


class Suspicions:
    """All checks of this module, on the same records."""

    def __init__(self) -> None:
        self._boxes, self._axes = BoxOrder(), AxisOrder()
        self._spaces = {space: SpaceUse(space) for space in SPACES}

    def add(self, record: Record) -> None:
        if record.objects:
            self._boxes.add(record)
            self._axes.add(record)
            self._spaces[record.space].add(record)

    def problems(self) -> Iterator[Problem]:
        swapped = list(self._axes.problems())
        yield from swapped
        yield from self._boxes.problems()
        for use in self._spaces.values():
            # Swapped axes make shapes exceed the image too, and are the better explanation.
            if not (swapped and use.stated == "pixel"):
                yield from use.problems()


def _largest(objects: Sequence[RecordObject]) -> tuple[float, float]:
    """Return the largest x and the largest y."""
    return max(max(item.coords[::2]) for item in objects), max(max(item.coords[1::2]) for item in objects)


def _extent(record: Record, space: Space) -> tuple[float, float]:
    sides: dict[Space, float] = {"unit": 1.0, "norm1000": 1000.0, "bin": BINS - 1.0}
    return (record.width, record.height) if space == "pixel" else (sides[space], sides[space])


def _are_alike(first: Space, second: Space) -> bool:
    """Return True for equal spaces, and for norm1000 and bin, which no data can tell apart."""
    return first == second or {first, second} == {"norm1000", "bin"}
