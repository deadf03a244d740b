"""Places of the transitions: leading order, exact minimum of the action, and what training and sampling show, with errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from copyhead.experiment.diagnostics import NOTHING, Estimate, over_seeds
from copyhead.experiment.locate import onset, resolution, steepest
from copyhead.record import plain
from copyhead.study.curves import Measured
from copyhead.study.methods import OK
from copyhead.study.spec import Reproduction
from copyhead.study.study_file import EXPECTED
from copyhead.theory.leading_order import leading_order

# File of the table in the folder of a reproduction.
TRANSITIONS = "transitions.json"

# Transitions that have rows in the table beyond the paper's task: of a front of rows, each of which jumps, the last ones.
MOST_PLACES = 4


def transition_table(spec: Reproduction, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """One row for each place: leading order, exact minimum of the action, measured value with its error, and ratios."""
    rows: list[dict[str, Any]] = []
    if spec.problem.beyond:
        return _beyond_table(spec, measured)
    for attention, results in measured.items():
        scales = leading_order(spec.problem)
        softmax = attention == "softmax"
        copying = scales.copying_softmax if softmax else scales.copying_linear
        jumping = next((t for t in results.theory.transitions if t.window), None)
        for t in results.theory.transitions:
            if t.kind == "first-order" and t.window:
                place = "pooling P* (equal action)" if t.pools else "P* (equal action)"
                sampled = {} if results.ladder is None or t is not jumping else _equal_weight(results.ladder, spec.problem.chi)
                rows.append(_row(attention, place, scales.pooling if t.pools else copying, t.P, sampled))
                ends = (
                    ("small", t.window[1], "upper fold", scales.upper_fold if softmax else None),
                    ("copy", t.window[0], "lower fold", None),
                )
                # jumps are searched for around the first window
                for start, fold, name, scale in ends if t is jumping else ():
                    jump = results.jump[start]
                    adam = over_seeds(((jump.low + jump.high) / 2).values)
                    sgld = {
                        f"SGLD chi {spec.problem.chi * f:g}": _branch_change(d.data, start) for f, d in results.sgld.items()
                    }
                    rows.append(_row(attention, name, scale, fold, {f"Adam from {start} start": adam, **sgld}))
            elif t.kind == "second-order":
                rows.append(_row(attention, "P_c (pooling)", scales.pooling, t.P, _curve_places(spec, results, "c1", onset)))
            else:
                rows.append(
                    _row(attention, "crossover (steepest cG)", copying, t.P, _curve_places(spec, results, "cG", steepest))
                )
    return rows


def _beyond_table(spec: Reproduction, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """Beyond the paper's task: no leading order; jumps and places read off the curves of Adam. Of many jumps only the last."""
    rows: list[dict[str, Any]] = []
    for attention, results in measured.items():
        transitions = results.theory.transitions
        for t in transitions[-MOST_PLACES:]:
            if t.window:
                rows.append(_row(attention, "P* (equal action)", None, t.P, {}))
                for start, fold, name in (("small", t.window[1], "upper end"), ("copy", t.window[0], "lower end")):
                    jump = _branch_change(results.adam.data, start)
                    rows.append(_row(attention, f"{name} of coexistence", None, fold, {f"Adam from {start} start": jump}))
            else:
                quantity, locate = ("c1", onset) if t.kind == "second-order" else ("cG", steepest)
                place = "P_c" if t.kind == "second-order" else "crossover (steepest cG)"
                # after a jump the curve is steepest at the jump
                first = t is next((one for one in transitions if one.kind in (t.kind, "first-order")), None)
                seen = _curve_places(spec, results, quantity, locate) if first else {}
                rows.append(_row(attention, place, None, t.P, seen))
    return rows


def _equal_weight(ladder: xr.Dataset, chi: float) -> dict[str, Estimate]:
    """P* by sampling at finite chi: on expected moments, with the error of the sampling, and over data sets."""
    good = ladder[["P_star", "P_star_error"]].where(ladder.status == OK)
    expected = good.sel(seed=EXPECTED)
    mean, error = float(expected.P_star), float(expected.P_star_error)
    found = {f"branch weights at chi {chi:g}, expected moments": NOTHING._replace(mean=mean, error=error, n=1)}
    over = good.P_star.sel(seed=good.seed >= 0).values
    over = over[np.isfinite(over)]
    if len(over) > 1:
        found[f"branch weights at chi {chi:g}"] = over_seeds(over)
    return found


def _row(attention: str, place: str, leading: float | None, exact: float, measured: dict[str, Estimate]) -> dict[str, Any]:
    """A row of the table; None stands for a number that there is not, as in JSON."""
    return {
        "attention": attention,
        "place": place,
        "leading_order": leading,
        "exact": exact,
        "exact_over_leading": None if leading is None else exact / leading,
        "measured": {
            name: {
                "P": plain(value.mean),
                "error": plain(value.error),
                "over_exact": plain(value.mean / exact),
                "n": value.n,
            }
            for name, value in measured.items()
        },
    }


def _curve_places(spec: Reproduction, results: Measured, quantity: str, locate: Any) -> dict[str, Estimate]:
    """A place read off every data set's own curve, from the small start; the error includes the spacing of the grid."""
    curves = {"Adam": results.adam}
    curves |= {f"SGLD chi {spec.problem.chi * factor:g}": sampled for factor, sampled in results.sgld.items()}
    found = {}
    for name, data in ((name, curve.data) for name, curve in curves.items()):
        values = data[quantity].sel(start="small")
        values = values.mean("draw") if "draw" in values.dims else values
        places = np.array([locate(data.P.values, values.sel(seed=seed).values) for seed in data.seed.values])
        places = places[np.isfinite(places)]
        place = over_seeds(places) if len(places) > 1 else NOTHING._replace(n=len(places))
        found[name] = place._replace(error=float(np.hypot(place.error, resolution(data.P.values, place.mean))))
    return found


def _branch_change(data: xr.Dataset, start: str) -> Estimate:
    """Where chains from a start change branch: for each data set the middle between two grid points.

    Nothing, unless the two ends of the grid are in different phases and every data set changes exactly once.
    """
    level = data.aG.sel(start=start)
    level = (level.mean("draw") if "draw" in level.dims else level).transpose("seed", "P").values
    if not np.isfinite(level).all() or level[:, 0].max() > 0.5 * level[:, -1].min():
        return NOTHING
    copies = level > (level[:, :1] + level[:, -1:]) / 2
    if np.any(np.sum(copies[:, 1:] != copies[:, :-1], axis=1) != 1):
        return NOTHING
    grid = data.P.values.astype(float)
    index = np.argmax(copies, axis=1)
    places = over_seeds((grid[index] + grid[index - 1]) / 2)
    return places._replace(error=float(np.hypot(places.error, resolution(grid, places.mean))))
