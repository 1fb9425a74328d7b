"""Ranks that share an engine: each of them asks for all, and gets the rollouts of its own requests."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout import colocate
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.colocate import RankGroup

GUARDED = Decode(9, "sampling", temperature=0.5, guard=RepeatTerminate(enabled=True, max_object_keys=3))


class FakeRanks:
    """Threads that stand for ranks."""

    def __init__(self, count: int) -> None:
        self.barrier, self.texts, self.here = threading.Barrier(count, timeout=5), [""] * count, threading.local()

    def gather(self, text: str) -> list[str]:
        self.texts[self.here.rank] = text
        self.barrier.wait()
        texts = list(self.texts)
        self.barrier.wait()
        return texts

    def run(self, work):
        def run_rank(rank: int):
            self.here.rank = rank
            return work(rank)

        with ThreadPoolExecutor(len(self.texts)) as pool:
            return list(pool.map(run_rank, range(len(self.texts))))


@pytest.fixture
def ranks(monkeypatch):
    def make(count: int) -> FakeRanks:
        threads = FakeRanks(count)
        monkeypatch.setattr(colocate, "gather_texts", threads.gather)
        monkeypatch.setattr(colocate, "together", lambda work: work())
        return threads

    return make


def request(rank: int, number: int) -> Request:
    return Request(ImageRef(f"images/é{rank}-{number}.png", 64, 48), GUARDED, seed=10 * rank + number + 1)


def answer(request: Request) -> Rollout:
    return Rollout((1, 2), (request.seed, 7), f'é "{request.seed}"\n', (-0.1, -1 / 3), "stop", version=4)


@pytest.mark.parametrize(
    ("size", "counts"), [(2, (2, 1)), (2, (0, 3)), (2, (0, 0)), (2, (1, 2, 0, 1)), (4, (1, 0, 2, 1))]
)
def test_each_rank_gets_the_answers_to_its_own_requests_in_their_order(ranks, size, counts):
    calls = {}

    def work(rank: int) -> list[Rollout]:
        def ask(requests):
            calls[rank] = list(requests)
            return [answer(request) for request in requests]

        return RankGroup(rank, size).share_requests([request(rank, k) for k in range(counts[rank])], ask)

    results = ranks(len(counts)).run(work)
    by_rank = [[request(rank, k) for k in range(count)] for rank, count in enumerate(counts)]
    assert results == [list(map(answer, requests)) for requests in by_rank]
    assert calls == {
        first + place: [request for requests in by_rank[first : first + size] for request in requests]
        for first in range(0, len(counts), size)
        for place in range(size)
    }


def test_a_rank_with_an_engine_of_its_own_asks_nobody(ranks):
    own = [request(3, 0)]
    assert RankGroup(3, 1).share_requests(own, lambda requests: list(map(answer, requests))) == [answer(own[0])]
