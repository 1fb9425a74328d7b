"""The stream of rows: its order, and going on where it stopped."""

from collections import Counter

import numpy as np
import pytest

from coordexp.correction import Segment
from coordexp.pack import CarryBuffer, Example, PackingError
from coordexp.train.stream import Order, RowStream, Stage


def order(records=10, rank=0, ranks=1, **options) -> Order:
    return Order(records, rank, ranks, **({"seed": 3, "shuffled": True} | options))


def encode(indices, moment) -> list[Example]:
    return [made(index) for index in indices]


def made(index: int) -> Example:
    length = 3 + index % 5
    streams = {name: np.zeros(length, dtype=np.int8) for name in ("roles", "kinds", "sides")}
    floats = {name: np.zeros(length, dtype=np.float32) for name in ("coord_targets", "weights")}
    return Example(
        Segment(np.full(length, index), **streams, **floats, prompt_length=1), f"{index}.png", (8, 8), "A"
    )


def stream(packing=True, **options) -> RowStream:
    buffer = CarryBuffer(16, 12) if packing else None
    return RowStream(order(**options), encode, 4, buffer, max_length=16)


def images(rows) -> list[list[str]]:
    return [[example.image for example in row] for row in rows]


def taken(rows: int, of: RowStream) -> list[list[str]]:
    iterator = iter(of)
    return images(next(iterator) for _ in range(rows))


def test_every_epoch_has_every_record_once_in_another_order():
    one = order()
    epochs = [[one.index(e * 10 + k) for k in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(10))
    assert [order(shuffled=False).index(k) for k in range(12)] == [*range(10), 0, 1]
    assert [order(seed=4).index(k) for k in range(10)] != epochs[0]


@pytest.mark.scenario("R05.C1", on="pure")
def test_ranks_share_out_each_epoch_and_nothing_is_left_over():
    ranks = [order(rank=rank, ranks=3) for rank in range(3)]
    first = [one.index(k) for k in range(10) for one in ranks]
    assert Counter(first[:10]) == Counter(range(10))
    assert Counter(first) == Counter(list(range(10)) * 3)


def test_a_curriculum_takes_its_records_for_its_samples_and_then_all():
    one = order(stages=[Stage(6, (1, 2, 3)), Stage(4, (5, 6))])
    drawn = [one.index(k) for k in range(20)]
    assert sorted(drawn[:6]) == [1, 1, 2, 2, 3, 3]
    assert sorted(drawn[6:10]) == [5, 5, 6, 6]
    assert sorted(drawn[10:]) == list(range(10))


@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_stream_gives_the_rows_that_would_have_come(tmp_path, packing):
    whole = taken(20, stream(packing))
    begun = stream(packing)
    first = taken(7, begun)
    begun.save(tmp_path)
    again = stream(packing)
    again.load(tmp_path)
    assert first + taken(13, again) == whole
    assert again.epoch == pytest.approx(again.taken / 10)


def test_without_packing_a_row_is_one_micro_batch():
    assert [len(row) for row in taken(5, stream(packing=False))] == [4] * 5


@pytest.mark.scenario("R14.C1", on="pure")
def test_with_packing_rows_are_full_and_nothing_is_lost_or_repeated():
    of = stream()
    drawn = [name for row in taken(30, of) for name in row]
    waiting = [example.image for example, _ in of.buffer.waiting]
    read = Counter(f"{of.order.index(k)}.png" for k in range(of.taken))
    assert Counter(drawn) + Counter(waiting) == read
    assert of.ledger.report(steps=1)["packing/fill"] > 0.9


def with_limit(limit: int) -> RowStream:
    """Micro-batches of 8 segments of 3 to 7 tokens, for rows of 16: more comes in than a row takes out."""
    return RowStream(order(), encode, 8, CarryBuffer(16, limit), max_length=16)


@pytest.mark.scenario("R06.S4", on="pure")
def test_a_micro_batch_that_the_buffer_cannot_hold_stops_the_run_with_a_way_out():
    of = with_limit(8)
    rows = iter(of)
    next(rows)
    left = len(of.buffer)
    assert 0 < left < 8
    assert of.buffer.tokens < 2 * 16, "so the next micro-step takes another micro-batch"
    with pytest.raises(
        PackingError, match=r"8 segments.*packing_buffer is 8\n.*raise training\.packing_buffer"
    ) as no:
        next(rows)
    assert "smaller training.per_device_train_batch_size" in str(no.value)
    assert of.taken == 16, "the whole micro-batch was made, and not only what fits"


def test_each_micro_step_takes_a_whole_micro_batch_or_none_as_two_rows_wait_or_not():
    of = with_limit(18)  # fewer than 32 tokens are at most 10 segments
    rows, took = iter(of), []
    for _ in range(60):
        before, enough = of.taken, of.buffer.tokens >= 2 * 16
        next(rows)
        took.append(of.taken - before)
        assert took[-1] == (0 if enough else 8)
    assert set(took) == {0, 8}


def test_the_way_out_of_an_overflow_is_a_larger_buffer_with_which_the_run_goes_on(tmp_path):
    of = with_limit(8)
    rows = iter(of)
    next(rows)
    of.save(tmp_path)
    with pytest.raises(PackingError, match="packing_buffer is 8"):
        next(rows)
    again = with_limit(18)
    again.load(tmp_path)
    assert taken(1, with_limit(18)) + taken(20, again) == taken(21, with_limit(18))


@pytest.mark.scenario("R05.C1", "R06.C2", on="pure")
def test_each_rank_has_a_carry_buffer_of_its_own_samples_alone(tmp_path):
    ranks = [stream(rank=rank, ranks=2) for rank in range(2)]
    assert ranks[0].buffer is not ranks[1].buffer
    for of in ranks:
        drawn = [name for row in taken(15, of) for name in row]
        waiting = [example.image for example, _ in of.buffer.waiting]
        assert Counter(drawn + waiting) == Counter(f"{of.order.index(k)}.png" for k in range(of.taken))
        of.save(tmp_path)
    for of in ranks:
        again = stream(rank=of.order.rank, ranks=2)
        again.load(tmp_path)
        assert [example.image for example, _ in again.buffer.waiting] == [
            example.image for example, _ in of.buffer.waiting
        ]


def test_a_checkpoint_of_another_order_is_refused(tmp_path):
    stream().save(tmp_path)
    with pytest.raises(ValueError, match=r"has seed 3, this run 9[\s\S]*same data, settings"):
        stream(seed=9).load(tmp_path)
    with pytest.raises(ValueError, match="packing"):
        stream(packing=False).load(tmp_path)
    other = RowStream(order(), encode, 5, CarryBuffer(16, 12), max_length=16)
    with pytest.raises(ValueError, match="batch 4, this run 5"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match=r"stream_1\.json: missing[\s\S]*as many processes"):
        stream(rank=1, ranks=2).load(tmp_path)


def test_a_record_that_is_too_long_is_named_without_packing():
    of = RowStream(order(), encode, 4, None, max_length=6)
    with pytest.raises(PackingError, match=r"4\.png: 7 tokens, and global_max_length is 6|9\.png: 7 tokens"):
        taken(3, of)
