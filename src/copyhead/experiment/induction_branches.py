"""The branch on which a two-layer network ended, fractions of runs per branch, and the training threshold.

Branches are those of the theory (docs/induction.md), told apart by scores on fresh sequences:

    with a copy head (previous-token score above twice that of uniform attention): induction (beta > 0) or anti-induction,
    or by heart, if the loss on fresh sequences is above that of f = 0 all the same;
    without: pooling (w > 0), anti-pooling (w < 0);   diverged: weights that are not finite.

The empty state is the part of pooling and anti-pooling with |w| of the order of the scatter over data sets; a run on a finite
data set is never exactly there, and its loss on fresh sequences may be a little above that of f = 0.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import isotonic_regression

from copyhead.experiment.induction_scores import Scores
from copyhead.model.two_layer import Loss

Branch = Literal["pooling", "anti-pooling", "induction", "anti-induction", "by heart", "diverged"]
BRANCHES: tuple[Branch, ...] = ("pooling", "anti-pooling", "induction", "anti-induction", "by heart", "diverged")
# A copy head is there if the previous-token score is this many times that of uniform attention.
FORMED = 2.0
# 2% leave room for the scatter of the loss over fresh sequences.
SLACK = 1.02


class Fraction(NamedTuple):
    """hits of all runs; low, high: the Wilson interval of one standard error (z = 1)."""

    hits: int
    runs: int
    value: float
    low: float
    high: float


class Threshold(NamedTuple):
    """P at which half of the runs have formed a copy head; ln P has standard error `log_error`.

    nan if the fractions do not cross one half on the grid.
    """

    P: float
    log_error: float

    @property
    def error(self) -> float:
        """Standard error of P."""
        return self.P * self.log_error


def uniform_previous(length: int) -> float:
    """Previous-token score of uniform causal attention, the mean of 1 / n over rows of n = 2 .. L positions."""
    return float(np.mean(1 / np.arange(2, length + 1)))


def classify(scores: Scores, length: int, vocab: int, loss: Loss) -> list[Branch]:
    """The branch of every run, from its scores (leading axis: runs)."""
    blank = 1.0 if loss == "squared" else math.log(vocab)
    each = np.stack(np.broadcast_arrays(*scores), axis=-1).reshape(-1, len(Scores._fields))
    return [_one(Scores(*one), FORMED * uniform_previous(length), blank) for one in each]


def _one(seen: Scores, formed: float, blank: float) -> Branch:
    if not np.all(np.isfinite(seen)):
        return "diverged"
    if seen.previous <= formed:
        return "pooling" if seen.w > 0 else "anti-pooling"
    if seen.loss > SLACK * blank:
        return "by heart"
    return "induction" if seen.beta > 0 else "anti-induction"


def fraction(hits: int, runs: int) -> Fraction:
    """Binomial fraction with its interval (Wilson 1927), which is not empty at 0 and 1."""
    value = hits / runs
    middle = (value + 0.5 / runs) / (1 + 1 / runs)
    half = math.sqrt(value * (1 - value) / runs + 0.25 / runs**2) / (1 + 1 / runs)
    return Fraction(hits, runs, value, middle - half, middle + half)


def fractions(branches: list[Branch]) -> dict[Branch, Fraction]:
    """Of every branch."""
    return {name: fraction(branches.count(name), len(branches)) for name in BRANCHES}


def threshold(
    sequences: Float[np.ndarray, "P"], hits: Int[np.ndarray, "P"], runs: Int[np.ndarray, "P"], seed: int = 0, draws: int = 2000
) -> Threshold:
    """Where the fraction of runs with a copy head crosses one half, linear in ln P; a P without runs is left out.

    Fractions are made monotone (isotonic regression). The error is the scatter of the crossing over fractions drawn from their
    posterior (Beta(hits + 1/2, rest + 1/2)), and the uncertainty within a grid interval, its width / sqrt 12, in quadrature.
    """
    there = np.asarray(runs) > 0
    log_p, hits, runs = np.log(np.asarray(sequences, float)[there]), np.asarray(hits)[there], np.asarray(runs)[there]
    if not len(runs):
        return Threshold(float("nan"), float("nan"))
    place = _crossing(log_p, hits / runs)
    if not np.isfinite(place):
        return Threshold(float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).beta(hits + 0.5, runs - hits + 0.5, (draws, len(hits)))
    found = np.array([_crossing(log_p, one) for one in drawn])
    index = min(int(np.searchsorted(log_p, place, side="right")), len(log_p) - 1)
    grid = (log_p[index] - log_p[index - 1]) / math.sqrt(12)
    return Threshold(math.exp(place), math.hypot(float(np.nanstd(found)), grid))


def _crossing(log_p: Float[np.ndarray, "P"], values: Float[np.ndarray, "P"]) -> float:
    rising = isotonic_regression(values).x
    if rising[0] >= 0.5 or rising[-1] < 0.5:
        return float("nan")
    after = int(np.argmax(rising >= 0.5))
    part = (0.5 - rising[after - 1]) / (rising[after] - rising[after - 1])
    return float(log_p[after - 1] + part * (log_p[after] - log_p[after - 1]))


def emergence(step: Int[np.ndarray, "r"], score: Float[np.ndarray, "n r"], share: float = 0.5) -> Float[np.ndarray, "n"]:
    """The step at which a score of each run has gone `share` of the way from its start to its end, linear between records."""
    gone = (score - score[:, :1]) / (score[:, -1:] - score[:, :1])
    after = np.argmax(gone >= share, axis=1)
    row = np.arange(len(score))
    before = np.maximum(after - 1, 0)
    rise = gone[row, after] - gone[row, before]
    part = np.where(rise > 0, (share - gone[row, before]) / np.where(rise > 0, rise, 1), 0.0)
    return step[before] + part * (step[after] - step[before])
