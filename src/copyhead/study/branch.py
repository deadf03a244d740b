"""The branch that a run belongs to: of the theory by its start, of linear attention by its sign."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float

from copyhead.experiment.convergence import summary
from copyhead.theory.solution import Solution
from copyhead.theory.transition import Minimum

# What changes sign with (G, W) -> (-G, -W) in linear attention.
ODD = ("c1", "cG", "cI", "cS", "a1", "aG", "pt", "tp", "overlap")


def branch_state(found: Solution, sequences: float, start: str) -> Minimum:
    """The minimum that a run from `start` belongs to.

    Where two minima coexist inside a window, the small start belongs to the one of smaller cG and the copy start to the other.
    Elsewhere there is one, and metastable minima that both starts leave behind do not count.
    """
    minima = found.minima(sequences)
    if not any(t.window and t.window[0] <= sequences <= t.window[1] for t in found.transitions):
        return minima[0]
    choose = min if start == "small" else max
    return choose(minima, key=lambda minimum: float(minimum.order_parameters.cG))


# A chain of linear attention has chosen a sector if its mean c1 is this many of its own errors from zero.
CHOSEN = 5.0


def sector(c1: Float[np.ndarray, "chain draw"]) -> Float[np.ndarray, "chain"]:
    """The sign of each chain of linear attention; (G, W) and its mirror image (-G, -W) are equally good.

    One for a chain that has not chosen: turning such a chain by the sign of its mean would give the mean a bias.
    """
    found = [summary(chain[None]) for chain in c1]
    return np.array([-1.0 if one.mean < -CHOSEN * one.error else 1.0 for one in found])


def signed(data: xr.Dataset, attention: str) -> xr.Dataset:
    """Turns mirror images (-G, -W) of linear attention into the sector of positive tr W, chain by chain."""
    if attention != "linear" or "heads" in data:  # those of several heads are signed where they are measured
        return data
    if "overlap" in data:
        mean = data.overlap.mean("draw") if "draw" in data.dims else data.overlap
        sign = xr.where(mean < 0, -1.0, 1.0)
    else:
        sign = xr.where(data.c1 < 0, -1.0, 1.0)
    return data.assign({name: data[name] * sign for name in ODD if name in data})
