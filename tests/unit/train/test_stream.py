"""The stream of rows: the order of samples, packing, and resuming."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.answers.segment import Segment
from coordexp.objective.carry import CarryBuffer, Example, PackingError
from coordexp.train.stream import RowStream, SampleOrder, StageRecords
from tests.examples import examples


def order(records=10, rank=0, ranks=1, **options) -> SampleOrder:
    return SampleOrder(records, rank, ranks, **({"seed": 3, "shuffled": True} | options))


def example_of(length: int, index: int = 0) -> Example:
    streams = {name: np.zeros(length, dtype=np.int8) for name in ("roles", "kinds", "sides")}
    floats = {name: np.zeros(length, dtype=np.float32) for name in ("coord_targets", "weights")}
    segment = Segment(np.full(length, index), **streams, **floats, prompt_length=1)
    return Example(segment, f"{index}.png", (8, 8), "A")


def make_example(index: int) -> Example:
    return example_of(3 + index % 5, index)


def stream(packing=True, **options) -> RowStream:
    buffer = CarryBuffer(16, 12) if packing else None
    return RowStream(order(**options), 4, buffer, max_length=16)


def next_row(stream: RowStream) -> tuple[Example, ...]:
    (indices,) = stream.plan_step().records
    return stream.pack([make_example(index) for index in indices])


def draw(rows: int, stream: RowStream) -> list[list[str]]:
    """Return the images of the next rows."""
    return [[example.image for example in next_row(stream)] for _ in range(rows)]


def test_every_epoch_has_every_record_once_in_another_order():
    whole = order()
    epochs = [[whole.index(e * 10 + k) for k in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != list(range(10))
    assert [order(shuffled=False).index(k) for k in range(12)] == [*range(10), 0, 1]
    assert [order(seed=4).index(k) for k in range(10)] != epochs[0]


@pytest.mark.scenario("R05.C1", on="pure")
def test_ranks_share_out_each_epoch_and_nothing_is_left_over():
    ranks = [order(rank=rank, ranks=3) for rank in range(3)]
    first = [rank.index(k) for k in range(10) for rank in ranks]
    assert Counter(first[:10]) == Counter(range(10))
    assert Counter(first) == Counter(list(range(10)) * 3)


def test_a_curriculum_takes_its_records_for_its_samples_and_then_all():
    curriculum = order(stages=[StageRecords(6, np.array([1, 2, 3])), StageRecords(4, np.array([5, 6]))])
    drawn = [curriculum.index(k) for k in range(20)]
    assert sorted(drawn[:6]) == [1, 1, 2, 2, 3, 3]
    assert sorted(drawn[6:10]) == [5, 5, 6, 6]
    assert sorted(drawn[10:]) == list(range(10))


@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_stream_gives_the_rows_that_would_have_come(tmp_path, packing):
    whole = draw(20, stream(packing))
    begun = stream(packing)
    first = draw(7, begun)
    begun.save(tmp_path)
    again = stream(packing)
    again.load(tmp_path)
    assert first + draw(13, again) == whole
    assert again.epoch == pytest.approx(again.taken / 10)


@pytest.mark.scenario("R14.C1", on="pure")
def test_with_packing_rows_are_full_and_nothing_is_lost_or_repeated():
    packed = stream()
    drawn = [name for row in draw(30, packed) for name in row]
    waiting = [example.image for example, _ in packed.buffer.waiting]
    read = Counter(f"{packed.order.index(k)}.png" for k in range(packed.taken))
    assert Counter(drawn) + Counter(waiting) == read
    assert packed.metrics.report(steps=1)["packing/fill"] > 0.9


def with_limit(limit: int) -> RowStream:
    """Return a stream with micro-batches of 8 segments of 3 to 7 tokens, for rows of 16: more segments arrive
    than a row takes."""
    return RowStream(order(), 8, CarryBuffer(16, limit), max_length=16)


@pytest.mark.scenario("R06.S4", on="pure")
def test_a_micro_batch_that_the_buffer_cannot_hold_stops_the_run_with_a_way_out():
    packed = with_limit(8)
    next_row(packed)
    left = len(packed.buffer)
    assert 0 < left < 8
    assert packed.buffer.tokens < 2 * 16, "so the next micro-step takes another micro-batch"
    with pytest.raises(PackingError, match=r"8 segments.*packing_buffer is 8"):
        next_row(packed)
    assert packed.taken == 16, "the whole micro-batch was made, and not only what fits"


@pytest.mark.scenario("R05.C1", "R06.C2", on="pure")
def test_each_rank_has_a_carry_buffer_of_its_own_samples_alone(tmp_path):
    ranks = [stream(rank=rank, ranks=2) for rank in range(2)]
    assert ranks[0].buffer is not ranks[1].buffer
    for packed in ranks:
        drawn = [name for row in draw(15, packed) for name in row]
        waiting = [example.image for example, _ in packed.buffer.waiting]
        assert Counter(drawn + waiting) == Counter(f"{packed.order.index(k)}.png" for k in range(packed.taken))
        packed.save(tmp_path)
    for packed in ranks:
        again = stream(rank=packed.order.rank, ranks=2)
        again.load(tmp_path)
        assert [example.image for example, _ in again.buffer.waiting] == [
            example.image for example, _ in packed.buffer.waiting
        ]


def test_a_checkpoint_of_another_order_is_refused(tmp_path):
    stream().save(tmp_path)
    with pytest.raises(ValueError, match=r"seed 3, .* 9"):
        stream(seed=9).load(tmp_path)
    with pytest.raises(ValueError, match="packing"):
        stream(packing=False).load(tmp_path)
    other = RowStream(order(), 5, CarryBuffer(16, 12), max_length=16)
    with pytest.raises(ValueError, match="batch 4, this run 5"):
        other.load(tmp_path)
    with pytest.raises(ValueError, match="2 processes"):
        stream(rank=1, ranks=2).load(tmp_path)
    stream(ranks=2).save(tmp_path)
    with pytest.raises(ValueError, match=r"stream_1\.json"):
        stream(rank=1, ranks=2).load(tmp_path)


def group_of(ranks: int, samples: int, packing: bool) -> list[RowStream]:
    """Return the streams of so many ranks, which take 12 samples in a step together."""
    buffers = [CarryBuffer(16, 200) if packing else None for _ in range(ranks)]
    return [
        RowStream(order(50, rank, ranks), samples, buffer, max_length=16, accumulation=12 // samples // ranks)
        for rank, buffer in enumerate(buffers)
    ]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("sizes", [[(2, 3), (1, 4)], [(1, 4), (3, 2), (2, 6)], [(4, 3), (6, 2), (2, 2), (1, 12)]])
def test_with_another_number_of_ranks_a_run_goes_on_without_losing_or_repeating_a_sample(tmp_path, sizes, packing):
    trained, steps = Counter(), 0
    for number, (ranks, samples) in enumerate(sizes):
        group = group_of(ranks, samples, packing)
        for rank in group:
            if number:
                rank.load(tmp_path)
                assert rank.plan_step().step == steps
                rank.load(tmp_path)  # as if it had not planned anything
        for k in range(3 + number):
            for rank in group:
                if packing and rank.order.rank and k == 1:
                    continue  # so that the ranks have taken different numbers of samples
                for records in rank.plan_step().records:
                    trained.update(example.image for example in rank.pack([make_example(i) for i in records]))
        steps = max(rank.rows * ranks * samples for rank in group) // 12
        for rank in group:
            rank.rows = steps * (12 // samples // ranks)
            rank.save(tmp_path)
    waiting = Counter(e.image for rank in group for e, _ in rank.buffer.waiting) if packing else Counter()
    last = [rank.order.position(rank.taken) for rank in group]
    done = {rank.order.position(k) for rank in group for k in range(rank.taken)}
    places = [*range(group[0].order.begin), *group[0].order.done, *done]
    assert len(set(places)) == len(places), "no place is taken twice"
    assert set(range(min(last))) <= set(places), "no place is left out"
    whole = order(50)
    assert trained + waiting == Counter(f"{whole.index(place)}.png" for place in places)


@examples(60)
@given(st.data())
def test_however_lengths_change_every_planned_micro_step_has_an_example(data):
    """Steps are planned before their examples exist, so the plan may expect more tokens than there are."""
    batch, micro_steps, ahead = (data.draw(st.integers(1, most)) for most in (6, 5, 2))
    packed = RowStream(
        order(1000),
        batch,
        CarryBuffer(16, 400),
        max_length=16,
        accumulation=micro_steps,
        measure_truth=lambda _: 12,
    )
    plans = []
    for _ in range(12):
        low, high = sorted(data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16))))
        plans += [packed.plan_step() for _ in range(ahead - len(plans))]
        for records in plans.pop(0).records:
            assert packed.pack([example_of(data.draw(st.integers(low, high))) for _ in records])
    assert len(packed.buffer) <= 40 + 2 * batch * micro_steps * ahead


def test_a_record_that_is_too_long_is_named_without_packing():
    packed = RowStream(order(), 4, None, max_length=6)
    with pytest.raises(PackingError, match=r"[49]\.png: 7 tokens"):
        draw(3, packed)
