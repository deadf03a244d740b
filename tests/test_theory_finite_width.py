"""Finite d_model: the symmetric minimum with adapting embeddings, and trained networks of every width."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from conftest import QUICK
from copyhead.experiment.adam import AdamSettings, train
from copyhead.experiment.cells import assemble, data_sets
from copyhead.experiment.observables import measure_all, yardstick
from copyhead.experiment.path import path
from copyhead.model import targets, tokens
from copyhead.model.network import Network
from copyhead.problem import Problem
from copyhead.theory.finite_width import finite_width
from copyhead.theory.full_network import measure_network, minimise_network, symmetric
from copyhead.theory.transition import phases

pytestmark = pytest.mark.slow

PROBLEM = Problem(length=8, vocab=3, noise=0.6, token_scale=1.0, content=True, sequences=150)


def limit(problem: Problem):
    """The order parameters of the kernel limit."""
    return phases(problem).minima(problem.sequences)[0].order_parameters


def enumerated(problem: Problem):
    """All sequences of a small task, one-hot."""
    grid = np.indices((problem.vocab,) * problem.length).reshape(problem.length, -1).T
    return np.eye(problem.vocab)[grid]


@cache
def energy_of_all_weights(problem: Problem, width: int):
    """E of (flat weights, g_E) and its gradient, over all V^L sequences with weight P / V^L each; rows and W_V at the start."""
    length, vocab, kind = problem.length, problem.vocab, problem.attention
    rng = np.random.default_rng(0)
    rows = np.linalg.qr(rng.standard_normal((width, length + vocab)))[0].T
    value = np.linalg.qr(rng.standard_normal((width, width)))[0]
    one_hot, target = enumerated(problem), targets.shift(length)
    shapes = [rows.shape, value.shape, value.shape, (width, vocab)]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def energy(flat, variance):
        z, query_key, v, last = (part.reshape(shape) for part, shape in zip(jnp.split(flat, ends), shapes, strict=True))
        h = z[:length] + one_hot @ z[length:]
        logits = jnp.einsum("mad,de,mbe->mab", h, query_key, h)
        matrix = jax.nn.softmax(logits, axis=-1) if kind == "softmax" else logits / length
        missed = target @ one_hot - matrix @ one_hot @ (z[length:] @ v @ last)
        data = problem.sequences * jnp.mean(jnp.sum(missed**2, axis=(1, 2))) / (2 * problem.kappa)
        moved = jnp.sum((z - rows) ** 2) + jnp.sum((v - value) ** 2)
        return data + (jnp.sum(query_key**2) + jnp.sum(last**2) + width / variance * moved) / 2

    return jax.jit(jax.value_and_grad(energy), compiler_options=QUICK), rows, value, ends


def all_weights(problem: Problem, width: int, variance: float, state) -> np.ndarray:
    """(cG, cI, cS) at the minimum over every weight, without symmetry, and over all V^L sequences with weight P / V^L each."""
    length, vocab, target = problem.length, problem.vocab, targets.shift(problem.length)
    slope, rows, value, ends = energy_of_all_weights(problem, width)
    blocks = symmetric(state, problem)
    whole = np.block([[blocks.pp, blocks.pt], [blocks.tp, blocks.tt]])
    begin = (rows, rows.T @ whole @ rows, value, np.linalg.pinv(rows[length:] @ value))
    place = np.concatenate([part.ravel() for part in begin])
    with jax.enable_x64(True):
        # rounding of E can end a search before its gradient vanishes; a new one forgets the curvature that misled it
        for _ in range(5):
            best = minimize(
                lambda x: tuple(np.asarray(part, float) for part in slope(x, variance)),
                place,
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": 20000, "maxfun": 20000, "gtol": 1e-8, "ftol": 1e-16},
            )
            place = best.x
            if np.abs(best.jac).max() < 1e-7:
                break
    assert np.abs(best.jac).max() < 1e-6
    z = best.x[: ends[0]].reshape(rows.shape)
    both = z @ best.x[ends[0] : ends[1]].reshape(width, width) @ z.T
    pp, tt = both[:length, :length], both[length:, length:]
    other = np.mean(pp[(target + np.eye(length)) == 0])
    different = (tt.sum() - np.trace(tt)) / (vocab * (vocab - 1))
    return np.array([np.sum(pp * target) / length - other, np.trace(tt) / vocab - different, np.trace(pp) / length - other])


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_the_minimum_is_that_of_all_weights_over_all_sequences_up_to_the_second_order_in_the_inverse_width(kind):
    """The other lags are not quite equal at finite width, which the theory leaves out; cG feels it at second order only."""
    problem = Problem(length=4, vocab=2, noise=0.5, token_scale=1.0, content=True, sequences=120, attention=kind)
    state, errors = limit(problem), []
    for variance in (0.025, 0.0125):  # only d_model / g_E matters
        found = finite_width(problem, 12, variance, state)
        assert found.converged
        values = np.array([found.order_parameters.cG, found.order_parameters.cI, found.order_parameters.cS])
        difference = all_weights(problem, 12, variance, state) - values
        assert abs(difference[0]) < 5e-3 * (values[0] - state.cG)  # 2.5e-3 seen, and half of that at half the variance
        errors.append(np.abs(difference).max())
    # four for a second order, two for a first; 3.71 and 3.47 seen, with a third order of that size
    assert 3 < errors[0] / errors[1] < 5


def test_an_infinite_width_is_the_kernel_limit_and_corrections_fall_like_its_inverse():
    state = limit(PROBLEM)
    moved = [float(finite_width(PROBLEM, width, 1.0, state).order_parameters.cG) - float(state.cG) for width in (1e3, 1e4, 1e5)]
    assert all(change > 0 for change in moved)  # embeddings that adapt make copying cheaper
    # the next order is moved / cG = 1% at 1e3 and a tenth of that at 1e4
    assert moved[0] / moved[1] == pytest.approx(10, rel=0.05)
    assert moved[1] / moved[2] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_trained_embedded_networks_depart_from_the_limit_as_predicted(attention):
    """Adam on all weights against the kernel limit on the same data: the shift of cG, two codes and no common sample."""
    problem = PROBLEM.replace(attention=attention, sequences=None)
    places = [(150, seed, "copy", 1.0) for seed in range(3)]
    state = limit(problem.replace(sequences=150))
    fresh = tokens.sample(tokens.stream(0, "fresh"), 64, problem.length, tokens.uniform(problem.vocab))
    exact = [
        float(measure_network(minimise_network(problem, data, symmetric(state, problem)).blocks, problem, fresh)[0].cG)
        for data in (data_sets(problem, [150], seed)[0] for seed in range(3))
    ]
    for width in (32, 128):
        net = Network(kind="embedded", width=width, embedding_variance=1.0)
        way = path(problem, net)
        trained = train(assemble(way, places), way, AdamSettings(2500, 0.03))
        assert trained.converged.all()
        found = measure_all(trained.weights, yardstick(problem, net, 16), problem)
        shift = np.abs(np.asarray(found.cG)) - exact
        expected = finite_width(problem.replace(sequences=150), width, 1.0, state).order_parameters.cG - state.cG
        # the shift itself depends on the data set: by the relative change of its curvature, of order P^(-1/2)
        assert shift.mean() == pytest.approx(expected, rel=3 / 150**0.5)


def test_order_parameters_do_not_drift_with_width():
    """d_model 64, 256 and 1024 at the default g_E agree within the scatter of data sets; so do all with the limit."""
    problem = PROBLEM.replace(sequences=None)
    runs = [(150, seed, "small", 1.0) for seed in range(3)]
    found = {}
    for width in (64, 256, 1024):
        net = Network(kind="embedded", width=width)
        way = path(problem, net)
        trained = train(assemble(way, runs), way, AdamSettings(1000, 0.05))
        seen = measure_all(trained.weights, yardstick(problem, net, 256), problem)
        found[width] = np.array([getattr(seen, name) for name in ("cG", "cI", "cS", "aG", "loss")])
    scatter = found[1024].std(axis=1, ddof=1)
    for width in (64, 256):
        assert np.all(np.abs(found[width] - found[1024]).mean(axis=1) < scatter), width


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_the_kernel_network_ends_at_the_exact_minimum_of_its_data_set(attention):
    problem = PROBLEM.replace(attention=attention, sequences=None)
    data = data_sets(problem, [150], 0)[0]
    state = limit(problem.replace(sequences=150))
    exact = minimise_network(problem, data, symmetric(state, problem))
    assert exact.converged
    net = Network(kind="kernel")
    way = path(problem, net)
    trained = train(assemble(way, [(150, 0, "copy", 1.0)]), way, AdamSettings(3000, 0.03))
    assert trained.converged.all()
    for name in ("pp", "pt", "tp", "tt", "output"):
        # gradients below 1e-3 with curvature of order one leave weights within 1e-3
        assert np.abs(getattr(trained.weights, name)[0] - getattr(exact.blocks, name)).max() < 1e-3, name
    fresh = tokens.sample(tokens.stream(0, "fresh"), 256, problem.length, tokens.uniform(problem.vocab))
    seen = measure_all(trained.weights, yardstick(problem, net, 256), problem)
    expected, error = measure_network(exact.blocks, problem, fresh)
    for name, value in expected._asdict().items():
        assert float(getattr(seen, name)[0]) == pytest.approx(float(value), abs=2e-3), name
    assert 0 < error < 0.1 * float(expected.loss)
