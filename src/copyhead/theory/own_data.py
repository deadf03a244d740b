"""Beyond the paper's task, the minimum of S over all H L^2 logits on one data set: no symmetry and no expected moments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model import targets
from copyhead.model.attention import attention
from copyhead.model.energy import loss_per_token
from copyhead.model.moments import Empirical, Moments
from copyhead.problem import Attention, Problem
from copyhead.theory.descent import descend
from copyhead.theory.saddle_point import in_double
from copyhead.theory.symmetric import Parts, SymmetricTask, attention_on, parts
from copyhead.theory.unreduced import value_and_gradient


class OwnMinimum(NamedTuple):
    """A minimum on one data set. found: order parameters; its loss is that on the data. loss: on the population, same W.

    lags: mean attention of each head on each lag of the target.
    """

    found: Parts
    loss: float
    lags: Float[np.ndarray, "H K"]
    logits: Float[np.ndarray, "H L L"]
    gradient: float
    converged: bool


def minimise(
    task: SymmetricTask,
    start: Float[np.ndarray, "H L L"],
    kind: Attention,
    population: Moments,
    shifts: Float[np.ndarray, "K L L"],
    tolerance: float = 1e-6,
) -> OwnMinimum:
    """Minimises S from a start (L-BFGS in float64): the minimum of the basin that the start lies in.

    Args:
        population: moments that the loss is measured on, with W at its best for the data of the task.
        shifts: one matrix for each lag of the target.
        tolerance: on the largest entry of the gradient.
    """
    with jax.enable_x64(True):
        task, population = jax.tree.map(lambda leaf: jnp.asarray(in_double(leaf)), (task, population))

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = value_and_gradient(flat.reshape(start.shape), task, kind)
            return value, gradient.ravel()

        found = descend(objective, start.ravel(), tolerance)
        logits = found.place.reshape(start.shape)
        seen = Parts(*map(np.asarray, parts(logits, task, kind)))
        loss = _population_loss(jnp.asarray(logits), task, population, kind)
        by_lag = np.asarray(attention_on(jnp.asarray(logits), task, kind, shifts))
    return OwnMinimum(seen, float(loss), by_lag, logits, found.gradient, found.converged)


def _population_loss(logits: Array, task: SymmetricTask, population: Moments, kind: Attention) -> Array:
    matrices = attention(logits, kind, task.prior.length, task.layout.columns) * task.layout.scored[:, None]
    assert isinstance(task.moments, Empirical)
    output = task.moments.best_output(matrices, task.target, task.prior.ridge)
    return loss_per_token(matrices, output, task.target, population, task.layout)


def read(found: OwnMinimum, problem: Problem) -> dict[str, Any]:
    """Order parameters of a minimum: those of the leading head, rows, and heads in falling order of aG."""
    seen = found.found
    order = np.argsort(-seen.aG, kind="stable")
    first = order[0]
    scored = np.asarray(targets.scored(targets.operator(problem))) > 0
    return {
        **{name: getattr(seen, name)[first] for name in ("c1", "cG", "a1", "aG")},
        "loss": np.asarray(found.loss),
        "rows": seen.rows[first][scored],
        "heads": seen.cG[order],
        "heads_a": seen.aG[order],
        "lags": found.lags[first],
    }
