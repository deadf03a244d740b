"""Root and minimum of a function of one number: SciPy's bracketing methods, at the tolerances of this staircase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scipy.optimize import brentq, minimize_scalar


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root in [low, high], to rounding; where rounding has taken the change of sign away, the end closer to zero."""
    ends = function(low), function(high)
    if ends[0] * ends[1] >= 0:
        return low if abs(ends[0]) < abs(ends[1]) else high
    found: Any = brentq(function, low, high, xtol=1e-15, rtol=1e-14)  # type: ignore[arg-type]
    return float(found)


def minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one minimum in [low, high] has it; to the square root of rounding, as for any minimum."""
    found: Any = minimize_scalar(function, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return float(found.x)
