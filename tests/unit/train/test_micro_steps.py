"""The rows of a micro-step on one rank. Several ranks are tested in tests/integration/test_stage2.py."""

from types import SimpleNamespace

import pytest

from coordexp.train.trainer import RowTrainer


def rows(lengths: list[int], *, cap: int = 10, packing: bool = False) -> list[list[int]]:
    contract = SimpleNamespace(packing=packing, packing_length=cap)
    trainer = SimpleNamespace(rollout_matching_cfg=contract, _add_waited=None)
    return [[len(part) for part in row] for row in RowTrainer._split_rows(trainer, tuple(map(range, lengths)))]


@pytest.mark.scenario("R05.C2", on="fake")
def test_without_packing_no_forward_pass_has_more_than_the_cap():
    assert rows([4, 6, 1]) == [[4, 6], [1]]
    assert rows([4, 6]) == [[4, 6]]
    assert rows([10, 10, 3]) == [[10], [10], [3]]


def test_a_packed_row_is_one_forward_pass():
    assert rows([4, 6], packing=True) == [[4, 6]]
