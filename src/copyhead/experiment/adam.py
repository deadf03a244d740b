"""Full-batch Adam with the L2 prior in the loss, for many cells at once.

The minimum of E(G, W) is the saddle point of the posterior at chi -> infinity; weight decay decoupled from the gradient would
move it. The cost of a step does not depend on P: the data enter through their moments.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from copyhead.experiment.cells import Cells, Objective, in_chunks
from copyhead.experiment.packed import COMPILATION, Packed, Rows, Transposed, chunk_size, gradient, pack
from copyhead.experiment.packed import rows as row_sums
from copyhead.model.network import Positional
from copyhead.model.prior import Prior
from copyhead.problem import Attention

# A gradient entry below this moves no order parameter by more than about 1e-3: the softest curvature away from a fold is
# of order one, in units in which the prior of a logit has curvature 1 / g_W.
GRADIENT_TOLERANCE = 1e-3


class AdamSettings(NamedTuple):
    """steps: updates of one run. learning_rate: at the start; it decays to zero along a cosine."""

    steps: int = 4000
    learning_rate: float = 0.03


class Trained(NamedTuple):
    """weights: after the last step, leading axis n. gradient: largest entry of |grad E| there."""

    weights: Positional
    gradient: Float[np.ndarray, "n"]

    @property
    def converged(self) -> np.ndarray:
        """Whether the run ended at a stationary point; not so on a slow passage near a fold."""
        return self.gradient < GRADIENT_TOLERANCE


def train(cells: Cells, objective: Objective, settings: AdamSettings, chunk: int | None = None) -> Trained:
    """Trains every cell from its own start on its own data set; chi plays no role.

    Args:
        chunk: cells run at a time, by default what fits the cache; results do not depend on it beyond float32 rounding.
    """
    target, layout, prior, kind = objective
    rows = row_sums(target, layout)

    def run(part: Cells) -> Trained:
        weights, largest = descend(
            Transposed(np.swapaxes(part.start.logits, -1, -2), part.start.output),
            pack(part.data, target), rows, prior, kind, settings,
        )  # fmt: skip
        return Trained(Positional(np.swapaxes(np.asarray(weights.logits), -1, -2), weights.output), largest)

    length, vocab = target.shape[0], cells.start.output.shape[-1]
    return in_chunks(run, cells, chunk or chunk_size(length, vocab))


@partial(jax.jit, static_argnames=("rows", "prior", "kind", "settings"), compiler_options=COMPILATION)
def descend(
    start: Transposed,
    data: Packed,
    rows: Rows,
    prior: Prior,
    kind: Attention,
    settings: AdamSettings,
) -> tuple[Transposed, Float[Array, "cell"]]:
    """All steps of one chunk: the weights and the largest gradient entry at the end."""
    optimiser = optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))

    def slope(weights: Transposed) -> Transposed:
        return gradient(weights, data, rows, prior, kind)

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, memory = state
        updates, memory = optimiser.update(slope(weights), memory)
        return (optax.apply_updates(weights, updates), memory), None

    (weights, _), _ = jax.lax.scan(step, (start, optimiser.init(start)), length=settings.steps, unroll=2)
    largest = [jnp.max(jnp.abs(part), axis=(-2, -1)) for part in slope(weights)]
    return weights, jnp.maximum(*largest)
