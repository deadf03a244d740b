"""Results of a study joined by attention and method: estimates at every P and start, with the signs of the theory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float

from copyhead.experiment.adam import NEVER
from copyhead.experiment.convergence import summary
from copyhead.experiment.diagnostics import Estimate, over_chains, over_seeds
from copyhead.study.spec import Part, Reproduction
from copyhead.study.store import Store
from copyhead.theory.solution import Solution, solve
from copyhead.theory.transition import Minimum

# What changes sign with (G, W) -> (-G, -W) in linear attention.
ODD = ("c1", "cG", "cI", "cS", "a1", "aG", "pt", "tp")


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


def gather(spec: Reproduction, work: list[Part], store: Store) -> dict[str, Measured]:
    """Joins the stored parts by attention, in the convention of sign of the theory."""
    found: dict[str, Measured] = {}
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        jump = {
            part.name.split("-")[2]: store.read(part.name)
            for part in work
            if part.method == "jump" and part.problem.attention == attention
        }
        adam = _joined(work, store, f"adam-{attention}-", attention)
        methods = {part.method for part in work}
        exact = _joined(work, store, f"exact-{attention}-", attention) if "exact" in methods else None
        factors = spec.chi_factors if "langevin" in methods else ()
        sgld = {f: _joined(work, store, f"langevin-{attention}-x{f:g}-", attention) for f in factors}
        ladder = next((store.read(part.name) for part in work if part.name == f"ladder-{attention}"), None)
        found[attention] = Measured(solve(problem, reach=adam.sequences), adam, exact, sgld, jump, ladder)
    return found


def _joined(work: list[Part], store: Store, prefix: str, attention: str) -> Curves:
    pieces = [store.read(name) for name in sorted(part.name for part in work) if name.startswith(prefix)]
    joined = xr.concat(pieces, dim="seed", data_vars="all", combine_attrs="drop")
    return Curves(flattened(signed(kept(joined), attention)))


def flattened(data: xr.Dataset) -> xr.Dataset:
    """Arrays over rows, heads and lags as one variable for each entry, name[coordinate]."""
    own = {name: next(iter(set(values.dims) & {"row", "head", "lag"}), None) for name, values in data.items()}
    parts = {
        f"{name}[{place}]": data[name].sel({dim: place}, drop=True)
        for name, dim in own.items()
        if dim is not None
        for place in data[dim].values
    }
    return (
        data.drop_vars([name for name, dim in own.items() if dim is not None])
        .drop_dims([dim for dim in ("row", "head", "lag") if dim in data.dims])
        .assign(parts)
    )


def kept(data: xr.Dataset) -> xr.Dataset:
    """nan in place of everything that a run that diverged has left behind."""
    return data.where(data.diverged == NEVER).assign(diverged=data.diverged) if "diverged" in data else data


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


def lost_runs(work: list[Part], store: Store) -> list[str]:
    """One line for each run that diverged: which, by which step, and at which step size."""
    found = []
    for part in work:
        data = store.read(part.name)
        if "diverged" not in data:
            continue
        flat = data.diverged.stack(cell=data.diverged.dims)
        for cell in flat[flat != NEVER]:
            where = ", ".join(f"{name} = {cell[name].item()}" for name in data.diverged.dims)
            size = data.attrs["step_size"]
            found.append(f"{part.name} ({where}): diverged by step {cell.item()} at {size}; left out, a smaller step may help")
    return found
