"""Messages about work in shards."""

from coordexp.data.shards import Shard, is_finished, read_finished
from tests.messages import provoke
from tests.unit.data import test_shards
from tests.unit.data.test_shards import REQUEST, SPOILT, write_shard


@provoke("16/16", "x")
def a_shard_that_is_none(folder, text):
    Shard.parse(text)


@provoke({"max_new_tokens": 8}, {"data": "b"})
def a_shard_of_another_request(folder, changes):
    write_shard(folder, 0)
    is_finished(folder, Shard(0, 3), REQUEST | changes, "predict")


@provoke()
def a_folder_without_shards(folder):
    read_finished(folder)


@provoke(*(spoil.__name__ for spoil in SPOILT))
def results_of_three_shards_after(folder, spoil):
    for number in range(3):
        write_shard(folder, number)
    getattr(test_shards, spoil)(folder)
    read_finished(folder)


@provoke()
def shards_that_are_missing(folder):
    for number in (0, *range(14, 20)):
        write_shard(folder, number, count=20)
    read_finished(folder)
