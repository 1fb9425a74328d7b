"""Properties of the selection from any buffer (R05)."""

import random

import pytest

from coordexp.objective.carry import WINDOW, first_in_first_out, select
from tests.examples import SHARE


@pytest.mark.scenario("R05.C2", "R05.C4", "R05.C5", "R05.S1", on="pure")
@pytest.mark.timeout(240)
def test_no_selection_is_below_first_in_first_out_above_the_cap_or_without_the_oldest():
    chooser = random.Random(11)
    for _ in range(round(100_000 * SHARE)):
        capacity = chooser.choice((8, 20, 50, 100))
        count = (
            chooser.choice((1, 2, 3, 5, 8, 13, WINDOW + 6)) if chooser.random() < 0.1 else chooser.randint(1, 9)
        )
        largest = chooser.choice((capacity, capacity // 2, capacity // 4))
        lengths = [chooser.randint(1, largest) for _ in range(count)]
        chosen = select(lengths, capacity)
        total = sum(lengths[i] for i in chosen)
        assert chosen[0] == 0
        assert list(chosen) == sorted(set(chosen))
        assert sum(lengths[i] for i in first_in_first_out(lengths, capacity)) <= total <= capacity
