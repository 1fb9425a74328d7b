"""An error on one rank is an error on all of them, in seconds: two real processes that talk by gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.ranks import gather_texts, max_over_ranks, sum_over_ranks, together

WORKER = Path(__file__).parent / "ranks_worker.py"


SCENES = ("success", "one_fails", "both_fail", "the_inner_one_fails", "early_failure", "early_failure_between")


@pytest.fixture(scope="module")
def came_of(tmp_path_factory) -> list[dict]:
    """What each rank says of each scene; rank 1 does not survive the last one."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER)]
    scenes = [*SCENES, "waiting", "texts", "sums", "killed"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder), *scenes], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=50)[1][-2000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    assert all(file.is_file() for file in files), errors
    return [json.loads(file.read_text()) for file in files]


def test_work_that_succeeds_gives_each_rank_its_own(came_of):
    assert [rank["success"]["gave"] for rank in came_of] == ["work of 0", "work of 1"]


FAILURES = {
    "one_fails": "no such picture: é.png",
    "the_inner_one_fails": "inside",
    "early_failure": "before all",
    "early_failure_between": "on the way",
}


@pytest.mark.parametrize(("scene", "text"), FAILURES.items(), ids=FAILURES)
def test_an_error_on_one_rank_is_told_by_the_other_within_seconds(came_of, scene, text):
    """Also when the ranks are at different calls, one inside of the other."""
    there, here = came_of[1][scene], came_of[0][scene]
    assert (there["raised"], there["text"]) == ("FileNotFoundError", text)
    assert here["raised"] == "RankError"
    assert here["text"] == f"rank 1 failed, and with it all others\n  FileNotFoundError: {text}"
    assert max(there["seconds"], here["seconds"]) < 3


def test_two_ranks_that_fail_keep_their_own_errors(came_of):
    assert [rank["both_fail"]["text"] for rank in came_of] == ["fault of 0", "fault of 1"]


@pytest.mark.parametrize("scene", SCENES)
def test_after_an_error_no_rank_waits_in_a_call_that_the_other_has_left(came_of, scene):
    assert [rank[scene]["in step"] for rank in came_of] == [True, True]


def test_a_rank_is_told_how_long_it_waited_for_the_others(came_of):
    (first,), (last,) = (rank["waiting"]["gave"] for rank in came_of)
    assert first > 0.3
    assert last < 0.3


def test_texts_sums_and_maxima_of_all_ranks_are_the_same_on_all(came_of):
    for rank in came_of:
        assert rank["texts"]["gave"] == ["cup é 🙂" * 1000, ""]
        assert rank["sums"]["gave"] == [3.0, 2.0**53, 7]


def test_a_rank_that_is_gone_is_a_lost_rank_for_the_other_within_seconds(came_of):
    survivor, gone = came_of
    assert "killed" not in gone
    assert survivor["killed"]["raised"] == "RankLostError"
    assert survivor["killed"]["text"].startswith("rank 0 lost another rank and cannot go on (")
    assert "--resume goes on" in survivor["killed"]["text"]
    assert survivor["killed"]["seconds"] < 5


def test_one_process_alone_needs_no_other():
    assert together(lambda: 5) == 5
    assert sum_over_ranks([1.5]) == [1.5]
    assert max_over_ranks(3) == 3
    assert gather_texts("a") == ["a"]
    with pytest.raises(KeyError, match="mine"):
        together(lambda: {}["mine"])
