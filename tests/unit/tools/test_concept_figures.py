"""The figures of docs/concepts show what the code computes."""

import pytest
from concept_figures import FIGURES, IMAGES

PAGES = IMAGES.parent / "concepts"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_that_of_the_code_and_has_its_page(name):
    figure = IMAGES / f"concept-{name}.svg"
    assert figure.read_text() == FIGURES[name](), "run `python tools/concept_figures.py`"
    assert f"../images/{figure.name}" in (PAGES / f"{name}.md").read_text()
