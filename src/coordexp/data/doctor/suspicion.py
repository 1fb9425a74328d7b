"""What only many records can tell: boxes written as x, y, width, height; x and y swapped; a wrong space.

Each suspicion has two parts: a share of the shapes breaks as it is written, and practically all of them fit as
they are suspected to be. One without the other says nothing. `add` counts, `problems` concludes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from coordexp.data.coordinates import BINS
from coordexp.data.doctor.checks import Problem
from coordexp.data.records import SPACES, Record, RecordObject, Space

SLACK = 1.005  # of the extent, for what merely touches the border
FITS = 0.99  # share that must fit a suspicion
BREAKS = 0.05  # share that must break as written
FEW = 3  # fewer than so many are no share


@dataclass
class BoxOrder:
    """Boxes as corners, as corner and size, or as centre and size."""

    boxes: int = 0
    inverted: int = 0
    as_size: int = 0
    as_centre: int = 0

    def add(self, record: Record) -> None:
        width, height = (side * SLACK for side in record.extent)
        for found in record.objects:
            if found.kind == "bbox_2d":
                a, b, c, d = found.coords
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
                detail = f"as corners {self.inverted} of {self.boxes} boxes are inverted; read so, {fit} are sound"
                yield Problem(code, detail)
                return


@dataclass
class AxisOrder:
    """In images that are not square, shapes that fit when x and y are exchanged."""

    shapes: int = 0
    outside: int = 0
    inside_swapped: int = 0

    def add(self, record: Record) -> None:
        width, height = record.extent
        if record.space != "pixel" or max(width, height) < 1.1 * min(width, height):
            return
        for found in record.objects:
            x, y = _furthest([found])
            self.shapes += 1
            self.outside += x > width * SLACK or y > height * SLACK
            self.inside_swapped += x <= height * SLACK and y <= width * SLACK

    def problems(self) -> Iterator[Problem]:
        enough = self.shapes >= 10 and self.outside >= max(FEW, BREAKS * self.shapes)
        if enough and self.inside_swapped >= FITS * self.shapes:
            yield Problem(
                "suspect-swapped",
                f"{self.outside} of {self.shapes} objects leave their images; swapped, {self.inside_swapped} fit",
            )


@dataclass
class SpaceUse:
    """Of the records that state one space: how they fit each, and how far they reach in it."""

    stated: Space
    records: int = 0
    fits: dict[Space, int] = field(default_factory=lambda: dict.fromkeys(SPACES, 0))
    reach: dict[Space, list[float]] = field(default_factory=lambda: {space: [0.0, 0.0] for space in SPACES})

    def add(self, record: Record) -> None:
        x, y = _furthest(record.objects)
        self.records += 1
        for space in SPACES:
            width, height = _extent(record, space)
            self.fits[space] += x <= width * SLACK and y <= height * SLACK
            self.reach[space][0] = max(self.reach[space][0], x / width)
            self.reach[space][1] = max(self.reach[space][1], y / height)

    def problems(self) -> Iterator[Problem]:
        others = [space for space in SPACES if not _alike(space, self.stated)]
        fitting = [space for space in others if self.fits[space] >= FITS * self.records]
        if not fitting or self.records < 5:
            return
        best = max(fitting, key=lambda space: min(self.reach[space]))
        name = "norm1000 or bin" if best in ("norm1000", "bin") else best
        breaks = self.records - self.fits[self.stated]
        if breaks >= max(FEW, 0.2 * self.records):
            yield Problem(
                "suspect-space",
                f"stated {self.stated}: {breaks} of {self.records} records leave it; as {name}, "
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
        """The far part of what is stated is never used, while the other space is used to its edges."""
        fills = min(self.reach[other]) >= 0.9
        return self.records >= 30 and fills and min(self.reach[self.stated]) <= 0.9


class Suspicions:
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
            if not (swapped and use.stated == "pixel"):  # swapped axes leave the image too, and explain it better
                yield from use.problems()


def _furthest(objects: tuple[RecordObject, ...] | list[RecordObject]) -> tuple[float, float]:
    return max(max(found.coords[::2]) for found in objects), max(max(found.coords[1::2]) for found in objects)


def _extent(record: Record, space: Space) -> tuple[float, float]:
    sides: dict[Space, float] = {"unit": 1.0, "norm1000": 1000.0, "bin": BINS - 1.0}
    return (record.width, record.height) if space == "pixel" else (sides[space], sides[space])


def _alike(one: Space, other: Space) -> bool:
    return one == other or {one, other} == {"norm1000", "bin"}
