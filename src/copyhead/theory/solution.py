"""The theory of any problem: branches followed in P, or a front of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable

from copyhead.problem import Problem
from copyhead.theory.front import Front, has_front
from copyhead.theory.transition import Phases, phases, search_range

Solution = Phases | Front


def solve(problem: Problem, reach: Iterable[float] = ()) -> Solution:
    """All minima against P and the transitions; see `transition.phases` and `front.Front`.

    Args:
        reach: values of P that the range must hold, beside that of the problem and those of all transitions.

    Raises:
        ProblemError: where the order-parameter theory does not apply.
    """
    if not has_front(problem):
        return phases(problem, reach=reach)
    own = [] if problem.sequences is None else [problem.sequences]
    wanted = [*search_range(problem), *reach, *own]
    return Front.of(problem, math.log(min(wanted)), math.log(max(wanted)))
