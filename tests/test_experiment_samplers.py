"""Every sampler against what is known without it: the prior, a Gaussian, quadrature over all logits, exact joint draws."""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arviz_stats.base.array import array_stats
from scipy.stats import chi2

from conftest import QUICK
from copyhead.experiment import hamiltonian, langevin, mala, reference
from copyhead.experiment.collapsed import Rung, sizes
from copyhead.experiment.hamiltonian import HamiltonianSettings, Trace
from copyhead.experiment.langevin import LangevinSettings
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath, Transposed
from copyhead.experiment.reference import ReferenceSettings
from copyhead.experiment.target import Collapsed, Joint, Reduced, posed
from copyhead.model import moments, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Positional
from copyhead.problem import Problem

pytestmark = pytest.mark.slow

# Gates, then |difference| < Z errors: 7e-6 for one comparison that is right, below 1e-3 for the hundred or so of this file.
LEAST_ESS, RHAT, Z = 400.0, 1.03, 4.5


def tiny(kind: str = "softmax", chi: float = 5.0, **fields) -> Problem:
    """Two positions, two tokens; K is not the identity. The mirror images of linear attention are near enough to cross."""
    given = {
        "noise": 0.5 if kind == "softmax" else 2.0,
        "logit_variance": 1.3,
        "output_variance": 0.6,
        "position_scale": 1.2,
        "token_scale": 0.7,
    }
    return Problem(**{"length": 2, "vocab": 2, "attention": kind, "chi": chi, **given, **fields})


def data(problem: Problem, sequences: int = 6) -> Empirical:
    drawn = tokens.sample(tokens.stream(1, "train"), sequences, problem.length, tokens.uniform(problem.vocab))
    return moments.empirical(drawn, problem.vocab)


def agree(draws: np.ndarray, mean: float, variance: float | None = None) -> None:
    """Draws (chain, draw) have this mean and variance."""
    squares = [] if variance is None else [((draws - mean) ** 2, variance)]
    for values, wanted in ((draws, mean), *squares):
        values = np.asarray(values, float)
        ess = float(array_stats.ess(values, chain_axis=0, draw_axis=1, method="mean"))
        assert ess > LEAST_ESS
        assert float(array_stats.rhat(values, chain_axis=0, draw_axis=1)) < RHAT
        assert abs(values.mean() - wanted) < Z * values.std() / np.sqrt(ess)


def own(problem: Problem, given: Empirical, rung: Rung, repeats: int, settings: HamiltonianSettings, seed: int = 0) -> Trace:
    """Own HMC. given: data sets (leading axis). rung: leading axis of rungs. It starts from the prior."""
    random, count = np.random.default_rng(seed), len(given.sequences)
    shape = len(rung.chi), repeats, count
    whole = Rung(*(np.broadcast_to(np.asarray(part, np.float32)[:, None, None], shape) for part in rung))
    start = 0.5 * random.normal(size=(*shape, problem.length, problem.length)).astype(np.float32)
    keys = random.integers(0, 2**32, size=(*shape, 2), dtype=np.uint32)
    against, packed = yardstick(problem, Network(), 8), PackedPath(problem).pack(given)
    return jax.tree.map(np.asarray, hamiltonian.run(start, packed, whole, keys, against, sizes(problem), settings, problem))


def one_rung(problem: Problem) -> Rung:
    return Rung(*(np.array([part]) for part in (problem.chi, 1.0, 0.0, 0.0)))


def alone(given: Empirical) -> Empirical:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], given)


def on_all_weights(module, problem: Problem, given: Empirical, settings: LangevinSettings, seed: int = 0):
    """SGLD or MALA on (G, W), one chain for each of the data sets (leading axis)."""
    random, path = np.random.default_rng(seed), PackedPath(problem)
    cells = len(given.sequences)
    start = Transposed(
        *(0.5 * random.normal(size=(cells, size, size)).astype(np.float32) for size in (problem.length, problem.vocab))
    )
    keys = random.integers(0, 2**32, size=(cells, 2), dtype=np.uint32)
    chi = np.full(cells, problem.chi, np.float32)
    found = module.chains(start, path.pack(given), chi, keys, path, yardstick(problem, Network(), 8), settings)
    return jax.tree.map(np.asarray, found)


def many(given: Empirical, count: int) -> Empirical:
    return jax.tree.map(lambda leaf: np.stack([np.asarray(leaf)] * count), given)


def copies(position, chains: int, spread: float, seed: int):
    """`chains` starts around a position, with normal scatter."""
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf + spread * random.normal(size=(chains, *np.shape(leaf))), leaf.dtype), position
    )


class Law(NamedTuple):
    mean: float
    variance: float


@partial(jax.jit, static_argnames="target")
def _on_grid(logits, target: Collapsed, rung: Rung):
    """log of the density over the prior, and what is measured; W enters by its mean and covariance given G."""
    seen, numbers = target.posed, target.posed.prior
    matrix = jax.vmap(lambda one: attention(one, seen.kind, numbers.length))(logits)
    square, overlap = (
        rung.weight
        / numbers.kappa
        * jax.vmap(lambda a, b=b: seen.moments.contract(a, a if b is None else b, seen.layout)[0])(matrix)
        for b in (None, seen.target)
    )
    vocab = square.shape[-1]
    inverse = jnp.linalg.inv(square + jnp.eye(vocab) / numbers.output_variance)
    mean = inverse @ overlap
    gain = rung.chi / 2 * jnp.sum(overlap * mean, axis=(1, 2)) + vocab / 2 * jnp.linalg.slogdet(inverse)[1]
    on = jnp.sum(seen.target * matrix, axis=(1, 2)) / numbers.length
    off = jnp.sum((1 - seen.target) * matrix, axis=(1, 2)) / numbers.length
    place = jnp.log(on / off) if seen.kind == "softmax" else numbers.length * (on - off)
    gain -= rung.stiffness * (place - rung.center) ** 2 / 2
    c1 = jnp.sum((1 - seen.target) * logits, axis=(1, 2)) / numbers.length
    cG = jnp.sum(seen.target * logits, axis=(1, 2)) / numbers.length - c1
    trace = jnp.trace(mean, axis1=1, axis2=2) / vocab
    # columns of W are independent given G
    spread = jnp.trace(inverse, axis1=1, axis2=2) / rung.chi / vocab**2
    return gain, {"c1": c1, "cG": cG, "aG": on - off, "overlap": trace}, spread


@cache
def law(problem: Problem, rung: Rung | None = None, nodes: int = 24, sequences: int = 6) -> dict[str, Law]:
    """Means and variances at L = 2 by Gauss-Hermite quadrature over the prior of all four logits, in float64."""
    rung = rung or Rung(problem.chi, 1.0, 0.0, 0.0)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda leaf: np.asarray(leaf, float), data(problem, sequences))
        target = Collapsed(posed(problem, given))
        places, weights = np.polynomial.hermite_e.hermegauss(nodes)
        normal = np.stack(np.meshgrid(*[places] * 4, indexing="ij"), axis=-1).reshape(-1, 2, 2)
        log_weights = sum(grid.ravel() for grid in np.meshgrid(*[np.log(weights)] * 4, indexing="ij"))
        values, vectors = np.linalg.eigh(problem.position_scale * np.eye(2) + problem.token_scale / problem.vocab)
        root = (vectors * np.sqrt(values)) @ vectors.T
        logits = root @ normal @ root * np.sqrt(problem.logit_variance / rung.chi)
        gain, seen, spread = jax.tree.map(np.asarray, _on_grid(logits, target, rung))
    density = np.exp(gain + log_weights - np.max(gain + log_weights))
    density /= density.sum()
    found = {}
    for name, value in seen.items():
        mean = float(density @ value)
        found[name] = Law(mean, float(density @ (value - mean) ** 2 + (density @ spread if name == "overlap" else 0)))
    return found


@pytest.mark.parametrize("problem", [tiny(), tiny("linear")], ids=lambda p: p.attention)
def test_quadrature_has_converged(problem):
    for name, one in law(problem).items():
        assert np.allclose(one, law(problem, nodes=18)[name], atol=1e-4)


HAMILTONIAN = HamiltonianSettings(leapfrogs=4, warmup=150, draws=1000)


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_hamiltonian_samples_the_posterior(kind):
    problem = tiny(kind)
    trace = own(problem, alone(data(problem)), one_rung(problem), 16, HAMILTONIAN)
    for name, one in law(problem).items():
        agree(getattr(trace.observables, name)[0, :, 0], *one)
    assert 0.7 < trace.acceptance.mean() < 0.99


@pytest.mark.parametrize("kind", ["softmax", "linear"])
def test_mala_samples_the_posterior(kind):
    problem = tiny(kind)
    settings = LangevinSettings(step_logits=0.3, output_courant=0.5, warmup=500, draws=800, thin=10)
    found = on_all_weights(mala, problem, many(data(problem), 16), settings)
    for name, one in law(problem).items():
        agree(getattr(found.observables, name), *one)
    assert 0.4 < found.acceptance.mean() < 0.75


def test_sgld_samples_the_posterior_as_its_step_goes_to_zero():
    """Means at a step and at half of it: the bias is linear in the step, so twice the latter minus the former has none."""
    problem, exact = tiny(), law(tiny())
    found = []
    for seed, fraction in ((0, 1.0), (1, 0.5)):
        settings = LangevinSettings(0.16 * fraction, 0.16 * fraction, warmup=500, draws=1200, thin=int(10 / fraction))
        found.append(on_all_weights(langevin, problem, many(data(problem), 24), settings, seed).observables)
    for name, one in exact.items():
        for power, wanted in ((1, one.mean), (2, one.variance)):
            values = [np.asarray((getattr(part, name) - one.mean * (power - 1)) ** power, float) for part in found]
            errors = []
            for value in values:
                ess = float(array_stats.ess(value, chain_axis=0, draw_axis=1, method="mean"))
                assert ess > LEAST_ESS
                assert float(array_stats.rhat(value, chain_axis=0, draw_axis=1)) < RHAT
                errors.append(value.std() / np.sqrt(ess))
            extrapolated = 2 * values[1].mean() - values[0].mean()
            assert abs(extrapolated - wanted) < Z * np.hypot(2 * errors[1], errors[0]), name


def measured(position, target, problem: Problem) -> dict[str, np.ndarray]:
    """Of positions (chain, draw, ...)."""
    shift, length = targets.shift(problem.length), problem.length
    if isinstance(target, Reduced):
        return {"c1": position[..., 0], "cG": position[..., 1]}
    logits = position.logits if isinstance(target, Joint) else position
    matrix = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    means = [((part * array).sum((-2, -1)) / length) for array in (logits, matrix) for part in (shift, 1 - shift)]
    seen = {"c1": means[1], "cG": means[0] - means[1], "aG": means[2] - means[3]}
    if isinstance(target, Joint):
        seen["overlap"] = np.trace(position.output, axis1=-2, axis2=-1) / problem.vocab
    return seen


@pytest.mark.parametrize("kind", [Joint, Collapsed])
@pytest.mark.parametrize("algorithm", ["hmc", "nuts"])
def test_the_library_samples_the_same_posterior(kind, algorithm):
    problem = tiny()
    target = kind(posed(problem, data(problem)))
    place = target.initial(Positional(np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)))
    settings = ReferenceSettings(warmup=300, draws=1000, leapfrogs=8, doublings=5)
    trace = reference.sample(target, copies(place, 6, 0.3, 0), problem.chi, 1, algorithm, settings)
    assert trace.divergent.mean() < 0.01
    for name, draws in measured(trace.positions, target, problem).items():
        agree(draws, *law(problem)[name])


def test_the_library_samples_tied_logits():
    """Two numbers with a flat measure, so a grid of 10 standard deviations and more is the answer."""
    problem = tiny()
    target = Reduced(posed(problem, data(problem)))
    settings = ReferenceSettings(warmup=300, draws=1000, doublings=5)
    trace = reference.sample(target, copies(jnp.zeros(2), 6, 0.3, 0), problem.chi, 1, "nuts", settings)
    edge = np.linspace(-6, 6, 401)
    grid = np.stack(np.meshgrid(edge, edge, indexing="ij"), axis=-1).reshape(-1, 2).astype(np.float32)
    value = jax.jit(jax.vmap(lambda place: target.log_density(place, problem.chi)), compiler_options=QUICK)(grid)
    density = np.exp(np.asarray(value, float) - float(value.max()))
    density /= density.sum()
    assert max(density.reshape(401, 401)[0].sum(), density.reshape(401, 401)[:, -1].sum()) < 1e-9
    for index in range(2):
        mean = density @ grid[:, index]
        agree(trace.positions[..., index], mean, density @ (grid[:, index] - mean) ** 2)


def prior_variance(pattern: np.ndarray, problem: Problem) -> float:
    """Of <pattern, G>: g_W / chi <pattern, K pattern K>."""
    kernel = problem.position_scale * np.eye(problem.length) + problem.token_scale / problem.vocab
    return problem.logit_variance / problem.chi * float(np.sum(pattern * (kernel @ pattern @ kernel)))


def test_without_data_hamiltonian_and_mala_return_the_prior():
    """HMC has the exact flow of the prior: it refuses nothing. The energy is chi^2 of L^2 degrees of freedom over 2 chi."""
    problem = tiny(length=3, vocab=3, cyclic=False)
    shift, scored = targets.shift(3, cyclic=False), np.array([[0.0], [1.0], [1.0]])
    off = scored * (1 - shift) / 4
    wanted = {"c1": prior_variance(off, problem), "cG": prior_variance(shift / 2 - off, problem)}
    weightless = one_rung(problem)._replace(weight=np.zeros(1))
    trace = own(problem, alone(data(problem)), weightless, 8, HAMILTONIAN)
    # float32 of energies of order ten
    assert trace.acceptance.min() > 1 - 1e-4
    nothing = jax.tree.map(lambda leaf: 0 * leaf, many(data(problem), 16))
    settings = LangevinSettings(step_logits=0.3, output_courant=0.5, warmup=500, draws=800, thin=10)
    adjusted = on_all_weights(mala, problem, nothing, settings)
    for name, variance in wanted.items():
        agree(getattr(trace.observables, name)[0, :, 0], 0.0, variance)
        agree(getattr(adjusted.observables, name), 0.0, variance)
    agree(trace.marks.prior[0, :, 0], 9 / 2 / problem.chi, 9 / 2 / problem.chi**2)
    for overlap in (trace.observables.overlap[0, :, 0], adjusted.observables.overlap):
        agree(overlap, 0.0, problem.output_variance / problem.chi / problem.vocab)


def test_pinned_logits_leave_the_gaussian_of_the_outputs():
    """With g_W = 1e-4 logits are zero to 0.01, which enters squared: W is Gaussian, with mean and covariance written out here.

    Smaller ones the library's adaptation cannot follow, which adds a constant to the variances that it estimates.
    """
    problem = tiny(logit_variance=1e-4, vocab=3)
    given = data(problem)
    drawn = tokens.sample(tokens.stream(1, "train"), 6, 2, tokens.uniform(3))
    x = np.eye(3)[drawn]
    mean_x = x.mean(axis=1)  # what attention at zero logits reads at each of the two positions
    precision = 2 * mean_x.T @ mean_x / problem.kappa + np.eye(3) / problem.output_variance
    covariance = np.linalg.inv(precision)
    mean = covariance @ (mean_x.T @ x.sum(axis=1)) / problem.kappa
    target = Joint(posed(problem, given))
    place = Positional(np.zeros((2, 2), np.float32), np.zeros((3, 3), np.float32))
    settings = ReferenceSettings(warmup=400, draws=1000, doublings=6)
    trace = reference.sample(target, copies(place, 6, 5e-3, 0), problem.chi, 2, "nuts", settings)
    output = trace.positions.output
    for row in range(3):
        for column in range(3):
            agree(output[..., row, column], mean[row, column], covariance[row, row] / problem.chi)
        # within a column entries are correlated, between columns they are not
        other = (row + 1) % 3
        apart = output - mean
        agree(apart[..., row, 0] * apart[..., other, 0], covariance[row, other] / problem.chi)
        agree(apart[..., row, 0] * apart[..., row, 1], 0.0)
    trace = on_all_weights(mala, problem, many(given, 16), LangevinSettings(0.3, 0.5, warmup=500, draws=600, thin=10))
    agree(trace.observables.overlap, np.trace(mean) / 3, np.trace(covariance) / problem.chi / 9)


def test_rungs_that_exchange_keep_their_marginals():
    """Rungs differ in chi, number of data and bias at once; each against quadrature of its own density."""
    problem = tiny()
    rungs = [Rung(3.0, 0.3, 0.0, 0.0), Rung(5.0, 1.0, 0.0, 0.0), Rung(6.0, 1.4, 1.0, 2.0), Rung(5.0, 1.0, 0.2, 3.0)]
    ladder = Rung(*(np.array(part) for part in zip(*rungs, strict=True)))
    trace = own(problem, alone(data(problem)), ladder, 12, HAMILTONIAN)
    assert np.nanmin(np.nanmean(trace.exchanged[:-1], axis=(1, 2, 3))) > 0.1
    assert np.isnan(trace.exchanged[-1]).all()
    # the states of a ladder are permuted, never copied
    assert np.array_equal(np.sort(trace.walker, axis=0), np.broadcast_to(np.arange(4)[:, None, None, None], trace.walker.shape))
    for index, rung in enumerate(rungs):
        for name, one in law(problem, rung).items():
            agree(getattr(trace.observables, name)[index, :, 0], *one)


RANKS, SETS = 15, 384


def joint_draws(problem: Problem, sequences: int) -> tuple[dict[str, np.ndarray], Empirical]:
    """(G, W) with a data set, exactly from prior(G, W) uniform(x) exp(-chi |T x - A x W|^2 / (2 kappa)), by rejection.

    Given x, (G, W) has the density exp(-chi E), for which every sampler here is written. Data sets are not uniform
    then: how likely one is depends on its own evidence, and any law that gives this conditional will do.
    """
    random, count, length, vocab = np.random.default_rng(5), 2**17, problem.length, problem.vocab
    values, vectors = np.linalg.eigh(problem.position_scale * np.eye(length) + problem.token_scale / vocab)
    root = (vectors * np.sqrt(values)) @ vectors.T
    logits = root @ random.normal(size=(count, length, length)) @ root * np.sqrt(problem.logit_variance / problem.chi)
    output = random.normal(size=(count, vocab, vocab)) * np.sqrt(problem.output_variance / problem.chi)
    drawn = random.integers(0, vocab, size=(count, sequences, length))
    x = np.eye(vocab)[drawn]
    matrix = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if problem.attention == "softmax" else logits / length
    error = ((np.roll(x, 1, axis=2) - matrix[:, None] @ x @ output[:, None]) ** 2).sum((1, 2, 3))
    kept = np.flatnonzero(random.random(count) < np.exp(-problem.chi * error / (2 * problem.kappa)))[:SETS]
    assert len(kept) == SETS
    shift = targets.shift(length)
    on = (shift * logits[kept]).sum((1, 2)) / length
    off = ((1 - shift) * logits[kept]).sum((1, 2)) / (length * (length - 1))
    truth = {"c1": off, "cG": on - off, "overlap": np.trace(output[kept], axis1=1, axis2=2) / vocab}
    return truth, PackedPath(problem).collect(list(drawn[kept]))


def ranks_are_uniform(truth: np.ndarray, draws: np.ndarray) -> None:
    """Cook, Gelman and Rubin (2006), Talts et al. (2018). A false alarm in 1e5 for each call, of which there are six."""
    counts = np.bincount((draws < truth[:, None]).sum(axis=1), minlength=RANKS + 1)
    expected = len(truth) / (RANKS + 1)
    assert np.sum((counts - expected) ** 2 / expected) < chi2.isf(1e-5, RANKS)


def test_calibration_by_simulation():
    problem = tiny(noise=1.0, chi=4.0)
    truth, given = joint_draws(problem, 3)
    trace = own(problem, given, one_rung(problem), 1, HAMILTONIAN._replace(warmup=100, draws=RANKS, thin=8))
    settings = LangevinSettings(step_logits=0.3, output_courant=0.5, warmup=600, draws=RANKS, thin=100)
    adjusted = on_all_weights(mala, problem, given, settings)
    for name, value in truth.items():
        ranks_are_uniform(value, getattr(trace.observables, name)[0, 0])
        ranks_are_uniform(value, getattr(adjusted.observables, name))
