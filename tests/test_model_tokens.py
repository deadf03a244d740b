"""Token draws: prefixes, laws with zeros, streams; and the target operators."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.model import targets, tokens


@given(seed=st.integers(0, 2**32), first=st.integers(1, 40), more=st.integers(0, 40), length=st.integers(2, 9))
def test_a_data_set_is_the_prefix_of_every_larger_one(seed, first, more, length):
    law = np.array([0.5, 0.2, 0.3])
    small = tokens.sample(tokens.stream(seed, "train"), first, length, law)
    large = tokens.sample(tokens.stream(seed, "train"), first + more, length, law)
    assert small.shape == (first, length)
    np.testing.assert_array_equal(small, large[:first])


@pytest.mark.parametrize(
    "law", [[0, 0.3, 0, 0, 0.7, 0], [0.1] * 7 + [0.3, 0], [0, 0, 1], [0.7 / 3, 0, 0.7 / 3, 0, 0.7 / 3, 0.3], [3, 0, 1]]
)
def test_tokens_of_zero_probability_are_never_drawn(law):
    law = np.array(law, float)
    drawn = tokens.sample(tokens.stream(0, "train"), 4000, 8, law)
    assert set(np.unique(drawn)) == set(np.flatnonzero(law))


@pytest.mark.parametrize("draw", [0.0, 0.3, 1 - 2**-53])
def test_no_draw_of_the_generator_falls_on_a_zero_probability(monkeypatch, draw):
    """The three edges: the least draw, one exactly on a step of the distribution function, and the largest."""

    class Edge:
        def random(self, shape):
            return np.full(shape, draw)

    monkeypatch.setattr(np.random, "default_rng", lambda _: Edge())
    law = np.array([0, 0.3, 0, 0.7, 0])
    assert law[tokens.sample(None, 1, 1, law)[0, 0]] > 0


def test_frequencies_follow_the_law():
    law, count = np.array([0.5, 0.2, 0.3]), 40_000
    drawn = tokens.sample(tokens.stream(1, "train"), count // 8, 8, law)
    frequencies = np.bincount(drawn.ravel(), minlength=3) / count
    # five standard errors of a binomial frequency; the seed is fixed, so this is no lottery
    assert np.all(np.abs(frequencies - law) < 5 * np.sqrt(law * (1 - law) / count))


def test_streams_of_one_seed_share_no_draws():
    law = tokens.uniform(1000)
    sources = [tokens.stream(7, name, *parts) for name in tokens.STREAMS for parts in ((), (0,), (1,))]
    draws = [tokens.sample(source, 4, 16, law) for source in sources]
    assert len({draw.tobytes() for draw in draws}) == len(sources)


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("cyclic", [True, False])
def test_the_target_copies_the_token_that_stands_lag_positions_before(lag, cyclic):
    length = 5
    target = targets.shift(length, lag, cyclic)
    for a in range(length):
        for b in range(length):
            copied = b == (a - lag) % length if cyclic else b == a - lag
            assert target[a, b] == copied
