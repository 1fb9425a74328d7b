"""An error on one rank becomes an error on all of them within seconds: two real processes that use gloo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from coordexp.ranks import gather_texts, max_over_ranks, sum_over_ranks, together

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "ranks_worker.py"

SCENES = ("success", "one_fails", "both_fail", "the_inner_one_fails", "early_failure", "early_failure_between")


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> list[dict]:
    """The outcome of each scene on each rank. Rank 1 does not survive the last scene."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER)]
    scenes = [*SCENES, "waiting", "texts", "group", "sums", "rank_killed"]
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


def test_work_that_succeeds_returns_the_result_of_each_rank(reports):
    assert [rank["success"]["returned"] for rank in reports] == ["work of 0", "work of 1"]


FAILURES = {
    "one_fails": "no such image: é.png",
    "the_inner_one_fails": "inside",
    "early_failure": "before all",
    "early_failure_between": "on the way",
}


@pytest.mark.parametrize(("scene", "text"), FAILURES.items(), ids=FAILURES)
def test_an_error_on_one_rank_is_raised_on_the_other_within_seconds(reports, scene, text):
    """This also holds if the ranks are at different calls, one nested in the other."""
    there, here = reports[1][scene], reports[0][scene]
    assert (there["raised"], there["text"]) == ("FileNotFoundError", text)
    assert here["raised"] == "RankError"
    assert here["text"] == f"rank 1 failed, so all ranks stop\n  FileNotFoundError: {text}"
    assert max(there["seconds"], here["seconds"]) < 3


def test_two_ranks_that_fail_keep_their_own_errors(reports):
    assert [rank["both_fail"]["text"] for rank in reports] == ["fault of 0", "fault of 1"]


@pytest.mark.parametrize("scene", SCENES)
def test_after_an_error_no_rank_waits_in_a_call_that_the_other_has_left(reports, scene):
    assert [rank[scene]["in step"] for rank in reports] == [True, True]


def test_a_rank_learns_how_long_it_waited_for_the_others(reports):
    (first,), (last,) = (rank["waiting"]["returned"] for rank in reports)
    assert first > 0.3
    assert last < 0.3


def test_messages_between_ranks_have_a_gloo_group_of_their_own(reports):
    assert [rank["group"]["returned"] for rank in reports] == [["gloo", False, True]] * 2


def test_texts_sums_and_maxima_of_all_ranks_are_the_same_on_all(reports):
    for rank in reports:
        assert rank["texts"]["returned"] == ["cup é 🙂" * 1000, ""]
        assert rank["sums"]["returned"] == [3.0, 2.0**53, 7]


def test_a_rank_that_is_gone_is_a_lost_rank_for_the_other_within_seconds(reports):
    survivor, gone = reports
    assert "rank_killed" not in gone
    assert survivor["rank_killed"]["raised"] == "RankLostError"
    assert survivor["rank_killed"]["text"].startswith("rank 0 lost another rank and cannot go on (")
    assert "--resume continues" in survivor["rank_killed"]["text"]
    assert survivor["rank_killed"]["seconds"] < 5


def test_a_single_process_needs_no_group():
    assert together(lambda: 5) == 5
    assert sum_over_ranks([1.5]) == [1.5]
    assert max_over_ranks(3) == 3
    assert gather_texts("a") == ["a"]
    with pytest.raises(KeyError, match="mine"):
        together(lambda: {}["mine"])
