"""Metropolis-adjusted Langevin (MALA) on (G, W), full batch, for many chains at once: SGLD's step without its bias.

The proposal is that of `langevin`, theta - eps grad E + sqrt(2 eps / chi) xi, with the same constant steps of the two blocks; a
factor on both adapts during warm-up to the acceptance that is best in many dimensions (Roberts and Rosenthal 1998).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.optimizers.dual_averaging import dual_averaging
from jax.scipy.special import ndtr
from jaxtyping import Array, Float, UInt32

from copyhead.experiment.cells import Cells, in_chunks
from copyhead.experiment.langevin import LangevinSettings, Step, langevin_step, step_sizes
from copyhead.experiment.noise import normals
from copyhead.experiment.observables import Yardstick, measure
from copyhead.experiment.packed import Packed, PackedPath, Transposed
from copyhead.experiment.path import COMPILATION

ACCEPTANCE = 0.574
# The factor on the steps of SGLD, at first and at most; more than the latter, and the limit of stability is passed anyway.
FIRST_FACTOR, LARGEST_FACTOR = 0.1, 8.0


class Adjusted(NamedTuple):
    """observables: of shape (n, draws). acceptance: mean probability since the draw before, likewise. factor: on the steps."""

    observables: Any
    acceptance: Float[np.ndarray, "n draw"]
    factor: Float[np.ndarray, "n"]


def sample(
    cells: Cells, path: PackedPath, yardstick: Yardstick, settings: LangevinSettings, chunk: int | None = None
) -> Adjusted:
    """Runs one chain for each cell."""

    def run(part: Cells) -> Adjusted:
        start, data = path.prepare(part.start, part.data, part.batch_key)
        return chains(start, data, part.chi, part.key, path, yardstick, settings)

    return in_chunks(run, cells, chunk or path.cells)


def _scaled(steps: Any, factor: Float[Array, "cell"]) -> Any:
    """A Step for each weight, times a factor; those of the positional network have no frame."""
    return Transposed(*(Step(jnp.asarray(step.bulk) * factor[:, None, None]) for step in steps))


def _log_proposal(origin: Transposed, slope: Transposed, goal: Transposed, steps: Any, chi: Array) -> Array:
    """Log density of proposing `goal` from `origin`, up to a constant of the steps."""
    total = jnp.zeros(len(chi))
    for start, down, end, step in zip(origin, slope, goal, steps, strict=True):
        gap = (end - start + step.bulk * down) ** 2 / step.bulk
        total -= chi / 4 * jnp.sum(gap, axis=(-2, -1))
    return total


@partial(jax.jit, static_argnames=("path", "settings"), compiler_options=COMPILATION)
def chains(
    start: Transposed,
    data: Packed,
    chi: Float[Array, "cell"],
    key: UInt32[Array, "cell 2"],
    path: PackedPath,
    yardstick: Yardstick,
    settings: LangevinSettings,
) -> Adjusted:
    """Warm-up and draws of one chunk of chains."""
    base = step_sizes(path, start, path.sequences(data), settings)
    begin, update, _ = dual_averaging()
    test_key = key ^ jnp.uint32(1)

    def step(state: tuple, factor: Array) -> tuple[tuple, Array]:
        weights, energy, slope, number = state
        steps = _scaled(base, factor)
        goal = langevin_step(weights, slope, steps, chi, key, number)
        there, uphill = path.energy_and_slope(goal, data)
        gain = chi * (energy - there)
        gain += _log_proposal(goal, uphill, weights, steps, chi) - _log_proposal(weights, slope, goal, steps, chi)
        probability = jnp.where(jnp.isfinite(gain), jnp.exp(jnp.minimum(gain, 0)), 0.0)
        accepted = ndtr(normals(test_key, number, 1)[:, 0]) < probability

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(accepted.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        kept = jax.tree.map(choose, (goal, there, uphill), (weights, energy, slope))
        return (*kept, number + 1), probability

    def warm(carried: tuple, _: None) -> tuple[tuple, None]:
        state, adaptation = carried
        state, probability = step(state, jnp.minimum(jnp.exp(adaptation[0]), LARGEST_FACTOR))
        return (state, update(adaptation, ACCEPTANCE - probability)), None

    adaptation = begin(jnp.full(len(chi), FIRST_FACTOR))
    adaptation = adaptation._replace(log_x_avg=jnp.zeros(len(chi)), avg_error=jnp.zeros(len(chi)))
    state = (start, *path.energy_and_slope(start, data), jnp.uint32(0))
    (state, adaptation), _ = jax.lax.scan(warm, (state, adaptation), length=settings.warmup)
    factor = jnp.minimum(jnp.exp(adaptation[1]), LARGEST_FACTOR) if settings.warmup else jnp.full(len(chi), FIRST_FACTOR)

    def draw(state: tuple, _: None) -> tuple[tuple, tuple]:
        state, probability = jax.lax.scan(lambda state, _: step(state, factor), state, length=settings.thin)
        seen = jax.vmap(lambda one: measure(one, yardstick, path.problem))(path.restore(state[0]))
        return state, (seen, probability.mean(axis=0))

    _, (trace, probability) = jax.lax.scan(draw, state, length=settings.draws)
    trace = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), trace)
    return Adjusted(trace, probability.T, factor)
