"""Token draws: prefixes, laws with zeros, streams; pair probabilities of every law; and the target operators."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from copyhead.model import markov, targets, tokens
from copyhead.problem import Problem
from copyhead.record import ProblemError


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


CHAIN = np.array([[0.1, 0.6, 0.3], [0.5, 0.0, 0.5], [0.8, 0.2, 0.0]])
# Token 0 is left for good: probability zero in the stationary chain.
LEFT = np.array([[0.0, 1, 1, 0], [0, 0, 3, 1], [0, 1, 0, 2], [0, 2, 2, 0]])
PERIODIC = np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
LAWS = {
    "uniform": tokens.Independent(tokens.uniform(3)),
    "zipf": tokens.Independent(tokens.zipf(4, 1.3)),
    "counts": tokens.Independent(np.array([0, 0.7, 0, 0.3])),
    "chain": tokens.Markov(CHAIN),
    "left": tokens.Markov(LEFT),
    "periodic": tokens.Markov(PERIODIC),
}


def written(path, table):
    path.write_text("\n".join(" ".join(map(str, row)) for row in np.atleast_2d(table)), encoding="utf-8")
    return str(path)


def problem(**fields):
    return Problem.preset("paper", **fields)


def measured(drawn, lag, vocab, cyclic):
    """Frequencies of the pairs (x_i, x_{i + lag}), averaged over sequences and positions."""
    length = drawn.shape[1]
    left = drawn if cyclic else drawn[:, : length - lag]
    right = np.roll(drawn, -lag, axis=1) if cyclic else drawn[:, lag:]
    return np.bincount((left * vocab + right).ravel(), minlength=vocab**2).reshape(vocab, vocab) / left.size


def check_frequencies(law, length, cyclic, count=40_000):
    drawn = law.draw(tokens.stream(3, "train"), count, length, cyclic)
    pairs = law.pairs(length, cyclic)
    assert drawn.shape == (count, length)
    np.testing.assert_allclose(pairs.sum((1, 2)), 1, rtol=1e-12)
    np.testing.assert_allclose(np.diagonal(pairs[0]), law.marginal(length, cyclic), rtol=1e-12)
    np.testing.assert_array_equal(pairs[0], np.diag(np.diagonal(pairs[0])))
    for lag in range(length):
        # A mean over positions of zeros and ones varies at most as one of them does, p (1 - p); sequences are independent.
        error = 5 * np.sqrt(pairs[lag] * (1 - pairs[lag]).clip(0) / count)
        found = measured(drawn, lag, law.vocab, cyclic)
        assert np.all(np.abs(found - pairs[lag]) <= error + 1e-12), (lag, found, pairs[lag])
        assert np.all(found[pairs[lag] == 0] == 0)


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_frequencies_of_draws_are_the_pair_probabilities(name, cyclic):
    check_frequencies(LAWS[name], 6, cyclic)


@pytest.mark.parametrize("name", LAWS)
def test_an_open_sequence_has_the_same_law_at_every_position(name):
    law, count = LAWS[name], 40_000
    drawn = law.draw(tokens.stream(4, "train"), count, 5, False)
    p = law.marginal(5, False)
    for i in range(5):
        found = np.bincount(drawn[:, i], minlength=law.vocab) / count
        assert np.all(np.abs(found - p) <= 5 * np.sqrt(p * (1 - p) / count) + 1e-12)


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_a_data_set_of_any_law_is_the_prefix_of_every_larger_one(name, cyclic, monkeypatch):
    law = LAWS[name]
    large = law.draw(tokens.stream(5, "train"), 400, 6, cyclic)
    np.testing.assert_array_equal(law.draw(tokens.stream(5, "train"), 300, 6, cyclic), large[:300])
    monkeypatch.setattr(markov, "CHUNK", 28)
    np.testing.assert_array_equal(law.draw(tokens.stream(5, "train"), 300, 6, cyclic), large[:300])


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_no_law_draws_a_token_of_probability_zero(name, cyclic):
    law = LAWS[name]
    drawn = law.draw(tokens.stream(6, "train"), 2000, 6, cyclic)
    assert set(np.unique(drawn)) == set(np.flatnonzero(law.marginal(6, cyclic)))


@pytest.mark.parametrize("cyclic", [True, False])
@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2**-53])
def test_no_draw_of_the_generator_is_a_transition_of_probability_zero(monkeypatch, draw, cyclic):
    """The edges again, in tables with zeros at both ends of a row; a row is not left for the next one."""

    class Edge:
        def random(self, shape):
            return np.full(shape, draw)

    monkeypatch.setattr(np.random, "default_rng", lambda _: Edge())
    table = np.kron([[0, 1, 1, 0], [0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1]], np.ones((3, 3))) * (np.arange(12) % 3 < 2)
    drawn = tokens.Markov(table).draw(tokens.stream(0, "train"), 2, 8, cyclic)
    assert np.all(table[drawn[:, :-1], drawn[:, 1:]] > 0)
    assert not cyclic or np.all(table[drawn[:, -1], drawn[:, 0]] > 0)


def test_uniform_draws_are_those_of_sample_to_the_bit():
    found = tokens.law(problem(vocab=7)).draw(tokens.stream(8, "train"), 50, 32, True)
    np.testing.assert_array_equal(found, tokens.sample(tokens.stream(8, "train"), 50, 32, tokens.uniform(7)))


@given(vocab=st.integers(2, 2000), exponent=st.floats(0, 5))
def test_zipf_is_normalised_and_falls_as_a_power(vocab, exponent):
    p = tokens.law(problem(vocab=vocab, tokens=f"zipf:{exponent:.12f}")).marginal(32, True)
    assert len(p) == vocab
    # rounding of a sum of 2000 terms, and the exponent as written
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-12)
    np.testing.assert_allclose(p[0] / p, np.arange(1, vocab + 1) ** exponent, rtol=1e-9)


def ring(table, length):
    """Probabilities of all V^L sequences on a ring, by enumeration."""
    vocab = len(table)
    sequences = np.array(list(itertools.product(range(vocab), repeat=length)))
    weight = np.prod(table[sequences, np.roll(sequences, -1, axis=1)], axis=1)
    return sequences, weight / weight.sum()


def test_the_ring_law_is_that_of_enumeration():
    table, length, count = CHAIN / CHAIN.sum(axis=1, keepdims=True), 4, 200_000
    law = tokens.Markov(CHAIN)
    sequences, probability = ring(table, length)
    expected = np.zeros((length, 3, 3))
    for lag in range(length):
        for i in range(length):
            np.add.at(expected[lag], (sequences[:, i], sequences[:, (i + lag) % length]), probability / length)
    # rounding
    np.testing.assert_allclose(law.pairs(length, True), expected, atol=1e-14)
    np.testing.assert_allclose(law.marginal(length, True), np.diagonal(expected[0]), atol=1e-14)
    assert np.max(np.abs(law.marginal(length, True) - law.marginal(length, False))) > 0.01

    drawn = law.draw(tokens.stream(9, "train"), count, length, True)
    found = np.bincount(drawn @ 3 ** np.arange(length)[::-1], minlength=3**length) / count
    # five standard errors of a binomial frequency, of each of the 81 sequences
    assert np.all(np.abs(found - probability) <= 5 * np.sqrt(probability * (1 - probability) / count))


@given(seed=st.integers(0, 2**32), vocab=st.integers(2, 12))
def test_the_stationary_law_is_kept_by_one_step(seed, vocab):
    random = np.random.default_rng(seed)
    table = random.random((vocab, vocab)) * (random.random((vocab, vocab)) < 0.5)
    # a cycle through all tokens, so that each is reached from each
    table += 1e-6 * np.roll(np.eye(vocab), 1, axis=1)
    law = tokens.Markov(table)
    p = law.marginal(5, False)
    assert np.all(p > 0)
    np.testing.assert_allclose(p @ law.transition, p, rtol=1e-12)
    np.testing.assert_allclose(p.sum(), 1, rtol=1e-12)


def test_small_stationary_probabilities_keep_their_relative_accuracy():
    """A chain that is balanced in detail: p_1 / p_0 = M_01 / M_10."""
    law = tokens.Markov(np.array([[1 - 1e-14, 1e-14], [0.5, 0.5]]))
    p = law.marginal(5, False)
    np.testing.assert_allclose(p[1] / p[0], law.transition[0, 1] / law.transition[1, 0], rtol=1e-14)


def test_a_chain_that_forgets_at_once_has_independent_tokens():
    p = np.array([0.5, 0.2, 0.3])
    chain, law = tokens.Markov(np.tile(p, (3, 1))), tokens.Independent(p)
    for cyclic in (True, False):
        np.testing.assert_allclose(chain.pairs(5, cyclic), law.pairs(5, cyclic), atol=1e-15)
    assert law.independent
    assert not chain.independent


def test_rows_of_a_chain_and_counts_are_normalised(tmp_path):
    # Rows and counts whose sum is too large for a float, too.
    table = CHAIN * [[7], [1], [1e-300]]
    table[1] = [1.5e308, 0, 1.5e308]
    chain = tokens.law(problem(vocab=3, tokens="markov:" + written(tmp_path / "chain", table)))
    np.testing.assert_allclose(chain.pairs(4, False), tokens.Markov(CHAIN).pairs(4, False), rtol=1e-12)
    for table in ([[6, 0, 2]], [[6], [0], [2]], [[1.5e308, 0, 0.5e308]]):
        law = tokens.law(problem(vocab=3, tokens="counts:" + written(tmp_path / "counts", table)))
        np.testing.assert_allclose(law.marginal(4, True), [0.75, 0, 0.25], rtol=1e-14)


@pytest.mark.parametrize(
    ("kind", "table", "vocab", "message"),
    [
        ("counts", [[1, 2, 3]], 4, "must have vocab = 4 counts, has 3"),
        ("counts", [[1, 2], [3, 4]], 4, "must be one row or one column of counts, is (2, 2)"),
        ("counts", [[1, -2, 3]], 3, "must be counts >= 0, not all zero, has -2"),
        ("counts", [[0, 0, 0]], 3, "must be counts >= 0, not all zero, has 0"),
        ("markov", [[1, 2], [3, 4]], 3, "must be 3 x 3 (vocab), is (2, 2)"),
        ("markov", [[1, 2, 3], [3, 4, 5]], 2, "must be 2 x 2 (vocab), is (2, 3)"),
        ("markov", [[1, 2], [3, -4]], 2, "row 2: must be numbers >= 0, has -4"),
        ("markov", [[0, 0], [3, 4]], 2, "row 1: must have a number > 0, is zero everywhere"),
        ("markov", [[1, 0, 0], [1, 1, 1], [0, 0, 1]], 3, "must have one stationary law"),
    ],
)
def test_files_of_laws_that_do_not_fit_are_refused(tmp_path, kind, table, vocab, message):
    path = written(tmp_path / "table", table)
    with pytest.raises(ProblemError, match=rf"^tokens file = {re.escape(repr(path))}.*{re.escape(message)}"):
        tokens.law(problem(vocab=vocab, tokens=f"{kind}:{path}"))


@pytest.mark.parametrize("what", ["marginal", "pairs", "draw"])
def test_a_periodic_chain_closes_only_to_rings_of_its_period(what):
    law = tokens.Markov(PERIODIC, "tokens file = 'x'")

    def ask(length, cyclic):
        if what == "draw":
            return law.draw(tokens.stream(0, "train"), 2, length, cyclic)
        return getattr(law, what)(length, cyclic)

    with pytest.raises(ProblemError, match=r"^length = 4: tokens file = 'x' has no sequence .* needs a multiple of the period"):
        ask(4, True)
    assert np.all(np.isfinite(ask(6, True)))
    assert np.all(np.isfinite(ask(4, False)))


def test_a_law_is_read_once_and_again_when_its_file_changes(tmp_path):
    path = written(tmp_path / "counts", [[1, 2, 3]])
    asked = problem(vocab=3, tokens=f"counts:{path}")
    first = tokens.law(asked)
    assert tokens.law(asked.replace(chi=7)) is first
    written(tmp_path / "counts", [[1, 2, 30]])
    np.testing.assert_allclose(tokens.law(asked).marginal(4, True), np.array([1, 2, 30]) / 33, rtol=1e-14)


def test_files_give_the_number_of_tokens(tmp_path):
    assert tokens.vocab_of("counts:" + written(tmp_path / "row", [[1, 2, 3]])) == 3
    assert tokens.vocab_of("counts:" + written(tmp_path / "column", [[1], [2], [3], [4]])) == 4
    assert tokens.vocab_of("markov:" + written(tmp_path / "chain", LEFT)) == 4
    assert [tokens.vocab_of(name) for name in ("uniform", "zipf:1.2", "corpus:nowhere")] == [None] * 3
    path = written(tmp_path / "wide", [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ProblemError, match=r"must be one row or one column of counts, is \(2, 3\)"):
        tokens.vocab_of(f"counts:{path}")
    with pytest.raises(ProblemError, match=r"must have as many rows as columns, is \(2, 3\)"):
        tokens.vocab_of(f"markov:{path}")
    with pytest.raises(ProblemError, match=r"^tokens file = .*cannot be read"):
        tokens.vocab_of(f"counts:{tmp_path / 'nowhere'}")


def test_descriptions_are_numbers_that_json_holds(tmp_path):
    said = tokens.describe(problem(vocab=8))
    assert said == json.loads(json.dumps(said))
    assert said["entropy_bits"] == pytest.approx(3, rel=1e-14)
    assert said["collision"] == pytest.approx(1 / 8, rel=1e-14)
    assert (said["independent"], said["occurring"], said["vocab"]) == (True, 8, 8)
    said = tokens.describe(problem(vocab=3, tokens="counts:" + written(tmp_path / "counts", [[0, 5, 0]])))
    assert (str(said["entropy_bits"]), said["collision"], said["occurring"]) == ("0.0", 1.0, 1)
    # The ring has another law of one token than the open chain.
    chain = "markov:" + written(tmp_path / "chain", CHAIN)
    closed, opened = (tokens.describe(problem(vocab=3, length=4, cyclic=cyclic, tokens=chain)) for cyclic in (True, False))
    assert closed["collision"] == pytest.approx(np.sum(tokens.Markov(CHAIN).marginal(4, True) ** 2), rel=1e-14)
    assert abs(closed["collision"] - opened["collision"]) > 1e-3
