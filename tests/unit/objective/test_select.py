"""Selection of a row's segments from their lengths."""

import itertools
import os
import subprocess
import sys

import pytest

from coordexp.errors import UserError
from coordexp.objective.carry import CarryBuffer, first_in_first_out, select, split_in_order


@pytest.mark.slow
@pytest.mark.scenario("R05.C6", "R05.S2", "R37.S1", on="pure")
def test_another_process_draws_the_same_rows_whatever_its_hash_seed():
    program = (
        "from coordexp.objective.carry import CarryBuffer\n"
        "buffer = CarryBuffer(256, 300)\n"
        "[buffer.add(range(n * 7919 % 97 + 3)) for n in range(300)]\n"
        "print([[len(item) for item in buffer.draw().items] for _ in range(40)])"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(shown) == 1


@pytest.mark.scenario("R05.C6", on="pure")
def test_of_equal_totals_fewer_segments_win_and_then_older_ones():
    assert select([4, 2, 2, 2, 4, 4, 2], 8) == (0, 4)
    assert select([1, 2, 2, 2], 5) == (0, 1, 2)
    assert select([4, 3, 2, 1, 3], 10) == (0, 1, 4)


@pytest.mark.scenario("R05.C7", on="pure")
def test_a_segment_beyond_the_exact_window_is_still_found_by_binpacking():
    lengths = [60, 30, *[50] * 100, 40]
    assert first_in_first_out(lengths, 100) == (0, 1)
    assert select(lengths, 100) == (0, 102)


@pytest.mark.scenario("R05.C6", "R05.S1", "R37.S1", on="pure")
def test_up_to_twelve_segments_the_result_is_what_trying_all_subsets_gives():
    for seed in range(400):
        count, capacity = 1 + seed % 12, 20 + seed % 31
        lengths = [1 + (seed * 31 + k * k * 17 + k * 5) % capacity for k in range(count)]
        subsets = ((0, *rest) for size in range(count) for rest in itertools.combinations(range(1, count), size))
        sums = ((sum(lengths[i] for i in subset), subset) for subset in subsets)
        best = min((-total, len(subset), subset) for total, subset in sums if total <= capacity)
        assert select(lengths, capacity) == best[2]


@pytest.mark.scenario("R05.C2", on="pure")
def test_a_micro_batch_is_cut_in_order_into_the_fewest_rows_under_the_cap():
    for seed in range(300):
        count, capacity = 1 + seed % 9, 10 + seed % 21
        lengths = [1 + (seed * 31 + k * k * 17 + k * 5) % capacity for k in range(count)]
        rows = [lengths[part] for part in split_in_order(lengths, capacity)]
        assert [*itertools.chain(*rows)] == lengths
        assert all(0 < sum(row) <= capacity for row in rows)
        cuts = (cut for size in range(count) for cut in itertools.combinations(range(1, count), size))
        fewest = next(
            len(cut) + 1
            for cut in cuts
            if all(sum(lengths[start:end]) <= capacity for start, end in itertools.pairwise((0, *cut, count)))
        )
        assert len(rows) == fewest


def test_a_micro_batch_is_cut_into_more_rows_when_another_rank_needs_them():
    lengths = [4, 3, 3, 5, 2]
    assert len(split_in_order(lengths, 10)) == 2
    for rows in range(1, 6):
        parts = [lengths[part] for part in split_in_order(lengths, 10, at_least=rows)]
        assert len(parts) == max(rows, 2)
        assert [*itertools.chain(*parts)] == lengths
        assert all(0 < sum(part) <= 10 for part in parts)


@pytest.mark.parametrize(("lengths", "words"), [([], "nothing waits"), ([3, 11], "segment 1 has 11"), ([0], "0")])
def test_what_cannot_be_selected_from_is_refused(lengths, words):
    with pytest.raises(ValueError, match=words):
        select(lengths, 10)


@pytest.mark.scenario("R05.S4", on="pure")
def test_without_binpacking_selection_and_buffer_fail_with_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "binpacking", None)  # as if it were not installed
    for attempt in (lambda: select([3, 4], 10), lambda: CarryBuffer(10, 4)):
        with pytest.raises(UserError, match=r"pip install binpacking.*training\.packing: false"):
            attempt()
