"""Places of transitions, read off measured curves without any theory."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float


def onset(sequences: Float[np.ndarray, "P"], order_parameter: Float[np.ndarray, "P"], rising: float = 0.75) -> float:
    """Where an order parameter that grows like sqrt(P - P_c) starts: a quadratic in m^2, extrapolated to P(m = 0).

    Uses the points above a tenth and below `rising` of the largest value; P is fitted as a function of m^2.

    Returns:
        nan if fewer than three points lie in that range.
    """
    size = np.abs(order_parameter)
    use = (size > 0.1 * size.max()) & (size < rising * size.max()) & (np.arange(len(size)) <= np.argmax(size))
    if use.sum() < 3:
        return float("nan")
    return float(np.polyfit(size[use] ** 2, np.asarray(sequences, float)[use], min(2, use.sum() - 2))[-1])


def steepest(sequences: Float[np.ndarray, "P"], order_parameter: Float[np.ndarray, "P"]) -> float:
    """Where an order parameter grows fastest against ln P: a parabola through the largest slope and its neighbours.

    Its systematic error is that of the grid, see `resolution`.

    Returns:
        nan if there are fewer than four points, or the largest slope is at an end of the data.
    """
    if len(sequences) < 4:
        return float("nan")
    log_p = np.log(np.asarray(sequences, float))
    slopes = np.diff(order_parameter) / np.diff(log_p)
    middle = (log_p[1:] + log_p[:-1]) / 2
    top = int(np.argmax(slopes))
    if not 0 < top < len(slopes) - 1:
        return float("nan")
    a, b, _ = np.polyfit(middle[top - 1 : top + 2] - middle[top], slopes[top - 1 : top + 2], 2)
    return float(np.exp(middle[top] - b / (2 * a)))


def crossing(sequences: Float[np.ndarray, "P"], order_parameter: Float[np.ndarray, "P"], level: float) -> float:
    """Where an order parameter first rises to a level, linear in ln P between grid points.

    Returns:
        nan if it does not.
    """
    log_p = np.log(np.asarray(sequences, float))
    rises = np.flatnonzero((order_parameter[1:] >= level) & (order_parameter[:-1] < level))
    if not rises.size:
        return float("nan")
    first = int(rises[0])
    part = (level - order_parameter[first]) / (order_parameter[first + 1] - order_parameter[first])
    return float(np.exp(log_p[first] + part * (log_p[first + 1] - log_p[first])))


def resolution(sequences: Float[np.ndarray, "P"], place: float) -> float:
    """Half the distance between the two grid points around a place, as a standard deviation (uniform: / sqrt 3)."""
    grid = np.asarray(sequences, float)
    if not grid[0] < place < grid[-1]:
        return float("nan")
    index = int(np.searchsorted(grid, place))
    return float((grid[index] - grid[index - 1]) / 2 / np.sqrt(3))
