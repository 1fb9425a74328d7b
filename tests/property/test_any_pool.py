"""Properties of every pool of servers, whatever fails: which server gets which request, and what comes back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordexp.config.rollout import capacity_shortage
from coordexp.servers.pool import Loss, Pool, Window, split_count
from tests.examples import examples

SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=9)


def ready(sizes, version=3) -> Pool:
    return replace(Pool.of(sizes), version=version, states=(version,) * len(sizes))


@pytest.mark.scenario("R07.C17", on="pure")
@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 70))
def test_equal_servers_get_chunks_of_the_rounded_up_size(count, size, servers):
    """As the specification writes it: server i gets [i * chunk : (i + 1) * chunk]."""
    chunk = -(-count // servers)
    requests = list(range(count))
    counts = split_count(count, [size] * servers)
    assert counts == [len(requests[i * chunk : (i + 1) * chunk]) for i in range(servers)]


@pytest.mark.scenario("R15.C3", on="pure")
@given(st.integers(1, 300), SIZES.filter(lambda sizes: len(set(sizes)) > 1))
def test_unequal_servers_get_their_proportion_to_less_than_one_request(count, sizes):
    for share, size in zip(split_count(count, sizes), sizes, strict=True):
        assert abs(share - count * size / sum(sizes)) < 1


def test_the_rest_goes_to_the_largest_remainder_and_of_equal_ones_to_the_first():
    assert split_count(3, [1, 1, 2]) == [1, 1, 1]  # 0.75, 0.75 and 1.5
    assert split_count(1, [2, 2, 1]) == [1, 0, 0]


@pytest.mark.scenario("R07.S3", on="pure")
@given(st.integers(0, 80), SIZES, st.integers(0, 15), st.integers(1, 16))
def test_chunks_are_contiguous_in_order_and_the_same_every_time(count, sizes, rank, learners):
    def chunks():
        window = Window(ready(sizes), 100 * learners, rank % learners, learners)
        window.add(range(count))
        return window.next_calls()

    first = chunks()
    assert first == chunks()
    assert tuple(request for _, part in first for request in part) == tuple(range(count))
    assert all(part for _, part in first)
    assert len({server for server, _ in first}) == len(first)


def windows(sizes, batch, learners, count) -> list[Window]:
    """Return the windows of all ranks, with the same number of requests each."""
    of_ranks = [Window(ready(sizes), batch, rank, learners) for rank in range(learners)]
    for window in of_ranks:
        window.add(range(count))
    return of_ranks


@pytest.mark.scenario("R07.C17", "R15.C3", on="pure")
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 8), st.integers(1, 40), st.integers(1, 80))
def test_no_server_gets_more_first_requests_of_all_ranks_than_it_decodes_and_one_rank_rounds_up(
    servers, size, batch, learners, count
):
    sizes = [size] * servers
    if capacity_shortage(batch, sum(sizes), learners):
        return
    asked = [0] * servers
    for window in windows(sizes, batch, learners, count):
        for server, part in window.next_calls():
            asked[server] += len(part)
    assert max(asked) < batch * size + -(-(batch * sum(sizes) // learners) // servers)


@pytest.mark.scenario("R15.C2", on="pure")
def test_the_slots_of_a_rank_are_rounded_down_and_at_least_one():
    assert ready([1, 2]).capacity(4, 5) == 2
    assert ready([1, 1]).capacity(1, 4) == 1


def time_to_answer(sizes, batch, learners, count) -> int:
    """Return when all requests of all ranks are answered, if each takes one unit of time. A server decodes the
    requests that it got first, as many as it can at once."""
    of_ranks = windows(sizes, batch, learners, count)
    queues: list[list] = [[] for _ in sizes]
    left: dict = {}
    time = 0
    while True:
        for rank, window in enumerate(of_ranks):
            for call in window.next_calls():
                queues[call[0]] += [(rank, call)] * len(call[1])
                left[rank, call] = len(call[1])
        if not any(queues):
            return time
        time += 1
        for server, queue in enumerate(queues):
            for rank, call in queue[: batch * sizes[server]]:
                left[rank, call] -= 1
                if not left[rank, call]:
                    of_ranks[rank].close(call)
            del queue[: batch * sizes[server]]


@pytest.mark.scenario("R15.C3", on="pure")
@pytest.mark.parametrize(
    ("sizes", "learners", "batch", "count", "expected"),
    [
        ([1] * 4, 4, 1, 8, 8),  # one server per GPU; 18 if all ranks began with the same servers
        ([1] * 3, 2, 1, 6, 6),
        ([1] * 8, 8, 2, 8, 4),
        ([1] * 24, 8, 4, 32, 3),
        ([1] * 8, 4, 1, 16, 8),
        ([1] * 4, 4, 2, 16, 8),
        ([2, 1], 3, 2, 8, 5),
        ([8] * 3, 8, 4, 32, 3),
    ],
)
def test_several_ranks_keep_all_servers_busy(sizes, learners, batch, count, expected):
    assert time_to_answer(sizes, batch, learners, count) <= expected


@examples(300)
@given(st.data())
@pytest.mark.scenario("R10.C6", "R15.C2", on="pure")
def test_every_request_is_answered_or_no_server_is_left_and_never_are_more_open_than_may_be(data):
    sizes = data.draw(SIZES)
    count, batch = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 4))
    learners = data.draw(st.integers(1, 12))
    rank = data.draw(st.integers(0, learners - 1))
    window = Window(ready(sizes), batch, rank, learners)
    window.add(range(count))
    running: list = []
    answered: list[int] = []
    while True:
        running += (made := window.next_calls())
        usable, capacity = window.pool.usable, window.pool.capacity(batch, learners)
        requests = {k: [len(part) for server, part in running if server == k] for k in usable}
        assert all(server in usable and part for server, part in running)
        # After a loss, more may still be open than the servers that are left may have.
        assert not made or sum(map(sum, requests.values())) <= capacity
        devices = sum(sizes[k] for k in usable)
        most = {k: -(-capacity * sizes[k] // devices) for k in usable}
        assert all(sum(requests[k]) <= most[k] for k in {server for server, _ in made})
        is_full = sum(map(sum, requests.values())) >= capacity or all(sum(requests[k]) >= most[k] for k in usable)
        waiting = count - len(answered) - sum(map(sum, requests.values()))
        assert not (usable and waiting) or is_full, "a server idles while requests wait"
        if not running:
            break
        call = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if data.draw(st.integers(0, 9)) == 0:
            window.lose(call[0], Loss("killed"))
            running = [other for other in running if other[0] != call[0]]
        else:
            answered += call[1]
            window.close(call)
    assert window.is_idle
    assert len(answered) == len(set(answered))
    assert len(answered) == count or not window.pool.usable


@pytest.mark.scenario("R07.C17", "R07.S3", "R15.C3", on="pure")
@given(st.integers(0, 60), SIZES, st.integers(1, 8), st.integers(0, 15), st.integers(1, 16))
def test_requests_that_may_all_be_open_at_once_go_out_as_one_call_per_server(count, sizes, batch, rank, learners):
    pool, rank = ready(sizes), rank % learners
    if count > pool.capacity(batch, learners):
        return
    window = Window(pool, batch, rank, learners)
    window.add(range(count))
    calls = window.next_calls()
    shares = {server: share for server, share in pool.split(count, rank, learners).items() if share}
    assert [(server, len(part)) for server, part in calls] == list(shares.items())


def answer_in_turn(window: Window) -> list[int]:
    """Answer the oldest call first, and return the order in which requests were asked."""
    calls, order = window.next_calls(), []
    while calls:
        order += calls[0][1]
        window.close(calls[0])
        calls = [*calls[1:], *window.next_calls()]
    return order


def test_the_requests_of_two_steps_are_asked_one_after_the_other():
    window = Window(ready([1, 1]), decode_batch_size=1)
    window.add(range(4))
    window.add(range(4, 8))
    assert answer_in_turn(window) == list(range(8))


def test_a_server_that_is_done_goes_on_with_the_next_request_while_another_is_slow():
    window = Window(ready([1, 1]), decode_batch_size=1)
    window.add(range(6))
    of_the_slow, call = sorted(window.next_calls())
    answered = []
    while call:
        answered += call[1]
        window.close(call)
        (call,) = window.next_calls() or [None]
    assert of_the_slow == (0, (0,))
    assert answered == [1, 2, 3, 4, 5]


def test_the_requests_of_a_server_that_is_lost_come_next():
    window = Window(ready([1, 1]), decode_batch_size=1)
    window.add(range(6))
    first, second = window.next_calls()
    window.lose(first[0], Loss("killed"))
    window.close(second)
    assert answer_in_turn(window) == [*first[1], 2, 3, 4, 5]


STATES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2) | st.just(Loss("reason"))), max_size=40)


@examples(300)
@given(STATES, st.integers(0, 2))
def test_a_server_may_be_asked_only_while_it_has_the_weights_of_the_pool(events, version):
    pool, states = replace(Pool.of([1] * 4), version=version), {}
    for server, state in events:
        pool = pool.mark(server, state)
        states[server] = state
    assert pool.usable == tuple(k for k in range(4) if states.get(k) == version)
    assert set(pool.out) == {k for k in range(4) if not isinstance(states.get(k), int)}
