"""What holds for every pool of servers, whatever fails when: who is asked, for what, and what comes back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordexp.config.capacity import capacity_shortage, requests_per_rank
from coordexp.rollout.pool import Pool, Up, answered, shares

SIZES = st.lists(st.integers(1, 8), min_size=1, max_size=9)


def ready(sizes, version=3) -> Pool:
    pool = Pool.of(sizes).at(version)
    for k in range(len(sizes)):
        pool = pool.synced(k, version)
    return pool


@given(st.integers(0, 300), SIZES)
def test_every_request_has_one_server(count, sizes):
    found = shares(count, sizes)
    assert sum(found) == count
    assert all(share >= 0 for share in found)


@pytest.mark.scenario("R07.C17", on="pure")
@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 70))
def test_equal_servers_get_chunks_of_the_rounded_up_size(count, size, servers):
    """As the specification writes it: server i gets [i * chunk : (i + 1) * chunk]."""
    chunk = -(-count // servers)
    places = list(range(count))
    found = shares(count, [size] * servers)
    assert found == [len(places[i * chunk : (i + 1) * chunk]) for i in range(servers)]


@pytest.mark.scenario("R15.C3", on="pure")
@given(st.integers(1, 300), SIZES.filter(lambda sizes: len(set(sizes)) > 1))
def test_unequal_servers_get_their_proportion_to_less_than_one_request(count, sizes):
    for share, size in zip(shares(count, sizes), sizes, strict=True):
        assert abs(share - count * size / sum(sizes)) < 1


def test_what_is_left_goes_to_the_largest_remainder_and_of_equal_ones_to_the_first():
    assert shares(3, [1, 1, 2]) == [1, 1, 1]  # 0.75, 0.75 and 1.5
    assert shares(1, [2, 2, 1]) == [1, 0, 0]


@pytest.mark.scenario("R07.S3", on="pure")
@given(st.integers(0, 80), SIZES, st.integers(0, 15), st.integers(1, 16))
def test_chunks_are_contiguous_in_order_and_the_same_every_time(count, sizes, rank, learners):
    pool, places = ready(sizes), tuple(range(count))
    found = pool.chunks(places, rank % learners, learners)
    assert found == pool.chunks(places, rank % learners, learners)
    assert tuple(place for _, part in found for place in part) == places
    assert all(part for _, part in found)
    assert len({server for server, _ in found}) == len(found)


@given(SIZES, st.integers(1, 8), st.integers(1, 40))
def test_ranks_with_few_requests_each_do_not_all_ask_the_same_server(sizes, batch, learners):
    """No server has more than it decodes at once, and what one rank asks for besides."""
    sizes = [sizes[0]] * len(sizes)
    if capacity_shortage(batch, tuple(sizes), learners):
        return
    wave = requests_per_rank(batch, tuple(sizes), learners)
    if wave > len(sizes):
        return
    asked = [0] * len(sizes)
    for rank in range(learners):
        for server, part in ready(sizes).chunks(range(wave), rank, learners):
            asked[server] += len(part)
    assert max(asked) <= batch * sizes[0] + wave


@settings(max_examples=300)
@given(st.data())
def test_every_request_is_answered_once_or_no_server_is_left_and_no_server_that_is_out_is_asked(data):
    sizes = data.draw(SIZES)
    count, batch = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 4))
    learners = data.draw(st.integers(1, 12))
    rank = data.draw(st.integers(0, learners - 1))
    pool = ready(sizes)
    out: set[int] = set()
    given_out: list[int] = []

    def ask(chunks):
        answers, losses = {}, {}
        assert sum(len(part) for _, part in chunks) <= max(1, batch * sum(sizes) // learners)
        for server, part in chunks:
            assert server not in out
            if data.draw(st.integers(0, 4)) == 0:
                losses[server] = "killed"
                out.add(server)
            else:
                given_out.extend(part)
                answers |= {place: f"answer {place}" for place in part}
        return answers, losses

    after, found = answered(pool, count, batch, ask, rank, learners)
    assert len(given_out) == len(set(given_out)) == len(found)
    assert all(found[place] == f"answer {place}" for place in found)
    assert sorted(found) == list(range(count)) or not after.usable
    assert set(after.out) == out
    if count == 0:
        assert not given_out and after == pool


EVENTS = st.one_of(
    st.tuples(st.just("at"), st.integers(0, 5)),
    st.tuples(st.just("synced"), st.integers(0, 3), st.integers(0, 5)),
    st.tuples(st.just("lost"), st.integers(0, 3)),
    st.tuples(st.just("failed"), st.integers(0, 3)),
)


@settings(max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_a_server_may_be_asked_only_after_a_full_sync_at_the_version_that_is_current(events):
    pool, has, current = Pool.of([1] * 4), [None] * 4, None
    for name, *words in events:
        if name == "at":
            pool, current = pool.at(words[0]), words[0]
        elif name == "synced":
            pool = pool.synced(*words)
            if words[1] == current:
                has[words[0]] = current
        else:
            pool = getattr(pool, name)(words[0], "reason")
            has[words[0]] = None
        wanted = tuple(k for k in range(4) if current is not None and has[k] == current)
        assert pool.usable == wanted
        assert {*pool.usable, *pool.behind} == set(range(4))


def test_the_first_reason_of_a_loss_is_kept_until_an_attempt_to_bring_it_back_fails():
    pool = ready([1, 1]).lost(0, "killed").lost(0, "refused")
    assert pool.out == {0: "killed"}
    assert pool.failed(0, "another model").out == {0: "another model"}
    assert pool.states[1] == Up(3)
