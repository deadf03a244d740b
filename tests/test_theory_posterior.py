"""S(G), the exact posterior over the logits, and its gradient, against ridge regression, quadrature and sampling of W."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from conftest import QUICK
from copyhead.model import moments, tokens
from copyhead.problem import Problem
from copyhead.theory import posterior as closed_form
from copyhead.theory.action import at, copy_task, full_task, reduced_action
from copyhead.theory.posterior import best_output, token_blocks

pytestmark = pytest.mark.usefixtures("x64")

KINDS = pytest.mark.parametrize("kind", ["softmax", "linear"])
CYCLIC = pytest.mark.parametrize("cyclic", [True, False])
action = jax.jit(closed_form.action, static_argnames="kind", compiler_options=QUICK)
negative_log_posterior = jax.jit(closed_form.negative_log_posterior, static_argnames="kind", compiler_options=QUICK)
gradient_of_action = jax.jit(jax.grad(closed_form.action), static_argnames="kind", compiler_options=QUICK)

# linear algebra on well-conditioned matrices of a few rows
ROUNDING = 1e-11


def regression(logits, data, problem):
    """The rows (A x)_a and the targets of all scored positions of all sequences: f = rows @ W."""
    length = problem.length
    weights = logits / length
    if problem.attention == "softmax":
        weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    one_hot = np.eye(problem.vocab)[data]
    first = 0 if problem.cyclic else 1
    rows = np.concatenate([(weights @ x)[first:] for x in one_hot])
    copied = np.concatenate([np.roll(x, 1, axis=0)[first:] for x in one_hot])
    return rows, copied


def logit_prior(logits, problem):
    """1/2 <G, K^-1 G K^-1> / g_W, before chi."""
    length = problem.length
    kernel = problem.position_scale * np.eye(length) + problem.token_scale / problem.vocab * np.ones((length, length))
    inverse = np.linalg.inv(kernel)
    return np.sum(logits * (inverse @ logits @ inverse)) / (2 * problem.logit_variance)


def energy(logits, output, data, problem):
    rows, copied = regression(logits, data, problem)
    kappa = (problem.length if problem.cyclic else problem.length - 1) * problem.noise
    error, weights = np.sum((copied - rows @ output) ** 2), np.sum(output**2)
    return error / (2 * kappa) + weights / (2 * problem.output_variance) + logit_prior(logits, problem)


def ridge_output(logits, data, problem):
    """The W that minimises the energy, as a least-squares problem with the prior as additional rows."""
    rows, copied = regression(logits, data, problem)
    kappa = (problem.length if problem.cyclic else problem.length - 1) * problem.noise
    root, vocab = np.sqrt(kappa / problem.output_variance), problem.vocab
    stacked = np.concatenate([rows, root * np.eye(vocab)]), np.concatenate([copied, np.zeros((vocab, vocab))])
    return np.linalg.lstsq(*stacked, rcond=None)[0]


def an_example(kind="softmax", cyclic=True, token_scale=0.0, chi=3.0, length=5, vocab=3, sequences=6, noise=0.3, seed=0):
    problem = Problem(
        length=length,
        vocab=vocab,
        noise=noise,
        logit_variance=1.7,
        output_variance=0.8,
        position_scale=1.2,
        token_scale=token_scale,
        chi=chi,
        attention=kind,
        cyclic=cyclic,
    )
    rng = np.random.default_rng(seed)
    data = rng.integers(0, vocab, (sequences, length))
    task = full_task(problem, moments.empirical(data, vocab))
    return problem, data, task, 1.5 * rng.normal(size=(4, length, length))


@KINDS
@CYCLIC
@pytest.mark.parametrize("token_scale", [0.0, 0.7])
def test_action_is_the_least_energy_over_the_output_map(kind, cyclic, token_scale):
    problem, data, task, matrices = an_example(kind, cyclic, token_scale)
    for logits in matrices:
        output = ridge_output(logits, data, problem)
        least = energy(logits, output, data, problem)
        assert float(action(jnp.asarray(logits), task, kind)) == pytest.approx(least, rel=ROUNDING)
        found = best_output(token_blocks(jnp.asarray(logits), task, kind), task.prior)[0]
        np.testing.assert_allclose(found, output, rtol=1e-9, atol=1e-10)  # least squares squares the condition number
        # it is the least: any step away from it costs energy
        step = 1e-2 * np.random.default_rng(1).normal(size=output.shape)
        assert energy(logits, output + step, data, problem) > least


@KINDS
@CYCLIC
def test_loss_per_token_at_the_best_output(kind, cyclic):
    problem, data, task, matrices = an_example(kind, cyclic, seed=3)
    rows, copied = regression(matrices[0], data, problem)
    error = np.sum((copied - rows @ ridge_output(matrices[0], data, problem)) ** 2) / len(rows)
    assert float(closed_form.loss_per_token(jnp.asarray(matrices[0]), task, kind)) == pytest.approx(error, rel=1e-10)


def kernel_posterior(logits, data, problem):
    """-log p(G | data) + const from the Gaussian marginal of every output: N(0, kappa/chi I + g_O/chi rows rows^T)."""
    rows, copied = regression(logits, data, problem)
    kappa = (problem.length if problem.cyclic else problem.length - 1) * problem.noise
    covariance = (kappa * np.eye(len(rows)) + problem.output_variance * rows @ rows.T) / problem.chi
    log_det = np.linalg.slogdet(covariance)[1]
    fit = np.sum(copied * np.linalg.solve(covariance, copied))
    return problem.chi * logit_prior(logits, problem) + fit / 2 + problem.vocab * log_det / 2


def differences(values):
    return [second - first for first, second in itertools.pairwise(values)]


def posterior(matrices, task, kind):
    return [float(negative_log_posterior(jnp.asarray(logits), task, kind)) for logits in matrices]


@KINDS
@CYCLIC
@pytest.mark.parametrize("chi", [0.5, 20.0])
def test_posterior_is_the_gaussian_marginal_over_the_output_map(kind, cyclic, chi):
    problem, data, task, matrices = an_example(kind, cyclic, token_scale=0.7, chi=chi)
    expected = differences([kernel_posterior(logits, data, problem) for logits in matrices])
    # the constant is the same for all G; what is left is a difference of numbers up to about 1e3
    np.testing.assert_allclose(differences(posterior(matrices, task, kind)), expected, rtol=1e-10, atol=1e-10)


@KINDS
@pytest.mark.parametrize("chi", [0.5, 4.0])
def test_posterior_is_the_integral_over_all_four_weights(kind, chi):
    """L = V = 2: Gauss-Hermite over the four entries of W under their prior N(0, g_O / chi)."""
    problem, data, task, matrices = an_example(kind, chi=chi, length=2, vocab=2, sequences=2, noise=2.0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(26)
    scale = np.sqrt(problem.output_variance / chi)
    grid = scale * np.array(list(itertools.product(nodes, repeat=4))).reshape(-1, 2, 2)
    log_weights = np.log(np.array(list(itertools.product(weights, repeat=4)))).sum(1)
    kappa = problem.length * problem.noise
    expected = []
    for logits in matrices:
        rows, copied = regression(logits, data, problem)
        errors = np.sum((copied - rows @ grid) ** 2, axis=(1, 2))
        log_likelihood = logsumexp(log_weights - chi * errors / (2 * kappa))
        expected.append(chi * logit_prior(logits, problem) - log_likelihood)
    # the data are worth less than one prior precision here, and 20, 26, 30 nodes leave 3e-8, 2e-10 and 3e-12
    np.testing.assert_allclose(differences(posterior(matrices, task, kind)), differences(expected), atol=1e-9)


@KINDS
def test_monte_carlo_over_the_output_map_converges_as_the_root_of_the_samples(kind):
    """log of the mean likelihood over 2^k draws of W from its prior: rms error over repetitions falls as 2^(-k/2)."""
    problem, data, task, matrices = an_example(kind, chi=1.0, length=3, vocab=2, sequences=2, seed=2)
    matrices, kappa, repeats = matrices[:2], 3 * problem.noise, 64
    exact = differences(posterior(matrices, task, kind))[0]
    rng, rms = np.random.default_rng(0), {}
    for power in (8, 13):
        output = np.sqrt(problem.output_variance) * rng.normal(size=(repeats, 2**power, 2, 2))
        estimates = []
        for logits in matrices:
            rows, copied = regression(logits, data, problem)
            errors = np.sum((copied - rows @ output) ** 2, axis=(2, 3))
            likelihood = logsumexp(-errors / (2 * kappa), axis=1) - power * np.log(2)
            estimates.append(logit_prior(logits, problem) - likelihood)
        deviation = estimates[1] - estimates[0] - exact
        rms[power] = np.sqrt(np.mean(deviation**2))
        # five standard errors of the mean of 64 repetitions; the log of a mean is biased by less at these sizes
        assert abs(np.mean(deviation)) < 5 * rms[power] / np.sqrt(repeats)
    # each rms of 64 repetitions is good to 1 / sqrt(128) = 9%; 40% is three times the error of their ratio
    assert rms[8] / rms[13] == pytest.approx(2**2.5, rel=0.4)


def test_only_the_determinant_is_left_when_the_action_is_taken_out():
    """Trap: chi multiplies S and nothing else, and the determinant counts V columns and the factor 1/2."""
    for chi in (0.5, 20.0):
        problem, data, task, matrices = an_example(chi=chi)
        rows, _ = regression(matrices[0], data, problem)
        gain = problem.output_variance / (5 * problem.noise)
        determinant = np.linalg.slogdet(np.eye(3) + gain * rows.T @ rows)[1]
        rest = posterior(matrices[:1], task, "softmax")[0] - chi * float(action(jnp.asarray(matrices[0]), task, "softmax"))
        assert rest == pytest.approx(1.5 * determinant, rel=1e-10)


@KINDS
def test_no_data_leave_the_prior(kind):
    problem, _, task, matrices = an_example(kind, token_scale=0.7)
    empty = task._replace(moments=moments.population(tokens.uniform(3), 0.0))
    for value in (action, negative_log_posterior):
        factor = 1.0 if value is action else problem.chi
        expected = factor * logit_prior(matrices[0], problem)
        assert float(value(jnp.asarray(matrices[0]), empty, kind)) == pytest.approx(expected, rel=ROUNDING)


@KINDS
@CYCLIC
def test_population_action_is_the_one_of_every_sequence_once(kind, cyclic):
    """All V^L sequences, each once, have exactly the pair counts of P = V^L sequences of uniform tokens."""
    problem, _, task, matrices = an_example(kind, cyclic, length=4, vocab=3)
    data = np.array(list(itertools.product(range(3), repeat=4)))
    task = full_task(problem, moments.population(tokens.uniform(3), 81.0))
    expected = [energy(g, ridge_output(g, data, problem), data, problem) for g in matrices]
    found = [float(action(jnp.asarray(g), task, kind)) for g in matrices]
    np.testing.assert_allclose(found, expected, rtol=ROUNDING)
    expected = differences([kernel_posterior(g, data, problem) for g in matrices])
    np.testing.assert_allclose(differences(posterior(matrices, task, kind)), expected, rtol=1e-9, atol=1e-9)


@KINDS
def test_two_token_modes_give_the_posterior_of_the_whole_token_space(kind):
    problem, _, _, matrices = an_example(kind, length=4, vocab=3)
    blocks = full_task(problem, moments.uniform_population(3, 20.0))
    whole = full_task(problem, moments.population(tokens.uniform(3), 20.0))
    np.testing.assert_allclose(posterior(matrices, blocks, kind), posterior(matrices, whole, kind), rtol=ROUNDING)


@KINDS
@CYCLIC
@pytest.mark.parametrize("token_scale", [0.0, 0.7])
def test_gradient_by_finite_differences_over_the_full_matrix(kind, cyclic, token_scale):
    """Differences of the explicit minimum over W, not of the function whose gradient is tested."""
    problem, data, task, matrices = an_example(kind, cyclic, token_scale, length=4)
    logits, step = matrices[0], 1e-5
    gradient = np.asarray(gradient_of_action(jnp.asarray(logits), task, kind))
    for a, b in itertools.product(range(4), repeat=2):
        ends = [logits.copy(), logits.copy()]
        ends[0][a, b] += step
        ends[1][a, b] -= step
        high, low = (energy(g, ridge_output(g, data, problem), data, problem) for g in ends)
        # rounding 1e-16 S / step, about 1e-10, and the third derivative times step^2
        assert gradient[a, b] == pytest.approx((high - low) / (2 * step), rel=1e-7, abs=1e-8)


def test_rows_that_are_not_scored_feel_the_prior_only():
    problem, _, task, matrices = an_example(cyclic=False)
    gradient = np.asarray(gradient_of_action(jnp.asarray(matrices[0]), task, "softmax"))
    expected = matrices[0][0] / (problem.position_scale**2 * problem.logit_variance)
    np.testing.assert_allclose(gradient[0], expected, rtol=ROUNDING)
    assert np.abs(gradient[1:] - matrices[0][1:] / (problem.position_scale**2 * problem.logit_variance)).max() > 1e-3


@KINDS
@CYCLIC
def test_the_two_parameter_task_is_the_full_one_on_symmetric_matrices(kind, cyclic):
    problem = Problem(
        length=6, vocab=3, noise=0.4, attention=kind, cyclic=cyclic, token_scale=0.5 if cyclic else 0.0, output_variance=0.7
    )
    whole, compressed = full_task(problem, moments.population(tokens.uniform(3), 40.0)), at(copy_task(problem), 40.0)
    for c1, cG in ((0.3, 1.1), (-0.2, 2.0), (0.0, 0.0)):
        logits = c1 + cG * whole.target
        logits[: 0 if cyclic else 1] = 0.0  # at its optimum
        expected = float(action(jnp.asarray(logits), whole, kind))
        found = float(reduced_action(jnp.array([c1, cG]), compressed, kind))
        assert found == pytest.approx(expected, rel=ROUNDING)
