"""Records with broken images give way to the next ones, and too many of them end a run."""

import json

import pytest

from coordexp.data import RecordFile
from coordexp.errors import DataError
from coordexp.train.mixture import Mixture
from coordexp.train.quarantine import FEW, Quarantine
from coordexp.train.stream import RowStream, SampleOrder
from tests.unit.data.planted import write_clean


@pytest.fixture
def planted(tmp_path):
    return write_clean(tmp_path)


def damage(planted, *numbers: int) -> None:
    for number in numbers:
        (planted.folder / f"images/{number}.png").write_bytes(b"broken")


def take(order: SampleOrder, count: int, quarantine: Quarantine) -> list[int]:
    stream = RowStream(order, 5, None, max_length=100, quarantine=quarantine)
    return [record for _ in range(count // 5) for record in stream.plan_micro_step()]


def test_the_place_of_a_broken_image_is_taken_by_the_next_record_and_all_others_stay(planted, tmp_path):
    damage(planted, 3, 4, 39)
    records = RecordFile(planted.write())
    order = SampleOrder(40, 0, 1, seed=1, shuffled=False)
    taken = take(order, 80, Quarantine(records, tmp_path / "run", 0.1))
    expected = {3: 5, 4: 5, 39: 0}
    assert taken == [expected.get(k, k) for k in range(40)] * 2
    lines = [json.loads(line) for line in (tmp_path / "run/quarantine.jsonl").read_text().splitlines()]
    assert [(line["record"], line["image"]) for line in lines] == [(k, f"images/{k}.png") for k in (3, 4, 39)]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_place_without_a_broken_image_is_as_it_would_be_without_any(planted, tmp_path, ranks):
    """Also with shuffled sets of a mixture, whose records stay in their sets."""
    damage(planted, 0, 9, 11, 25)
    records, mixture = RecordFile(planted.write()), Mixture((1, 1), (15, 25))
    for rank in range(ranks):
        order = SampleOrder(40, rank, ranks, seed=1, shuffled=True, mixture=mixture)
        undisturbed = [order.index(k) for k in range(60)]
        taken = take(order, 60, Quarantine(records, tmp_path / str(rank), 0.5))
        assert not {0, 9, 11, 25} & set(taken)
        for before, now in zip(undisturbed, taken, strict=True):
            assert before == now or (before in {0, 9, 11, 25} and (before < 15) == (now < 15))


def test_what_is_listed_stays_left_out_although_the_image_was_repaired(planted, tmp_path):
    damage(planted, 3)
    records = RecordFile(planted.write())
    assert Quarantine(records, tmp_path, 0.1).is_broken(3)
    write_clean(tmp_path)
    assert Quarantine(records, tmp_path, 0.1).is_broken(3)
    file = tmp_path / "quarantine.jsonl"
    file.write_text(file.read_text().replace("images/3.png", "other.png") + '{"record": 5, "ima')
    assert not Quarantine(records, tmp_path, 0.1).is_broken(3), "the line is of other data"


def test_too_many_broken_images_end_the_run_and_a_few_do_not(planted, tmp_path):
    records = RecordFile(planted.write())
    damage(planted, *range(FEW))
    Quarantine(records, tmp_path / "few", 0.01).examine(range(40))
    damage(planted, FEW)
    Quarantine(records, tmp_path / "many", 0.3).examine(range(40))
    with pytest.raises(DataError, match=r"broken_images"):
        Quarantine(records, tmp_path / "more", 0.01).examine(range(40))
