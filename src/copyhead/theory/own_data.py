"""Beyond the paper's task, the minimum of S over all H L^2 logits on one data set: no symmetry and no expected moments."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model import layout, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.energy import loss_per_token
from copyhead.model.moments import Empirical, Moments
from copyhead.model.prior import prior
from copyhead.problem import Attention, Problem
from copyhead.theory.descent import descend
from copyhead.theory.symmetric import Parts, SymmetricTask, action_of, parts


class OwnMinimum(NamedTuple):
    """A minimum on one data set. found: order parameters; its loss is that on the data. loss: on the population, same W."""

    found: Parts
    loss: float
    logits: Float[np.ndarray, "H L L"]
    gradient: float
    converged: bool


def full_logits(logits: Float[np.ndarray, "H R K"], problem: Problem) -> Float[np.ndarray, "H L L"]:
    """Logits of a symmetric minimum as full matrices; zero where they are masked, or their row is not scored."""
    if logits.shape[-2:] == (problem.length, problem.length) and not tokens.law(problem).independent:
        return logits
    return layout.compressed(targets.operator(problem), targets.allowed(problem)).expand(logits)


def own_task(problem: Problem, data: Empirical) -> SymmetricTask:
    """The task on all logits of all heads with the moments of a data set; every entry is a class of its own."""
    target = targets.operator(problem)
    law = tokens.law(problem).marginal(problem.length, problem.cyclic)
    whole = layout.masked(target, targets.allowed(problem))
    numbers = prior(problem, float(np.sum(law**2)))
    return SymmetricTask(np.ones(problem.heads), whole, None, np.arange(problem.length), target, whole, data, numbers)


@partial(jax.jit, static_argnames="kind")
def _value_and_gradient(logits: Array, task: SymmetricTask, kind: Attention) -> tuple[Array, Array]:
    return jax.value_and_grad(action_of)(logits, task, kind)


def minimise(
    task: SymmetricTask, start: Float[np.ndarray, "H L L"], kind: Attention, population: Moments, tolerance: float = 1e-6
) -> OwnMinimum:
    """Minimises S from a start (L-BFGS in float64): the minimum of the basin that the start lies in.

    Args:
        population: moments that the loss is measured on, with W at its best for the data of the task.
        tolerance: on the largest entry of the gradient.
    """
    with jax.enable_x64(True):
        task, population = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (task, population))

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = _value_and_gradient(flat.reshape(start.shape), task, kind)
            return value, gradient.ravel()

        found = descend(objective, start.ravel(), tolerance)
        logits = found.place.reshape(start.shape)
        seen = Parts(*map(np.asarray, parts(logits, task, kind)))
        loss = _population_loss(jnp.asarray(logits), task, population, kind)
    return OwnMinimum(seen, float(loss), logits, found.gradient, found.converged)


def _population_loss(logits: Array, task: SymmetricTask, population: Moments, kind: Attention) -> Array:
    matrices = attention(logits, kind, task.prior.length, task.layout.columns) * task.layout.scored[:, None]
    assert isinstance(task.moments, Empirical)
    output = task.moments.best_output(matrices, task.target, task.prior.ridge)
    return loss_per_token(matrices, output, task.target, population, task.layout)


def read(found: OwnMinimum, problem: Problem) -> dict[str, Float[np.ndarray, "..."]]:
    """Order parameters of a minimum: those of the leading head, rows, and heads in falling order of aG.

    In linear attention every head is taken with the sign that makes its aG positive: (-G_h, -W_h) is equally good.
    """
    seen = found.found
    sign = np.where((seen.aG < 0) & (problem.attention == "linear"), -1.0, 1.0)
    order = np.argsort(-sign * seen.aG, kind="stable")
    first = order[0]
    scored = np.asarray(targets.scored(targets.operator(problem))) > 0
    values = {name: sign[first] * getattr(seen, name)[first] for name in ("c1", "cG", "a1", "aG")}
    kept = layout.masked(targets.operator(problem), targets.allowed(problem)).columns
    matrix = attention(jnp.asarray(found.logits[first]), problem.attention, problem.length, kept)
    by_lag = []
    for lag in problem.lags or {}:
        place = targets.shift(problem.length, lag, problem.cyclic)
        by_lag.append(sign[first] * float(np.sum(place * np.asarray(matrix)) / np.sum(place)))
    return {
        **{name: np.asarray(value) for name, value in values.items()},
        "loss": np.asarray(found.loss),
        "rows": sign[first] * seen.rows[first][scored],
        "heads": (sign * seen.cG)[order],
        "heads_a": (sign * seen.aG)[order],
        "lags": np.array(by_lag),
    }
