"""Outlines enclose exactly the pixels of any mask, and a simplified ring stays within the tolerance."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as rle
from shapely import LinearRing, Point

from coordexp.data.importers.shape import simplify_ring
from coordexp.data.masks import decode_mask, trace_outlines

MASKS = st.tuples(st.integers(1, 9), st.integers(1, 9)).flatmap(lambda shape: arrays(np.bool_, shape))


def fill(ring, shape):
    """Return the pixels whose centre is inside, by the number of upright edges to their left."""
    xs, ys = np.array(ring[::2]), np.array(ring[1::2])
    inside = np.zeros(shape, dtype=bool)
    for x, y, next_y in zip(xs, ys, np.roll(ys, -1), strict=True):
        rows = slice(int(min(y, next_y)), int(max(y, next_y)))
        inside[rows, int(x) :] ^= True
    return inside


def fill_holes(mask):
    """Return every pixel that cannot be reached from outside by steps up, down, left and right."""
    outside = np.pad(np.zeros_like(mask), 1, constant_values=True)
    free = ~np.pad(mask, 1)
    while True:
        grown = outside.copy()
        grown[1:] |= outside[:-1]
        grown[:-1] |= outside[1:]
        grown[:, 1:] |= outside[:, :-1]
        grown[:, :-1] |= outside[:, 1:]
        grown &= free
        if (grown == outside).all():
            return ~outside[1:-1, 1:-1]
        outside = grown


@given(MASKS)
def test_rings_enclose_exactly_the_pixels_of_the_mask_and_of_its_holes(mask):
    rings, holes = trace_outlines(mask)
    inside = np.zeros(mask.shape, dtype=bool)
    for ring in rings:
        inside |= fill(ring, mask.shape)
    assert (inside == fill_holes(mask)).all()
    assert (holes > 0) == (fill_holes(mask) != mask).any()


@given(MASKS)
def test_compressed_and_plain_runs_give_the_mask_that_was_encoded(mask):
    compressed = rle.encode(np.asfortranarray(mask.astype(np.uint8)))
    flat = mask.T.ravel().astype(int)
    runs = np.diff(np.flatnonzero(np.diff(np.concatenate([[2], flat, [2]])))).tolist()
    plain = [0, *runs] if flat[0] else runs
    height, width = mask.shape
    for counts in (compressed["counts"].decode(), plain):
        assert (decode_mask({"size": [height, width], "counts": counts}, width, height) == mask).all()


def test_corners_only_are_kept_and_pixels_that_touch_at_a_corner_are_one_part():
    square = np.ones((3, 4), dtype=bool)
    assert trace_outlines(square) == ([(0, 0, 4, 0, 4, 3, 0, 3)], 0)
    assert len(trace_outlines(np.eye(4, dtype=bool))[0]) == 1
    assert len(trace_outlines(np.array([[True, False, True]]))[0]) == 2


number = st.floats(0, 100).map(lambda value: round(value, 2))
rings = st.lists(st.tuples(number, number), min_size=3, max_size=30, unique=True)


@given(rings, st.floats(0.1, 20))
def test_no_old_vertex_is_further_away_than_the_tolerance(points, tolerance):
    ring = tuple(value for point in points for value in point)
    short = simplify_ring(ring, tolerance)
    assert len(short) <= len(ring)
    line = LinearRing(zip(short[::2], short[1::2], strict=True))
    assert max(line.distance(Point(point)) for point in points) <= tolerance + 1e-9


def test_a_staircase_becomes_a_slope_and_a_circle_a_few_corners():
    stairs = np.tril(np.ones((50, 50), dtype=bool))
    (ring,), _ = trace_outlines(stairs)
    assert len(ring) > 200
    assert len(simplify_ring(ring, 1.0)) <= 10
    ys, xs = np.mgrid[:100, :100]
    (ring,), _ = trace_outlines((xs - 50) ** 2 + (ys - 50) ** 2 < 40**2)
    assert 12 <= len(simplify_ring(ring, 1.0)) <= 60
