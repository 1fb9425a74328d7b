"""The first figure of the README shows a correction that is computed."""

from correction_figure import FIGURE, draw_figure


def test_the_figure_is_that_of_the_correction():
    assert FIGURE.read_text() == draw_figure(), "run `python tools/correction_figure.py`"
