"""Order parameters: lift and project, the reduced action and the loss against section 4 written out, plateaus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import QUICK, Explicit
from copyhead import predict
from copyhead.model import layout, moments, targets, tokens
from copyhead.model.attention import attention
from copyhead.problem import Problem, ProblemError
from copyhead.theory import action as reduced
from copyhead.theory import order_parameters as op
from copyhead.theory.full_matrix import measure
from copyhead.theory.posterior import negative_log_posterior

pytestmark = pytest.mark.usefixtures("x64")

KINDS = pytest.mark.parametrize("kind", ["softmax", "linear"])
PLACES = [(0.0, 0.0), (0.3, 1.1), (-0.05, 2.7), (0.2, -0.8), (-0.4, 0.1)]
# a dozen operations on numbers of order one, and cancellation between P L / (2 kappa) and what is explained
ROUNDING = 1e-11

reduced_action = jax.jit(reduced.reduced_action, static_argnames="kind", compiler_options=QUICK)
order_parameters = jax.jit(op.order_parameters, static_argnames="kind", compiler_options=QUICK)


def numbers(kind, token_scale=0.0, cyclic=True) -> Problem:
    """Every number different from one, so that none can stand in for another."""
    return Problem(
        length=9,
        vocab=5,
        noise=0.7,
        logit_variance=1.3,
        output_variance=0.6,
        position_scale=1.2,
        token_scale=token_scale,
        attention=kind,
        cyclic=cyclic,
    )


VARIANTS = pytest.mark.parametrize(("token_scale", "cyclic"), [(0.0, True), (1.0, True), (0.0, False)])


@given(c1=st.floats(-3, 3), cG=st.floats(-3, 3), length=st.integers(2, 12), lag=st.integers(1, 5), cyclic=st.booleans())
def test_lift_and_project_invert_each_other(c1, cG, length, lag, cyclic):
    lag = min(lag, length - 1)
    target, rows = targets.shift(length, lag, cyclic), layout.full(length)
    matrix = op.lift(jnp.array([c1, cG]), jnp.asarray(target))
    expected = np.full((length, length), c1) + cG * target
    np.testing.assert_allclose(matrix, expected, rtol=1e-15)
    np.testing.assert_allclose(op.project(matrix, target, rows), [c1, cG], rtol=1e-12, atol=1e-12)


def test_project_of_any_matrix_is_the_two_means_over_scored_rows():
    length = 5
    matrix = np.random.default_rng(0).normal(size=(length, length))
    copied = [matrix[a, a - 1] for a in range(1, length)]
    others = [matrix[a, b] for a in range(1, length) for b in range(length) if b != a - 1]
    off, excess = op.project(jnp.asarray(matrix), targets.shift(length, cyclic=False), layout.full(length, cyclic=False))
    assert float(off) == pytest.approx(np.mean(others), rel=1e-12)
    assert float(excess) == pytest.approx(np.mean(copied) - np.mean(others), rel=1e-12)


def test_project_is_orthogonal():
    """The residue has no component left along the two patterns, so projecting twice changes nothing."""
    matrix, target = np.random.default_rng(1).normal(size=(6, 6)), targets.shift(6)
    rows = layout.full(6)
    first = op.project(jnp.asarray(matrix), target, rows)
    again = op.project(op.lift(jnp.stack(first), jnp.asarray(target)), target, rows)
    np.testing.assert_allclose(again, first, rtol=1e-12)
    rest = matrix - np.asarray(op.lift(jnp.stack(first), jnp.asarray(target)))
    assert np.sum(rest) == pytest.approx(0, abs=1e-12)
    assert np.sum(rest * target) == pytest.approx(0, abs=1e-12)


@KINDS
@VARIANTS
@pytest.mark.parametrize("sequences", [0.3, 40.0, 1e5])
def test_reduced_action_is_the_formula(kind, token_scale, cyclic, sequences):
    problem = numbers(kind, token_scale, cyclic)
    task, explicit = reduced.at(reduced.copy_task(problem), sequences), Explicit.of(problem)
    for c1, cG in PLACES:
        found = float(reduced_action(jnp.array([c1, cG]), task, kind=kind))
        assert found == pytest.approx(explicit.action(c1, cG, sequences), rel=ROUNDING)


@KINDS
@VARIANTS
def test_attention_and_loss_are_the_formulas(kind, token_scale, cyclic):
    problem, sequences = numbers(kind, token_scale, cyclic), 60.0
    task, explicit = reduced.at(reduced.copy_task(problem), sequences), Explicit.of(problem)
    for c1, cG in PLACES:
        found = order_parameters(jnp.array([c1, cG]), task, kind=kind)
        a1, aG = explicit.attention_parameters(c1, cG)
        assert (float(found.c1), float(found.cG)) == (c1, cG)
        assert float(found.a1) == pytest.approx(a1, rel=ROUNDING, abs=1e-14)
        assert float(found.aG) == pytest.approx(aG, rel=ROUNDING, abs=1e-14)
        assert float(found.loss) == pytest.approx(explicit.loss(c1, cG, sequences), rel=ROUNDING)


@KINDS
def test_determinant_of_the_reduced_posterior(kind):
    """-log p = chi S + (V/2) [(V-1) log(1 + P t / r) + log(1 + P s / r)] on the two token modes."""
    problem, sequences = numbers(kind), 60.0
    task, explicit = reduced.at(reduced.copy_task(problem), sequences), Explicit.of(problem)
    for c1, cG in PLACES:
        t, _, s, _ = explicit.sums(c1, cG)
        modes = 4 * np.log1p(sequences * t / explicit.ridge) + np.log1p(sequences * s / explicit.ridge)
        expected = 50 * explicit.action(c1, cG, sequences) + 2.5 * modes  # chi = 50 and V / 2
        found = float(negative_log_posterior(op.lift(jnp.array([c1, cG]), task.target), task, kind))
        assert found == pytest.approx(expected, rel=ROUNDING)


@KINDS
@pytest.mark.parametrize("cyclic", [True, False])
def test_measuring_a_symmetric_matrix_gives_its_order_parameters(kind, cyclic):
    problem, sequences = numbers(kind, cyclic=cyclic), 60.0
    population = moments.population(tokens.uniform(5), sequences)
    task, explicit = reduced.full_task(problem, population), Explicit.of(problem)
    logits = 0.2 + 1.4 * task.target
    found = measure(logits, task, population, kind)
    expected = (0.2, 1.4, *explicit.attention_parameters(0.2, 1.4), explicit.loss(0.2, 1.4, sequences))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_measured_softmax_attention_sums_to_one():
    problem = numbers("softmax")
    population = moments.population(tokens.uniform(5), 30.0)
    task = reduced.full_task(problem, population)
    for seed in range(3):
        logits = 2 * np.random.default_rng(seed).normal(size=(9, 9))
        found = measure(logits, task, population, "softmax")
        matrix = np.asarray(attention(jnp.asarray(logits), "softmax", 9))
        assert found.a1 + found.aG == pytest.approx(1.0, abs=1e-13)
        assert found.aG + found.a1 / 9 == pytest.approx(np.sum(matrix * task.target) / 9, abs=1e-13)


def test_the_loss_of_measured_logits_is_out_of_sample():
    """W from the data set, loss on the population: |T x - A x W|^2 averaged over every sequence there is."""
    problem = Problem(length=3, vocab=2, noise=0.4, sequences=5)
    data = np.random.default_rng(0).integers(0, 2, (5, 3))
    task = reduced.full_task(problem, moments.empirical(data, 2))
    logits = np.random.default_rng(1).normal(size=(3, 3))
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def rows(sequences):
        one_hot = np.eye(2)[sequences]
        return np.concatenate(weights @ one_hot), np.concatenate(np.roll(one_hot, 1, axis=1))

    seen, copied = rows(data)
    output = np.linalg.solve(seen.T @ seen + 3 * 0.4 * np.eye(2), seen.T @ copied)
    seen, copied = rows(np.array(list(np.ndindex(2, 2, 2))))
    expected = np.sum((copied - seen @ output) ** 2) / len(seen)
    found = measure(logits, task, moments.population(tokens.uniform(2)), "softmax")
    assert found.loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("token_scale", [0.0, 1.0])
@pytest.mark.parametrize("sequences", [100.0, 300.0, 1000.0])
def test_rows_of_softmax_minima_sum_to_zero(token_scale, sequences):
    for minimum in predict(Problem.preset("paper", token_scale=token_scale, sequences=sequences)).state:
        found = minimum.order_parameters
        assert found.c1 == pytest.approx(-found.cG / 32, rel=1e-8)  # Newton's residual, in a direction of curvature L
        assert found.a1 + found.aG == pytest.approx(1.0, abs=1e-13)


# P L / kappa is what the data are worth against the prior of W: 1e-7 and 1e9 are far beyond every scale of these problems.
@KINDS
def test_no_data_leave_zero_output(kind):
    problem = numbers(kind)
    task = reduced.at(reduced.copy_task(problem), 1e-7)
    for place in PLACES:
        assert float(order_parameters(jnp.array(place), task, kind=kind).loss) == pytest.approx(1.0, abs=1e-6)


def test_much_data_at_uniform_attention_leave_the_loss_of_pooling():
    task = reduced.at(reduced.copy_task(numbers("softmax")), 1e9)
    loss = order_parameters(jnp.zeros(2), task, kind="softmax").loss
    assert float(loss) == pytest.approx((1 - 1 / 5) * (1 - 1 / 9), abs=1e-6)


@pytest.mark.parametrize(("kind", "place"), [("softmax", (0.0, 25.0)), ("linear", (0.0, 9.0))])
def test_much_data_at_copying_attention_leave_no_loss(kind, place):
    task = reduced.at(reduced.copy_task(numbers(kind)), 1e9)
    assert float(order_parameters(jnp.array(place), task, kind=kind).loss) == pytest.approx(0.0, abs=1e-6)


@KINDS
def test_predicted_loss_goes_from_one_to_zero(kind):
    """At the global minimum itself, over eight orders of magnitude in P."""
    few, many = (predict(Problem(length=9, vocab=5, noise=0.7, attention=kind, sequences=p)).state[0] for p in (0.05, 1e7))
    assert few.order_parameters.loss == pytest.approx(1.0, abs=0.02)
    assert many.order_parameters.loss == pytest.approx(0.0, abs=1e-4)


def test_token_logits_without_cyclic_symmetry_are_refused():
    with pytest.raises(ProblemError, match="token_scale > 0: the order-parameter theory needs cyclic = True"):
        reduced.copy_task(Problem(length=9, vocab=5, noise=0.7, token_scale=1.0, cyclic=False))
