"""Convert source images to records, and write them to a JSONL file.

`convert_object` decides which shapes are written: box or polygon, one part or several, inside the image. Numbers
are rounded to a thousandth of a pixel. A shape that would have no area in 1,000 bins is dropped here, since it
cannot be trained on.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from coordexp.data.addresses import is_url, move_address
from coordexp.data.geometry import GeometryKind, box_ring, is_degenerate, is_valid_count, ring_area, to_bin
from coordexp.data.importers.source import (
    Dropped,
    ImportCounts,
    Ring,
    Rules,
    SourceImage,
    SourceObject,
    bounding_box,
)
from coordexp.data.records import Record, RecordObject
from coordexp.errors import DataError
from coordexp.files import write_parts

BORDER = 0.1  # pixels by which the rounding of a tool may move a shape out of its image
FLAT = 1e-6  # square pixels; a smaller area is zero up to rounding

KindAndCoords = tuple[GeometryKind, Ring]


def convert_object(
    source: SourceObject, size: tuple[int, int], rules: Rules, counts: ImportCounts
) -> Iterator[RecordObject]:
    with counts.dropping(source.where):
        for kind, coords in _choose_shapes(source, rules, counts):
            with counts.dropping(source.where):
                kept = _fit_into_image(kind, coords, size, source.where, rules, counts)
                if kind == "poly" and rules.tolerance > 0:
                    simple = simplify_ring(kept, rules.tolerance)
                    if simple != kept:
                        counts.add("changed", "polygon drawn with fewer vertices (--tolerance)", source.where)
                    kept = simple
                rounded = tuple(round(value, 3) for value in kept)
                if is_degenerate(kind, tuple(to_bin(value, size[k % 2]) for k, value in enumerate(rounded))):
                    raise Dropped("object that has no area in 1,000 bins")
                yield RecordObject(source.desc, kind, rounded, source.category_id, source.meta)


def _choose_shapes(source: SourceObject, rules: Rules, counts: ImportCounts) -> list[KindAndCoords]:
    """Apply the rules on geometry and on parts."""
    rings = _usable_rings(source, counts) if rules.geometry != "box" or not source.box else []
    if not rings and rules.geometry == "poly":
        raise Dropped("object without a usable polygon (--geometry poly)")
    several = "object of several parts"
    if rings and rules.geometry != "box":
        if len(rings) == 1:
            return [("poly", rings[0])]
        if rules.multipart == "split":
            counts.add("changed", f"{several}: split into one object each", source.where)
            return [("poly", ring) for ring in rings]
        if rules.multipart == "largest":
            counts.add("changed", f"{several}: the largest is taken", source.where)
            return [("poly", max(rings, key=lambda ring: abs(ring_area(ring))))]
        if rules.multipart == "drop":
            raise Dropped(f"{several} (--multipart drop)")
        counts.add("changed", f"{several}: its box is taken", source.where)
    elif source.rings and source.box and rules.geometry != "box":
        counts.add("changed", "object without a usable polygon: its box is taken", source.where)
    box = source.box or (bounding_box(rings) if rings else None)
    if box is None:
        raise Dropped("object without a usable box")
    if not (box[0] < box[2] and box[1] < box[3]):
        raise Dropped("box whose width or height is not above 0")
    return [("bbox_2d", box)]


def _usable_rings(source: SourceObject, counts: ImportCounts) -> list[Ring]:
    rings = []
    for ring in source.rings:
        with counts.dropping(source.where):
            if not is_valid_count("poly", len(ring)):
                raise Dropped("ring with an odd number of numbers or with fewer than 6")
            if abs(ring_area(ring)) < FLAT:
                raise Dropped("ring without area")
            rings.append(ring)
    return rings


def _fit_into_image(
    kind: GeometryKind, coords: Ring, size: tuple[int, int], where: str, rules: Rules, counts: ImportCounts
) -> Ring:
    """Apply the rule on shapes that extend beyond the image. Raise `Dropped` if nothing is left of the shape."""
    excess = max(max(-value, value - size[k % 2]) for k, value in enumerate(coords))
    if excess <= 0:
        return coords
    if excess > BORDER and rules.outside == "refuse":
        shown = [round(value, 2) for value in coords[:8]]
        raise DataError(
            f"{where}: {kind} {shown} extends beyond the image of {size[0]} x {size[1]} by {excess:.1f} pixels",
            "correct it, or import with --outside clip or --outside drop",
        )
    if excess > BORDER and rules.outside == "drop":
        raise Dropped("object that extends beyond the image (--outside drop)")
    clipped = _clip_ring(coords if kind == "poly" else box_ring(coords), size)
    if not clipped or abs(ring_area(clipped)) < FLAT:
        raise Dropped("object with no part inside the image")
    if excess <= BORDER:
        counts.add("changed", "object put outside the image by rounding: moved onto the border", where)
    else:
        counts.add("changed", "object that extends beyond the image: clipped", where)
    return clipped if kind == "poly" else bounding_box([clipped])


def _clip_ring(ring: Ring, size: tuple[int, int]) -> Ring:
    """Return the part of the ring inside the image, cut along one side after the other (Sutherland and
    Hodgman)."""
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


def simplify_ring(ring: Ring, tolerance: float) -> Ring:
    """Return the ring with fewer vertices, such that no old vertex is further from it than the tolerance (Ramer,
    Douglas, Peucker). Return the ring unchanged if less than a triangle would be left.

    The outline of a mask has a vertex at every step of its staircase; a tolerance of half a pixel or one pixel
    removes most of them."""
    points = np.array(ring).reshape(-1, 2)
    closed = np.vstack([points, points[:1]])
    far = int(np.argmax(np.hypot(*(points - points[0]).T)))
    kept, waiting = {0, far}, [(0, far), (far, len(points))]
    while waiting:
        start, end = waiting.pop()
        if end - start < 2:
            continue
        along, others = closed[end] - closed[start], closed[start + 1 : end] - closed[start]
        share = np.clip(others @ along / max(along @ along, np.finfo(float).tiny), 0, 1)
        distances = np.hypot(*(others - share[:, None] * along).T)  # from the segment between start and end
        worst = int(np.argmax(distances))
        if distances[worst] > tolerance:
            middle = start + 1 + worst
            kept.add(middle)
            waiting += [(start, middle), (middle, end)]
    simple = tuple(points[sorted(kept)].ravel().tolist())
    return simple if len(kept) > 2 and ring_area(simple) else ring


def write_records(
    images: Iterable[SourceImage], target: Path, rules: Rules, counts: ImportCounts, notify: Callable[[str], None]
) -> None:
    """Write the records. `notify` gets the number of images read so far, as a text. Raise DataError if most of the
    image files are missing, because then the folder of images is the wrong one."""
    with write_parts(target) as write:
        for number, image in enumerate(images, start=1):
            notify(f"{number:,} images")
            record = _convert_image(image, target.parent, rules, counts)
            if record is not None:
                write(f"{record.as_json()}\n")
                counts.images += 1
                counts.objects += len(record.objects)
        _check_missing(counts, rules)


def _convert_image(image: SourceImage, folder: Path, rules: Rules, counts: ImportCounts) -> Record | None:
    """Return the record of an image, or None if the rules drop it."""
    size = (image.width, image.height)
    converted = [(source.desc, tuple(convert_object(source, size, rules, counts))) for source in image.objects]
    objects = tuple(item for _, items in converted for item in items)
    if not objects and rules.empty == "drop":
        counts.add("dropped", "image without objects (--empty drop)", str(image.path))
        return None
    if not objects:
        counts.add("noted", "image without objects: kept", str(image.path))
    if isinstance(image.path, Path) and not image.path.is_file():
        counts.missing += 1
        counts.first_missing = counts.first_missing or str(image.path)
        if rules.missing == "drop":
            counts.add("dropped", "image file that does not exist (--missing drop)", str(image.path))
            return None
        counts.add(
            "noted",
            "image file that does not exist: its record is written, and training would stop at it",
            str(image.path),
        )
    address = str(image.path)
    classes = tuple(dict.fromkeys(item.desc for item in objects)) if rules.ask == "classes" else ()
    lost = {desc for desc, items in converted if not items}
    exhaustive = image.exhaustive and tuple(desc for desc in image.exhaustive if desc not in lost)
    return Record(
        address if is_url(address) else _relative_path(Path(address), folder),
        *size,
        "pixel",
        objects,
        image.image_id,
        exhaustive=exhaustive,
        **{"classes": classes or None, **image.request},
    )


def _check_missing(counts: ImportCounts, rules: Rules) -> None:
    images = counts.images + (counts.missing if rules.missing == "drop" else 0)
    if rules.missing == "keep" or counts.missing * 2 <= images:
        return
    raise DataError(
        f"{counts.missing:,} of {images:,} image files do not exist; the first is {counts.first_missing}",
        "give the folder of the images with --images; --missing keep writes the records without their files",
    )


def _relative_path(path: Path, folder: Path) -> str:
    """Return the path relative to the folder. Links are kept in a path below the folder; they are resolved in any
    other path, because `..` after a link leads to the parent of its target."""
    relative = os.path.relpath(path, folder)
    if relative.startswith(".."):
        return move_address(path.name, path.parent, folder)
    return Path(relative).as_posix()
