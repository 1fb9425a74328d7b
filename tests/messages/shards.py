"""Messages about work in shards."""

from coordexp.data.shards import Manifest, Shard, finish, is_finished, manifest_path, read_finished, result_path
from tests.messages import provoke

REQUEST = {"data": "a", "max_new_tokens": 9}


def write_shards(folder, count, **changes):
    for number in range(count):
        result_path(folder, Shard(number, count), "predict").write_bytes(b"")
        finish(folder, Manifest("predict", number, count, number, number + 1, "d.jsonl", REQUEST | changes, {}))


@provoke("16/16", "x")
def a_shard_that_is_none(folder, text):
    Shard.parse(text)


@provoke({"max_new_tokens": 8}, {"data": "b"})
def a_shard_of_another_request(folder, changes):
    write_shards(folder, 1)
    is_finished(folder, Shard(0, 1), REQUEST | changes, "predict")


@provoke(0, 2)
def a_folder_with_shards_of_jobs_with_3_and_so_many_shards(folder, count):
    write_shards(folder, count)
    if count:
        write_shards(folder, 3)
    read_finished(folder)


@provoke()
def shards_that_are_missing(folder):
    write_shards(folder, 20)
    for number in range(1, 14):
        manifest_path(folder, Shard(number, 20)).unlink()
    read_finished(folder)


@provoke()
def a_result_that_was_changed(folder):
    write_shards(folder, 1)
    result_path(folder, Shard(0, 1), "predict").write_bytes(b"b")
    read_finished(folder)


@provoke()
def a_torn_manifest(folder):
    manifest_path(folder, Shard(0, 1)).write_text("{")
    read_finished(folder)
