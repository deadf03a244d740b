"""From draws of biased chains to the unbiased posterior: the multistate Bennett acceptance ratio (Shirts and Chodera 2008)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import minimize
from scipy.special import logsumexp

# The equations of the free energies count as solved when no window misses more than this part of its draws.
RESIDUAL = 1e-6


def log_weights(bias: Float[np.ndarray, "window window draw"]) -> Float[np.ndarray, "window draw"]:
    """Log of the weight of each draw in the posterior without bias; the weights add up to one.

    The free energies f of the windows minimise a convex function. A draw n has weight 1 / sum_j exp(f_j - bias_j(n)).

    Args:
        bias: bias[j, k, n], that of window j at draw n of window k, in -log p.

    Raises:
        ArithmeticError: if the equations of the free energies are not solved to RESIDUAL.
    """
    windows, _, draws = bias.shape
    flat = bias.reshape(windows, -1)

    def shares(rest: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """log sum_j exp(f_j - bias_j) by draw, and the share of each window in it; one free energy is arbitrary."""
        exponent = np.concatenate([[0.0], rest])[:, None] - flat
        total = np.asarray(logsumexp(exponent, axis=0))
        return total, np.exp(exponent - total)

    def value(rest: np.ndarray) -> tuple[float, np.ndarray]:
        total, share = shares(rest)
        return total.mean() - rest.sum() / windows, share[1:].mean(axis=1) - 1 / windows

    def curvature(rest: np.ndarray) -> np.ndarray:
        share = shares(rest)[1][1:]
        return np.diag(share.mean(axis=1)) - share @ share.T / flat.shape[1]

    # exponential averages from each window to the next
    steps = [float(np.log(draws) - np.asarray(logsumexp(bias[k, k] - bias[k + 1, k]))) for k in range(windows - 1)]
    options = {"gtol": RESIDUAL / windows}
    found = minimize(value, np.cumsum(steps), jac=True, hess=curvature, method="trust-exact", options=options)
    residual = windows * float(np.max(np.abs(found.jac), initial=0.0))
    if residual > RESIDUAL:
        raise ArithmeticError(f"free energies of {windows} windows not found: residual {residual:.1e} of the draws of one")
    total, _ = shares(found.x)
    return (-total - np.asarray(logsumexp(-total))).reshape(windows, draws)


def profile(
    value: Float[np.ndarray, "draw"], log_weight: Float[np.ndarray, "draw"], edges: Float[np.ndarray, "b+1"]
) -> Float[np.ndarray, "b"]:
    """-log of the density in each bin, infinite where there is no draw.

    Bin by bin: numpy.histogram takes differences of cumulative sums, in which the weights of a barrier, e^-80, are lost.
    """
    bins, inside = np.searchsorted(edges, value) - 1, (value > edges[0]) & (value < edges[-1])
    mass = np.bincount(bins[inside], np.exp(log_weight[inside] - log_weight.max()), len(edges) - 1)
    with np.errstate(divide="ignore"):
        return -np.log(mass / np.diff(edges))


class Profile(NamedTuple):
    """F = -log p in nats over bins, least value zero, nan where a repeat has no draw. error: standard error over repeats."""

    center: Float[np.ndarray, "b"]
    mean: Float[np.ndarray, "b"]
    error: Float[np.ndarray, "b"]


def averaged(edges: Float[np.ndarray, "b+1"], profiles: Float[np.ndarray, "repeat b"]) -> Profile:
    """Mean over repeats, each known up to a constant: they are aligned by their means over the bins that all have visited."""
    seen = np.isfinite(profiles).all(axis=0)
    aligned = np.where(seen, profiles, np.nan) - profiles[:, seen].mean(axis=1, keepdims=True)
    mean = aligned.mean(axis=0)
    error = aligned.std(axis=0, ddof=1) / np.sqrt(len(profiles))
    return Profile((edges[1:] + edges[:-1]) / 2, mean - np.nanmin(mean), error)


def barrier(found: Profile, least: float) -> tuple[int, int, int] | None:
    """Bins of the lower well, the top, and the upper well; None if no top is `least` nats above both wells."""
    height = np.where(np.isnan(found.mean), np.inf, found.mean)
    best, places = least, None
    for top in range(1, len(height) - 1):
        below, above = int(np.argmin(height[:top])), top + 1 + int(np.argmin(height[top + 1 :]))
        if not np.isfinite([height[below], height[top], height[above]]).all():
            continue
        rise = height[top] - max(height[below], height[above])
        if rise > best:
            best, places = rise, (below, top, above)
    return places
