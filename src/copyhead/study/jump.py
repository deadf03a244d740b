"""The P at which training from one start changes branch, by repeated section on nested data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.experiment.adam import NEVER
from copyhead.problem import Problem, ProblemError
from copyhead.theory.transition import phases

# Runs as (place in the list of searches, P) -> their aG and the step by which each diverged.
Train = Callable[[list[tuple[int, int]]], tuple[Float[np.ndarray, "run"], Float[np.ndarray, "run"]]]


class Jumps(NamedTuple):
    """Of every search: the last P before the jump and the first after it, nan where it was not found; step of divergence."""

    low: Float[np.ndarray, "search"]
    high: Float[np.ndarray, "search"]
    diverged: Float[np.ndarray, "search"]


def bracket_around(problem: Problem) -> tuple[int, int]:
    """P from well below to well above the first coexistence window of the theory.

    Raises:
        ProblemError: if the theory has none.
    """
    window = next((t.window for t in phases(problem).transitions if t.window), None)
    if window is None:
        raise ProblemError("bracket: must be given, the theory has no coexistence window for this problem")
    return max(1, round(0.6 * window[0])), round(1.5 * window[1])


# Copy attention below this part of what the bracket's end has counts as this part: ratios of noise are no jumps.
FLOOR = 0.02


def jumps(bracket: tuple[int, int], searches: int, sections: int, train: Train) -> Jumps:
    """Searches that go on together: each round trains at `sections` values of P inside every bracket.

    Of the intervals between them the next round takes the one in which aG rises by the largest factor: a level of aG would not
    do, as one branch may reach at its end what the other has elsewhere. It is a jump if aG more than doubles between two
    neighbouring P; else the bracket holds none, or training was too short.
    """
    places = np.tile(bracket, (searches, 1))
    order, lost = (found.reshape(places.shape) for found in train([(k, p) for k in range(searches) for p in bracket]))
    diverged = lost.max(axis=1)
    least = FLOOR * np.abs(order).max(axis=1, keepdims=True)
    while np.any(places[:, 1] - places[:, 0] > 1):
        tried = np.round(np.linspace(places[:, 0], places[:, 1], sections + 2)[1:-1].T).astype(int)
        found, lost = (each.reshape(tried.shape) for each in train([(k, int(p)) for k, row in enumerate(tried) for p in row]))
        diverged = np.maximum(diverged, lost.max(axis=1))
        every = np.hstack([places[:, :1], tried, places[:, 1:]])
        values = np.hstack([order[:, :1], found, order[:, 1:]])
        rises = np.diff(np.log(np.maximum(values, least)), axis=1)
        rises[np.diff(every, axis=1) == 0] = -np.inf
        steepest = rises.argmax(axis=1)[:, None] + np.arange(2)
        places, order = (np.take_along_axis(each, steepest, axis=1) for each in (every, values))
    # a run that diverged counts neither as copying nor as not
    known = (np.maximum(order, least) @ [-2, 1] > 0) & (diverged == NEVER)
    low, high = np.where(known[:, None], places, np.nan).T
    return Jumps(low, high, diverged)
