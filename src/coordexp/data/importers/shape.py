"""One source object to the shapes that are written: box or polygon, one part or several, inside the image.

Numbers are rounded to a thousandth of a pixel. A shape that would have no area in 1,000 bins is dropped here,
since nothing could be trained on it.
"""

from collections.abc import Iterator

from coordexp.data.coordinates import to_bin
from coordexp.data.importers.simplify import simplified
from coordexp.data.importers.source import Ring, Rules, SourceError, SourceObject, area, hull
from coordexp.data.importers.tally import Tally
from coordexp.data.records import RecordObject
from coordexp.data.sample import GeometryKind, count_fits, degenerate

BORDER = 0.1  # pixels: what a tool's own rounding may put a shape outside by
FLAT = 1e-6  # square pixels: no more than what is left of zero after rounding

Shape = tuple[GeometryKind, Ring]


def settle(found: SourceObject, size: tuple[int, int], rules: Rules, tally: Tally) -> Iterator[RecordObject]:
    for kind, coords in _chosen(found, rules, tally):
        kept = _inside(kind, coords, size, found.where, rules, tally)
        if kept is None:
            continue
        if kind == "poly" and rules.tolerance > 0:
            plain = simplified(kept, rules.tolerance)
            if plain != kept:
                tally.add("changed", "polygon drawn with fewer vertices (--tolerance)", found.where)
            kept = plain
        rounded = tuple(round(value, 3) for value in kept)
        if degenerate(kind, tuple(to_bin(value, size[k % 2]) for k, value in enumerate(rounded))):
            tally.add("dropped", "object that has no area in 1,000 bins", found.where)
            continue
        yield RecordObject(found.desc, kind, rounded, found.category_id)


def _chosen(found: SourceObject, rules: Rules, tally: Tally) -> list[Shape]:
    """By the rules on geometry and parts."""
    rings = _usable(found, tally) if rules.geometry != "box" or not found.box else []
    if rules.geometry == "box":
        return _box(found, rings, tally)
    if not rings and rules.geometry == "poly":
        tally.add("dropped", "object without a usable polygon (--geometry poly)", found.where)
        return []
    if not rings:
        if found.rings and found.box:
            tally.add("changed", "object without a usable polygon: its box is taken", found.where)
        return _box(found, rings, tally)
    if len(rings) == 1 or rules.multipart == "split":
        if len(rings) > 1:
            tally.add("changed", "object of several parts: split into one object each", found.where)
        return [("poly", ring) for ring in rings]
    if rules.multipart == "drop":
        tally.add("dropped", "object of several parts (--multipart drop)", found.where)
        return []
    if rules.multipart == "box":
        tally.add("changed", "object of several parts: its box is taken", found.where)
        return _box(found, rings, tally)
    tally.add("changed", "object of several parts: the largest is taken", found.where)
    return [("poly", max(rings, key=lambda ring: abs(area(ring))))]


def _box(found: SourceObject, rings: list[Ring], tally: Tally) -> list[Shape]:
    box = found.box or (hull(rings) if rings else None)
    if box is None:
        tally.add("dropped", "object without a usable box", found.where)
        return []
    if not (box[0] < box[2] and box[1] < box[3]):
        tally.add("dropped", "box whose width or height is not above 0", found.where)
        return []
    return [("bbox_2d", box)]


def _usable(found: SourceObject, tally: Tally) -> list[Ring]:
    rings = []
    for ring in found.rings:
        if not count_fits("poly", len(ring)):
            tally.add("dropped", "ring with an odd number of numbers or with fewer than 6", found.where)
        elif abs(area(ring)) < FLAT:
            tally.add("dropped", "ring without area", found.where)
        else:
            rings.append(ring)
    return rings


def _inside(
    kind: GeometryKind, coords: Ring, size: tuple[int, int], where: str, rules: Rules, tally: Tally
) -> Ring | None:
    """By the rule on what leaves the image; None when nothing is left."""
    over = max(max(-value, value - size[k % 2]) for k, value in enumerate(coords))
    if over <= 0:
        return coords
    if over > BORDER and rules.outside == "refuse":
        shown = [round(value, 2) for value in coords[:8]]
        raise SourceError(
            f"{where}: {kind} {shown} leaves the image of {size[0]} x {size[1]} by {over:.1f} pixels\n"
            "  correct it, or import with --outside clip or --outside drop"
        )
    if over > BORDER and rules.outside == "drop":
        tally.add("dropped", "object that leaves the image (--outside drop)", where)
        return None
    ring = coords if kind == "poly" else (*coords[:3], coords[1], *coords[2:], coords[0], coords[3])
    cut = _cut(ring, size)
    if not cut or abs(area(cut)) < FLAT:
        tally.add("dropped", "object with no part inside the image", where)
        return None
    small = "object put outside the image by rounding: moved onto the border"
    tally.add("changed", small if over <= BORDER else "object that leaves the image: clipped", where)
    return cut if kind == "poly" else hull([cut])


def _cut(ring: Ring, size: tuple[int, int]) -> Ring:
    """The ring inside the image, one side of the image after the other (Sutherland and Hodgman)."""
    points = list(zip(ring[::2], ring[1::2], strict=True))
    for axis in (0, 1):
        for sign, limit in ((-1.0, 0.0), (1.0, float(size[axis]))):
            kept: list[tuple[float, float]] = []
            for k, here in enumerate(points):
                before = points[k - 1]
                over, over_before = sign * (here[axis] - limit), sign * (before[axis] - limit)
                if (over > 0) != (over_before > 0):
                    share = over_before / (over_before - over)
                    other = before[1 - axis] + share * (here[1 - axis] - before[1 - axis])
                    kept.append((limit, other) if axis == 0 else (other, limit))
                if over <= 0:
                    kept.append(here)
            points = kept
    distinct = [point for k, point in enumerate(points) if point != points[k - 1]]
    return tuple(value for point in distinct for value in point) if len(distinct) > 2 else ()
