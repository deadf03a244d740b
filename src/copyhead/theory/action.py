"""The action on the symmetric subspace: the full posterior, evaluated on lifted order parameters.

`copy_task` gives the compressed task in which L, V and P are numbers, so one compilation serves every size; with a full
layout the same functions work on empirical moments.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from copyhead.model import layout, moments, targets
from copyhead.model.prior import prior
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.order_parameters import lift
from copyhead.theory.posterior import Task, action


def copy_task(problem: Problem) -> Task:
    """The copy task in its commutant, with population moments of uniform tokens at P = 1.

    Raises:
        ProblemError: for token_scale > 0 without cyclic symmetry, where the symmetric ansatz is not exact (the token part
            of the kernel couples the rows, and positions are no longer equivalent).
    """
    if problem.token_scale > 0 and not problem.cyclic:
        raise ProblemError("token_scale > 0: the order-parameter theory needs cyclic = True; use the full matrix instead")
    return Task(
        np.array([[1.0, 0.0]]),
        moments.uniform_population(problem.vocab),
        layout.copy(problem.length, problem.scored),
        prior(problem),
    )


def full_task(problem: Problem, data: moments.Moments) -> Task:
    """The copy task on all L^2 logits, for any moments."""
    return Task(
        targets.shift(problem.length, cyclic=problem.cyclic),
        data,
        layout.full(problem.length, problem.cyclic),
        prior(problem),
    )


def at(task: Task, sequences: float | Float[Array, ""]) -> Task:
    """The same task with P sequences."""
    return task._replace(moments=task.moments.scaled(sequences))


def reduced_action(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Float[Array, ""]:
    """S at the symmetric logits of the given order parameters (c1, cG)."""
    return action(lift(coordinates, task.target), task, kind)
