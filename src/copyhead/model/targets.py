"""Target operators T (L x L), y = T x, which of their rows are scored, and which entries of the logits the mask leaves."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float

from copyhead.problem import Problem


def shift(length: int, lag: int = 1, cyclic: bool = True) -> Float[np.ndarray, "L L"]:
    """Copy the token that stands `lag` positions before: T_ab = delta(b, a - lag).

    lag = 1 is the copy task, T = G*. Not cyclic: the first `lag` rows are zero and not scored.
    """
    target = np.eye(length, k=-lag)
    return target + np.eye(length, k=length - lag) if cyclic and lag else target


def operator(problem: Problem) -> Float[np.ndarray, "L L"]:
    """T of a problem.

    Raises:
        ProblemError: for a target that does not fit the length or the mask.
    """
    lags = problem.lags
    if lags is None:
        return problem.target_matrix
    return sum(weight * shift(problem.length, lag, problem.cyclic) for lag, weight in lags.items())  # type: ignore[return-value]


def scored(target: Float[np.ndarray, "L L"]) -> Float[np.ndarray, "L"]:
    """One for each row that enters the loss: those in which the target is not zero."""
    return np.any(target != 0, axis=1).astype(float)


def allowed(problem: Problem) -> Bool[np.ndarray, "L L"]:
    """Which positions b a position a may attend to: all, or b <= a with a causal mask."""
    everything = np.ones((problem.length, problem.length), bool)
    return np.tril(everything) if problem.causal else everything
