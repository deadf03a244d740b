"""Token moments S_ij against loops over sequences, and against each other."""

import jax.numpy as jnp
import numpy as np
import pytest

from copyhead.model import layout, moments, tokens

pytestmark = pytest.mark.usefixtures("x64")

LAW = np.array([0.5, 0.3, 0.0, 0.2])
# products and sums of a few numbers of order one in float64
ROUNDING = {"rtol": 1e-12, "atol": 1e-12}


def brute_force(data: np.ndarray, vocab: int) -> np.ndarray:
    """sum_m x_i^m x_j^mT, one sequence at a time."""
    length = data.shape[1]
    tensor = np.zeros((length, length, vocab, vocab))
    for sequence in data:
        for i in range(length):
            for j in range(length):
                tensor[i, j, sequence[i], sequence[j]] += 1
    return tensor


def expected(law: np.ndarray, length: int, sequences: float) -> np.ndarray:
    """P [delta_ij Sigma + p p^T], entry by entry, as the probabilities of pairs of i.i.d. tokens."""
    tensor = np.zeros((length, length, law.size, law.size))
    for i in range(length):
        for j in range(length):
            tensor[i, j] = np.diag(law) if i == j else np.outer(law, law)
    return sequences * tensor


def direct_contraction(left, right, scored, tensor):
    """sum_ij (left^T right)_ij S_ij, with the scored rows only."""
    total = np.zeros(tensor.shape[2:])
    for i in range(left.shape[1]):
        for j in range(left.shape[1]):
            weight = sum(scored[a] * left[a, i] * right[a, j] for a in range(left.shape[0]))
            total += weight * tensor[i, j]
    return total


def matrices(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    left, right = np.random.default_rng(seed).normal(size=(2, length, length))
    return left, right


def test_empirical_moments_count_pairs_of_tokens():
    data = tokens.sample(tokens.stream(3, "train"), 11, 4, LAW)
    found = moments.empirical(data, LAW.size)
    np.testing.assert_array_equal(found.tensor, brute_force(data, LAW.size))  # integers: exact
    assert found.sequences == 11


@pytest.mark.parametrize("cyclic", [True, False])
def test_empirical_contractions_are_the_sums_over_pairs_of_positions(cyclic):
    length, vocab = 4, 3
    data = np.random.default_rng(5).integers(0, vocab, (7, length))
    tensor, (left, right) = brute_force(data, vocab), matrices(length)
    found, rows = moments.empirical(data, vocab), layout.full(length, cyclic)
    scored = [1 if cyclic or a > 0 else 0 for a in range(length)]
    np.testing.assert_allclose(
        found.contract(left, right, rows)[0], direct_contraction(left, right, scored, tensor), **ROUNDING
    )
    matrix = np.random.default_rng(6).normal(size=(vocab, vocab))
    np.testing.assert_allclose(
        found.contract_tokens(matrix, length),
        [[np.sum(tensor[i, j] * matrix) for j in range(length)] for i in range(length)],
        **ROUNDING,
    )


@pytest.mark.parametrize("cyclic", [True, False])
def test_population_contractions_are_the_sums_over_pairs_of_positions(cyclic):
    length, sequences = 5, 37.0
    tensor, (left, right) = expected(LAW, length, sequences), matrices(length, 1)
    found, rows = moments.population(LAW, sequences), layout.full(length, cyclic)
    scored = [1 if cyclic or a > 0 else 0 for a in range(length)]
    np.testing.assert_allclose(
        found.contract(left, right, rows)[0], direct_contraction(left, right, scored, tensor), **ROUNDING
    )
    matrix = jnp.asarray(np.random.default_rng(2).normal(size=(LAW.size, LAW.size)))
    np.testing.assert_allclose(
        found.contract_tokens(matrix, length),
        [[np.sum(tensor[i, j] * np.asarray(matrix)) for j in range(length)] for i in range(length)],
        **ROUNDING,
    )


@pytest.mark.parametrize("vocab", [2, 5])
def test_the_two_modes_of_uniform_tokens_are_the_whole_matrix(vocab):
    length, sequences = 4, 13.0
    left, right = matrices(length, 4)
    rows = layout.full(length)
    whole = np.asarray(moments.population(tokens.uniform(vocab), sequences).contract(left, right, rows)[0])
    modes = moments.uniform_population(vocab, sequences)
    zero_sum, uniform = np.asarray(modes.contract(left, right, rows)).ravel()
    projector = np.full((vocab, vocab), 1 / vocab)
    np.testing.assert_allclose(whole, zero_sum * (np.eye(vocab) - projector) + uniform * projector, **ROUNDING)
    np.testing.assert_array_equal(modes.multiplicity, [vocab - 1, 1])
    assert float(modes.multiplicity @ np.array([zero_sum, uniform])) == pytest.approx(np.trace(whole), rel=1e-12)


@pytest.mark.parametrize(
    "statistics", [moments.population(LAW, 8.0), moments.empirical(tokens.sample(tokens.stream(1, "train"), 8, 4, LAW), 4)]
)
def test_scaling_multiplies_the_moments_by_the_ratio_of_sequences(statistics):
    left, right = matrices(4)
    rows = layout.full(4)
    before, after = statistics.contract(left, right, rows), statistics.scaled(20.0).contract(left, right, rows)
    np.testing.assert_allclose(after, 2.5 * np.asarray(before), rtol=1e-6)  # float32 counts
    assert float(statistics.scaled(20.0).sequences) == 20.0


def test_empirical_moments_converge_to_the_population_as_the_root_of_P():
    """At P = 2^k the rms error over all entries is C P^(-1/2), with C^2 the mean variance of an entry of x_i x_j^T."""
    length, powers = 3, np.arange(6, 15)
    data = tokens.sample(tokens.stream(11, "train"), 2 ** int(powers[-1]), length, LAW)
    exact = expected(LAW, length, 1.0)
    errors = []
    for power in powers:
        found = np.asarray(moments.empirical(data[: 2**power], LAW.size).tensor, float) / 2.0**power
        errors.append(np.sqrt(np.mean((found - exact) ** 2)))
    scale = np.sqrt(np.mean(exact * (1 - exact)))  # an entry is a Bernoulli variable
    # an rms over about fifty correlated entries scatters by some 15%; 45% is three times that
    np.testing.assert_allclose(np.array(errors) * 2.0 ** (powers / 2), scale, rtol=0.45)
    # nine such points over a range of 2^8 in P fix the exponent to about 0.03
    assert np.polyfit(powers, np.log2(errors), 1)[0] == pytest.approx(-0.5, abs=0.1)
