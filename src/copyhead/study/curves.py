"""Results of a study joined by attention and method: estimates at every P and start, with the signs of the theory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xarray as xr

from copyhead.experiment.adam import NEVER
from copyhead.experiment.diagnostics import Estimate, over_chains, over_seeds
from copyhead.study.branch import signed
from copyhead.study.cell_store import flattened
from copyhead.study.results import Results
from copyhead.study.spec import Reproduction
from copyhead.study.study_file import Adam, Jump, Langevin
from copyhead.theory.solution import Solution, solve

# What a cell has beside its numbers.
TEXTS = ("status", "message", "verdict", "ladder", "seconds")


@dataclass(frozen=True, eq=False)
class Curves:
    """Results of one method over P, data seed and start, and over draws if it samples."""

    data: xr.Dataset
    known: dict[tuple[str, int, str], Estimate] = field(default_factory=dict)

    @property
    def sequences(self) -> list[int]:
        return [int(place) for place in self.data.P.values]

    def estimate(self, quantity: str, sequences: int, start: str) -> Estimate:
        """The estimate of one quantity at one grid point; computed once."""
        key = (quantity, sequences, start)
        if key not in self.known:
            values = self.data[quantity].sel(P=sequences, start=start)
            if "diverged" in self.data:
                kept = np.flatnonzero(self.data.diverged.sel(P=sequences, start=start) == NEVER)
                values = values.isel(seed=kept) if kept.size else values
            chains = "draw" in values.dims
            self.known[key] = over_chains(values.transpose("seed", "draw").values) if chains else over_seeds(values.values)
        return self.known[key]

    def values(self, quantity: str, sequences: int, start: str) -> np.ndarray:
        """One value for each data set, the mean over draws if there are any; nan where the run diverged."""
        found = self.data[quantity].sel(P=sequences, start=start)
        return (found.mean("draw") if "draw" in found.dims else found).values


class Measured(NamedTuple):
    """All results of one attention. sgld: by chi factor. jump: by start, empty if there is no first-order transition.

    exact: None where S is not minimised on the data sets. ladder: F(aG) and P* by sampling, None where they are not sampled.
    """

    theory: Solution
    adam: Curves
    exact: Curves | None
    sgld: dict[float, Curves]
    jump: dict[str, xr.Dataset]
    ladder: xr.Dataset | None


def gather(spec: Reproduction, found: Results) -> dict[str, Measured]:
    """Results by attention, in the convention of sign of the theory."""
    joined: dict[str, Measured] = {}
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        adam = _curves(found, f"adam-{attention}", attention)
        exact = _curves(found, f"exact-{attention}", attention) if f"exact-{attention}" in found else None
        names = {factor: f"sgld-{attention}-x{factor:g}" for factor in spec.chi_factors}
        sgld = {factor: _curves(found, name, attention, "_trace") for factor, name in names.items() if name in found}
        jump, ladder = f"jump-{attention}", f"ladder-{attention}"
        joined[attention] = Measured(
            solve(problem, reach=adam.sequences),
            adam,
            exact,
            sgld,
            {str(start): found[jump].isel(P=0).sel(start=start) for start in found[jump].start.values} if jump in found else {},
            found[ladder].isel(P=0, start=0) if ladder in found else None,
        )
    return joined


def _curves(found: Results, name: str, attention: str, part: str = "") -> Curves:
    """Curves of a block; of variables that end in `part` only, where draws are kept."""
    data = found[name]
    if part:
        named = {str(one): str(one).removesuffix(part) for one in data if str(one).endswith(part)}
        data = data[list(named)].rename(named).assign(diverged=data.diverged)
    else:
        data = data.drop_vars([name for name in TEXTS if name in data])
    return Curves(flattened(signed(kept(data), attention)))


def kept(data: xr.Dataset) -> xr.Dataset:
    """nan in place of everything that a run that diverged has left behind."""
    return data.where(data.diverged == NEVER).assign(diverged=data.diverged) if "diverged" in data else data


def lost_runs(found: Results) -> list[str]:
    """One line for each run that diverged: which, by which step, and at which step size."""
    from copyhead.experiment.langevin import LOGIT_STEPS

    lines = []
    for name, block in found.blocks.items():
        data = found[name]
        if "diverged" not in data:
            continue
        size = (
            f"step_logits = {LOGIT_STEPS[block.problem.attention]:g}"
            if isinstance(block.method, Langevin)
            else f"learning rate {block.method.rate:g}"
            if isinstance(block.method, Adam | Jump)
            else ""
        )
        flat = data.diverged.stack(cell=data.diverged.dims)
        for cell in flat[flat != NEVER]:
            where = ", ".join(f"{axis} = {cell[axis].item()}" for axis in data.diverged.dims if cell[axis].item() == cell[axis])
            lines.append(f"{name} ({where}): diverged by step {cell.item():g} at {size}; left out, a smaller step may help")
    return lines
