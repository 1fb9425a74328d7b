"""A simplified ring stays within the tolerance of the original."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from shapely import LinearRing, Point

from coordexp.data.importers.shape import simplify_ring
from coordexp.data.masks import trace_outlines

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


def test_a_ring_that_would_become_less_than_a_triangle_is_unchanged():
    assert simplify_ring((0, 0, 1, 0, 1, 1), 50.0) == (0, 0, 1, 0, 1, 1)
