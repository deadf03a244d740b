"""Gradient flow on the order parameters: against the full model, the minima of the action, and the laws of a saddle-node."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from copyhead.model import energy, layout, moments, targets, tokens
from copyhead.model.prior import prior
from copyhead.problem import Problem, ProblemError
from copyhead.theory import flow
from copyhead.theory.transition import phases

pytestmark = pytest.mark.slow

PAPER = Problem.preset("paper")
# theory.md section 6
LOWER, UPPER = 278.386, 337.177


@pytest.fixture(scope="module")
def found():
    return phases(PAPER)


def lifted(problem: Problem, y) -> tuple[jax.Array, jax.Array]:
    """G and W of y = (c1, cG, w_o, w_u); rows of G that are not scored are zero."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    scored = np.any(target != 0, axis=1, keepdims=True)
    uniform = np.ones((problem.vocab, problem.vocab)) / problem.vocab
    return scored * (y[0] + y[1] * target), y[2] * (np.eye(problem.vocab) - uniform) + y[3] * uniform


def full_energy(problem: Problem):
    """E of all entries of G and W on population moments, by the model itself."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    population = moments.population(tokens.uniform(problem.vocab), problem.sequences)
    whole = layout.full(problem.length, problem.cyclic)
    return lambda G, W: energy.energy(G, W, target, population, whole, prior(problem), problem.attention)


SMALL = {"length": 6, "vocab": 3, "noise": 0.8, "logit_variance": 1.3, "output_variance": 0.7, "position_scale": 1.2}
BOTH = pytest.mark.parametrize("attention", ["softmax", "linear"])


@BOTH
@pytest.mark.parametrize("cyclic", [True, False])
def test_reduced_energy_and_velocity_are_those_of_the_full_model(x64, quick, attention, cyclic):
    problem = Problem(**SMALL, attention=attention, cyclic=cyclic, sequences=70.0)
    task, y = flow.task_of(problem), np.array([0.13, 0.9, 1.1, 0.6])
    full = full_energy(problem)
    reduced = partial(flow.reduced_energy, task=task, kind=attention)
    assert float(jax.jit(reduced)(y)) == pytest.approx(float(jax.jit(full)(*lifted(problem, y))), rel=1e-12)
    velocity = np.linalg.solve(flow.metric(problem), np.asarray(jax.jit(jax.grad(reduced))(y)))
    for part, lift in zip(jax.jit(jax.grad(full, argnums=(0, 1)))(*lifted(problem, y)), lifted(problem, velocity), strict=True):
        # equal entry by entry: the full gradient has no part outside of the subspace
        assert np.abs(np.asarray(part) - lift).max() < 1e-10


def test_metric_is_that_of_the_weights_and_projection_inverts_the_lift(x64):
    for cyclic in (True, False):
        problem = Problem(**SMALL, cyclic=cyclic, sequences=70.0)
        y = np.array([0.3, -0.7, 0.4, 1.9])
        G, W = lifted(problem, y)
        assert y @ flow.metric(problem) @ y == pytest.approx(np.sum(np.square(G)) + np.sum(np.square(W)), rel=1e-12)
        assert np.array(flow.projected(problem, G, W)) == pytest.approx(y, rel=1e-12)
    start = np.array(flow.initial(problem, "small", 0.02))
    assert start @ flow.metric(problem) @ start == pytest.approx(4 * 0.02**2, rel=1e-12)


def test_projections_of_random_weights_have_the_size_of_an_entry():
    problem = Problem(**SMALL)
    draw = np.random.default_rng(0).normal
    root = np.linalg.cholesky(flow.metric(problem)).T
    drawn = np.array([root @ np.array(flow.projected(problem, draw(size=(6, 6)), draw(size=(3, 3)))) for _ in range(1000)])
    # four independent standard normals: errors of a covariance are sqrt(2 / 1000) at most
    assert np.abs(np.cov(drawn.T) - np.eye(4)).max() < 5 * np.sqrt(2 / 1000)


@BOTH
def test_flow_is_the_limit_of_gradient_descent_on_all_weights(x64, quick, attention):
    problem = Problem(**SMALL, attention=attention, sequences=70.0)
    start, duration = flow.initial(problem, "small", 0.1), 3.0
    slope = jax.grad(full_energy(problem), argnums=(0, 1))

    @jax.jit
    def descend(weights, steps, rate):
        def step(_, weights):
            return tuple(part - rate * by for part, by in zip(weights, slope(*weights), strict=True))

        return jax.lax.fori_loop(0, steps, step, weights)

    def descended(steps: int) -> np.ndarray:
        begin = tuple(jnp.asarray(part) for part in lifted(problem, start))
        return np.concatenate([np.asarray(part).ravel() for part in descend(begin, steps, duration / steps)])

    theory = flow.flow(problem, start, np.linspace(0, duration, flow.LOOKS))
    end = lifted(problem, [theory.c1[-1], theory.cG[-1], theory.w_o[-1], theory.w_u[-1]])
    expected = np.concatenate([part.ravel() for part in end])
    coarse, fine = descended(2000), descended(4000)
    errors = [np.abs(one - expected).max() for one in (coarse, fine)]
    assert errors[0] > 1e-5
    # of first order in eta, so half the step halves the error, and extrapolation removes it up to eta^2
    assert errors[0] / errors[1] == pytest.approx(2, abs=0.02)
    assert np.abs(2 * fine - coarse - expected).max() < 0.01 * errors[0]


@pytest.mark.parametrize(("sequences", "copies"), [(UPPER - 5, False), (UPPER + 5, True)])
def test_the_small_start_leaves_the_uniform_state_above_the_upper_fold_only(found, sequences, copies):
    problem = PAPER.replace(sequences=sequences)
    between = flow.levels(problem, "small", found)
    start = flow.initial(problem, "small", 0.01)
    passed = flow.passage(problem, start, between)
    assert passed.status == ("jumped" if copies else "stays")
    theory = flow.flow(problem, start, np.linspace(0, 120, flow.LOOKS))
    assert theory.converged
    assert np.all(np.diff(theory.energy) < 1e-12)
    # rates are 0.2 at least here, which leaves e^-10 after the jump; each minimum of the action is known to 1e-9
    minima = sorted(found.minima(sequences), key=lambda one: float(one.order_parameters.cG))
    ended = minima[-1 if copies else 0].order_parameters
    for name in ("cG", "a1", "aG", "loss"):
        assert getattr(theory, name)[-1] == pytest.approx(float(getattr(ended, name)), abs=1e-4), name
    assert theory.speed[-1] < 1e-3 * theory.speed[1]
    if copies:
        assert np.interp(passed.time, theory.time, theory.aG) == pytest.approx(between.middle, abs=2e-3)
        # a plateau near the fold: aG of the fold, and half of the whole time (docs/theory.md, section 15)
        assert passed.plateau == pytest.approx(between.before, rel=0.05)
        assert passed.length / passed.time == pytest.approx(0.5, abs=0.1)


def test_the_copy_start_falls_below_the_lower_fold_only(found):
    for sequences, status in ((LOWER - 5, "jumped"), (LOWER + 5, "stays")):
        problem = PAPER.replace(sequences=sequences)
        passed = flow.passage(problem, flow.initial(problem, "copy", 0.01), flow.levels(problem, "copy", found))
        assert passed.status == status


def test_slowing_down_has_exponent_one_half_on_both_sides_of_both_folds(found):
    distances = np.geomspace(1e-2, 1e-4, 9)
    for start, fold in (("small", UPPER), ("copy", LOWER)):
        slow = flow.slowing(PAPER.replace(sequences=300.0), start, distances, found=found)
        assert slow.fold == pytest.approx(fold, abs=1e-3)
        excess = -0.5 - slow.time_exponent
        assert np.all(np.diff(excess) < 0)
        # tau = C d^-1/2 + D: the excess falls as d^1/2, by 10^(1/8) a point; its first order is taken away by two points
        ratio = 10**0.125
        assert excess[-1] < 0.01
        assert (ratio * excess[-1] - excess[-2]) / (ratio - 1) == pytest.approx(0, abs=1e-3)
        assert (ratio * slow.rate_exponent[-1] - slow.rate_exponent[-2]) / (ratio - 1) == pytest.approx(0.5, abs=1e-3)
        # passage and relaxation of a saddle-node, without any fit
        product = slow.product
        assert (ratio**2 * product[-1] - product[-3]) / (ratio**2 - 1) == pytest.approx(1, abs=5e-3)


def test_no_fold_no_slowing_down():
    crossover = PAPER.replace(length=12, sequences=100.0)
    assert flow.slowing(crossover, "small", np.array([0.1, 0.01])) is None


@BOTH
def test_curvatures_are_among_those_of_all_weights(x64, quick, attention):
    problem = Problem(**SMALL, attention=attention, sequences=70.0)
    y = np.array([-0.05, 0.9, 1.1, 0.6])
    full, (G, W) = full_energy(problem), lifted(problem, y)

    def flat(weights):
        return full(weights[: G.size].reshape(G.shape), weights[G.size :].reshape(W.shape))

    every = np.linalg.eigvalsh(jax.jit(jax.hessian(flat))(np.concatenate([np.ravel(G), np.ravel(W)])))
    for value in flow.curvatures(problem, y[None])[0]:
        assert np.abs(every - value).min() < 1e-9 * every.max()


def test_from_the_saddle_of_linear_attention_the_time_grows_with_the_logarithm_of_the_scale():
    problem = PAPER.replace(attention="linear", sequences=400.0)
    known = phases(problem)
    # P / P_c - 1 for g_W = g_O = 1: the coupling of G and W grows as P and balances both priors at P_c = 115.0149
    growth = -flow.curvatures(problem, np.zeros((1, 4)))[0, 0]
    assert growth == pytest.approx(400 / 115.0149 - 1, rel=1e-6)
    between = flow.levels(problem, "small", known)
    times = [flow.passage(problem, flow.initial(problem, "small", s), between, False).time for s in (1e-7, 1e-5)]
    # other than at larger scales, what is not along the growing direction has decayed by then
    assert (times[0] - times[1]) / np.log(100) == pytest.approx(1 / growth, rel=1e-4)
    below = problem.replace(sequences=100.0)
    assert flow.passage(below, flow.initial(below, "small", 0.1), flow.levels(below, "small", known)).status == "stays"


def test_the_scale_of_a_small_start_does_not_matter_for_softmax(found):
    problem = PAPER.replace(sequences=400.0)
    between = flow.levels(problem, "small", found)
    times = [flow.passage(problem, flow.initial(problem, "small", s), between, False).time for s in (1e-8, 1e-4, 0.01)]
    assert times[0] == pytest.approx(times[1], rel=1e-4)
    assert times[0] == pytest.approx(times[2], rel=0.01)


def test_stability_limit_is_that_of_gradient_descent():
    problem = PAPER.replace(sequences=400.0)
    theory = flow.flow(problem, flow.initial(problem, "small", 0.01), np.linspace(0, 20, flow.LOOKS))
    # the stiffest direction is w_u alone: F = P L / V there, over kappa = L sigma^2, and the prior
    assert flow.learning_rates(problem, theory).limit == pytest.approx(2 / (400 / (4 * 0.9) + 1), rel=1e-9)


def test_too_few_steps_are_reported_and_leave_nan(monkeypatch):
    monkeypatch.setattr(flow, "MAX_STEPS", 5)
    problem = PAPER.replace(sequences=400.0)
    theory = flow.flow(problem, flow.initial(problem, "small", 0.01), np.linspace(0, 30, 7))
    assert not theory.converged
    assert np.isnan(theory.aG[-1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "sequences = None: must be given"),
        ({"token_scale": 1.0, "sequences": 100.0}, "token_scale = 1: training time is known for token_scale = 0"),
        ({"token_scale": 1.0, "content": True, "sequences": 100.0}, "content = True: training time is known for positional"),
        ({"head_dimension": 8, "sequences": 100.0}, "head_dimension = 8: training time is known"),
        ({"heads": 2, "sequences": 100.0}, "heads = 2: training time is known for copying by one head"),
    ],
)
def test_what_the_reduction_does_not_cover_is_refused(fields, message):
    with pytest.raises(ProblemError, match=message):
        flow.task_of(PAPER.replace(**fields))
    with pytest.raises(ProblemError, match="distances"):
        flow.slowing(PAPER.replace(sequences=300.0), "small", np.array([0.1, 0.2]))
