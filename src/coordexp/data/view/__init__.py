"""Records as one HTML page that loads nothing from elsewhere. Imports no torch."""

from coordexp.data.view.cards import Card, make_thumbnail, read_cards
from coordexp.data.view.page import render_records

__all__ = ["Card", "make_thumbnail", "read_cards", "render_records"]
