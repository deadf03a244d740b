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
import numpy as np
from jaxtyping import Array, Float, UInt32

from copyhead.experiment.cells import Cells, Objective, in_chunks
from copyhead.experiment.noise import normals
from copyhead.experiment.observables import Observables, Yardstick, measure
from copyhead.experiment.packed import COMPILATION, Packed, Rows, Transposed, chunk_size, gradient, pack
from copyhead.experiment.packed import rows as row_sums
from copyhead.model.network import Positional
from copyhead.model.prior import Prior
from copyhead.problem import Attention


class LangevinSettings(NamedTuple):
    """step_logits: eps of G, divided by the curvature of its prior where that is above one.

    output_courant: eps of W times a bound on its curvature, see `output_curvature`. warmup: steps before the first draw.
    draws: recorded states. thin: steps from one draw to the next.
    """

    step_logits: float = 0.03
    output_courant: float = 0.3
    warmup: int = 3000
    draws: int = 160
    thin: int = 50


def sample(
    cells: Cells, objective: Objective, yardstick: Yardstick, settings: LangevinSettings, chunk: int | None = None
) -> Observables:
    """Runs one chain for each cell; observables of shape (n, draws). A chain that diverges is nan from there on.

    Args:
        chunk: cells run at a time, by default what fits the cache; results do not depend on it beyond float32 rounding.
    """
    target, layout, prior, kind = objective
    rows = row_sums(target, layout)

    def run(part: Cells) -> Observables:
        start = Transposed(np.swapaxes(part.start.logits, -1, -2), part.start.output)
        return chains(start, pack(part.data, target), part.chi, part.key, rows, prior, yardstick, kind, settings)

    length, vocab = target.shape[0], cells.start.output.shape[-1]
    return in_chunks(run, cells, chunk or chunk_size(length, vocab))


def langevin_step(
    weights: Transposed,
    slope: Transposed,
    steps: tuple[Float[Array, "..."], Float[Array, "cell 1 1"]],
    chi: Float[Array, "cell"],
    key: UInt32[Array, "cell 2"],
    number: UInt32[Array, ""],
) -> Transposed:
    """theta - eps grad E + sqrt(2 eps / chi) xi. steps: eps of the logits and of the output map."""
    shapes = [part.shape[1:] for part in weights]
    sizes = [int(np.prod(shape)) for shape in shapes]
    noise = normals(key, number, sum(sizes)) * jnp.sqrt(2 / chi)[:, None]
    pieces = (noise[:, : sizes[0]], noise[:, sizes[0] :])
    moved = (
        part - eps * down + jnp.sqrt(eps) * xi.reshape(-1, *shape)
        for part, down, eps, xi, shape in zip(weights, slope, steps, pieces, shapes, strict=True)
    )
    return Transposed(*moved)


def output_curvature(
    sequences: Float[Array, "cell"], scored: float, vocab: int, prior: Prior, kind: Attention
) -> Float[Array, "cell"]:
    """A bound on the curvature of E in W: 1/g_O + P rho^2 scored / (V kappa), of the uniform token mode.

    rho, the row sum of A, is one for softmax. For linear attention it is small: pooling balances |G|^2 / g_W against
    |W|^2 / g_O, which gives rho^2 = tau_p sqrt(V g_W / g_O) / L; twice that is taken.
    """
    square = 1.0
    if kind == "linear":
        balance = prior.position_scale * (vocab * prior.logit_variance / prior.output_variance) ** 0.5
        square = min(1.0, 2 * balance / prior.length)
    return 1 / prior.output_variance + sequences * square * scored / (vocab * prior.kappa)


@partial(jax.jit, static_argnames=("rows", "prior", "kind", "settings"), compiler_options=COMPILATION)
def chains(
    start: Transposed,
    data: Packed,
    chi: Float[Array, "cell"],
    key: UInt32[Array, "cell 2"],
    rows: Rows,
    prior: Prior,
    yardstick: Yardstick,
    kind: Attention,
    settings: LangevinSettings,
) -> Observables:
    """Warm-up and draws of one chunk of chains."""
    curvature = output_curvature(data.sequences, sum(rows.scored), start.output.shape[-1], prior, kind)
    stiffest = max(1.0, 1 / (prior.position_scale**2 * prior.logit_variance))
    steps = (jnp.float32(settings.step_logits / stiffest), (settings.output_courant / curvature)[:, None, None])

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, number = state
        slope = gradient(weights, data, rows, prior, kind)
        return (langevin_step(weights, slope, steps, chi, key, number), number + 1), None

    def draw(state: tuple, _: None) -> tuple[tuple, Observables]:
        state, _ = jax.lax.scan(step, state, length=settings.thin, unroll=2)
        weights = Positional(state[0].logits.mT, state[0].output)
        return state, jax.vmap(lambda one: measure(one, yardstick, kind))(weights)

    state, _ = jax.lax.scan(step, (start, jnp.uint32(0)), length=settings.warmup, unroll=2)
    _, trace = jax.lax.scan(draw, state, length=settings.draws)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), trace)
