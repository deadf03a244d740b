"""The minimum of a smooth function of many variables in the basin of a start, and how well it is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize

# A gradient entry below this, with curvature of order one, leaves the place right to four digits.
ACCEPTED = 1e-4


class Descent(NamedTuple):
    """place, value: of the minimum. gradient: its largest entry there."""

    place: Float[np.ndarray, "n"]
    value: float
    gradient: float

    @property
    def converged(self) -> bool:
        return bool(self.gradient < ACCEPTED)


def descend(
    function: Callable[[Float[np.ndarray, "n"]], tuple[float, Float[np.ndarray, "n"]]],
    start: Float[np.ndarray, "n"],
    tolerance: float,
) -> Descent:
    """Minimises by L-BFGS in float64, until the gradient is below the tolerance or the value no longer falls.

    Args:
        function: value and gradient.
        tolerance: on the largest entry of the gradient.
    """

    def in_numpy(place: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = function(place)
        return float(value), np.asarray(gradient, np.float64)

    options = {"maxiter": 5000, "maxfun": 10000, "maxcor": 30, "gtol": tolerance, "ftol": 1e-15}
    found = minimize(in_numpy, np.asarray(start, np.float64), jac=True, method="L-BFGS-B", options=options)
    return Descent(found.x, float(found.fun), float(np.max(np.abs(in_numpy(found.x)[1]))))
