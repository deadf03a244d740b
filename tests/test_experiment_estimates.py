"""Estimates, gates and places read off measured curves."""

import numpy as np
import pytest

from copyhead.experiment.diagnostics import between_starts, over_chains, over_seeds
from copyhead.experiment.locate import onset, resolution, steepest


def autoregressive(rho: float, chains: int, draws: int, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(chains, draws)) * np.sqrt(1 - rho**2)
    path = np.zeros((chains, draws))
    for i in range(1, draws):
        path[:, i] = rho * path[:, i - 1] + noise[:, i]
    return path


def test_over_seeds_is_mean_and_standard_error():
    estimate = over_seeds(np.array([1.0, 2.0, 3.0, 4.0]))
    assert estimate.mean == 2.5
    assert estimate.scatter == pytest.approx(np.sqrt(5 / 3))
    assert estimate.error == pytest.approx(estimate.scatter / 2)
    assert estimate.mixed


def test_ess_of_an_autoregressive_chain():
    rho, draws = 0.8, 20_000
    estimate = over_chains(autoregressive(rho, 4, draws))
    # ESS of AR(1) is n (1 - rho) / (1 + rho); the estimator's own scatter at this length is a few percent for each of four
    assert estimate.ess == pytest.approx(4 * draws * (1 - rho) / (1 + rho), rel=0.1)


def test_errors_cover_the_truth():
    inside = [abs((e := over_chains(autoregressive(0.7, 8, 400, seed))).mean) < 2 * e.error for seed in range(200)]
    # two standard errors from eight chains (t with 7 degrees of freedom): 91.4%; binomial error of 200 trials 2%
    assert np.mean(inside) > 0.85


def test_chains_in_two_phases_do_not_pass_the_gate():
    first, second = autoregressive(0.5, 2, 500)
    assert between_starts(first, second) < 1.05
    assert between_starts(first, second + 10) > 1.5
    jumped = np.concatenate([first, second + 10])
    assert not over_chains(np.stack([jumped, jumped])).mixed


def test_not_finite_draws_are_not_an_estimate():
    estimate = over_chains(np.array([[1.0, np.nan], [1.0, 2.0]]))
    assert np.isnan(estimate.mean)
    assert not estimate.mixed


def test_onset_of_a_square_root():
    sequences = np.array([80, 105, 112, 120, 130, 150, 180, 240, 400])
    order_parameter = np.sqrt(np.clip(sequences - 110.0, 0, None) / (sequences + 30))
    # P as a function of m^2 is smooth but not exactly quadratic
    assert onset(sequences, -order_parameter) == pytest.approx(110, rel=0.01)
    assert np.isnan(onset(sequences, np.ones(9)))


def test_steepest_place_of_a_sigmoid():
    grid = np.geomspace(100, 1000, 40)
    assert steepest(grid, np.tanh(3 * np.log(grid / 333))) == pytest.approx(333, rel=1e-3)
    assert np.isnan(steepest(grid, grid**2))  # steepest at the end: no place inside
    assert resolution(grid, 333.0) == pytest.approx(0.5 * 333 * (np.exp(np.log(10) / 39) - 1) / np.sqrt(3), rel=0.05)
