"""Samples and geometry: what a detection problem is made of, before any token. Imports no torch."""

from coordexp.data.coordinates import BINS, to_bin, to_pixels
from coordexp.data.sample import Geometry, GeometryKind, Sample, TrueObject, degenerate

__all__ = ["BINS", "Geometry", "GeometryKind", "Sample", "TrueObject", "degenerate", "to_bin", "to_pixels"]
