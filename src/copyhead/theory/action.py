"""The action on the symmetric subspace: the full posterior, evaluated on lifted order parameters.

`copy_task` gives the compressed task in which L, V and P are numbers, so one compilation serves every size; with a full
layout the same functions work on empirical moments. Attention that reads the tokens has a task and an action of its own
(`content`); what is said of c1 and cG below then holds for c1, cG, cI and cS.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float

from copyhead.model import layout, moments, targets
from copyhead.model.prior import prior
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.content import ContentTask, content_action, content_task
from copyhead.theory.order_parameters import lift
from copyhead.theory.posterior import Task, action
from copyhead.theory.recipe import Recipe, RecipeTask, recipe_action
from copyhead.theory.symmetric import NoSubspace, SymmetricTask, at_sequences, dimension, symmetric_action, symmetric_task

CopyTask = Task | ContentTask | SymmetricTask
# What branches are followed of, and the static part that goes with it: the kind of attention, or a recipe.
AnyTask = CopyTask | RecipeTask
Kind = Attention | Recipe


def copy_task(problem: Problem) -> CopyTask:
    """The copy task in its commutant, with population moments of uniform tokens at P = 1.

    Raises:
        NoSubspace: for token_scale > 0 without cyclic symmetry, where the symmetric ansatz is not exact (the token part of the
            kernel couples the rows, and positions are no longer equivalent).
        ProblemError: for content = True see `content_task`.
    """
    if problem.content:
        problem.require_paper("content = True is known")
        return content_task(problem)
    if problem.beyond:
        return symmetric_task(problem)
    if problem.token_scale > 0 and not problem.cyclic:
        raise NoSubspace("token_scale > 0: the order-parameter theory needs cyclic = True")
    return Task(
        np.array([[1.0, 0.0]]),
        moments.uniform_population(problem.vocab),
        layout.copy(problem.length, problem.scored),
        prior(problem),
    )


def full_task(problem: Problem, data: moments.Moments) -> Task:
    """The copy task on all L^2 logits, for any moments.

    Raises:
        ProblemError: for content = True, where a sequence has logits of its own.
    """
    if problem.content:
        raise ProblemError("content = True: the L^2 logits depend on the sequence; only the order-parameter theory applies")
    return Task(
        targets.shift(problem.length, cyclic=problem.cyclic),
        data,
        layout.full(problem.length, problem.cyclic),
        prior(problem),
    )


def at(task: AnyTask, sequences: float | Float[Array, ""]) -> AnyTask:
    """The same task with P sequences."""
    if isinstance(task, ContentTask | RecipeTask):
        return task._replace(sequences=sequences)
    if isinstance(task, SymmetricTask):
        return at_sequences(task, sequences)
    return task._replace(moments=task.moments.scaled(sequences))


def row_entries(task: AnyTask, kind: Kind) -> Float[np.ndarray, "d"]:
    """Expected number of entries of a row of G that hold each order parameter: c1 and cG, with content also cI and cS.

    Beyond the paper's task only their sum has a meaning: coordinates of equal sign count alike.
    Of a recipe: its order parameter.
    """
    if isinstance(task, RecipeTask):
        assert not isinstance(kind, str)
        return np.asarray(kind.order(task.data))
    if isinstance(task, SymmetricTask):
        return np.ones(dimension(task, kind))
    length = float(task.prior.length)
    if isinstance(task, ContentTask):
        return np.array([length, 1.0, 1 + (length - 1) / float(task.vocab), 1.0])
    return np.array([length, 1.0])


def reduced_action(coordinates: Float[Array, "d"], task: AnyTask, kind: Kind) -> Float[Array, ""]:
    """S at the symmetric logits of the given order parameters (c1, cG)."""
    if isinstance(task, RecipeTask):
        return recipe_action(coordinates, task, kind)
    if isinstance(task, ContentTask):
        return content_action(coordinates, task, kind)
    if isinstance(task, SymmetricTask):
        return symmetric_action(coordinates, task, kind)
    return action(lift(coordinates, task.target), task, kind)
