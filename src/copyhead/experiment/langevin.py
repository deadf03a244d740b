"""Stochastic gradient Langevin dynamics (SGLD) on all weights, full batch or mini-batch, for many chains at once.

Convention: theta' = theta - eps grad E + sqrt(2 eps / chi) xi, so that eps -> 0 samples exp(-chi E). On a Gaussian mode of
curvature k the stationary variance is 1 / (chi k (1 - eps k / 2)): the bias of a finite step is known, and the step must
stay below 2 / k for the largest k. G and W have steps of their own: a constant preconditioner leaves the target as it is.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from copyhead.experiment.adam import NEVER, bounded
from copyhead.experiment.cells import Cells, in_chunks
from copyhead.experiment.noise import normals
from copyhead.experiment.observables import Yardstick, measure
from copyhead.experiment.path import COMPILATION, Path
from copyhead.problem import Problem

# eps of the logits: an eighth of what the stiffest logit mode of a copy head allows, some 1.5 / g_W in linear attention and
# 6 / g_W in softmax at the preset.
LOGIT_STEPS = {"softmax": 0.03, "linear": 0.1}


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


class Sampled(NamedTuple):
    """observables: of shape (n, draws). diverged: a step by which a chain was lost; adam.NEVER if it was not."""

    observables: Any
    diverged: Int[np.ndarray, "n"]


def sample(cells: Cells, path: Path, yardstick: Yardstick, settings: LangevinSettings, chunk: int | None = None) -> Sampled:
    """Runs one chain for each cell. A chain that diverges is nan from there on.

    Args:
        chunk: cells run at a time, by default what suits the path; results do not depend on it beyond float32 rounding.
    """

    def run(part: Cells) -> Sampled:
        start, data = path.prepare(part.start, part.data, part.batch_key)
        return chains(start, data, part.chi, part.key, path, yardstick, settings)

    return in_chunks(run, cells, chunk or path.cells)


def langevin_step(
    weights: Any,
    slope: Any,
    steps: Any,
    chi: Float[Array, "cell"],
    key: UInt32[Array, "cell 2"],
    number: UInt32[Array, ""],
) -> Any:
    """theta - eps grad E + sqrt(2 eps / chi) xi. steps: a Step for each weight, in the structure of the weights."""
    shapes = [part.shape[1:] for part in weights]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    noise = normals(key, number, int(ends[-1])) * jnp.sqrt(2 / chi)[:, None]
    moved = (
        part - step.times(down, 1.0) + step.times(xi.reshape(-1, *shape), 0.5)
        for part, down, step, xi, shape in zip(weights, slope, steps, jnp.split(noise, ends[:-1], axis=1), shapes, strict=True)
    )
    return type(weights)(*moved)


class Step(NamedTuple):
    """eps of one weight; a constant matrix, so that it leaves the target as it is.

    bulk: eps. stiff: eps within `frame`, orthonormal columns for the last axis of the weight; None: bulk everywhere.
    """

    bulk: Float[Array, "..."] | float
    stiff: Float[Array, "cell 1 1"] | float = 0.0
    frame: Float[Array, "cell n k"] | None = None

    def times(self, part: Float[Array, "cell m n"], power: float) -> Float[Array, "cell m n"]:
        """The matrix to a power, times a slope or noise."""
        bulk = jnp.asarray(self.bulk) ** power
        if self.frame is None:
            return bulk * part
        return bulk * part + (jnp.asarray(self.stiff) ** power - bulk) * (part @ self.frame @ self.frame.mT)


def output_curvature(sequences: Float[Array, "cell"], problem: Problem) -> Float[Array, "cell"]:
    """A bound on the curvature of E in W: 1/g_O + P rho^2 scored / (V kappa), of the uniform token mode.

    rho, the row sum of A, is one for softmax. For linear attention it is small: pooling balances |G|^2 / g_W against
    |W|^2 / g_O, which gives rho^2 = tau sqrt(V g_W / g_O) / L with tau = tau_p + tau_x L / V (the uniform direction of the
    logits is the cheaper, the more tokens add to it); twice that is taken.
    """
    square = 1.0
    if problem.attention == "linear":
        cheaper = problem.position_scale + problem.token_scale * problem.length / problem.vocab
        balance = cheaper * (problem.vocab * problem.logit_variance / problem.output_variance) ** 0.5
        square = min(1.0, 2 * balance / problem.length)
    return 1 / problem.output_variance + sequences * square * problem.scored / (problem.vocab * problem.kappa)


@partial(jax.jit, static_argnames=("path", "settings"), compiler_options=COMPILATION)
def chains(
    start: Any,
    data: Any,
    chi: Float[Array, "cell"],
    key: UInt32[Array, "cell 2"],
    path: Path,
    yardstick: Yardstick,
    settings: LangevinSettings,
) -> Sampled:
    """Warm-up and draws of one chunk of chains."""
    steps = step_sizes(path, start, path.sequences(data), settings)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, number = state
        slope = path.slope(weights, data, number)
        return (langevin_step(weights, slope, steps, chi, key, number), number + 1), None

    def draw(state: tuple, _: None) -> tuple[tuple, Any]:
        state, _ = jax.lax.scan(step, state, length=settings.thin, unroll=path.unroll)
        seen = jax.vmap(lambda one: measure(one, yardstick, path.problem))(path.restore(state[0]))
        return state, (seen, jnp.where(bounded(state[0]), NEVER, state[1].astype(jnp.int32)))

    state, _ = jax.lax.scan(step, (start, jnp.uint32(0)), length=settings.warmup, unroll=path.unroll)
    _, (trace, lost) = jax.lax.scan(draw, state, length=settings.draws)
    first = lost[jnp.argmax(lost != NEVER, axis=0), jnp.arange(lost.shape[1])]
    return Sampled(jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), trace), first)


# eps times a bound on the curvature of E, for logits that many positions share; the limit of stability is 2.
SHARED_COURANT = 0.8


def step_sizes(path: Path, start: Any, sequences: Float[Array, "cell"], settings: LangevinSettings) -> Any:
    """The Step of each weight: that of the logits times min(1, g), and for the output map from its curvature.

    Where positions share logits, see `Path.shared`, a step is bounded by their curvature 1/g + leverage C, with
    C = P scored w^2 / (V kappa) that of a common shift of all logits (linear), or of all of one token (softmax). w^2 is that of
    a copying network for linear attention (model.network.copying), and L/4, the most that any attention asks for, for softmax:
    w = (aG + 1/L) / (aG^2 + 1/L). A step beyond the limit of stability would not diverge but end in a cycle, whatever chi is.
    """
    problem = path.problem
    curvature = output_curvature(sequences, problem)
    steps = [Step(0.0 if g is None else settings.step_logits * min(1.0, g)) for g in path.variances]
    square = problem.length**1.5 / problem.vocab**0.5 if problem.attention == "linear" else problem.length / 4
    shift = sequences * square * problem.scored / (problem.vocab * problem.kappa)
    for index, found in enumerate(path.shared(start)):
        if found is not None:
            largest = steps[index].bulk
            within, elsewhere = (
                jnp.minimum(SHARED_COURANT / (1 / path.variances[index] + leverage * shift), largest)[:, None, None]
                for leverage in (found.leverage, found.elsewhere)
            )
            steps[index] = Step(elsewhere, within, found.frame)
    return type(path.variances)(*steps)._replace(output=Step((settings.output_courant / curvature)[:, None, None]))
