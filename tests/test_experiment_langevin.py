"""SGLD on problems with known answers."""

import jax
import jax.numpy as jnp
import numpy as np

from copyhead.experiment.adam import NEVER
from copyhead.experiment.cells import assemble
from copyhead.experiment.diagnostics import over_chains
from copyhead.experiment.langevin import LangevinSettings, Step, chains, langevin_step, sample
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath, Transposed
from copyhead.model.network import Network
from copyhead.problem import Problem

FRESH = 64


def test_stationary_variance_of_a_gaussian_mode_is_exact_in_the_step():
    """Variance 1 / (chi k (1 - eps k / 2)) at steps so large that eps and eps / 2 conventions differ by tens of percent."""
    curvature, chi, steps = np.array([1.0, 4.0, 9.0]), 7.0, 4000
    eps, cells, size = 0.1, 3, 20
    keys = np.arange(2 * cells, dtype=np.uint32).reshape(cells, 2)
    scale = jnp.asarray(curvature, jnp.float32)[:, None, None]

    def step(weights, number):
        slope = Transposed(scale * weights.logits, scale * weights.output)
        moved = langevin_step(
            weights, slope, Transposed(Step(eps), Step(jnp.full((cells, 1, 1), eps))), jnp.full(cells, chi), keys, number
        )
        return moved, weights.logits

    start = Transposed(jnp.zeros((cells, size, size)), jnp.zeros((cells, 3, 3)))
    _, path = jax.lax.scan(step, start, jnp.arange(steps, dtype=jnp.uint32))
    wanted = 1 / (chi * curvature * (1 - eps * curvature / 2))
    found = np.asarray(path[200:]).var(axis=(0, 2, 3))
    # n independent components times N / (correlation time of squares, 1 / (2 eps k)) draws; variance of a variance 2 / n
    effective = size**2 * (steps - 200) * np.minimum(1, eps * curvature)
    assert np.all(np.abs(found / wanted - 1) < 4 * np.sqrt(2 / effective))


def test_without_data_the_prior_is_sampled():
    problem = Problem(length=8, vocab=3, noise=0.9, logit_variance=0.5, output_variance=2.0, chi=10.0)
    path = PackedPath(problem)
    cells = assemble(path, [(20, seed, "small", problem.chi) for seed in range(8)])
    start, data = path.prepare(cells.start, cells.data, cells.batch_key)
    settings = LangevinSettings(step_logits=0.1, output_courant=0.2, warmup=500, draws=400, thin=20)
    nothing = jax.tree.map(jnp.zeros_like, data)
    trace = chains(start, nothing, cells.chi, cells.key, path, yardstick(problem, Network(), FRESH), settings).observables
    # cG is the mean of L entries minus the mean of L (L - 1): its prior variance is g_W / chi (1/L + 1/(L (L - 1)))
    length = problem.length
    variance = problem.logit_variance / problem.chi * (1 / length + 1 / (length * (length - 1)))
    variance /= 1 - settings.step_logits / problem.logit_variance / 2  # bias of the step, k = 1 / g_W
    estimate = over_chains(np.asarray(trace.cG))
    assert estimate.ess > 100
    assert estimate.rhat < 1.05
    assert abs(estimate.mean) < 4 * estimate.error
    second = over_chains(np.asarray(trace.cG) ** 2)
    assert abs(second.mean - variance) < 4 * second.error
    # tr W / V: variance g_O / (chi V), with its own bias
    overlap = over_chains(np.asarray(trace.overlap) ** 2)
    wanted = problem.output_variance / problem.chi / problem.vocab / (1 - settings.output_courant / 2)
    assert abs(overlap.mean - wanted) < 4 * overlap.error


def test_chains_do_not_depend_on_the_chunk():
    problem = Problem(length=8, vocab=3, noise=0.9)
    path = PackedPath(problem)
    cells = assemble(path, [(60, seed, start, 20.0) for seed in range(3) for start in ("small", "copy")])
    settings = LangevinSettings(warmup=20, draws=4, thin=5)
    against = yardstick(problem, Network(), FRESH)
    two, four = (sample(cells, path, against, settings, chunk=chunk).observables for chunk in (2, 4))
    for left, right in zip(two, four, strict=True):
        # float32: the order of sums may differ between chunk sizes
        assert np.allclose(left, right, rtol=1e-4, atol=1e-5)


def test_a_diverging_chain_is_reported_and_leaves_the_others_alone():
    problem = Problem(length=8, vocab=3, noise=0.9)
    path, against = PackedPath(problem), yardstick(problem, Network(), FRESH)
    cells = assemble(path, [(60, 0, "small", 20.0), (60, 1, "small", 20.0)])
    settings = LangevinSettings(warmup=20, draws=10, thin=5)
    healthy = sample(cells, path, against, settings).observables.loss
    cells.start.output[0] *= 1e30  # overflows in the first step
    sampled = sample(cells, path, against, settings)
    loss = sampled.observables.loss
    # seen at the first draw, after the warm-up and five steps
    assert sampled.diverged.tolist() == [25, NEVER]
    assert not np.isfinite(loss[0]).any()
    assert not over_chains(loss[:1]).mixed
    assert np.array_equal(loss[1], healthy[1])
