"""Ranks that share an engine: the first of a group asks for all of it, and each gets the answers to its own."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout import group
from coordexp.rollout.backend import Decode, Picture, Request, Rollout
from coordexp.rollout.group import Group, gathered, written

GUARDED = Decode(9, "sampling", temperature=0.5, guard=RepeatTerminate(enabled=True, max_object_keys=3))


class Ranks:
    """Threads that are ranks."""

    def __init__(self, count: int) -> None:
        self.barrier, self.texts, self.here = threading.Barrier(count, timeout=5), [""] * count, threading.local()

    def gather(self, text: str) -> list[str]:
        self.texts[self.here.rank] = text
        self.barrier.wait()
        found = list(self.texts)
        self.barrier.wait()
        return found

    def run(self, work):
        def one(rank: int):
            self.here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(len(self.texts)) as pool:
            return list(pool.map(one, range(len(self.texts))))


@pytest.fixture
def ranks(monkeypatch):
    def of(count: int) -> Ranks:
        made = Ranks(count)
        monkeypatch.setattr(group, "gather_texts", made.gather)
        monkeypatch.setattr(group, "together", lambda work: work())
        return made

    return of


def request(rank: int, number: int) -> Request:
    return Request(Picture(f"pictures/{rank}-{number}.png", 64, 48), GUARDED, seed=10 * rank + number + 1)


def answer(one: Request) -> Rollout:
    return Rollout((1, 2), (one.seed, 7), f'é "{one.seed}"\n', (-0.1, -1 / 3), "stop", version=4)


@pytest.mark.parametrize(
    ("size", "counts"), [(2, (2, 1)), (2, (0, 3)), (2, (0, 0)), (2, (1, 2, 0, 1)), (4, (1, 0, 2, 1))]
)
def test_each_rank_gets_the_answers_to_its_own_requests_in_their_order(ranks, size, counts):
    calls = {}

    def work(rank: int) -> list[Rollout]:
        def answers(requests):
            calls[rank] = list(requests)
            return [answer(one) for one in requests]

        return Group(rank, size).answered([request(rank, k) for k in range(counts[rank])], answers)

    found = ranks(len(counts)).run(work)
    own = [[request(rank, k) for k in range(count)] for rank, count in enumerate(counts)]
    assert found == [[answer(one) for one in part] for part in own]
    assert calls == {
        first: [one for part in own[first : first + size] for one in part] for first in range(0, len(counts), size)
    }


def test_a_rank_with_an_engine_of_its_own_asks_nobody(ranks):
    assert Group(3, 1).answered([request(3, 0)], lambda asked: [answer(one) for one in asked]) == [
        answer(request(3, 0))
    ]


def test_requests_come_back_from_text_as_they_were():
    requests = [request(0, 0), Request(Picture("é.png", 1, 2), Decode.greedy(5))]
    assert gathered(written(requests)) == requests
