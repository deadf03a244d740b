"""Full-batch Adam with the L2 prior in the loss, for many cells at once.

The minimum of E(G, W) is the saddle point of the posterior at chi -> infinity; weight decay decoupled from the gradient would
move it. The cost of a step does not depend on P: the data enter through their moments.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from copyhead.experiment.cells import Cells, Objective, in_chunks
from copyhead.model.network import Positional
from copyhead.problem import Attention

# A gradient entry below this moves no order parameter by more than about 1e-3: the softest curvature away from a fold is
# of order one, in units in which the prior of a logit has curvature 1 / g_W.
GRADIENT_TOLERANCE = 1e-3


class AdamSettings(NamedTuple):
    """steps: updates of one run. learning_rate: at the start; it decays to zero along a cosine."""

    steps: int = 4000
    learning_rate: float = 0.02


class Trained(NamedTuple):
    """weights: after the last step, leading axis n. gradient: largest entry of |grad E| there."""

    weights: Positional
    gradient: Float[Array, "n"]

    @property
    def converged(self) -> Array:
        """Whether the run ended at a stationary point; not so on a slow passage near a fold."""
        return self.gradient < GRADIENT_TOLERANCE


def train(
    cells: Cells, objective: Objective, kind: Attention, settings: AdamSettings, chunk: int = 16
) -> Trained:
    """Trains every cell from its own start on its own data set; chi plays no role."""
    return in_chunks(partial(_train, objective=objective, kind=kind, settings=settings), cells, chunk)


@partial(jax.jit, static_argnames=("kind", "settings"))
def _train(cells: Cells, objective: Objective, kind: Attention, settings: AdamSettings) -> Trained:
    gradient = jax.vmap(jax.grad(partial(objective.energy, kind=kind)))
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, memory = state
        updates, memory = optimiser.update(gradient(weights, cells), memory)
        return (optax.apply_updates(weights, updates), memory), None

    (weights, _), _ = jax.lax.scan(step, (cells.start, optimiser.init(cells.start)), length=settings.steps)
    largest = [jnp.max(jnp.abs(part), axis=(-2, -1)) for part in gradient(weights, cells)]
    return Trained(weights, jnp.maximum(*largest))
