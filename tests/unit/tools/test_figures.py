"""The figures of the README and of the documentation show what the code computes now."""

import concept_figures
import correction_figure
import pytest
import results_figure

PAGES = "".join((concept_figures.IMAGES.parent / name).read_text() for name in ("concepts.md", "operations.md"))


@pytest.mark.parametrize("name", concept_figures.FIGURES)
def test_a_figure_of_a_concept_is_that_of_the_code_and_has_its_page(name):
    figure = concept_figures.IMAGES / f"concept-{name}.svg"
    assert figure.read_text() == concept_figures.FIGURES[name](), "run `python tools/concept_figures.py`"
    assert f"](images/{figure.name})" in PAGES


def test_the_figure_of_the_readme_is_that_of_the_correction():
    drawn = correction_figure.draw_figure()
    assert correction_figure.FIGURE.read_text() == drawn, "run `python tools/correction_figure.py`"


def test_the_figure_of_results_is_that_of_the_table():
    drawn = results_figure.draw_figure(results_figure.PAGE.read_text())
    assert results_figure.FIGURE.read_text() == drawn, "run `python tools/results_figure.py`"
