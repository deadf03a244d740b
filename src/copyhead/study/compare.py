"""Theory against experiment: every grid point and every transition, side by side, with differences in units of error."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from copyhead.experiment.adam import GRADIENT_TOLERANCE, NEVER
from copyhead.experiment.diagnostics import NOTHING, RHAT_GATE, Estimate, between_starts, over_chains, over_seeds
from copyhead.experiment.locate import onset, resolution, steepest
from copyhead.problem import Problem
from copyhead.study.spec import Part, Reproduction, adapts
from copyhead.study.store import Store
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.finite_width import finite_width
from copyhead.theory.leading_order import leading_order
from copyhead.theory.order_parameters import AnyOrderParameters
from copyhead.theory.transition import Minimum, Phases, phases

# A grid point agrees if every quantity is within this many errors.
AGREEMENT = 3.0
# What changes sign with (G, W) -> (-G, -W) in linear attention.
ODD = ("c1", "cG", "cI", "cS", "a1", "aG", "pt", "tp")
# How far from the minimum a converged training run may stop, see experiment.adam.GRADIENT_TOLERANCE; the least error of Adam.
OPTIMISER_ERROR = 1e-4


def branch_state(found: Phases, sequences: float, start: str) -> Minimum:
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
                kept = self.data.diverged.sel(P=sequences, start=start) == NEVER
                values = values.isel(seed=np.flatnonzero(kept.values)) if kept.any() else values
            chains = "draw" in values.dims
            self.known[key] = over_chains(values.transpose("seed", "draw").values) if chains else over_seeds(values.values)
        return self.known[key]

    def values(self, quantity: str, sequences: int, start: str) -> np.ndarray:
        """One value for each data set, the mean over draws if there are any."""
        found = self.data[quantity].sel(P=sequences, start=start)
        return (found.mean("draw") if "draw" in found.dims else found).values


class Measured(NamedTuple):
    """All results of one attention. sgld: by chi factor. jump: by start, empty if there is no first-order transition."""

    theory: Phases
    adam: Curves
    exact: Curves
    sgld: dict[float, Curves]
    jump: dict[str, xr.Dataset]


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
        adam, exact = (_joined(work, store, f"{method}-{attention}-", attention) for method in ("adam", "exact"))
        sgld = {f: _joined(work, store, f"langevin-{attention}-x{f:g}-", attention) for f in spec.chi_factors}
        found[attention] = Measured(phases(problem, reach=adam.sequences), adam, exact, sgld, jump)
    return found


def _joined(work: list[Part], store: Store, prefix: str, attention: str) -> Curves:
    pieces = [store.read(name) for name in sorted(part.name for part in work) if name.startswith(prefix)]
    return Curves(signed(xr.concat(pieces, dim="seed", data_vars="all", combine_attrs="drop"), attention))


def signed(data: xr.Dataset, attention: str) -> xr.Dataset:
    """Turns mirror images (-G, -W) of linear attention into the sector of positive tr W, chain by chain."""
    if attention != "linear":
        return data
    if "overlap" in data:
        mean = data.overlap.mean("draw") if "draw" in data.dims else data.overlap
        sign = xr.where(mean < 0, -1.0, 1.0)
    else:
        sign = xr.where(data.c1 < 0, -1.0, 1.0)
    return data.assign({name: data[name] * sign for name in ODD if name in data})


def extrapolated(low: Estimate, high: Estimate, factor: float) -> Estimate:
    """SGLD at chi -> infinity from two values of chi, `factor` apart, for a shift of order 1/chi."""
    weight = factor / (factor - 1)
    mean = weight * high.mean - (weight - 1) * low.mean
    error = float(np.hypot(weight * high.error, (weight - 1) * low.error))
    scatter = float(np.hypot(weight * high.scatter, (weight - 1) * low.scatter))
    return Estimate(mean, scatter, error, min(low.ess, high.ess), max(low.rhat, high.rhat), low.n)


def grid_table(spec: Reproduction, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """One row for each attention, P, start and quantity.

    population: theory with population moments (equivalent kernel). exact: theory on the very data sets. z columns: difference
    over error, where the error is the scatter from data set to data set combined with the sampling error. z_paired: mean
    over data sets of the difference to the exact theory on the same data set, over the standard error of that difference.
    width_shift: what both columns of theory contain for the finite d_model of the network, see `width_shift`.
    """
    rows: list[dict[str, Any]] = []
    for attention, results in measured.items():
        window = next((t.window for t in results.theory.transitions if t.window), None)
        first, last = spec.chi_factors[0], spec.chi_factors[-1]
        problem = spec.problem.replace(attention=attention)
        for sequences in results.adam.sequences:
            inside = window is not None and window[0] <= sequences <= window[1]
            for start in map(str, results.adam.data.start.values):
                limit = branch_state(results.theory, sequences, start).order_parameters
                shift = width_shift(spec, problem, sequences, limit)
                state = {name: float(value) + shift[name] for name, value in limit._asdict().items()}
                sampled = sequences in results.sgld[first].sequences
                converged = float((results.adam.data.gradient.sel(P=sequences, start=start) < GRADIENT_TOLERANCE).mean())
                for quantity in state:
                    exact = results.exact.estimate(quantity, sequences, start)
                    exact = exact._replace(mean=exact.mean + shift[quantity])
                    own = results.exact.values(quantity, sequences, start) + shift[quantity]
                    adam = results.adam.estimate(quantity, sequences, start)
                    # a loss measured on sequences has their sampling error, which is the same for all runs and methods
                    measured_loss = quantity == "loss" and "loss_error" in results.exact.data
                    measuring = results.exact.estimate("loss_error", sequences, start).mean if measured_loss else 0.0
                    row = {
                        "attention": attention,
                        "P": sequences,
                        "start": start,
                        "in_window": inside,
                        "quantity": quantity,
                        "population": float(state[quantity]),
                        "width_shift": shift[quantity],
                        "separate": problem.head_dimension is not None,
                        "exact": exact.mean,
                        "adam": adam.mean,
                        "adam_scatter": adam.scatter,
                        "adam_error": adam.error,
                        "adam_converged": converged,
                        "adam_z": _z(adam.mean - float(state[quantity]), float(np.hypot(adam.scatter, measuring))),
                        "adam_z_paired": _paired(results.adam.values(quantity, sequences, start), own, OPTIMISER_ERROR),
                    }
                    if quantity == "loss":
                        row["adam_fresh_loss"] = results.adam.estimate("fresh", sequences, start).mean
                    if sampled:
                        at_chi = [results.sgld[factor].estimate(quantity, sequences, start) for factor in (first, last)]
                        limit = extrapolated(at_chi[0], at_chi[1], last / first)
                        sampling = _sampling_error(at_chi, last / first)
                        row |= {
                            "sgld": at_chi[0].mean,
                            "sgld_error": at_chi[0].error,
                            "sgld_high_chi": at_chi[1].mean,
                            "sgld_high_chi_error": at_chi[1].error,
                            "sgld_limit": limit.mean,
                            "sgld_limit_error": limit.error,
                            "sgld_ess": limit.ess,
                            "sgld_rhat": limit.rhat,
                            "sgld_mixed": limit.mixed,
                            "sgld_rhat_between_starts": _between(results.sgld[first].data, quantity, sequences),
                            "sgld_z": _z(
                                limit.mean - float(state[quantity]),
                                float(np.hypot(np.hypot(exact.scatter, measuring), limit.error)),
                            ),
                            "sgld_z_paired": _paired(
                                _limit_by_seed(results, quantity, sequences, start, last / first), own, sampling
                            ),
                        }
                    rows.append(row)
    return rows


def width_shift(spec: Reproduction, problem: Problem, sequences: float, limit: AnyOrderParameters) -> dict[str, float]:
    """Finite width minus kernel limit by the theory of adapting embeddings, where it applies; else nothing."""
    network = spec.network
    if not adapts(network, problem) or not isinstance(limit, ContentOrderParameters):
        return dict.fromkeys(limit._fields, 0.0)
    moved = finite_width(problem.replace(sequences=sequences), network.width, network.embedding_variance, limit)
    if not moved.converged:
        return dict.fromkeys(limit._fields, float("nan"))
    return {name: float(new) - float(old) for name, new, old in zip(limit._fields, moved.order_parameters, limit, strict=True)}


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


def _paired(values: np.ndarray, exact: np.ndarray, least: float) -> float:
    """Mean over data sets of the difference on the same data set, over its standard error, which is at least `least`.

    Data sets whose run diverged are left out.
    """
    difference = (values - exact)[np.isfinite(values - exact)]
    if len(difference) < 2:
        return float("nan")
    error = np.std(difference, ddof=1) / np.sqrt(len(difference))
    return float(np.mean(difference) / max(error, least))


def _limit_by_seed(results: Measured, quantity: str, sequences: int, start: str, factor: float) -> np.ndarray:
    """SGLD extrapolated to chi -> infinity on each data set."""
    low, high = (curves.values(quantity, sequences, start) for curves in results.sgld.values())
    return (factor * high - low) / (factor - 1)


def _sampling_error(at_chi: list[Estimate], factor: float) -> float:
    """Monte Carlo error alone of the extrapolated mean: the floor of the paired error."""
    weight = factor / (factor - 1)
    return float(np.hypot(weight * at_chi[1].sampling, (weight - 1) * at_chi[0].sampling))


def _z(difference: float, error: float) -> float:
    """difference / error, with float32 rounding as the least error: both may vanish together, as in c1 = 0 below P_c."""
    return float(difference / max(error, 1e-6))


def _between(data: xr.Dataset, quantity: str, sequences: int) -> float:
    """Median over data sets of R-hat between the two starts."""
    chains = data[quantity].sel(P=sequences).transpose("seed", "start", "draw").values
    return float(np.median([between_starts(*pair) for pair in chains])) if np.isfinite(chains).all() else float("inf")


class Agreement(NamedTuple):
    """How many grid points (P, start) outside the window have every quantity within AGREEMENT errors.

    points: all of them. gated: those left out of `points` because a training run had not converged or a chain had not mixed;
    they are shown, but neither agree nor disagree.
    """

    method: str
    attention: str
    theory: str
    error: str
    agree: int
    points: int
    gated: int

    @property
    def fraction(self) -> float:
        return self.agree / self.points if self.points else float("nan")


def agreement(rows: list[dict[str, Any]]) -> list[Agreement]:
    """Counts for Adam and SGLD (chi -> infinity), against the population theory and against the exact one."""
    found = []
    for attention in dict.fromkeys(row["attention"] for row in rows):
        for method, theory, error, column in (
            ("Adam", "population", "scatter of data sets", "adam_z"),
            ("Adam", "exact, same data", "paired standard error", "adam_z_paired"),
            ("SGLD", "population", "scatter and sampling", "sgld_z"),
            ("SGLD", "exact, same data", "paired standard error", "sgld_z_paired"),
        ):
            points: dict[tuple[int, str], list[tuple[bool, bool]]] = {}
            for row in rows:
                # L2 on W_Q and W_K has another minimum than the posterior (docs/theory.md, section 10): nothing to agree with
                if method == "Adam" and row["separate"]:
                    continue
                if row["attention"] == attention and not row["in_window"] and column in row:
                    passed = row["adam_converged"] == 1 if method == "Adam" else _mixed(row)
                    points.setdefault((row["P"], row["start"]), []).append((passed, abs(row[column]) <= AGREEMENT))
            counted = [all(near for _, near in point) for point in points.values() if all(passed for passed, _ in point)]
            gated = len(points) - len(counted)
            found.append(Agreement(method, attention, theory, error, sum(counted), len(counted), gated))
    return found


def _mixed(row: dict[str, Any]) -> bool:
    """Whether the chains of a row passed the gates, and both starts sample the same distribution."""
    return bool(row["sgld_mixed"] and row["sgld_rhat_between_starts"] <= RHAT_GATE)


def transition_table(spec: Reproduction, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """One row for each place: leading order, exact minimum of the action, measured value with its error, and ratios."""
    rows: list[dict[str, Any]] = []
    for attention, results in measured.items():
        scales = leading_order(spec.problem)
        softmax = attention == "softmax"
        copying = scales.copying_softmax if softmax else scales.copying_linear
        jumping = next((t for t in results.theory.transitions if t.window), None)
        for t in results.theory.transitions:
            if t.kind == "first-order" and t.window:
                pools = attention == "linear" and float(t.before.aG) == 0
                place = "pooling P* (equal action)" if pools else "P* (equal action)"
                rows.append(_row(attention, place, scales.pooling if pools else copying, t.P, {}))
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
                "P": _known(value.mean),
                "error": _known(value.error),
                "over_exact": _known(value.mean / exact),
                "n": value.n,
            }
            for name, value in measured.items()
        },
    }


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


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
    level = data.aG.sel(start=start).mean("draw").transpose("seed", "P").values
    if not np.isfinite(level).all() or level[:, 0].max() > 0.5 * level[:, -1].min():
        return NOTHING
    copies = level > (level[:, :1] + level[:, -1:]) / 2
    if np.any(np.sum(copies[:, 1:] != copies[:, :-1], axis=1) != 1):
        return NOTHING
    grid = data.P.values.astype(float)
    index = np.argmax(copies, axis=1)
    places = over_seeds((grid[index] + grid[index - 1]) / 2)
    return places._replace(error=float(np.hypot(places.error, resolution(grid, places.mean))))


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; columns are the union of the keys, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
