"""The order of many records is a permutation that is computed place by place, and looks like chance."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.train import stream as module
from coordexp.train.stream import KeyedPermutation, RowStream, SampleOrder
from tests.examples import examples

LARGE = 400  # records; the other tests of this module draw fewer


def permutation(records: int, *key: int) -> list[int]:
    permuted = KeyedPermutation(range(records), np.random.default_rng(key))
    return [permuted[place] for place in range(records)]


@examples(100)
@given(st.integers(1, 3000), st.integers(0, 2**64))
def test_every_record_has_one_place_and_another_one_with_another_key(records, key):
    first = permutation(records, key, 0)
    assert sorted(first) == list(range(records))
    assert permutation(records, key, 0) == first
    if records > 20:
        assert permutation(records, key, 1) != first != permutation(records, key + 1, 0)


def chi_square(counts: np.ndarray) -> float:
    """Return how far counts are from equal ones, in standard deviations of chance."""
    expected, freedom = counts.mean(), counts.size - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def test_every_record_comes_at_every_place_and_after_every_other_one_equally_often():
    drawn = np.array([permutation(LARGE, key) for key in range(300)])
    bins = 20
    places = np.arange(LARGE) * bins // LARGE
    counts = np.zeros((bins, bins))
    for row in drawn:
        np.add.at(counts, (places, row * bins // LARGE), 1)
    assert abs(chi_square(counts)) < 5
    steps = np.bincount((drawn[:, 1:] - drawn[:, :-1]).ravel() % LARGE, minlength=LARGE)
    assert abs(chi_square(steps[1:])) < 5


def test_a_hundred_million_records_are_in_an_order_without_memory_and_epochs_read_ahead_of_each_other():
    count = 10**8
    tracemalloc.start()
    order = SampleOrder(count, 3, 8, seed=1, shuffled=True)
    before, after = ([order.index(epoch * count // 8 - 1 + k) for k in range(2000)] for epoch in (1, 2))
    again = [order.index(count // 8 - 1 + k) for k in range(2000)]
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert memory < 2**20
    assert before == again and before[1:] != after[1:]
    assert len(set(before[1:])) == 1999 and min(before) >= 0 and max(before) < count
    gaps = np.abs(np.diff(np.array(before) / count))
    assert gaps.mean() == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_share_out_epochs_of_a_keyed_order_and_a_resumed_run_goes_on_in_it(tmp_path, monkeypatch, ranks):
    monkeypatch.setattr(module, "SHUFFLED", 40)

    def stream(rank: int) -> RowStream:
        return RowStream(SampleOrder(60, rank, ranks, seed=1, shuffled=True), 4, None, max_length=16)

    orders = [stream(rank).order for rank in range(ranks)]
    epochs = [[orders[k % ranks].index(k // ranks) for k in range(e * 60, e * 60 + 60)] for e in range(2)]
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs) and epochs[0] != epochs[1]
    for rank in range(ranks):
        whole = stream(rank)
        expected = [whole.plan_micro_step() for _ in range(20)]
        begun = stream(rank)
        first = [begun.plan_micro_step() for _ in range(7)]
        begun.save(tmp_path)
        resumed = stream(rank)
        resumed.load(tmp_path)
        assert first + [resumed.plan_micro_step() for _ in range(13)] == expected
    monkeypatch.setattr(module, "SHUFFLED", 60)
    stream(0).save(tmp_path)
    monkeypatch.setattr(module, "SHUFFLED", 40)
    with pytest.raises(ValueError, match="keyed"):
        stream(0).load(tmp_path)
