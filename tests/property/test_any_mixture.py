"""Whatever the shares of a mixture are, every prefix has them to within one sample."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordexp.train.mixture import Mixture
from coordexp.train.stream import SampleOrder

shares = st.lists(st.integers(1, 60) | st.integers(1, 2000), min_size=1, max_size=9)


@given(shares)
def test_every_prefix_has_its_shares_to_within_one_sample(numbers):
    mixture, period = Mixture(tuple(numbers), (1,) * len(numbers)), sum(numbers)
    places = [mixture.locate(position) for position in range(period + 50)]
    counts = np.cumsum(np.eye(len(numbers), dtype=np.int64)[[chosen for chosen, _ in places]], axis=0)
    lengths = np.arange(1, len(places) + 1)[:, None]
    assert (abs(counts * period - lengths * np.array(numbers)) < period).all()
    seen = Counter[int]()
    for chosen, before in places:
        assert before == seen[chosen]
        seen[chosen] += 1


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=2, max_size=4),
    st.integers(1, 5),
    st.integers(0, 10**9),
)
def test_ranks_together_take_a_prefix_of_the_mixture(pairs, ranks, start):
    mixture = Mixture(*(tuple(values) for values in zip(*pairs, strict=True)))

    def order(rank, ranks):
        return SampleOrder(sum(mixture.sizes), rank, ranks, seed=1, shuffled=True, mixture=mixture)

    together = [order(rank, ranks).index(taken) for taken in range(start, start + 5) for rank in range(ranks)]
    alone = order(0, 1)
    assert Counter(together) == Counter(alone.index(k) for k in range(start * ranks, (start + 5) * ranks))
