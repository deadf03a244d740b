"""E(G, W), its prior and the loss, against the network run on every sequence with loops; attention and layouts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICK
from copyhead.model import energy as energies
from copyhead.model import layout, moments, network, prior, targets, tokens
from copyhead.model.attention import attention
from copyhead.problem import Problem

pytestmark = pytest.mark.usefixtures("x64")

compiled_energy = jax.jit(energies.energy, static_argnames="kind", compiler_options=QUICK)
loss_per_token = jax.jit(energies.loss_per_token, compiler_options=QUICK)

# sums of some hundred terms of order one in float64
ROUNDING = 1e-11
KINDS = pytest.mark.parametrize("kind", ["softmax", "linear"])
CYCLIC = pytest.mark.parametrize("cyclic", [True, False])


def run_network(logits, output, sequence, kind):
    """f = A x W for one sequence, position by position."""
    length, vocab = len(sequence), output.shape[0]
    result = np.zeros((length, vocab))
    for a in range(length):
        weights = logits[a] / length if kind == "linear" else np.exp(logits[a]) / sum(np.exp(logits[a]))
        for b in range(length):
            result[a] += weights[b] * output[sequence[b]]
    return result


def squared_error(logits, output, data, kind, cyclic):
    total = 0.0
    for sequence in data:
        prediction = run_network(logits, output, sequence, kind)
        for a in range(0 if cyclic else 1, len(sequence)):
            copied = np.eye(output.shape[0])[sequence[a - 1]]  # Python's -1 is the cyclic neighbour of 0
            total += np.sum((copied - prediction[a]) ** 2)
    return total


def brute_force_energy(logits, output, data, problem):
    """1/(2 kappa) sum |y - f|^2 + |W|^2 / (2 g_O) + 1/2 <G, K^-1 G K^-1> / g_W with K inverted as a matrix."""
    length = problem.length
    kernel = problem.position_scale * np.eye(length) + problem.token_scale / problem.vocab * np.ones((length, length))
    inverse = np.linalg.inv(kernel)
    scored = length if problem.cyclic else length - 1
    error = squared_error(logits, output, data, problem.attention, problem.cyclic)
    return (
        error / (2 * scored * problem.noise)
        + np.sum(output**2) / (2 * problem.output_variance)
        + np.sum(logits * (inverse @ logits @ inverse)) / (2 * problem.logit_variance)
    )


def energy(logits, output, data, problem) -> float:
    value = compiled_energy(
        jnp.asarray(logits),
        jnp.asarray(output),
        targets.shift(problem.length, cyclic=problem.cyclic),
        moments.empirical(data, problem.vocab),
        layout.full(problem.length, problem.cyclic),
        prior.prior(problem),
        kind=problem.attention,
    )
    return float(value)


def an_example(length=5, vocab=3, sequences=7, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(length, length)), rng.normal(size=(vocab, vocab)), rng.integers(0, vocab, (sequences, length))


@KINDS
@CYCLIC
@pytest.mark.parametrize("token_scale", [0.0, 0.7])
def test_energy_is_the_sum_over_sequences(kind, cyclic, token_scale):
    problem = Problem(
        length=5,
        vocab=3,
        noise=0.6,
        logit_variance=1.7,
        output_variance=0.4,
        position_scale=1.3,
        token_scale=token_scale,
        attention=kind,
        cyclic=cyclic,
    )
    logits, output, data = an_example()
    assert energy(logits, output, data, problem) == pytest.approx(
        brute_force_energy(logits, output, data, problem), rel=ROUNDING
    )


@KINDS
@CYCLIC
def test_loss_per_token_is_the_mean_over_sequences_and_scored_positions(kind, cyclic):
    logits, output, data = an_example(seed=2)
    length, vocab = 5, 3
    loss = loss_per_token(
        attention(jnp.asarray(logits), kind, length),
        jnp.asarray(output),
        targets.shift(length, cyclic=cyclic),
        moments.empirical(data, vocab),
        layout.full(length, cyclic),
    )
    positions = len(data) * (length if cyclic else length - 1)
    assert float(loss) == pytest.approx(squared_error(logits, output, data, kind, cyclic) / positions, rel=ROUNDING)


def positional(logits, output):
    """The circuits of a positional network."""
    problem = Problem(length=logits.shape[0], vocab=output.shape[0], noise=1.0)
    return network.circuits(network.Positional(jnp.asarray(logits), jnp.asarray(output)), problem)


@KINDS
def test_the_forward_pass_is_the_network(kind):
    logits, output, data = an_example(seed=3)
    weights = positional(logits, output)
    expected = [run_network(logits, output, sequence, kind) for sequence in data]
    np.testing.assert_allclose(network.forward(weights, data, kind), expected, rtol=ROUNDING, atol=ROUNDING)


@CYCLIC
@pytest.mark.parametrize("length", [2, 5, 9])
def test_trap_half_and_mean_over_positions(cyclic, length):
    """No weights: |y|^2 = 1 at every scored position, so E = P / (2 sigma^2) whatever L. A sum would give L times that."""
    problem = Problem(length=length, vocab=3, noise=0.5, cyclic=cyclic)
    data = np.random.default_rng(1).integers(0, 3, (6, length))
    assert energy(np.zeros((length, length)), np.zeros((3, 3)), data, problem) == pytest.approx(6.0, rel=ROUNDING)


def test_trap_sum_over_outputs():
    """W = 1 everywhere and G = 0: every output is 1, so V - 1 errors of 1 at each position; a mean would give 1 - 1/V."""
    problem = Problem(length=4, vocab=5, noise=0.25, output_variance=1e9)
    data = np.random.default_rng(1).integers(0, 5, (3, 4))
    # P (V - 1) / (2 sigma^2) = 24; the prior of W adds 25 / (2e9)
    assert energy(np.zeros((4, 4)), np.ones((5, 5)), data, problem) == pytest.approx(24.0, rel=1e-8)


def test_trap_prior_halves():
    """Both priors by hand, with noise so large that the data do not count: 9 x 2^2 / (2 x 4) and 16 x 3^2 / (2 x 1.5)."""
    problem = Problem(length=4, vocab=3, noise=1e12, output_variance=4.0, logit_variance=1.5)
    data = np.zeros((1, 4), int)
    assert energy(np.full((4, 4), 3.0), np.full((3, 3), 2.0), data, problem) == pytest.approx(4.5 + 48.0, rel=1e-10)


def test_trap_energy_does_not_contain_chi():
    logits, output, data = an_example(seed=4)
    values = [energy(logits, output, data, Problem(length=5, vocab=3, noise=0.6, chi=chi)) for chi in (1.0, 50.0)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (lambda vocab: np.zeros((vocab, vocab)), lambda length, vocab: 1.0),
        (lambda vocab: np.full((vocab, vocab), 1 / vocab), lambda length, vocab: 1 - 1 / vocab),
        (lambda vocab: np.eye(vocab), lambda length, vocab: (1 - 1 / vocab) * (1 - 1 / length)),
    ],
    ids=["zero output", "constant mean", "pooling"],
)
def test_plateaus_of_the_population_loss_at_uniform_attention(output, expected):
    length, vocab = 6, 4
    statistics = moments.population(tokens.uniform(vocab), 10.0)
    loss = loss_per_token(
        jnp.full((length, length), 1 / length),
        jnp.asarray(output(vocab)),
        targets.shift(length),
        statistics,
        layout.full(length),
    )
    assert float(loss) == pytest.approx(expected(length, vocab), rel=ROUNDING)


def test_copying_leaves_no_loss():
    target = targets.shift(6)
    statistics = moments.population(np.array([0.6, 0.3, 0.1]), 10.0)
    loss = loss_per_token(jnp.asarray(target), jnp.eye(3), target, statistics, layout.full(6))
    assert float(loss) == pytest.approx(0.0, abs=ROUNDING)


def test_prior_of_any_law_uses_its_probability_of_agreement():
    problem = Problem(length=4, vocab=3, noise=1.0, token_scale=0.7)
    assert prior.prior(problem).token_coupling == pytest.approx(0.7 / 3, rel=1e-15)
    assert prior.prior(problem, collision=0.5).token_coupling == pytest.approx(0.35, rel=1e-15)


def test_prior_of_a_symmetric_matrix_is_the_same_in_both_layouts():
    problem = Problem(length=7, vocab=3, noise=1.0, position_scale=1.3, token_scale=0.7, logit_variance=0.6)
    numbers = prior.prior(problem)
    compressed = prior.logit_energy(jnp.array([[1.5, -0.4]]), layout.copy(7, 7), numbers)
    whole = prior.logit_energy(jnp.asarray(-0.4 + 1.9 * targets.shift(7)), layout.full(7), numbers)
    assert float(compressed) == pytest.approx(float(whole), rel=ROUNDING)


def test_softmax_at_the_reference_gap():
    """docs/theory.md, section 6: logit gap 0.5 ln 63 at L = 64, where A = 1 / (1 + sqrt(63))."""
    logits = np.zeros((1, 64))
    logits[0, 3] = 0.5 * np.log(63)
    matrix = attention(jnp.asarray(logits), "softmax", 64)
    assert float(matrix[0, 3]) == pytest.approx(0.111891192470867, abs=5e-16)  # printed with 15 digits


def test_compressed_softmax_counts_multiplicities_and_masks_the_ones_of_zero():
    columns, logits = np.array([[1.0, 5.0, 0.0]]), np.array([[0.7, -0.2, 40.0]])
    matrix = np.asarray(attention(jnp.asarray(logits), "softmax", 6, columns))
    normalisation = np.exp(0.7) + 5 * np.exp(-0.2)
    np.testing.assert_allclose(matrix[0, :2], np.exp([0.7, -0.2]) / normalisation, rtol=1e-14)
    assert np.sum(columns * matrix) == pytest.approx(1.0, rel=1e-14)


def test_softmax_does_not_overflow():
    matrix = np.asarray(attention(jnp.array([[1e4, 0.0]]), "softmax", 2))
    np.testing.assert_array_equal(matrix, [[1.0, 0.0]])


def test_linear_attention_divides_by_the_length():
    np.testing.assert_array_equal(attention(jnp.array([[3.0, -1.5]]), "linear", 2), [[1.5, -0.75]])


def test_column_sums_of_a_layout_that_has_none_are_refused():
    rows = layout.Layout(np.ones(2), np.ones(2), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"layout of shape \(2, 3\)"):
        rows.column_sums(jnp.ones((2, 3)))


@KINDS
def test_a_network_that_starts_from_copying_copies(kind):
    """Softmax puts e^2 L / (L - 1 + e^2 L) of the attention on the copied token; linear attention all of it."""
    length, vocab = 6, 4
    start = network.copying(targets.shift(length), vocab, kind)
    data = np.random.default_rng(0).integers(0, vocab, (5, length))
    outputs = np.asarray(network.forward(positional(*start), data, kind))
    if kind == "linear":  # at the least |G|^2 + |W|^2 for a given product, both are equal
        assert np.sum(start.logits**2) == pytest.approx(np.sum(start.output**2), rel=ROUNDING)
    share = np.exp(2) * length / (length - 1 + np.exp(2) * length) if kind == "softmax" else 1.0
    for sequence, output in zip(data, outputs, strict=True):
        expected = share * np.eye(vocab)[np.roll(sequence, 1)]
        if kind == "softmax":
            expected += (1 - share) * (np.eye(vocab)[sequence].sum(0) - np.eye(vocab)[np.roll(sequence, 1)]) / (length - 1)
        np.testing.assert_allclose(output, expected, atol=1e-12)
