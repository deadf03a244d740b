"""Cells of a study as a table over data sets: means with errors, and methods beside each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr

from copyhead.experiment.diagnostics import over_seeds
from copyhead.study.cell_store import table
from copyhead.study.compare import OPTIMISER_ERROR
from copyhead.study.methods import DIVERGED, OK, REFUSED
from copyhead.study.study_file import Study

# What is summarised, where there is such a column.
QUANTITIES = ("c1", "cG", "cI", "cS", "a1", "aG", "loss", "jump", "P_star", "log_ratio")
# What tells one theory or experiment from another, beside the axes of the grid.
KEYS = ("method", "settings", "start", "P")


def summary(found: xr.Dataset, study: Study) -> list[dict[str, Any]]:
    """One row for each point of the grid, start and method, over data sets.

    n: cells. ok, not_converged, diverged, refused: how many of them ended so. Each quantity: mean over the cells that were not
    lost, and its standard error (scatter over data sets; for one chain its Monte Carlo error). For trained and sampled cells
    z_<quantity> is the mean difference to the exact minimum on the same data set (where the study has one) over its standard
    error, which is at least OPTIMISER_ERROR. jump: the middle between the last P before it and the first after it.
    """
    rows = table(found)
    if "low" in rows:
        rows["jump"] = (rows.low + rows.high) / 2
    names = [*study.axes, *KEYS]
    shown = [name for name in QUANTITIES if name in rows]
    exact = rows[rows.method == "exact"]
    partners = {tuple(key): part for key, part in exact.groupby([*study.axes, "start", "P", "seed"], dropna=False)}
    summarised = []
    for key, part in rows.groupby(names, sort=False, dropna=False):
        kept = part[~part.status.isin([DIVERGED, REFUSED])]
        one: dict[str, Any] = dict(zip(names, key, strict=True))
        counts = {str(status): int(number) for status, number in part.status.value_counts().items()}
        one |= {"n": len(part), "ok": counts.pop(OK, 0), **{k.replace(" ", "_"): v for k, v in counts.items()}}
        for name in shown:
            values = kept[name].to_numpy(float)
            if not len(values) or not np.isfinite(values).any():
                continue
            estimate = over_seeds(values)
            error = estimate.error
            sampled = f"{name}_error" in kept and np.isfinite(kept[f"{name}_error"]).all()
            if len(values) == 1 and sampled:
                error = float(kept[f"{name}_error"].iloc[0])
            one |= {name: estimate.mean, f"{name}_error": error}
            if one["method"] in ("adam", "sgld"):
                differences = []
                for _, cell in kept.iterrows():
                    partner = partners.get((*(cell[axis] for axis in study.axes), cell.start, cell.P, cell.seed))
                    if partner is not None and np.isfinite(partner[name].iloc[0]):
                        differences.append(cell[name] - partner[name].iloc[0])
                if len(differences) > 1:
                    paired = over_seeds(np.array(differences))
                    one[f"z_{name}"] = paired.mean / max(paired.error, OPTIMISER_ERROR)
        summarised.append(one)
    return summarised


def places(found: xr.Dataset, study: Study) -> list[dict[str, Any]]:
    """One row for each problem of the study: verdict and places of its transitions, by the theory; empty without a theory."""
    rows = table(found)
    rows = rows[rows.method == "theory"]
    columns = ["verdict", "first_place", "last_place", "window_low", "window_high", "status"]
    axes = list(study.axes)
    if not len(rows) or "first_place" not in rows:
        return []
    if not axes:
        return [{name: rows.iloc[0][name] for name in columns}]
    return [
        {**dict(zip(axes, key, strict=True)), **{name: part.iloc[0][name] for name in columns}}
        for key, part in rows.groupby(axes, sort=False, dropna=False)
    ]
