"""Mixtures of data sets: which set a sample comes from, and which record of it."""

import numpy as np
import pytest

from coordexp.train.mixture import Mixture
from coordexp.train.stream import RowStream, SampleOrder


def mixed(shares=(3, 1), sizes=(10, 6), rank=0, ranks=1, seed=3, shuffled=True) -> SampleOrder:
    return SampleOrder(
        sum(sizes), rank, ranks, seed=seed, shuffled=shuffled, mixture=Mixture(tuple(shares), tuple(sizes))
    )


def test_each_set_takes_every_record_once_per_own_epoch_in_another_order():
    order = mixed()
    drawn = [order.index(k) for k in range(240)]
    for low, high in ((0, 10), (10, 16)):
        own = [record for record in drawn if low <= record < high]
        epochs = [own[k : k + high - low] for k in range(0, len(own) - (high - low) + 1, high - low)]
        assert len(epochs) >= 10
        assert all(sorted(epoch) == list(range(low, high)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_the_first_set_has_the_order_of_a_run_on_it_alone():
    drawn = [mixed().index(k) for k in range(100)]
    alone = SampleOrder(10, 0, 1, seed=3, shuffled=True)
    own = [record for record in drawn if record < 10]
    assert own == [alone.index(k) for k in range(len(own))]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_rank_gets_every_set(ranks):
    """Without changing turns, the ranks would have one set each whenever the period divides their number."""
    orders = [mixed((1, 1), (40, 40), rank=rank, ranks=ranks) for rank in range(ranks)]
    drawn = [[order.index(k) for k in range(400)] for order in orders]
    for records in drawn:
        assert 0.4 < np.mean(np.array(records) < 40) < 0.6


def stream(**options) -> RowStream:
    return RowStream(mixed(**options), 4, None, max_length=16)


def take_micro_batch(stream: RowStream) -> tuple[int, ...]:
    (records,) = stream.plan_step().records
    stream.pack(())
    return records


def test_a_resumed_mixture_takes_the_records_that_would_have_come(tmp_path):
    whole = stream()
    expected = [take_micro_batch(whole) for _ in range(50)]
    begun = stream()
    first = [take_micro_batch(begun) for _ in range(33)]
    begun.save(tmp_path)
    again = stream()
    again.load(tmp_path)
    assert first + [take_micro_batch(again) for _ in range(17)] == expected
    assert again.epoch == 50 * 4 / 16


def test_a_checkpoint_of_other_weights_or_sets_is_refused(tmp_path):
    stream().save(tmp_path)
    with pytest.raises(ValueError, match=r"\[\[3, 10\], \[1, 6\]\].*\[\[1, 10\], \[1, 6\]\]"):
        stream(shares=(1, 1)).load(tmp_path)
    with pytest.raises(ValueError, match=r"\[\[3, 6\], \[1, 10\]\]"):
        stream(sizes=(6, 10)).load(tmp_path)
    alone = RowStream(SampleOrder(16, 0, 1, seed=3, shuffled=True), 4, None, max_length=16)
    with pytest.raises(ValueError, match=r"\[\[3, 10\], \[1, 6\]\].*None"):
        alone.load(tmp_path)
    alone.save(tmp_path)
    with pytest.raises(ValueError, match="sets None"):
        stream().load(tmp_path)
