"""Minima of S(G) over all L^2 logits, without any symmetric ansatz: for one data set, and as a check of the reduction."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.energy import loss_per_token
from copyhead.model.moments import Moments
from copyhead.problem import Attention
from copyhead.theory.descent import descend
from copyhead.theory.order_parameters import OrderParameters, project
from copyhead.theory.posterior import Task, action, best_output, token_blocks


class FullMinimum(NamedTuple):
    """A minimum over the full matrix. gradient: largest entry of |grad S| there; converged: see `Descent`."""

    logits: Float[np.ndarray, "L L"]
    action: float
    gradient: float
    converged: bool


@partial(jax.jit, static_argnames="kind")
def _value_and_gradient(logits: Array, task: Task, kind: Attention) -> tuple[Array, Array]:
    return jax.value_and_grad(action)(logits, task, kind)


def minimise(task: Task, start: Float[np.ndarray, "L L"], kind: Attention, tolerance: float = 1e-6) -> FullMinimum:
    """Minimises S from a start (L-BFGS in float64); finds the minimum of the basin that the start lies in.

    Args:
        task: with a full layout, see action.full_task.
        tolerance: on the largest entry of the gradient. S itself is of order L.
    """
    shape = start.shape
    with jax.enable_x64(True):
        task = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), task)

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = _value_and_gradient(flat.reshape(shape), task, kind)
            return value, gradient.ravel()

        found = descend(objective, start.ravel(), tolerance)
    return FullMinimum(found.place.reshape(shape), found.value, found.gradient, found.converged)


def measure(logits: Float[np.ndarray, "L L"], task: Task, population: Moments, kind: Attention) -> OrderParameters:
    """Order parameters of any matrix; loss per token on the population, with W at its optimum for the task's own data."""
    with jax.enable_x64(True):
        task, population = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (task, population))
        matrix = attention(jnp.asarray(logits), kind, task.prior.length)
        output = best_output(token_blocks(jnp.asarray(logits), task, kind), task.prior)[0]
        c1, cG = project(jnp.asarray(logits), task.target, task.layout)
        off, excess = project(matrix, task.target, task.layout)
        loss = loss_per_token(matrix, output, task.target, population, task.layout)
        return OrderParameters(*(float(value) for value in (c1, cG, task.prior.length * off, excess, loss)))
