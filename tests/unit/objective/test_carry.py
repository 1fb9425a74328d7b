"""The carry buffer: segments that do not fit into a row wait, whole, for a bounded time."""

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from coordexp.answers.segment import Segment
from coordexp.errors import DataError
from coordexp.objective.carry import CarryBuffer, Example, ExampleId, PackingError, select
from coordexp.train.stream import read_buffer, save_buffer
from tests.streams import WAITING, closed_when_full, first_in_first_out, rollout_lengths, stream


def filled(lengths, *, capacity=10, limit=50, **settings):
    buffer = CarryBuffer(capacity, limit, **settings)
    for length in lengths:
        buffer.add(range(length))
    return buffer


@pytest.mark.scenario("R05.C3", "R05.C4", "R06.S3", on="pure")
def test_what_a_row_leaves_waits_whole_for_the_next_ones():
    lengths = [7, 6, 5, 4, 3, 3]
    buffer = filled(lengths)
    drawn = [[len(item) for item in buffer.draw().items] for _ in range(3)]
    assert drawn == [[7, 3], [6, 4], [5, 3]]
    assert len(buffer) == buffer.tokens == 0


def test_a_row_leaves_what_does_not_fit_and_later_arrivals_queue_behind_it():
    buffer = filled([6, 6])
    first = buffer.draw()
    assert [len(item) for item in first.items] == [6] and first.report.waiting == 1
    buffer.add(range(4))
    row = buffer.draw()
    assert [len(item) for item in row.items] == [6, 4]
    assert row.report.oldest_waited == 1
    assert row.report.fill == 1.0
    assert row.report.segments == 2
    assert row.report.waiting == 0


@pytest.mark.scenario("R05.S3", on="pure")
def test_an_oversized_segment_is_refused_when_it_comes_and_told_how_to_get_in():
    buffer = filled([3])
    with pytest.raises(PackingError, match=r"11 tokens.*row of 10[\s\S]*global_max_length[\s\S]*max_new_tokens"):
        buffer.add(range(11))
    assert len(buffer) == 1


def test_a_buffer_that_would_overflow_fails_with_a_way_out():
    buffer = filled([9, 9, 9], limit=3)
    with pytest.raises(PackingError, match=r"packing_buffer is 3[\s\S]*per_device_train_batch_size"):
        buffer.add(range(2))
    assert len(buffer) == 3


def test_a_segment_without_tokens_is_refused():
    with pytest.raises(PackingError, match="without tokens"):
        filled([]).add(range(0))


def test_a_row_below_the_wanted_fill_says_so():
    assert not filled([5], min_fill_ratio=0.5).draw().report.underfull
    assert filled([5], min_fill_ratio=0.85).draw().report.underfull
    assert not filled([9], min_fill_ratio=0.85).draw().report.underfull


def example(seed: int) -> Example:
    maker = np.random.default_rng(seed)
    length = int(maker.integers(4, 9))
    streams = {name: maker.integers(0, 4, length).astype(np.int8) for name in ("roles", "kinds", "sides")}
    targets = np.where(maker.random(length) < 0.5, np.nan, maker.random(length) * 999).astype(np.float32)
    weights = maker.random(length).astype(np.float32)
    ids = maker.integers(0, 1000, length)
    segment = Segment(ids, **streams, coord_targets=targets, weights=weights, prompt_length=2)
    id = None if seed % 3 == 0 else ExampleId(step=99, micro=0, rank=1, index=seed)
    return Example(segment, f"images/{seed}\u00e9.png", (seed + 1, 9), "AB"[seed % 2], id)


def same(example: Example, other: Example) -> bool:
    streams = ("ids", "roles", "kinds", "sides", "coord_targets", "weights")
    equal = (
        np.array_equal(
            getattr(example.segment, name), getattr(other.segment, name), equal_nan=name == "coord_targets"
        )
        and getattr(example.segment, name).dtype == getattr(other.segment, name).dtype
        for name in streams
    )
    rest = ("image", "size", "channel", "id")
    return (
        all(getattr(example, name) == getattr(other, name) for name in rest)
        and example.segment.prompt_length == other.segment.prompt_length
        and all(equal)
    )


@pytest.mark.parametrize("waiting", [0, 1, 7])
def test_a_saved_buffer_goes_on_as_if_it_had_not_been_interrupted(tmp_path, waiting):
    buffer: CarryBuffer[Example] = CarryBuffer(16, 50)
    for seed in range(4):
        buffer.add(example(seed))
    while len(buffer):
        buffer.draw()
    for seed in range(waiting):
        buffer.add(example(seed))
    if waiting == 7:
        buffer.draw()  # what it leaves has waited
    save_buffer(buffer, tmp_path / "carry.safetensors")
    again: CarryBuffer[Example] = CarryBuffer(16, 50)
    again.restore(*read_buffer(tmp_path / "carry.safetensors"))
    assert again.rows == buffer.rows
    assert [row for _, row in again.waiting] == [row for _, row in buffer.waiting]
    while len(buffer):
        ours, theirs = buffer.draw(), again.draw()
        assert ours.report == theirs.report
        assert all(map(same, ours.items, theirs.items))
    assert not len(again)


def test_a_file_that_is_no_buffer_is_refused_with_its_name(tmp_path):
    broken = tmp_path / "carry.safetensors"
    broken.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"carry\.safetensors does not hold a carry buffer"):
        CarryBuffer(16, 50).restore(*read_buffer(broken))


@pytest.mark.parametrize(
    "changes", [{"format": "1"}, {"examples": '[["a.png", 4, 4, "B"]]'}, {"examples": "[1]"}, {"rows": "many"}]
)
def test_a_buffer_of_another_version_is_refused(tmp_path, changes):
    buffer: CarryBuffer[Example] = CarryBuffer(16, 50)
    buffer.add(example(0))
    file = tmp_path / "carry.safetensors"
    save_buffer(buffer, file)
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    save_file(load_file(file), file, metadata=metadata | changes)
    with pytest.raises(DataError) as raised:
        read_buffer(file)
    assert str(file) in raised.value.problem and "checkpoint" in raised.value.fix


def test_a_restored_segment_that_no_longer_fits_is_refused(tmp_path):
    buffer: CarryBuffer[Example] = CarryBuffer(16, 50)
    buffer.add(example(0))
    save_buffer(buffer, tmp_path / "carry.safetensors")
    with pytest.raises(PackingError, match="global_max_length"):
        CarryBuffer(3, 50).restore(*read_buffer(tmp_path / "carry.safetensors"))


def test_over_a_long_stream_rows_are_full_and_no_segment_waits_long():
    lengths = rollout_lengths(10_000, seed=4)
    assert abs(np.median(lengths) - 2400) < 100
    assert abs(np.quantile(lengths, 0.9) - 5000) < 250
    ours, fifo = stream(lengths, select), stream(lengths, first_in_first_out)
    assert np.mean(ours.fills) >= 0.97
    assert np.mean(ours.fills) >= np.mean(fifo.fills)
    assert np.mean(ours.fills) > np.mean(closed_when_full(lengths)) + 0.05
    assert max(ours.waits) <= WAITING
