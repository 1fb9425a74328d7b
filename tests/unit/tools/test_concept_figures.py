"""The figures of docs/concepts show what the code computes."""

import pytest
from concept_figures import FIGURES, IMAGES, LENGTHS, draw_packing, draw_policies

PAGES = IMAGES.parent / "concepts"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_that_of_the_code_and_has_its_page(name):
    figure = IMAGES / f"concept-{name}.svg"
    assert figure.read_text() == FIGURES[name](), "run `python tools/concept_figures.py`"
    assert f"../images/{figure.name}" in (PAGES / f"{name}.md").read_text()


def test_every_example_is_in_a_row_or_waits():
    figure = draw_packing()
    assert all(f">{length}<" in figure for length in LENGTHS)


def test_a_policy_that_removes_duplicates_leaves_one_cup_again_in_the_figure():
    """It is in what the model wrote, and in the answer that the defaults keep."""
    assert draw_policies().count(">cup again<") == 2
