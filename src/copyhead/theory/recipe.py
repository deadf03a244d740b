"""The general recipe: action = P x population loss / (2 kappa) + prior, for any network, task and symmetry (docs/induction.md).

A recipe says what coordinates of the weights a symmetry leaves, the population loss and the prior energy as functions of them.
All that is said of branches, folds and equal action (`saddle_point`, `continuation`) then holds. The action of the copy task is
what is left of it when W is eliminated (a test derives it so).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Float


class Recipe(Protocol):
    """Static part of a task: hashable, so that one compilation serves all numbers in `RecipeTask.data`."""

    def loss(self, coordinates: Float[Array, "d"], data: Any) -> Float[Array, ""]:
        """Population loss: squared error summed over the outputs and over the scored positions of a sequence, expected."""
        ...

    def cost(self, coordinates: Float[Array, "d"], data: Any) -> Float[Array, ""]:
        """Prior energy, a quadratic form."""
        ...

    def order(self, data: Any) -> Float[Array, "d"]:
        """The order parameter as a linear function of the coordinates."""
        ...


class RecipeTask(NamedTuple):
    """The numbers of a task: whatever the recipe needs, kappa, and P."""

    data: Any
    kappa: float | Float[Array, ""]
    sequences: float | Float[Array, ""]


def recipe_action(coordinates: Float[Array, "d"], task: RecipeTask, recipe: Recipe) -> Float[Array, ""]:
    """S = P loss / (2 kappa) + prior."""
    return task.sequences * recipe.loss(coordinates, task.data) / (2 * task.kappa) + recipe.cost(coordinates, task.data)
