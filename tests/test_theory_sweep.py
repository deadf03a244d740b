"""Random problems: every state that is predicted is a minimum of the formula, and none lower or further is found."""

import math

import numpy as np
import pytest
from scipy.optimize import brentq, minimize

from conftest import Explicit
from copyhead import predict
from copyhead.problem import Problem
from copyhead.theory.transition import phases

pytestmark = pytest.mark.usefixtures("x64")


def random_problem(seed: int, attention: str) -> Problem:
    """Sizes and scales over one to two orders of magnitude, all drawn on a logarithmic scale."""
    rng = np.random.default_rng([seed, len(attention)])
    length, vocab = (int(np.exp(rng.uniform(np.log(3), np.log(150)))) for _ in range(2))
    noise, logit, output, scale = np.exp(rng.uniform(-1, 1, 4))
    token_scale = float(rng.choice([0.0, 0.0, 1.0, np.exp(rng.normal())]))
    return Problem(
        length=length,
        vocab=vocab,
        noise=noise,
        logit_variance=logit,
        output_variance=output,
        position_scale=scale,
        token_scale=token_scale,
        attention=attention,
        cyclic=bool(token_scale > 0 or rng.integers(2)),
    )


def places(problem: Problem) -> list[float]:
    """P below, inside and above the transitions, away from the places themselves."""
    found = []
    for transition in phases(problem).transitions:
        low, high = transition.window or (transition.P, transition.P)
        inside = [0.9 * low + 0.1 * high, 0.2 * low + 0.8 * high] if transition.window else []
        found += [0.7 * low, *inside, 1.4 * high]
    assert found
    return found


def minima_by_scan(explicit: Explicit, sequences: float) -> list[float]:
    """Every minimum of the one-dimensional action, lowest first; at cG = -30 nothing is left on the copied token."""
    grid = np.linspace(-30, 2 * math.log(explicit.length) + 30, 8001)
    slope = explicit.softmax_slope(grid, sequences)
    found = [
        brentq(explicit.softmax_slope, grid[i], grid[i + 1], args=(sequences,), xtol=1e-14)
        for i in np.flatnonzero((slope[:-1] < 0) & (slope[1:] >= 0))
    ]
    return sorted(found, key=lambda cG: explicit.softmax_action(cG, sequences))


@pytest.mark.parametrize("seed", range(12))
def test_softmax_states_are_all_minima_there_are(seed):
    problem = random_problem(seed, "softmax")
    explicit = Explicit.of(problem)
    for sequences in places(problem):
        state = predict(problem.replace(sequences=sequences)).state
        expected = minima_by_scan(explicit, sequences)
        assert [minimum.metastable for minimum in state] == [False] + [True] * (len(expected) - 1)
        # a simple root of the slope, away from the folds
        np.testing.assert_allclose([minimum.order_parameters.cG for minimum in state], expected, rtol=1e-7, atol=1e-9)
        actions = [explicit.softmax_action(cG, sequences) for cG in expected]
        np.testing.assert_allclose([minimum.action for minimum in state], actions, rtol=1e-10)


def actions_by_multistart(explicit: Explicit, sequences: float, seed: int) -> list[float]:
    """The actions that twelve runs of BFGS find from starts of every size up to far beyond the copying solution."""
    rng = np.random.default_rng(seed)
    widths = explicit.logit_variance * explicit.position_scale**2 / explicit.output_variance
    copying = (explicit.length * explicit.vocab * widths) ** 0.25
    values = []
    for _ in range(12):
        start = rng.normal(size=2) * copying * np.array([explicit.length**-0.5, 1.0]) * np.exp(rng.normal())
        found = minimize(
            lambda x: explicit.action(*x, sequences), start, jac=lambda x: explicit.gradient(*x, sequences), method="BFGS"
        )
        values.append(found.fun)
    return values


@pytest.mark.parametrize("seed", range(12))
def test_linear_states_are_minima_and_the_first_is_the_lowest(seed):
    problem = random_problem(seed, "linear")
    explicit = Explicit.of(problem)
    for sequences in places(problem):
        state = predict(problem.replace(sequences=sequences)).state
        for minimum in state:
            point = np.array([minimum.order_parameters.c1, minimum.order_parameters.cG])
            assert minimum.action == pytest.approx(explicit.action(*point, sequences), rel=1e-10)
            curvature = explicit.hessian(*point, sequences)
            units = np.sqrt(np.diag(curvature))
            assert np.linalg.eigvalsh(curvature / np.outer(units, units))[0] > 0
            # the Newton step that is left, against the size of the order parameters (or one, at zero)
            left = np.linalg.solve(curvature, explicit.gradient(*point, sequences))
            assert np.abs(left).max() < 1e-7 * max(np.abs(point).max(), 1)
        # BFGS ends within about 1e-9 of the minimum of S
        actions, known = actions_by_multistart(explicit, sequences, seed), [minimum.action for minimum in state]
        assert known[0] == pytest.approx(min(actions), rel=1e-8)
        assert known == sorted(known)
