"""Two phases at the same P: runs sorted into two branches, and whether nothing lies between them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from copyhead.experiment.classification import Quantity
from copyhead.experiment.shapes import Fit
from copyhead.experiment.table import Runs

# Between two branches is this part of their gap.
MIDDLE = 0.25, 0.75
# A run is on one branch and not on the other where they are this many scatters apart.
APART = 4.0
# Share of the grid at either end from which the two branches start.
ENDS = 5
ROUNDS = 20
# Parameters of two lines and the place where they change.
LINES = 5
# Starts disagree at one P if their means do by this many standard errors and by this part of the height.
DISAGREE, PART = 5.0, 0.2
# Latent heat below this part of the range of the loss contradicts coexistence.
NO_HEAT = 0.05


class Branches(NamedTuple):
    """Runs on two lines in x = ln P, the upper one being that of large P.

    upper: which runs are on it. gap: between the lines, by run. scatter: standard deviation around the lines.
    between: which runs lie in the middle half of the gap. window: first grid point with a run on the upper branch and last one
    with a run on the lower; the branches coexist from the first to the last if they are in this order.
    """

    upper: Bool[np.ndarray, "run"]
    gap: Float[np.ndarray, "run"]
    scatter: float
    between: Bool[np.ndarray, "run"]
    window: tuple[int, int]

    @property
    def coexisting(self) -> int:
        """Number of grid points in the window, 0 if no lower run is at a larger P than an upper one."""
        return max(self.window[1] - self.window[0] + 1, 0)


def branches(x: Float[np.ndarray, "run"], y: Float[np.ndarray, "run"], index: Int[np.ndarray, "run"]) -> Branches | None:
    """Sorts runs into two branches: lines fitted in turn to the runs that are nearest to each. y grows with P on the whole.

    Returns:
        None if a branch is left with fewer than three runs.
    """
    points = index.max() + 1
    count = max(2, points // ENDS)
    line = np.stack([np.ones_like(x), (x - x.mean()) / np.ptp(x)], -1)
    middle = (y[index < count].mean() + y[index >= points - count].mean()) / 2
    lower, upper, above = y, y, y > middle
    for _ in range(ROUNDS):
        if min(above.sum(), (~above).sum()) < 3:
            return None
        lower, upper = (line @ np.linalg.lstsq(line[side], y[side], rcond=1e-10)[0] for side in (~above, above))
        before, above = above, y > (lower + upper) / 2
        if np.array_equal(before, above):
            break
    if not 0 < above.sum() < len(above):
        return None
    gap = upper - lower
    left = y - np.where(above, upper, lower)
    # exact values have no scatter; their ratios are to stay finite
    scatter = max(float(np.sqrt(np.sum(left**2) / max(len(y) - LINES, 1))), 1e-9 * float(np.ptp(y)))
    height = (y - lower) / np.where(gap > 0, gap, np.nan)
    between = (height > MIDDLE[0]) & (height < MIDDLE[1])
    # where the lines meet a run is on either
    apart = gap > APART * scatter
    if not ((above & apart).any() and (~above & apart).any()):
        return None
    return Branches(above, gap, scatter, between, (int(index[above & apart].min()), int(index[~above & apart].max())))


def two_branches(runs: Runs, found: Branches, curves: tuple[Fit, ...]) -> tuple[Quantity, ...]:
    """How well two branches describe the runs: separation, points with both, share between, ln likelihood, gap.

    The likelihood is that of normal scatter, against the best of the single curves.
    """
    first, last = sorted(found.window)
    inside = (runs.point >= first) & (runs.point <= last)
    gap = float(found.gap[inside].mean())
    sides = [int((inside & side).sum()) for side in (found.upper, ~found.upper)]
    rss = min(np.sum((runs.y - fit.values[runs.point]) ** 2) for fit in curves)
    likelihood = len(runs.y) / 2 * np.log(rss / (found.scatter**2 * max(len(runs.y) - LINES, 1)))
    return (
        Quantity("gap over scatter of two branches", gap / found.scatter),
        Quantity("grid points with both branches", float(found.coexisting)),
        Quantity("share of runs between the branches", float(found.between[inside].mean())),
        Quantity("ln likelihood of two branches over one curve", float(likelihood)),
        Quantity("gap between the branches", gap, found.scatter * float(np.sqrt(sum(1 / max(n, 1) for n in sides)))),
    )


def hysteresis(runs: Runs) -> tuple[tuple[Quantity, ...], int]:
    """The largest difference between two starts in standard errors, and the number of P where they disagree."""
    start = runs.table.start
    if start is None or len(np.unique(start)) < 2:
        return (), 0
    first = start == np.unique(start)[0]
    points = len(runs.curve.x)
    counts = [np.bincount(runs.point[side], minlength=points) for side in (first, ~first)]
    shared = np.minimum(*counts) > 0
    if not shared.any():
        return (Quantity("grid points with both starts", 0.0),), 0
    sums = [np.bincount(runs.point[side], runs.y[side], points) for side in (first, ~first)]
    low, high = (total / np.maximum(count, 1) for total, count in zip(sums, counts, strict=True))
    difference = np.abs(high - low)[shared]
    # the starts agree at most P, so the median of their difference is scatter; repeats may know it to be larger
    quiet = np.median(difference) / 0.6745
    within = np.where(first, low[runs.point], high[runs.point])
    freedom = len(runs.y) - sum(int((count > 0).sum()) for count in counts)
    repeated = (
        np.sqrt(np.sum((runs.y - within) ** 2) / freedom * sum(1 / count[shared] for count in counts)) if freedom else 0.0
    )
    error = np.maximum(quiet, repeated)
    apart = (difference > DISAGREE * error) & (difference > PART * np.ptp(runs.curve.y))
    largest = int(np.argmax(difference))
    return (
        Quantity(
            "largest difference of the starts", difference[largest], float(np.broadcast_to(error, difference.shape)[largest])
        ),
        Quantity("grid points where they disagree", float(apart.sum())),
    ), int(apart.sum())


def latent_heat(runs: Runs, found: Branches) -> tuple[tuple[Quantity, ...], bool]:
    """The difference of the loss between the branches inside the window, and whether it is zero within small errors."""
    loss = runs.table.loss
    if loss is None:
        return (), False
    inside = (runs.point >= found.window[0]) & (runs.point <= found.window[1])
    lower, upper = (loss[inside & side] for side in (~found.upper, found.upper))
    heat = float(lower.mean() - upper.mean())
    known = min(len(lower), len(upper)) > 1
    error = float(np.sqrt(lower.var(ddof=1) / len(lower) + upper.var(ddof=1) / len(upper))) if known else float("nan")
    small = NO_HEAT * np.ptp(loss)
    return (Quantity("latent heat (loss of lower less upper branch)", heat, error),), abs(heat) + 2 * error < small
