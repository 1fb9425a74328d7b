"""The figure of the README is drawn from the table in docs/results.md, and shows it as it is now."""

from results_figure import FIGURE, PAGE, draw_figure


def test_the_figure_is_that_of_the_table():
    assert FIGURE.read_text() == draw_figure(PAGE.read_text()), "run `python tools/results_figure.py`"
