"""Phase diagrams of the theory in any two parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.problem import Problem, ProblemError
from copyhead.record import plain
from copyhead.theory.action import copy_task
from copyhead.theory.leading_order import leading_order
from copyhead.theory.solution import Solution, solve

NUMBERS = {int, float, int | None, float | None}
NUMERIC = tuple(name for name, field in Problem.model_fields.items() if field.annotation in NUMBERS)
INTEGER = tuple(name for name in NUMERIC if Problem.model_fields[name].annotation in (int, int | None))


class Axis(NamedTuple):
    """One axis of a diagram: a field of Problem and its values."""

    name: str
    values: tuple[float, ...]


class Diagram(NamedTuple):
    """A diagram over x (columns) and y (rows).

    verdicts: for each point. places: P of the strongest transition, nan where there is none. loss, cG: of the global minimum
    at P where one axis is `sequences`, else just above the transition. lines: P of transitions, folds and leading order
    against the other axis, where one axis is `sequences`.
    """

    problem: Problem
    x: Axis
    y: Axis
    verdicts: np.ndarray
    places: Float[np.ndarray, "y x"]
    loss: Float[np.ndarray, "y x"]
    cG: Float[np.ndarray, "y x"]
    lines: dict[str, Float[np.ndarray, "other"]]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, nan as None."""
        return {
            "problem": self.problem.model_dump(),
            "x": {"field": self.x.name, "values": list(self.x.values)},
            "y": {"field": self.y.name, "values": list(self.y.values)},
            "verdict": self.verdicts.tolist(),
            "P": plain(self.places),
            "loss": plain(self.loss),
            "cG": plain(self.cG),
            "lines": plain(self.lines),
        }


def parse_axis(option: str, text: str) -> Axis:
    """Reads FIELD=LOW:HIGH:COUNT, spaced evenly in the logarithm, or FIELD=V1,V2,...

    Raises:
        ProblemError: naming the option, its value and what is allowed.
    """
    usage = f"{option} = {text!r}: must be FIELD=LOW:HIGH:COUNT (log-spaced, COUNT >= 2) or FIELD=V1,V2,... ascending"
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in NUMERIC:
        raise ProblemError(f"{option} = {text!r}: FIELD must be one of {', '.join(NUMERIC)}")
    try:
        if ":" in values:
            low, high, count = values.split(":")
            points = np.geomspace(float(low), float(high), int(count))
        else:
            points = np.array([float(value) for value in values.split(",")])
    except ValueError:
        raise ProblemError(usage) from None
    if not np.all(np.isfinite(points)) or np.any(np.diff(points) <= 0):
        raise ProblemError(usage)
    if name in INTEGER:
        points = np.unique(np.round(points))
    if len(points) < 2:
        raise ProblemError(usage)
    return Axis(name, tuple(int(p) if name in INTEGER else float(p) for p in points))


def check(problem: Problem, x: Axis, y: Axis) -> None:
    """Refuses axes that cannot be evaluated.

    Raises:
        ProblemError: if both axes are the same field, or a value is outside its range.
    """
    if x.name == y.name:
        raise ProblemError(f"y = {y.name!r}: must be another field than x")
    for axis in (x, y):
        for value in (axis.values[0], axis.values[-1]):
            copy_task(problem.replace(**{axis.name: value}))


def diagram(problem: Problem, x: Axis, y: Axis, step: Callable[[], None] = lambda: None) -> Diagram:
    """Evaluates the theory over two axes; `step` is called after each solved problem (see `cost`).

    Raises:
        ProblemError: see `check`.
    """
    check(problem, x, y)
    shape = len(y.values), len(x.values)
    verdicts = np.full(shape, "", dtype=object)
    places, loss, cG = (np.full(shape, np.nan) for _ in range(3))
    lines: dict[str, np.ndarray] = {}
    if "sequences" in (x.name, y.name):
        p_axis, other = (x, y) if x.name == "sequences" else (y, x)
        for index, value in enumerate(other.values):
            varied = problem.replace(**{other.name: value})
            found = solve(varied, reach=p_axis.values)
            _add_lines(lines, found, varied, index, len(other.values))
            for place, sequences in enumerate(p_axis.values):
                state = found.minima(sequences)[0].order_parameters
                at = (index, place) if x.name == "sequences" else (place, index)
                verdicts[at], loss[at], cG[at] = found.verdict, state.loss, state.cG
                places[at] = found.transitions[0].P if found.transitions else np.nan
            step()
    else:
        for row, column in np.ndindex(shape):
            found = solve(problem.replace(**{x.name: x.values[column], y.name: y.values[row]}))
            verdicts[row, column] = found.verdict
            if found.transitions:
                strongest = (
                    next(t for t in found.transitions if t.kind == found.verdict) if found.complete else found.transitions[0]
                )
                places[row, column] = strongest.P
                loss[row, column], cG[row, column] = strongest.after.loss, strongest.after.cG
            step()
    return Diagram(problem, x, y, verdicts, places, loss, cG, lines)


def cost(x: Axis, y: Axis) -> int:
    """How many problems `diagram` solves."""
    others = [axis for axis in (x, y) if axis.name != "sequences"]
    return int(np.prod([len(axis.values) for axis in others]))


def _add_lines(lines: dict[str, np.ndarray], found: Solution, problem: Problem, index: int, count: int) -> None:
    scales = leading_order(problem)
    softmax = problem.attention == "softmax"
    values = {} if problem.beyond else {"leading order": scales.copying_softmax if softmax else scales.copying_linear}
    if not softmax and not problem.beyond:
        values["leading order (pooling)"] = scales.pooling
    for transition in found.transitions:
        values[transition.kind] = transition.P
        if transition.window:
            values["lower fold"], values["upper fold"] = transition.window
    for name, value in values.items():
        lines.setdefault(name, np.full(count, np.nan))[index] = value
