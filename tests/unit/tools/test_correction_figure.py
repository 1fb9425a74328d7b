"""The first figure of the README shows a correction that is computed."""

from correction_figure import FAINT, FIGURE, FOUND, LABELS, MISSED, correct_answer, draw_figure


def test_the_figure_is_that_of_the_correction():
    assert FIGURE.read_text() == draw_figure(), "run `python tools/correction_figure.py`"


def test_a_found_object_is_trained_towards_its_label_and_a_missed_one_is_added():
    lines = {line.colour: line for line in correct_answer()}
    assert lines[FOUND].numbers == LABELS["red cup"] and lines[MISSED].numbers == LABELS["blue bowl"]
    assert "lamp" in lines[FAINT].text and len(lines) == 3
