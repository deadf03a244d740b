"""Exchange, the joining of windows, and P* by umbrella sampling, against exact densities, theory and unbiased runs."""

from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arviz_stats.base.array import array_stats
from scipy.stats import t as student

from conftest import QUICK
from copyhead.experiment import hamiltonian
from copyhead.experiment.cells import scattered
from copyhead.experiment.collapsed import Rung, Seen, negative_log_density, sizes
from copyhead.experiment.free_energy import averaged, log_weights, profile
from copyhead.experiment.hamiltonian import HamiltonianSettings, State, exchange
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.umbrella import FreeEnergy, climb, free_energy, round_trips
from copyhead.model import moments, tokens
from copyhead.model.network import Network
from copyhead.problem import Problem
from copyhead.theory.coexistence import maxwell

# For errors from n repeats the quantile of Student's law with n - 1 degrees that is passed with this probability.
ALARM = 1e-5


def errors(repeats: int) -> float:
    return float(student.isf(ALARM / 2, repeats - 1))


def states(rungs: int) -> tuple[State, Rung, Problem]:
    """Random states, each with the energies of its rung."""
    problem, random = Problem(length=4, vocab=3, noise=0.9), np.random.default_rng(0)
    shape = rungs, 2, 1
    root = random.normal(size=(*shape, 3, 3))
    rung = Rung(*(random.uniform(low, high, shape) for low, high in ((1, 2), (0.5, 1.5), (-1, 1), (0, 2))))
    place, prior = random.normal(size=shape), random.uniform(1, 2, shape)
    seen = Seen(prior, root @ root.swapaxes(-1, -2), random.normal(size=(*shape, 3, 3)), place)
    energy = negative_log_density(seen, rung, sizes(problem)) - rung.chi * prior
    logits, walker = random.normal(size=(*shape, 4, 4)), np.broadcast_to(np.arange(rungs)[:, None, None], shape)
    return State(logits, seen, energy, np.zeros_like(logits), walker), rung, problem


@pytest.mark.parametrize("rungs", [2, 5])
def test_exchange_has_the_probability_of_detailed_balance(rungs):
    with jax.enable_x64(True):
        check_exchange(rungs)


def check_exchange(rungs: int) -> None:
    state, rung, problem = states(rungs)
    state, numbers = jax.tree.map(jnp.asarray, state), sizes(problem)

    density = jax.jit(lambda seen, rung: negative_log_density(seen, rung, numbers), compiler_options=QUICK)
    swap = jax.jit(lambda uniform, number: exchange(state, rung, uniform, number, numbers), compiler_options=QUICK)

    def energy(of: int, at: int) -> np.ndarray:
        there = Rung(*(np.asarray(part)[at] for part in rung))
        return np.asarray(density(jax.tree.map(lambda leaf: leaf[of], state.seen), there))

    for number in (0, 1):
        after, probability = swap(jnp.zeros((rungs, 2, 1)), jnp.uint32(number))
        order = np.arange(rungs)
        for low in range(number, rungs - 1, 2):
            cost = energy(low, low + 1) + energy(low + 1, low) - energy(low, low) - energy(low + 1, low + 1)
            np.testing.assert_allclose(probability[low], np.minimum(1, np.exp(-cost)), rtol=1e-9)
            order[[low, low + 1]] = low + 1, low
        # a uniform number of zero accepts all, one of one none but the certain; only the lower number of a pair counts
        assert np.array_equal(after.walker, np.broadcast_to(order[:, None, None], (rungs, 2, 1)))
        np.testing.assert_array_equal(after.logits, state.logits[order])
        assert np.isnan(np.asarray(probability)[[i for i in range(rungs) if order[i] <= i]]).all()
        kept, _ = swap(jnp.ones((rungs, 2, 1)), jnp.uint32(number))
        assert np.array_equal(kept.walker, state.walker)


def test_round_trips():
    # rows are rungs: state 0 climbs and comes back, state 2 is at the top, goes down, and comes back; state 1 stays between
    walker = np.array([[0, 1, 1, 2, 1, 0], [1, 0, 2, 1, 0, 1], [2, 2, 0, 0, 2, 2]])
    assert round_trips(walker) == 2
    assert round_trips(walker[:, :4]) == 0
    assert round_trips(np.array([[0, 1] * 10, [1, 0] * 10])) == 18  # two states of 20 visits each: nine returns


@pytest.mark.parametrize("height", [5.0, 80.0])
def test_windows_that_were_sampled_exactly_give_the_free_energy(height):
    """A tilted double well with a barrier in nats; each window is drawn by inverse transform on a fine grid."""
    repeats, draws, random = 8, 200, np.random.default_rng(0)
    grid = np.linspace(-1.6, 1.6, 20001)
    energy = height * (grid**2 - 1) ** 2 + 1.5 * grid
    # the bias is stiffer than the barrier is curved, 4 height, and windows are a width apart
    stiffness = 8 * height
    centers = np.arange(-1.3, 1.3, 1 / np.sqrt(4 * height))
    edges = np.linspace(-1.2, 1.2, 41)

    cumulative = []
    for center in centers:
        log_density = -energy - stiffness * (grid - center) ** 2 / 2
        total = np.cumsum(np.exp(log_density - log_density.max()))
        cumulative.append(total / total[-1])
    profiles, ratios = [], []
    for _ in range(repeats):
        draw = np.stack([np.interp(random.random(draws), total, grid) for total in cumulative])
        weight = log_weights(stiffness * (draw[None] - centers[:, None, None]) ** 2 / 2).ravel()
        assert np.logaddexp.reduce(weight) == pytest.approx(0, abs=1e-9)
        value = draw.ravel()
        profiles.append(profile(value, weight, edges))
        ratios.append(np.logaddexp.reduce(weight[value > 0]) - np.logaddexp.reduce(weight[value <= 0]))
    exact = np.array([-np.logaddexp.reduce(-energy[(grid > low) & (grid <= high)]) for low, high in pairwise(edges)])
    found = averaged(edges, np.array(profiles))
    difference = found.mean - exact
    difference -= difference.mean()
    assert np.all(np.abs(difference) < errors(repeats) * found.error)
    assert found.error.max() < 0.3
    # the barrier, from well to top, in nats
    assert found.mean.max() > 0.9 * height
    wanted = np.logaddexp.reduce(-energy[grid > 0]) - np.logaddexp.reduce(-energy[grid <= 0])
    assert abs(np.mean(ratios) - wanted) < errors(repeats) * np.std(ratios, ddof=1) / np.sqrt(repeats)


# A first-order transition that is near its end point (L = 16.5): barriers are 17 nats at chi = 50 and below two at 10.
SMALL = Problem(length=24, vocab=4, noise=0.9, chi=50.0)
REPEATS = 8


def given(problem: Problem, sequences: float):
    one = moments.expected(tokens.uniform(problem.vocab), sequences, problem.length)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], one)


@cache
def climbed(chi: float, sequences: float) -> FreeEnergy:
    problem = SMALL.model_copy(update={"chi": chi})
    settings = HamiltonianSettings(leapfrogs=4, warmup=80, draws=200, losses=False)
    return free_energy(*climb(problem, given(problem, sequences), REPEATS, settings, 0), problem, sequences)


@pytest.mark.slow
def test_P_star_is_that_of_the_theory_whatever_the_start():
    found, theory = climbed(50.0, 200.0), maxwell(SMALL)
    assert found.status == "good"
    assert theory is not None
    # the theory is to one loop: its own terms of order 1/chi^2, from the branches moved by that loop, measure the next order
    remainder = abs(theory.P - theory.limit - theory.slope / SMALL.chi)
    assert 0 < remainder < 0.1
    assert abs(found.P_star.mean - theory.P) < errors(REPEATS) * found.P_star.error + remainder
    # tighter than what tells theory at finite chi (200.25) from that at infinite chi (197.41)
    assert found.P_star.error < 0.1
    assert found.log_ratio.mean == pytest.approx(found.slope * np.log(200.0 / found.P_star.mean), abs=0.3)


@pytest.mark.slow
def test_free_energy_is_that_of_unbiased_chains_where_they_cross():
    sequences = 211.0
    found, problem = climbed(10.0, sequences), SMALL.model_copy(update={"chi": 10.0})
    assert found.status == "good"
    assert min(height.mean for height in found.heights) > 1
    random, shape = np.random.default_rng(3), (1, 24, 1)
    rung = Rung(*(np.full(shape, value, np.float32) for value in (problem.chi, 1, 0, 0)))
    keys = random.integers(0, 2**32, size=(*shape, 2), dtype=np.uint32)
    trace = hamiltonian.run(
        scattered(problem, shape, 3).logits.swapaxes(-1, -2),
        PackedPath(problem).pack(given(problem, sequences)),
        rung,
        keys,
        yardstick(problem, Network(), 1),
        sizes(problem),
        HamiltonianSettings(leapfrogs=4, warmup=200, draws=6000, losses=False),
        problem,
    )
    aG = np.asarray(trace.observables.aG)[0, :, 0].astype(float)
    copying = (aG > found.top).astype(float)
    ess = float(array_stats.ess(copying, chain_axis=0, draw_axis=1, method="mean"))
    assert ess > 200
    assert float(array_stats.rhat(aG, chain_axis=0, draw_axis=1)) < 1.05
    share = copying.mean()
    ratio, error = np.log(share / (1 - share)), 1 / np.sqrt(ess * share * (1 - share))
    assert abs(ratio - found.log_ratio.mean) < errors(REPEATS) * np.hypot(error, found.log_ratio.error)
