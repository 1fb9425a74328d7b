"""The figures of docs/concepts.md show what the code computes."""

import pytest
from concept_figures import FIGURES, IMAGES

PAGES = "".join((IMAGES.parent / name).read_text() for name in ("concepts.md", "operations.md"))


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_that_of_the_code_and_has_its_page(name):
    figure = IMAGES / f"concept-{name}.svg"
    assert figure.read_text() == FIGURES[name](), "run `python tools/concept_figures.py`"
    assert f"](images/{figure.name})" in PAGES
