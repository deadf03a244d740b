"""Adam with the L2 prior in the loss, full batch or mini-batch, for many cells at once.

The minimum of E is the saddle point of the posterior at chi -> infinity; weight decay decoupled from the gradient would move
it. For the positional network the cost of a step does not depend on P: the data enter through their moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from copyhead.experiment.cells import Cells, in_chunks
from copyhead.experiment.path import COMPILATION, Path
from copyhead.model.network import Weights

# A gradient entry below this moves no order parameter by more than about 1e-3: the softest curvature away from a fold is
# of order one, in units in which the prior of a logit has curvature 1 / g_W.
GRADIENT_TOLERANCE = 1e-3
# A run is looked at for divergence up to as many times; weights above this bound, far beyond any minimum, count as diverged.
CHECKS, LARGEST_WEIGHT = 20, 1e4
# Step of a run that did not diverge.
NEVER = -1


class AdamSettings(NamedTuple):
    """steps: updates of one run. learning_rate: at the start; it decays to zero along a cosine."""

    steps: int = 4000
    learning_rate: float = 0.03


class Trained(NamedTuple):
    """weights: after the last step, leading axis n. gradient: largest entry of |grad E| of the full batch there.

    Entries of weights whose prior is narrow are measured in its units: the gradient is multiplied by min(1, sqrt(g)).
    diverged: a step by which the weights were not finite, or beyond LARGEST_WEIGHT; NEVER if they stayed.
    """

    weights: Weights
    gradient: Float[np.ndarray, "n"]
    diverged: Int[np.ndarray, "n"]

    @property
    def converged(self) -> np.ndarray:
        """Whether the run ended at a stationary point; not so on a slow passage near a fold, and with mini-batches."""
        return self.gradient < GRADIENT_TOLERANCE


def train(cells: Cells, path: Path, settings: AdamSettings, chunk: int | None = None) -> Trained:
    """Trains every cell from its own start on its own data set; chi plays no role unless a prior depends on it.

    Args:
        chunk: cells run at a time, by default what suits the path; results do not depend on it beyond float32 rounding.
    """

    def run(part: Cells) -> Trained:
        weights, largest, diverged = descend(*path.prepare(part.start, part.data, part.batch_key), path, settings)
        return Trained(path.restore(weights), largest, diverged)

    return in_chunks(run, cells, chunk or path.cells)


@partial(jax.jit, static_argnames=("path", "settings"), compiler_options=COMPILATION)
def descend(start: Any, data: Any, path: Path, settings: AdamSettings) -> tuple[Any, Float[Array, "cell"], Int[Array, "cell"]]:
    """All steps of one chunk: the weights, the largest gradient entry at the end, and the step of divergence."""
    begin, update = updating(start, data, path, settings)
    checks = math.gcd(CHECKS, settings.steps)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        return update(state), None

    def stretch(state: tuple, _: None) -> tuple[tuple, None]:
        """The steps from one check to the next, and a note of the cells that are lost at its end."""
        *inner, diverged = state
        inner, _ = jax.lax.scan(step, tuple(inner), length=settings.steps // checks, unroll=path.unroll)
        lost = (diverged == NEVER) & ~bounded(inner[0])
        return (*inner, jnp.where(lost, inner[2].astype(jnp.int32), diverged)), None

    never = jnp.full(len(start[0]), NEVER, jnp.int32)
    (weights, _, _, diverged), _ = jax.lax.scan(stretch, (*begin, never), length=checks)
    units = [0.0 if g is None else min(1.0, g**0.5) for g in path.variances]
    slope = path.slope(weights, data, None)
    largest = jnp.stack([unit * _largest(part) for unit, part in zip(units, slope, strict=True)])
    return weights, jnp.max(largest, axis=0), diverged


def updating(start: Any, data: Any, path: Path, settings: AdamSettings) -> tuple[tuple, Callable[[tuple], tuple]]:
    """The state (weights, memory of Adam, number of the step) before the first step, and what one step makes of a state."""
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))
    rates = path.rates

    def update(state: tuple) -> tuple:
        weights, memory, number = state
        updates, memory = optimiser.update(path.slope(weights, data, number), memory)
        updates = type(updates)(*(rate * update for rate, update in zip(rates, updates, strict=True)))
        return optax.apply_updates(weights, updates), memory, number + 1

    return (start, optimiser.init(start), jnp.uint32(0)), update


def bounded(weights: Any) -> Array:
    """Which cells have finite weights below LARGEST_WEIGHT."""
    return jnp.all(jnp.stack([_largest(part) for part in weights]) < LARGEST_WEIGHT, axis=0)


def _largest(part: Float[Array, "cell ..."]) -> Float[Array, "cell"]:
    """The largest size of an entry, of whatever axes a weight has."""
    return jnp.max(jnp.abs(part), axis=tuple(range(1, part.ndim)))
