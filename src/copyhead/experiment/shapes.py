"""Shapes of a measured curve against x = ln P: no feature, a smooth step, a kink, a jump; least squares and AICc.

Every shape is linear in some coefficients, which least squares gives at once. The others are searched on a grid, many at a
time, and on finer and finer grids around the best: the squares are not smooth where a kink or a break crosses a point.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

# nonlinear parameters (..., q) to basis functions (..., x, k)
Basis = Callable[[np.ndarray], np.ndarray]
# those and coefficients (..., k) to whether the shape is admitted
Admitted = Callable[[np.ndarray, np.ndarray], np.ndarray]

# Relative size of a ridge that keeps the normal equations of the search solvable.
RIDGE = 1e-10
# Places tried for a step, and a third of those for a kink or a jump.
MOST = 100
# How many of the best grid points are refined, and by how many moves on a mesh that is halved where no move helps.
REFINED, MOVES = 2, 14
# Exponents of a kink.
EXPONENT = 0.1, 0.65
# A kink may be rounded by fluctuations over these parts of the grid spacing, by u -> r ln(1 + exp(u / r)).
ROUNDED = 0.0, 0.12
# On its disordered side the curve is flat up to this part of its height: else the exponential foot of a step could pass for a
# line that ends in a kink. A drift up to the second part is admitted where a kink is to be excluded.
FLAT, DRIFT = 0.06, 0.25
# Step of the numerical derivative for the errors, in meshes of the grid.
DERIVATIVE = 0.02


class Fit(NamedTuple):
    """A fitted shape. parameters, errors: the nonlinear ones, named by its function. values: the fitted curve at the given x.

    aicc: n ln(RSS/n) + 2k + 2k(k+1)/(n-k-1) with k parameters, the variance among them; inf if n <= k + 1,
    or if no such shape is admitted.
    """

    parameters: Float[np.ndarray, "q"]
    errors: Float[np.ndarray, "q"]
    coefficients: Float[np.ndarray, "k"]
    values: Float[np.ndarray, "x"]
    aicc: float


class Curve(NamedTuple):
    """Means y at places x = ln P in ascending order, with weights (inverse variances up to a factor)."""

    x: Float[np.ndarray, "x"]
    y: Float[np.ndarray, "x"]
    weights: Float[np.ndarray, "x"]


def smooth(curve: Curve, degree: int = 2) -> Fit:
    """A polynomial: a curve without any feature."""
    x = (curve.x - curve.x.mean()) / np.ptp(curve.x)
    return _fit(curve, lambda _: np.stack([x**power for power in range(degree + 1)], -1)[None], [])


def step(curve: Curve) -> Fit:
    """A smooth step on a sloping line: the best in AICc of a + b x + h S and, where the slope changes too, + c (x - x0) S.

    S is a `step_function` of (x0, ln w), with heavy tails, or of (x0, ln w, ln nu).
    """
    x = curve.x
    places = np.linspace(x[0], x[-1], min(2 * len(x), MOST))
    widths = np.linspace(np.log(np.diff(x).min() / 8), np.log(np.ptp(x) / 2), 9)
    skews = np.log([0.3, 1.1, 4.0])

    def on_one_line(theta: np.ndarray) -> np.ndarray:
        return _on_a_line(x, step_function(x, theta))

    def between_two(theta: np.ndarray) -> np.ndarray:
        s = step_function(x, theta)
        return _on_a_line(x, s, s * (x - theta[..., :1]))

    tried = [_fit(curve, on_one_line, [places, widths])]
    tried += [_fit(curve, basis, [places, widths, skews]) for basis in (on_one_line, between_two)]
    return min(tried, key=lambda fit: fit.aicc)


def step_function(x: Float[np.ndarray, "x"], theta: Float[np.ndarray, "... q"]) -> Float[np.ndarray, "... x"]:
    """A step of height one that is steepest at x0: s((x - x0) / w + ln nu)^nu with s the logistic function.

    nu = 1 is tanh; above, the foot is sharper than the shoulder, and below it is the other way round. Without nu it is the step
    1/2 + atan((x - x0) / w) / pi with heavy tails.
    """
    z = (x - theta[..., :1]) / np.exp(theta[..., 1:2])
    if theta.shape[-1] == 2:
        return 0.5 + np.arctan(z) / np.pi
    return (0.5 * (1 + np.tanh((z + theta[..., 2:]) / 2))) ** np.exp(theta[..., 2:])


def step_width(theta: Float[np.ndarray, "q"]) -> float:
    """Distance in x between a quarter and three quarters of a `step_function`."""
    if len(theta) == 2:
        return 2 * float(np.exp(theta[1]))
    lower, upper = np.array([0.25, 0.75]) ** np.exp(-theta[2])
    return float(np.exp(theta[1]) * (np.log(upper / (1 - upper)) - np.log(lower / (1 - lower))))


def kink(curve: Curve, side: int, exponent: float | None = None, flat: float = FLAT) -> Fit:
    """A power law that starts at x_c on a line: a + b x + u^beta (A + B u), u = max(side (x - x_c), 0); (x_c, beta) or (x_c,).

    Sharp, or rounded over a part of the grid spacing, whichever is better.

    Args:
        side: 1 if it grows towards larger x, else -1.
        exponent: a fixed beta.
        flat: largest change of the line where u = 0, in heights of the curve.
    """
    x, height = curve.x, np.ptp(curve.y)
    places = np.linspace(x[1], x[-2], min(6 * len(x), 3 * MOST))

    def nearly_flat(theta: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
        length = side * (theta[..., 0] - (x[0] if side > 0 else x[-1]))
        return np.abs(coefficients[..., 1]) * length <= flat * height

    def fit(rounding: float) -> Fit:
        def basis(theta: np.ndarray) -> np.ndarray:
            u = side * (x - theta[..., :1])
            u = rounding * np.logaddexp(0, u / rounding) if rounding else np.maximum(u, 0)
            power = u ** (theta[..., 1:] if exponent is None else exponent)
            return _on_a_line(x, power, power * u)

        return _fit(
            curve,
            basis,
            [places] if exponent else [places, np.linspace(*EXPONENT, 6)],
            admitted=nearly_flat,
            extra=int(rounding > 0),
        )

    spacing = float(np.median(np.diff(x)))
    return min((fit(part * spacing) for part in ROUNDED), key=lambda one: one.aicc)


def jump(curve: Curve) -> Fit:
    """A break in the middle of one interval between two lines or parabolas, the better in AICc; (place of the break,)."""
    x = curve.x
    centred = (x - x.mean()) / np.ptp(x)

    def lines(theta: np.ndarray) -> np.ndarray:
        above = (x > theta).astype(float)
        return _on_a_line(x, above, above * centred)

    def parabolas(theta: np.ndarray) -> np.ndarray:
        above = (x > theta).astype(float)
        u = x - theta  # fewest terms that bend on both sides of the break
        return _on_a_line(x, above, above * centred, above * u**2, (1 - above) * u**2)

    breaks = (x[1:-2] + x[2:-1]) / 2
    axes = [breaks[:: 1 + len(breaks) // (3 * MOST)]]
    return min((_fit(curve, basis, axes, refine=False) for basis in (lines, parabolas)), key=lambda fit: fit.aicc)


def _on_a_line(x: np.ndarray, *functions: np.ndarray) -> np.ndarray:
    centred = np.broadcast_to(x - x.mean(), functions[0].shape)
    return np.stack([np.ones_like(centred), centred, *functions], -1)


def _fit(
    curve: Curve, basis: Basis, axes: list[np.ndarray], refine: bool = True, admitted: Admitted | None = None, extra: int = 0
) -> Fit:
    """The least squares over all nonlinear parameters between the ends of the axes."""
    root = np.sqrt(curve.weights / curve.weights.mean())[:, None]
    target = curve.y * root[:, 0]

    def squares(theta: np.ndarray) -> np.ndarray:
        matrix = basis(theta) * root
        turned = matrix.swapaxes(-1, -2)
        normal, right = turned @ matrix, turned @ target
        ridge = RIDGE * np.einsum("...kk->...", normal)[..., None, None] * np.eye(normal.shape[-1])
        solved = np.linalg.solve(normal + ridge, right[..., None])
        total = np.sum((target - (matrix @ solved)[..., 0]) ** 2, axis=-1)
        return total if admitted is None else np.where(admitted(theta, solved[..., 0]), total, np.inf)

    def residual(theta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        matrix = basis(theta[None])[0]
        solved = np.linalg.lstsq(matrix * root, target, rcond=1e-12)[0]
        return target - (matrix * root) @ solved, solved

    best = np.array(list(product(*axes)))
    errors = np.full(len(axes), np.nan)
    mesh = np.array([np.ptp(axis) / (len(axis) - 1) for axis in axes])
    low, high = np.array([axis[0] for axis in axes]), np.array([axis[-1] for axis in axes])
    if axes:
        best = best[np.argsort(squares(best))[: REFINED if refine else 1]]
        around = np.array(sorted(product((-1, 0, 1), repeat=len(axes)), key=any))  # first: no move
        moves = np.tile(mesh / 2, (len(best), 1))
        for _ in range(MOVES if refine else 0):
            tried = np.clip(best[:, None] + around * moves[:, None], low, high)
            chosen = np.argmin(squares(tried), axis=1)
            best = tried[np.arange(len(best)), chosen]
            moves[chosen == 0] /= 2
        best = best[[np.argmin(squares(best))]]
    left, solved = residual(best[0])
    total, size, linear = float(left @ left), len(curve.x), len(solved)
    if axes and refine:
        shifts = DERIVATIVE * mesh * np.where(best[0] + mesh > high, -1, 1)
        jacobian = np.stack([(residual(best[0] + move)[0] - left) for move in np.diag(shifts)], -1) / shifts
        variance = np.diag(np.linalg.pinv(jacobian.T @ jacobian)) * total / max(size - linear - len(axes), 1)
        errors = np.sqrt(np.maximum(variance, 0))
    k = linear + len(axes) + 1 + extra
    # exact values would have a logarithm without end
    total = max(total, size * (1e-9 * np.ptp(curve.y)) ** 2)
    aicc = size * np.log(total / size) + 2 * k + 2 * k * (k + 1) / (size - k - 1) if size > k + 1 else np.inf
    if admitted is not None and not admitted(best[0], solved):
        aicc = np.inf
    return Fit(best[0], errors, solved, basis(best)[0] @ solved, float(aicc))
