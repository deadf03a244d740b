"""From draws of biased chains to the unbiased posterior: free energy along an order parameter, branch weights, P*.

The multistate Bennett acceptance ratio (Shirts and Chodera 2008) gives every draw of every window a weight in the posterior
without bias. All energies are -log p, in units of one (not divided by chi).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp

# Newton's iterations on the equations of the free energies, and the largest residual, in draws per window, that ends them.
ITERATIONS, RESIDUAL = 60, 1e-6


def log_weights(bias: Float[np.ndarray, "window window draw"]) -> Float[np.ndarray, "window draw"]:
    """Log of the weight of each draw in the posterior without bias; they add up to one.

    The free energies f of the windows maximise a concave function; Newton's steps, halved until it rises, start from the
    exponential averages between neighbours.

    Args:
        bias: bias[j, k, n], that of window j at draw n of window k.

    Raises:
        ArithmeticError: if Newton's iterations do not converge.
    """
    windows, _, draws = bias.shape
    flat = bias.reshape(windows, -1)
    steps = [-logsumexp(bias[k, k] - bias[k + 1, k]) + np.log(draws) for k in range(windows - 1)]
    free = np.concatenate([[0.0], np.cumsum(steps)])

    def value(free: np.ndarray) -> tuple[float, np.ndarray]:
        exponent = free[:, None] - flat
        total = logsumexp(exponent, axis=0)
        return float(draws * free.sum() - total.sum()), np.exp(exponent - total)

    height, part = value(free)
    for _ in range(ITERATIONS):
        slope = draws - part.sum(axis=1)
        if np.max(np.abs(slope)) < RESIDUAL * draws:
            total = logsumexp(free[:, None] - flat, axis=0)
            return (-total - logsumexp(-total)).reshape(windows, draws)
        curvature = np.diag(part.sum(axis=1)) - part @ part.T
        # one free energy is arbitrary
        change = np.concatenate([[0.0], np.linalg.solve(curvature[1:, 1:], slope[1:])])
        step = 1.0
        while step > 1e-6:
            tried, there = value(free + step * change)
            if tried >= height - 1e-9 * abs(height):
                break
            step /= 2
        free, height, part = free + step * change, tried, there
    raise ArithmeticError(f"free energies of {windows} windows not found: largest residual {np.max(np.abs(slope)) / draws:.1e}")
