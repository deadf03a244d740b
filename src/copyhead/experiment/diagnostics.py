"""Estimates with errors: ESS and R-hat within and between chains, scatter over data sets, and gates that must be passed."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from arviz_stats.base.array import array_stats
from jaxtyping import Float

# Gates for a sampled mean: below this ESS, or above this R-hat, the error is not to be believed.
ESS_GATE = 100.0
RHAT_GATE = 1.1


class Estimate(NamedTuple):
    """mean: over data sets (and draws). scatter: standard deviation from data set to data set.

    error: standard error of the mean, from the scatter and, for chains, from the effective sample size.
    ess: effective sample size of all chains together. rhat: median over chains of the rank-normalised split R-hat of one; both
    nan if not sampled. Chains that run on different data sets have different targets, so there is no R-hat between them.
    n: number of data sets. sampling: the part of the error that is Monte Carlo error, zero if not sampled.
    """

    mean: float
    scatter: float
    error: float
    ess: float
    rhat: float
    n: int
    sampling: float = 0.0

    @property
    def mixed(self) -> bool:
        """Whether the gates are passed; training runs have none to pass."""
        return bool(np.isnan(self.ess) or (self.ess >= ESS_GATE and self.rhat <= RHAT_GATE))


# The estimate where there is nothing to estimate from.
NOTHING = Estimate(np.nan, np.nan, np.nan, np.nan, np.nan, 0)


def over_seeds(values: Float[np.ndarray, "seed"]) -> Estimate:
    """The estimate of a quantity with one exact value for each data set. Not finite values propagate."""
    n = len(values)
    scatter = float(np.std(values, ddof=1)) if n > 1 else float("nan")
    return Estimate(float(np.mean(values)), scatter, scatter / np.sqrt(n), float("nan"), float("nan"), n)


def over_chains(draws: Float[np.ndarray, "seed draw"]) -> Estimate:
    """The estimate from one chain for each data set.

    The error is the larger of two: scatter of the chain means over sqrt(n), which holds both data and sampling scatter, and
    the Monte Carlo error alone, which the scatter of few chains can miss by chance.
    """
    n = len(draws)
    if not np.all(np.isfinite(draws)):
        return Estimate(float("nan"), float("nan"), float("nan"), 0.0, float("inf"), n)
    between = over_seeds(draws.mean(axis=1))
    if np.ptp(draws) == 0:
        return between._replace(ess=float(draws.size), rhat=1.0)
    ess = np.array([float(array_stats.ess(chain[None], chain_axis=0, draw_axis=1, method="mean")) for chain in draws])
    rhat = float(np.median([between_starts(*np.array_split(chain[: len(chain) // 2 * 2], 2)) for chain in draws]))
    monte_carlo = float(np.sqrt(np.sum(draws.var(axis=1, ddof=1) / ess))) / n
    return between._replace(error=max(between.error, monte_carlo), ess=float(ess.sum()), rhat=rhat, sampling=monte_carlo)


def between_starts(first: Float[np.ndarray, "draw"], second: Float[np.ndarray, "draw"]) -> float:
    """R-hat of two chains on one data set from different starts: far above one where the starts end in two phases."""
    return float(array_stats.rhat(np.stack([first, second]), chain_axis=0, draw_axis=1))
