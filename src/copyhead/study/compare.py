"""Theory against experiment at every grid point, side by side, with differences in units of error."""

from __future__ import annotations

import csv
import io
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from copyhead.experiment.adam import GRADIENT_TOLERANCE
from copyhead.experiment.diagnostics import RHAT_GATE, Estimate, between_starts
from copyhead.problem import Problem
from copyhead.study.branch import branch_state
from copyhead.study.curves import Measured
from copyhead.study.spec import Reproduction, adapts
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.finite_width import finite_width
from copyhead.theory.order_parameters import AnyOrderParameters
from copyhead.theory.transition import numbers

# A grid point agrees if every quantity is within this many errors.
AGREEMENT = 3.0
# How far from the minimum a converged training run may stop, see experiment.adam.GRADIENT_TOLERANCE; the least error of Adam.
OPTIMISER_ERROR = 1e-4


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
    adam_worst: the largest of those differences, over the scatter of the exact theory: far above one where a run has ended on
    another branch, which would otherwise hide in the error that it enlarges.
    width_shift: what both columns of theory contain for the finite d_model of the network, see `width_shift`.
    """
    rows: list[dict[str, Any]] = []
    for attention, results in measured.items():
        windows = [t.window for t in results.theory.transitions if t.window]
        first, last = spec.chi_factors[0], spec.chi_factors[-1]
        problem = spec.problem.replace(attention=attention)
        for sequences in results.adam.sequences:
            inside = any(window[0] <= sequences <= window[1] for window in windows)
            for start in map(str, results.adam.data.start.values):
                branch = branch_state(results.theory, sequences, start)
                shift = width_shift(spec, problem, sequences, branch.order_parameters)
                state = {name: value + shift.get(name, 0.0) for name, value in numbers(branch, problem).items()}
                sampled = bool(results.sgld) and sequences in results.sgld[first].sequences
                converged = float((results.adam.data.gradient.sel(P=sequences, start=start) < GRADIENT_TOLERANCE).mean())
                for quantity in state:
                    moved = shift.get(quantity, 0.0)
                    adam = results.adam.estimate(quantity, sequences, start)
                    trained = results.adam.values(quantity, sequences, start)
                    # without a theory of the same data sets the scatter is that of the training runs
                    source = results.adam if results.exact is None else results.exact
                    exact = source.estimate(quantity, sequences, start)
                    exact = exact._replace(mean=exact.mean + moved)
                    own = source.values(quantity, sequences, start) + moved
                    # a loss measured on sequences has their sampling error, which is the same for all runs and methods
                    measured_loss = quantity == "loss" and "loss_error" in source.data
                    measuring = source.estimate("loss_error", sequences, start).mean if measured_loss else 0.0
                    row = {
                        "attention": attention,
                        "P": sequences,
                        "start": start,
                        "in_window": inside,
                        "quantity": quantity,
                        "population": float(state[quantity]),
                        "width_shift": moved,
                        "separate": problem.head_dimension is not None,
                        "exact": float("nan") if results.exact is None else exact.mean,
                        "adam": adam.mean,
                        "adam_scatter": adam.scatter,
                        "adam_error": adam.error,
                        "adam_converged": converged,
                        "adam_z": _z(adam.mean - float(state[quantity]), float(np.hypot(exact.scatter, measuring))),
                    }
                    if results.exact is not None:
                        row["adam_z_paired"] = _paired(trained, own, OPTIMISER_ERROR)
                        worst = np.nanmax(np.abs(trained - own), initial=0.0)
                        row["adam_worst"] = float(worst / max(exact.scatter, OPTIMISER_ERROR))
                    if quantity == "loss":
                        row["adam_fresh_loss"] = results.adam.estimate("fresh", sequences, start).mean
                    if sampled:
                        at_chi = [results.sgld[factor].estimate(quantity, sequences, start) for factor in (first, last)]
                        limit: Estimate = extrapolated(at_chi[0], at_chi[1], last / first)
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

    Adam's must also be on the branch of the exact theory in every data set, see `adam_worst`; chains have gates for that.
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
                    near = abs(row[column]) <= AGREEMENT and (method == "SGLD" or row.get("adam_worst", 0.0) <= AGREEMENT)
                    points.setdefault((row["P"], row["start"]), []).append((passed, near))
            counted = [all(near for _, near in point) for point in points.values() if all(passed for passed, _ in point)]
            gated = len(points) - len(counted)
            if points or method == "Adam":
                found.append(Agreement(method, attention, theory, error, sum(counted), len(counted), gated))
    return found


def _mixed(row: dict[str, Any]) -> bool:
    """Whether the chains of a row passed the gates, and both starts sample the same distribution."""
    return bool(row["sgld_mixed"] and row["sgld_rhat_between_starts"] <= RHAT_GATE)


def to_csv(rows: list[dict[str, Any]]) -> str:
    """Rows as CSV; columns are the union of the keys, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
