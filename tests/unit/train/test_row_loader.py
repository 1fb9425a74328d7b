"""Rows are made in another thread, one row ahead of the one that is trained."""

import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from coordexp.train.step import RowLoader

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(20)


@dataclass(frozen=True)
class FakeExample:
    image: str
    size: tuple[int, int] = (8, 8)


@dataclass(frozen=True)
class FakeCollator:
    """A row is the pixels of its examples. An image named "broken" cannot be read."""

    pixels: object = None
    begun: list = field(default_factory=list)

    def __call__(self, examples):
        self.begun.append([example.image for example in examples])
        return [self.pixels(example.image, example.size) for example in examples]


def read(image, size):
    if image == "broken":
        raise OSError("not an image")
    return f"pixels of {image} in {threading.current_thread().name}"


def rows(*names: str):
    return [tuple(FakeExample(f"{name}{k}") for k in range(2)) for name in names]


@pytest.mark.parametrize("threads", [0, 2])
def test_the_next_row_and_no_other_is_made_while_a_row_is_trained(threads):
    collate, (a, b, c) = FakeCollator(read), rows("a", "b", "c")
    loader = RowLoader(collate, threads, CPU)
    loader.begin([a, b, c])
    for number, row in enumerate((a, b, c), start=1):
        tensors = loader.next_row(row)
        assert [text.split(" in ")[0] for text in tensors] == [f"pixels of {example.image}" for example in row]
        assert not any(threading.current_thread().name in text for text in tensors)
        time.sleep(0.05)
        assert len(collate.begun) == min(number + 1, 3)
    loader.begin(rows("d"))
    time.sleep(0.05)
    assert collate.begun[-1] == ["d0", "d1"]


def test_the_images_of_a_row_are_read_in_parallel():
    barrier = threading.Barrier(2, timeout=5)
    (row,) = rows("a")
    loader = RowLoader(FakeCollator(lambda image, size: barrier.wait() >= 0), 2, CPU)
    loader.begin([row])
    assert loader.next_row(row) == [True, True]


@pytest.mark.parametrize("threads", [0, 2])
def test_an_image_that_cannot_be_read_is_an_error_of_its_own_row(threads):
    good, bad = rows("a")[0], (FakeExample("broken"),)
    loader = RowLoader(FakeCollator(read), threads, CPU)
    loader.begin([good, bad])
    assert len(loader.next_row(good)) == 2
    with pytest.raises(OSError, match="not an image"):
        loader.next_row(bad)
