"""Ranks that share an engine: each of them asks for all, and gets the rollouts of its own requests."""

import json

import pytest

from coordexp.config.rollout import RepeatTerminate
from coordexp.rollout import colocate
from coordexp.rollout.backend import Decode, ImageRef, Request, Rollout
from coordexp.rollout.colocate import share_requests

GUARDED = Decode(9, "sampling", temperature=0.5, guard=RepeatTerminate(enabled=True, max_object_keys=3))


def request(rank: int, number: int) -> Request:
    return Request(ImageRef(f"images/é{rank}-{number}.png", 64, 48), GUARDED, seed=10 * rank + number + 1)


def answer(request: Request) -> Rollout:
    return Rollout((1, 2), (request.seed, 7), f'é "{request.seed}"\n', (-0.1, -1 / 3), "stop", version=4)


@pytest.mark.parametrize(
    ("size", "counts"), [(1, (2, 1)), (2, (2, 1)), (2, (0, 0)), (2, (1, 2, 0, 1)), (4, (1, 0, 2, 1))]
)
def test_each_rank_gets_the_answers_to_its_own_requests_in_their_order(monkeypatch, size, counts):
    by_rank = [[request(rank, k) for k in range(count)] for rank, count in enumerate(counts)]
    texts = [json.dumps(colocate.REQUESTS.dump_python(requests)) for requests in by_rank]
    monkeypatch.setattr(colocate, "gather_texts", lambda own: texts)
    for rank, requests in enumerate(by_rank):
        asked: list[Request] = []

        def ask(batch, asked=asked):
            asked += batch
            return [answer(request) for request in batch]

        assert share_requests(requests, rank, size, ask) == [answer(request) for request in requests]
        first = rank - rank % size
        assert asked == [request for group in by_rank[first : first + size] for request in group]
