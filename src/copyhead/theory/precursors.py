"""Precursors: how susceptibility and relaxation change along a branch on the way to the place where it gives way to another.

At P* of a first-order transition nothing happens to a branch. It ends at its fold, where chi Var cG grows like the distance to
the power -1/2 and relaxation slows down like its inverse; at a pitchfork the powers are -1 and 1.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.problem import Problem, ProblemError
from copyhead.theory.continuation import Segment
from copyhead.theory.effective_action import gaussian_task
from copyhead.theory.fluctuations import Status, branch
from copyhead.theory.transition import Phases, Transition, phases

Place = Literal["P*", "upper fold", "lower fold", "P_c"]
FARTHEST, NEAREST, POINTS = 0.3, 1e-3, 26


class Exponent(NamedTuple):
    """d ln y / d ln distance by least squares over the last decade. error: standard error from the scatter about the line.

    The theory has no noise: the error is that of the straight line, and the value tends to its limit with the distance.
    """

    value: float
    error: float


class Approach(NamedTuple):
    """One branch on the way to `place`, at the number of sequences P, from one side; arrays go towards it.

    order_parameter: the one whose fluctuations are meant. before: whether it comes from smaller P.
    sequences, distance: P of each point, |P - place| / place.
    susceptibility, relaxation: chi times the variance, and the slowest rate per unit of eps times steps, for chi -> infinity.
    mean, finite_susceptibility, finite_relaxation, status: at `chi`, see `Fluctuations`; nan with status "no minimum".
    """

    place: Place
    P: float
    order_parameter: Literal["c1", "cG"]
    before: bool
    sequences: Float[np.ndarray, "n"]
    distance: Float[np.ndarray, "n"]
    susceptibility: Float[np.ndarray, "n"]
    relaxation: Float[np.ndarray, "n"]
    susceptibility_exponent: Exponent
    relaxation_exponent: Exponent
    chi: float
    mean: Float[np.ndarray, "n"]
    finite_susceptibility: Float[np.ndarray, "n"]
    finite_relaxation: Float[np.ndarray, "n"]
    status: tuple[Status, ...]


def precursors(
    problem: Problem,
    farthest: float = FARTHEST,
    nearest: float = NEAREST,
    points: int = POINTS,
    found: Phases | None = None,
    mobility: tuple[float, float] = (1.0, 1.0),
) -> tuple[Approach, ...]:
    """The approach to every transition at which a branch ends, or gives way to another, in order of P of the transitions.

    First-order: the branch of small P to P* and to the upper fold, that of large P to the lower fold. Second-order: both
    sides of P_c. A crossover has none.

    Args:
        farthest, nearest: distances between which `points` are taken, in geometric progression; where the branch does not
            reach as far as that, fewer.
        found: what `phases` found for this problem, at any chi, if it is known already.
        mobility: of G and W, their step sizes in units of eps; for the rates only.

    Raises:
        ProblemError: for content = True or separate query and key matrices; unless 0 < nearest < farthest < 1.
    """
    if not 0 < nearest < farthest < 1:
        raise ProblemError(f"nearest = {nearest:g}, farthest = {farthest:g}: must be 0 < nearest < farthest < 1")
    gaussian_task(problem)  # refuses what the expansion does not cover before anything is followed
    found = phases(problem) if found is None else found
    distances = np.geomspace(farthest, nearest, points)
    return tuple(
        _approach(problem, found, way, distances, mobility)
        for transition in found.transitions
        for way in _ways(found, transition)
    )


class _Way(NamedTuple):
    """What an Approach begins with, after the branch that it goes along."""

    segment: Segment
    place: Place
    P: float
    order_parameter: Literal["c1", "cG"]
    before: bool


def _ways(found: Phases, transition: Transition) -> list[_Way]:
    quantity: Literal["c1", "cG"] = "c1" if transition.pools else "cG"
    log_p = math.log(transition.P)
    if transition.window is not None:
        lower, upper = transition.window
        first, second = sorted((segment for segment, _ in found.points(log_p)[:2]), key=lambda segment: segment.lower)
        return [
            _Way(first, "P*", transition.P, quantity, True),
            _Way(first, "upper fold", upper, quantity, True),
            _Way(second, "lower fold", lower, quantity, False),
        ]
    if transition.kind == "second-order":
        ending = [s for s in found.segments if s.end is not None and abs(s.upper - log_p) < 1e-9]
        grown = [s for s in found.segments if s.start is not None and s.start in [other.end for other in ending]]
        pairs = [*((segment, True) for segment in ending), *((segment, False) for segment in grown)]
        return [_Way(segment, "P_c", transition.P, quantity, before) for segment, before in pairs]
    return []


def _approach(
    problem: Problem, found: Phases, way: _Way, distances: Float[np.ndarray, "n"], mobility: tuple[float, float]
) -> Approach:
    task, index = gaussian_task(problem), ("c1", "cG").index(way.order_parameter)
    sequences = way.P * (1 - distances if way.before else 1 + distances)
    held = (np.log(sequences) >= way.segment.lower) & (np.log(sequences) <= way.segment.upper)
    sequences, distances = sequences[held], distances[held]
    along = [branch(found, way.segment, task, math.log(value), mobility) for value in sequences]
    susceptibility = np.array([one.susceptibility[index, index] for one in along])
    relaxation = np.array([one.saddle_relaxation for one in along])
    return Approach(
        *way[1:],
        sequences,
        distances,
        susceptibility,
        relaxation,
        _exponent(distances, susceptibility),
        _exponent(distances, relaxation),
        problem.chi,
        np.array([getattr(one, way.order_parameter) for one in along]),
        problem.chi * np.array([one.covariance[index, index] for one in along]),
        np.array([one.relaxation for one in along]),
        tuple(one.status for one in along),
    )


def _exponent(distances: Float[np.ndarray, "n"], values: Float[np.ndarray, "n"]) -> Exponent:
    """nan with fewer than four points in the last decade."""
    last = distances <= 10 * distances.min(initial=math.inf) * (1 + 1e-9)
    if np.count_nonzero(last) < 4:
        return Exponent(math.nan, math.nan)
    slopes, covariance = np.polyfit(np.log(distances[last]), np.log(values[last]), 1, cov=True)
    return Exponent(float(slopes[0]), math.sqrt(float(covariance[0, 0])))
