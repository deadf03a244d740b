"""Full-batch stochastic gradient Langevin dynamics (SGLD) on (G, W), for many chains at once.

Convention: theta' = theta - eps grad E + sqrt(2 eps / chi) xi, so that eps -> 0 samples exp(-chi E). On a Gaussian mode of
curvature k the stationary variance is 1 / (chi k (1 - eps k / 2)): the bias of a finite step is known, and the step must
stay below 2 / k for the largest k. G and W have steps of their own: a constant preconditioner leaves the target as it is.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from copyhead.experiment.cells import Cells, Objective, in_chunks
from copyhead.experiment.observables import Observables, Yardstick, measure
from copyhead.model.network import Positional
from copyhead.problem import Attention


class LangevinSettings(NamedTuple):
    """step_logits: eps of G. output_courant: eps of W times the largest curvature that W can have under softmax.

    That curvature is 1/g_O + P/(V sigma^2), of the uniform token mode. warmup: steps before the first draw. draws: recorded
    states. thin: steps from one draw to the next.
    """

    step_logits: float = 0.03
    output_courant: float = 0.3
    warmup: int = 4000
    draws: int = 200
    thin: int = 50


def sample(
    cells: Cells,
    objective: Objective,
    kind: Attention,
    yardstick: Yardstick,
    settings: LangevinSettings,
    chunk: int = 16,
) -> Observables:
    """Runs one chain for each cell; observables of shape (n, draws)."""
    run = partial(_sample, objective=objective, yardstick=yardstick, kind=kind, settings=settings)
    return in_chunks(run, cells, chunk)


@partial(jax.jit, static_argnames=("kind", "settings"))
def _sample(
    cells: Cells, objective: Objective, yardstick: Yardstick, kind: Attention, settings: LangevinSettings
) -> Observables:
    length, vocab = cells.start.logits.shape[-1], cells.start.output.shape[-1]
    scored = jnp.sum(objective.layout.scored)
    gradient = jax.grad(partial(objective.energy, kind=kind))

    def move(weights: Positional, cell: Cells, key: jax.Array) -> Positional:
        curvature = 1 / cell.prior.output_variance + cell.data.sequences * scored / (vocab * cell.prior.kappa)
        steps = (settings.step_logits, settings.output_courant / curvature)
        noise = jax.random.normal(key, (length**2 + vocab**2,))
        noises = (noise[: length**2].reshape(length, length), noise[length**2 :].reshape(vocab, vocab))
        moved = (
            part - eps * slope + jnp.sqrt(2 * eps / cell.prior.chi) * xi
            for part, slope, xi, eps in zip(weights, gradient(weights, cell), noises, steps, strict=True)
        )
        return Positional(*moved)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, keys = state
        split = jax.vmap(jax.random.split)(keys)
        return (jax.vmap(move)(weights, cells, split[:, 0]), split[:, 1]), None

    def draw(state: tuple, _: None) -> tuple[tuple, Observables]:
        state, _ = jax.lax.scan(step, state, length=settings.thin)
        return state, jax.vmap(lambda weights: measure(weights, yardstick, kind))(state[0])

    state, _ = jax.lax.scan(step, (cells.start, cells.key), length=settings.warmup)
    _, trace = jax.lax.scan(draw, state, length=settings.draws)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), trace)
