"""The figure of the README is drawn from the table in docs/results.md, and shows it as it is now."""

from results_figure import FIGURE, PAGE, draw_figure, read_table


def test_the_figure_is_that_of_the_table():
    assert FIGURE.read_text() == draw_figure(PAGE.read_text()), "run `python tools/results_figure.py`"


def test_a_table_is_read_as_numbers():
    page = "Text.\n\n| labels missing | a |\n| --- | --- |\n| 0 % | 0.5 ± 0.1 |\n| 50 % | 0.25 |\n\nMore."
    assert read_table(page) == (["labels missing", "a"], [[0.0, 0.5], [50.0, 0.25]])
