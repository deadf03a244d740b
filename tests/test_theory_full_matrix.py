"""All L^2 logits: the symmetric minimum is a minimum there too, and one data set approaches it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import QUICK
from copyhead import predict
from copyhead.model import moments, tokens
from copyhead.problem import Problem
from copyhead.theory.action import full_task
from copyhead.theory.full_matrix import measure, minimise
from copyhead.theory.posterior import action
from copyhead.theory.transition import phases

pytestmark = pytest.mark.usefixtures("x64")

LENGTH, VOCAB = 8, 3
# One problem a kind: softmax in the middle of its crossover, and linear attention between pooling and copying.
CASES = pytest.mark.parametrize(
    "problem",
    [
        Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0),
        Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0, cyclic=False),
        Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0, token_scale=0.6),
        Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0, attention="linear"),
        Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0, attention="linear", token_scale=0.6),
    ],
    ids=lambda p: f"{p.attention}-{'cyclic' if p.cyclic else 'open'}-tau{p.token_scale:g}",
)


@cache
def population_task(problem: Problem):
    return full_task(problem, moments.population(tokens.uniform(problem.vocab), problem.sequences))


def symmetric(problem: Problem, values) -> np.ndarray:
    """G = c1 1 1^T + cG G*; a row that is not scored is zero."""
    target = np.roll(np.eye(problem.length), -1, axis=1)
    logits = values.c1 + values.cG * target
    logits[: 0 if problem.cyclic else 1] = 0.0
    return logits


@CASES
def test_a_perturbed_start_returns_to_the_symmetric_minimum(problem):
    (state,) = predict(problem).state
    expected = symmetric(problem, state.order_parameters)
    start = expected + 0.3 * np.random.default_rng(0).normal(size=expected.shape)
    found = minimise(population_task(problem), start, problem.attention)
    assert found.converged
    assert found.gradient < 1e-4  # a hundred times the default tolerance
    assert found.action == pytest.approx(state.action, rel=1e-9)
    # a gradient of 1e-5 over a curvature of order 0.1
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)


def lowest_eigenvalue(problem: Problem, logits: np.ndarray, task) -> float:
    size = logits.size

    def flat(x):
        return action(x.reshape(logits.shape), task, problem.attention)

    both = jax.jit(lambda x: (jax.grad(flat)(x), jax.hessian(flat)(x)), compiler_options=QUICK)
    gradient, hessian = both(jnp.asarray(logits.ravel()))
    assert hessian.shape == (size, size)
    assert float(jnp.abs(gradient).max()) < 1e-6  # stationary without any ansatz
    return float(np.linalg.eigvalsh(np.asarray(hessian))[0])


@CASES
def test_the_symmetric_minimum_has_no_unstable_direction_among_all_logits(problem):
    (state,) = predict(problem).state
    assert lowest_eigenvalue(problem, symmetric(problem, state.order_parameters), population_task(problem)) > 1e-3


def test_both_coexisting_minima_are_minima_among_all_logits():
    """Rows that differ cost more than rows alike: a metastable symmetric state does not decay row by row (L = 18)."""
    problem = Problem(length=18, vocab=4, noise=0.9)
    (transition,) = predict(problem).transitions
    problem = problem.replace(sequences=transition.P)
    state = predict(problem).state
    assert len(state) == 2
    for minimum in state:
        assert lowest_eigenvalue(problem, symmetric(problem, minimum.order_parameters), population_task(problem)) > 1e-2


def test_zero_is_a_saddle_among_all_logits_above_the_pitchfork():
    problem = Problem(length=LENGTH, vocab=VOCAB, noise=0.5, attention="linear")
    place = predict(problem).transitions[0].P
    eigenvalues = []
    for factor in (0.99, 1.01):
        at_place = problem.replace(sequences=factor * place)
        eigenvalues.append(lowest_eigenvalue(at_place, np.zeros((LENGTH, LENGTH)), population_task(at_place)))
    assert eigenvalues[0] > 0 > eigenvalues[1]


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_one_data_set_approaches_the_population_as_it_grows(attention):
    """P sequences weighted as if they were 40: the order parameters approach those of the population as P^(-1/2)."""
    problem = Problem(length=LENGTH, vocab=VOCAB, noise=0.5, sequences=40.0, attention=attention)
    population = moments.population(tokens.uniform(VOCAB), 40.0)
    (state,) = predict(problem).state
    start = symmetric(problem, state.order_parameters)
    data = tokens.sample(tokens.stream(5, "train"), 2**16, LENGTH, tokens.uniform(VOCAB))
    distances = {}
    for power in (10, 16):
        task = full_task(problem, moments.empirical(data[: 2**power], VOCAB).scaled(np.float64(40.0)))
        found = minimise(task, start, attention)
        assert found.converged
        distances[power] = np.linalg.norm(found.logits - start) / LENGTH
        measured = measure(found.logits, task, population, attention)
        # the mean over L copy entries is off by less than one entry is
        assert measured.cG == pytest.approx(state.order_parameters.cG, abs=3 * distances[power])
        assert measured.loss == pytest.approx(state.order_parameters.loss, abs=0.5 * distances[power])
    # 2^6 times the data, an eighth of the distance; the norm of 64 logits of one data set scatters by some 20%
    assert distances[10] / distances[16] == pytest.approx(8, rel=0.5)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_transitions_on_the_full_layout_are_those_of_the_compressed_one(attention):
    """The same search with L^2 entries and V x V token blocks in place of four numbers."""
    problem = Problem(length=LENGTH, vocab=VOCAB, noise=0.5, attention=attention)
    whole = phases(problem, full_task(problem, moments.population(tokens.uniform(VOCAB))))
    compressed = phases(problem)
    assert [t.kind for t in whole.transitions] == [t.kind for t in compressed.transitions]
    for one, other in zip(whole.transitions, compressed.transitions, strict=True):
        assert pytest.approx(other.P, rel=1e-5) == one.P  # a crossover is a maximum, known to the root of rounding
        np.testing.assert_allclose(one.before, other.before, rtol=1e-5, atol=1e-8)
