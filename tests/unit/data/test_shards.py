"""The parts of a job, their manifests and locks, and which folders of results are refused."""

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.data.shards import (
    Manifest,
    Shard,
    claim,
    finish,
    is_finished,
    manifest_path,
    read_finished,
    result_path,
    survey,
)
from coordexp.errors import DataError, UserError

REQUEST = {"data": "a", "max_new_tokens": 9}


@given(total=st.integers(0, 200), count=st.integers(1, 40), batch=st.integers(1, 17))
def test_the_shards_of_a_job_are_all_its_records_once_and_end_where_batches_end(total, count, batch):
    parts = [Shard(number, count).cut(total, batch) for number in range(count)]
    assert [index for part in parts for index in part] == list(range(total))
    assert all(part.start % batch == 0 or not part for part in parts)
    batches = [-(-len(part) // batch) for part in parts]
    assert max(batches) - min(batches) <= 1


def test_a_shard_has_a_number_from_0_and_below_the_count():
    assert Shard.parse("15/16") == Shard(15, 16)
    for text in ("16/16", "3", "-1/4", "1/0", "1 / 4", "a/b", "٣/٤"):
        with pytest.raises(UserError):
            Shard.parse(text)


def write_shard(folder: Path, number: int, count: int = 3, request: dict = REQUEST, content: bytes = b"line\n"):
    """Write the result of a shard with ten records."""
    part = (10 * number, 10 * number + 10)
    result_path(folder, Shard(number, count), "predict").write_bytes(content)
    finish(folder, Manifest("predict", number, count, *part, "d.jsonl", request, {"images": 10}))


def test_only_a_shard_with_a_manifest_is_finished_and_only_for_its_own_request(tmp_path):
    write_shard(tmp_path, 1)
    assert is_finished(tmp_path, Shard(1, 3), REQUEST, "predict")
    assert not is_finished(tmp_path, Shard(0, 3), REQUEST, "predict")
    with pytest.raises(DataError, match="max_new_tokens 9 is now 8"):
        is_finished(tmp_path, Shard(1, 3), REQUEST | {"max_new_tokens": 8}, "predict")
    with pytest.raises(DataError, match="another command"):
        is_finished(tmp_path, Shard(1, 3), REQUEST, "doctor")
    manifest_path(tmp_path, Shard(1, 3)).unlink()
    assert not is_finished(tmp_path, Shard(1, 3), REQUEST, "predict")


def test_a_survey_tells_finished_shards_from_those_that_were_begun_and_those_that_were_not(tmp_path):
    write_shard(tmp_path, 2)
    (tmp_path / "00000-of-00003.unfinished.jsonl").touch()
    known = survey(tmp_path)
    assert (known.count, set(known.finished), known.begun, known.missing) == (3, {2}, {0}, [0, 1])


def lose_a_shard(folder):
    manifest_path(folder, Shard(1, 3)).unlink()


def add_one_of_another_job(folder):
    write_shard(folder, 1, count=4)


def replace_one_by_that_of_another_request(folder):
    write_shard(folder, 1, request=REQUEST | {"data": "b"})


def change_a_result(folder):
    result_path(folder, Shard(1, 3), "predict").write_bytes(b"other\n")


def lose_a_result(folder):
    result_path(folder, Shard(1, 3), "predict").unlink()


def tear_a_manifest(folder):
    manifest_path(folder, Shard(1, 3)).write_text('{"command": "pre')


SPOILT = {
    lose_a_shard: "not finished: 1",
    add_one_of_another_job: "with 3 and with 4 shards",
    replace_one_by_that_of_another_request: "00001-of-00003.json",
    change_a_result: "00001-of-00003.answers.jsonl",
    lose_a_result: "00001-of-00003.answers.jsonl",
    tear_a_manifest: "00001-of-00003.json",
}


@pytest.mark.parametrize(("spoil", "named"), SPOILT.items())
def test_results_that_do_not_belong_together_are_refused_by_name(tmp_path, spoil, named):
    for number in range(3):
        write_shard(tmp_path, number)
    assert [manifest.shard for manifest in read_finished(tmp_path)] == [0, 1, 2]
    spoil(tmp_path)
    with pytest.raises(DataError, match=named):
        read_finished(tmp_path)


def test_a_folder_without_shards_is_refused(tmp_path):
    with pytest.raises(DataError):
        survey(tmp_path)


def hold(folder: Path, number: int, connection) -> None:
    with claim(folder, Shard(number, 3)):
        connection.send("held")
        connection.recv()


def test_a_shard_has_one_process_at_a_time_until_that_is_killed_and_other_shards_are_free(tmp_path):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    other = context.Process(target=hold, args=(tmp_path, 1, there))
    other.start()
    try:
        assert here.poll(20) and here.recv() == "held"
        with pytest.raises(UserError), claim(tmp_path, Shard(1, 3)):
            pass
        with claim(tmp_path, Shard(0, 3)):
            pass
    finally:
        other.kill()
        other.join()
    with claim(tmp_path, Shard(1, 3)):
        pass
