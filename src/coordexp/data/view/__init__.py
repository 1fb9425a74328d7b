"""Records as one HTML page to look at, with nothing loaded from elsewhere. Imports no torch."""

from coordexp.data.view.cards import Card, read_cards
from coordexp.data.view.page import page

__all__ = ["Card", "page", "read_cards"]
