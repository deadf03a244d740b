"""Critical end point: where the coexistence window of a first-order transition closes and a crossover is left.

There S' = S'' = S''' = 0 along the soft direction (theory.md section 5). On the branch that starts at P = 0, parametrised
by arclength s, the window is where d ln P / ds is negative; so at the end point the least value of d ln P / ds is zero.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from copyhead.problem import Problem
from copyhead.theory import scalar
from copyhead.theory.action import copy_task
from copyhead.theory.continuation import follow, slowest
from copyhead.theory.saddle_point import Point, System
from copyhead.theory.transition import search_range

Parameter = Literal["length", "vocab", "logit_variance", "output_variance"]
# How far from the problem's own value the end point is sought: 2^10 either way, in steps of two.
LADDER = 10
LOWEST: dict[str, float] = {"length": 2.0, "vocab": 2.0, "logit_variance": 0.0, "output_variance": 0.0}


class EndPoint(NamedTuple):
    """The end point in (P, parameter).

    value: real also for the integer parameters. speed: the least d ln P / ds there, zero up to the tolerance.
    """

    parameter: str
    value: float
    P: float
    cG: float
    speed: float


def end_point(problem: Problem, parameter: Parameter = "length") -> EndPoint | None:
    """The value of `parameter` at which the window closes, all else as in `problem`.

    Returns:
        None if the window neither opens nor closes within a factor 2^10 of the problem's own value.

    Raises:
        ValueError: for a parameter on which the end point cannot depend: noise and chi only rescale P and the weights.
    """
    if parameter not in LOWEST:
        raise ValueError(f"parameter = {parameter!r}: must be one of {', '.join(LOWEST)}")

    def speed(log_value: float) -> float:
        return float(_slowest_point(problem, parameter, math.exp(log_value))[1].tangent[-1])

    center = math.log(getattr(problem, parameter))
    least = math.log(LOWEST[parameter]) if LOWEST[parameter] else -math.inf
    here = speed(center)
    for step in range(1, LADDER + 1):
        for sign in (-1, 1):
            inner, outer = (max(center + sign * k * math.log(2), least) for k in (step - 1, step))
            if inner != outer and speed(outer) * here < 0:
                log_value = scalar.root(speed, inner, outer)
                system, point = _slowest_point(problem, parameter, math.exp(log_value))
                cG = float(system.coordinates(point.z)[1])
                return EndPoint(parameter, math.exp(log_value), math.exp(point.log_p), cG, float(point.tangent[-1]))
    return None


def _slowest_point(problem: Problem, parameter: Parameter, value: float) -> tuple[System, Point]:
    """The point of least d ln P / ds on the branch from P = 0."""
    varied = problem.model_copy(update={parameter: value})
    system = System.of(copy_task(varied), problem.attention)
    lower, upper = (math.log(bound) for bound in search_range(varied))
    points = follow(system, system.at_fixed_p(np.zeros((1, system.dimension)), lower)[0], lower, upper).points
    index = int(np.clip(np.argmin([point.tangent[-1] for point in points]), 1, len(points) - 2))
    before, here, after = points[index - 1 : index + 2]
    span = float(np.linalg.norm(here.vector - before.vector) + np.linalg.norm(after.vector - here.vector))
    return system, slowest(system, before, span)
