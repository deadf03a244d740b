"""What each method of a study makes of cells that share problem and settings: one labelled data set along `cell`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr

from copyhead.problem import Problem, ProblemError
from copyhead.study.cell import Cell, Group
from copyhead.study.study_file import EXPECTED, Adam, Exact, Jump, Ladder, Langevin, Theory

# Status of a cell. Refused: the method does not apply to the problem, for the reason in `message`.
OK, NOT_CONVERGED, DIVERGED, REFUSED = "ok", "not converged", "diverged", "refused"
# Long names; all quantities but the wall time are dimensionless.
MEANINGS = {
    "c1": "mean logit off the target",
    "cG": "copy logit: on the target, above c1",
    "cI": "logit of equal tokens",
    "cS": "logit of the own position, above c1",
    "a1": "mean attention off the target, times L",
    "aG": "copy attention: on the target, above a1 / L",
    "loss": "squared error per token on the population",
    "fresh": "squared error per token on fresh sequences",
    "overlap": "trace of W / V",
    "pt": "mean logit between a position and a token",
    "tp": "mean logit between a token and a position",
    "content": "root mean square dependence of the logits on the token",
    "signs": "share of tokens served with one sign",
    "rows": "copy logit by row, leading head",
    "heads": "copy logit by head, in falling order of copy attention",
    "heads_a": "copy attention by head, falling",
    "lags": "mean attention of the leading head on each lag of the target",
    "action": "action S of the state",
    "metastable": "one if another state has a lower action",
    "verdict": "order of the transitions of this problem",
    "first_place": "P of the first transition",
    "last_place": "P of the last transition",
    "window_low": "P of the lower fold of the last first-order transition",
    "window_high": "P of its upper fold",
    "gradient": "largest entry of the gradient at the end",
    "diverged": "step by which the run was lost, -1 if it was not",
    "loss_error": "standard error of the loss over fresh sequences",
    "low": "last P before the jump",
    "high": "first P after the jump",
    "P_star": "P at which the two wells of F(aG) weigh the same",
    "log_ratio": "log weight of copying over uniform",
    "height_below": "barrier of F(aG) seen from the uniform well",
    "height_above": "barrier of F(aG) seen from the copying well",
    "exchange": "least acceptance of an exchange between windows",
    "free_energy": "F(aG), least value zero",
    "bin_aG": "aG at the middle of a bin of F",
    "ladder": "what the ladder shows",
}
# What is kept of every cell beside its results.
STATE = ("status", "message", "seconds")
ERRORS = {
    "error": "standard error of",
    "trace": "draws of",
    "sd": "standard deviation over draws of",
    "ess": "effective sample size of",
    "rhat": "split R-hat of",
}


def check(group: Group, sequences: float) -> None:
    """Refuses a group that its method cannot run, with data sets of at most P = sequences, before anything is started.

    Raises:
        ProblemError: if problem, network and batch do not go together, need too much memory, or P is no whole number.
    """
    problem, method = group
    if isinstance(method, Theory):
        return
    from copyhead.experiment.path import path
    from copyhead.model.network import Network
    from copyhead.study.memory import refuse_too_large

    if isinstance(method, Ladder):
        from copyhead.study.sampling import SamplingSettings
        from copyhead.study.sampling import check as check_sampling

        check_sampling(problem.replace(sequences=sequences), SamplingSettings())
        return
    if isinstance(method, Langevin):
        problem.require_paper("SGLD is")
    if isinstance(method, Jump):
        sequences = bracket_of(problem, method)[1]
    network = Network() if isinstance(method, Exact) else method.network
    if not isinstance(method, Exact):
        path(problem, network, method.batch)
    refuse_too_large(problem, network, sequences)


def bracket_of(problem: Problem, method: Jump) -> tuple[int, int]:
    """P between which a jump is looked for.

    Raises:
        ProblemError: if the method gives none, and the theory neither.
    """
    from copyhead.study.jump import bracket_around

    return method.bracket or bracket_around(problem)


def run_cells(group: Group, cells: list[Cell]) -> xr.Dataset:
    """Results of cells of one group, in their order, with status, message and seconds (wall time over cells).

    A problem that the method refuses gives cells of status `refused`: nothing to be tried again.
    """
    began = time.perf_counter()
    problem, method = group
    message = ""
    try:
        values, status = _METHODS[method.kind](problem, method, cells)
    except ProblemError as error:
        values, status, message = {}, [REFUSED] * len(cells), str(error)
    # texts are there for every method: xarray has nothing to fill them up with where cells are joined
    for name in ("verdict", "ladder"):
        values.setdefault(name, np.array([""] * len(cells), object))
    own = {name: _own_axes(problem, name, np.shape(array)) for name, array in values.items()}
    found = xr.Dataset(coords={dim: places for one in own.values() for dim, places in one.items()})
    for name, array in values.items():
        found[name] = (("cell", *own[name]), np.asarray(array), {"long_name": meaning(name), "units": "1"})
    seconds = (time.perf_counter() - began) / len(cells)
    return found.assign(
        status=("cell", np.array(status, object), {"long_name": f"{OK}, {NOT_CONVERGED}, {DIVERGED} or {REFUSED}"}),
        message=("cell", np.array([message] * len(cells), object), {"long_name": "why a cell was refused"}),
        seconds=("cell", np.full(len(cells), seconds), {"long_name": "wall time over the cells run with it", "units": "s"}),
    )


def meaning(name: str) -> str:
    """Long name of a variable."""
    if name in MEANINGS:
        return MEANINGS[name]
    base, _, part = name.rpartition("_")
    return f"{ERRORS[part]} {MEANINGS[base]}"


def _own_axes(problem: Problem, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """The axes beside `cell` that a variable has, with their coordinates; empty where there is none."""
    from copyhead.experiment.observables import axes

    if name.endswith("_trace"):
        return {"draw": range(shape[-1])}
    if name in ("free_energy", "free_energy_error"):
        return {"around": list(AROUND), "bin": range(shape[-1])}
    if name == "bin_aG":
        return {"bin": range(shape[-1])}
    return dict([axes(problem)[name]]) if name in ("rows", "heads", "heads_a", "lags") else {}


def _theory(problem: Problem, method: Theory, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment.observables import axes
    from copyhead.study.branch import branch_state
    from copyhead.theory.solution import solve
    from copyhead.theory.transition import attention_by_lag

    found = solve(problem, reach=sorted({cell.sequences for cell in cells if cell.sequences is not None}))
    changes, jumps = found.transitions, [t for t in found.transitions if t.window]
    window = (jumps[-1].window if jumps else None) or (np.nan, np.nan)
    places = {
        "first_place": changes[0].P if changes else np.nan,
        "last_place": changes[-1].P if changes else np.nan,
        "window_low": window[0],
        "window_high": window[1],
    }
    columns: dict[str, list[Any]] = {}
    for cell in cells:
        row: dict[str, Any] = dict(places)
        if cell.sequences is not None:
            state = branch_state(found, cell.sequences, cell.start)
            row |= {name: float(value) for name, value in state.order_parameters._asdict().items()}
            row |= {"action": state.action, "metastable": float(state.metastable)}
            own = axes(problem)
            if own:
                row["rows"] = [state.rows[a] for a in own["rows"][1]]
                row["heads"] = list(state.heads)
                row["lags"] = list(attention_by_lag(problem, state).values()) if problem.lags else []
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    values: dict[str, Any] = {name: np.array(column, float) for name, column in columns.items()}
    values["verdict"] = np.array([found.verdict] * len(cells), object)
    return values, [OK if found.complete else NOT_CONVERGED] * len(cells)


def _exact(problem: Problem, method: Exact, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment.adam import GRADIENT_TOLERANCE
    from copyhead.study.branch import signed
    from copyhead.study.exact import exact_minima

    picked = {}
    for seed in dict.fromkeys(cell.seed for cell in cells):
        own = [cell for cell in cells if cell.seed == seed]
        starts = tuple(dict.fromkeys(cell.start for cell in own))
        found = exact_minima(problem, sorted({_whole(cell) for cell in own}), [seed], starts)
        found = signed(found, problem.attention)
        for cell in own:
            picked[cell] = found.sel(P=_whole(cell), seed=seed, start=cell.start)
    values = {str(name): np.stack([picked[cell][name].values for cell in cells]) for name in picked[cells[0]].data_vars}
    lost = ~np.isfinite(values["cG"]) | ~(values["gradient"] < GRADIENT_TOLERANCE)
    return values, [NOT_CONVERGED if one else OK for one in lost]


def _trained(problem: Problem, method: Adam | Jump, runs: list[Any]) -> tuple[Any, Any]:
    """Observables of training runs (P, seed, start, chi), and the runs."""
    from copyhead.experiment.adam import AdamSettings, train
    from copyhead.experiment.cells import assemble
    from copyhead.experiment.observables import measure_all, yardstick
    from copyhead.experiment.path import path

    way = path(problem, method.network, method.batch)
    trained = train(assemble(way, runs), way, AdamSettings(method.steps, method.rate))
    return measure_all(trained.weights, yardstick(problem, method.network, _fresh(problem)), problem), trained


def _adam(problem: Problem, method: Adam, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment.adam import GRADIENT_TOLERANCE, NEVER

    observed, trained = _trained(problem, method, _runs(problem, cells))
    values = _turned(observed._asdict(), problem)
    values |= {"gradient": trained.gradient, "diverged": trained.diverged.astype(float)}
    lost = trained.diverged != NEVER
    return values, [
        DIVERGED if gone else OK if gradient < GRADIENT_TOLERANCE else NOT_CONVERGED
        for gone, gradient in zip(lost, trained.gradient, strict=True)
    ]


def _langevin(problem: Problem, method: Langevin, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment.adam import NEVER
    from copyhead.experiment.cells import assemble
    from copyhead.experiment.diagnostics import over_chains
    from copyhead.experiment.langevin import LOGIT_STEPS, LangevinSettings, sample
    from copyhead.experiment.observables import yardstick
    from copyhead.experiment.path import path

    way = path(problem, method.network, method.batch)
    settings = LangevinSettings(LOGIT_STEPS[problem.attention], warmup=method.warmup, draws=method.draws, thin=method.thin)
    against = yardstick(problem, method.network, _fresh(problem))
    sampled = sample(assemble(way, _runs(problem, cells)), way, against, settings)
    traces = _turned(sampled.observables._asdict(), problem, draws=True)
    values: dict[str, Any] = {"diverged": sampled.diverged.astype(float)}
    mixed = np.ones(len(cells), bool)
    for name, trace in traces.items():
        found = [over_chains(chain[None]) for chain in trace]
        mixed &= [one.mixed for one in found]
        values |= {
            name: [one.mean for one in found],
            f"{name}_error": [one.error if np.isfinite(one.error) else one.sampling for one in found],
            f"{name}_sd": trace.std(axis=1, ddof=1),
            f"{name}_ess": [one.ess for one in found],
            f"{name}_rhat": [one.rhat for one in found],
        }
        values |= {f"{name}_trace": trace} if method.trace else {}
    return values, [
        DIVERGED if step != NEVER else OK if good else NOT_CONVERGED for step, good in zip(sampled.diverged, mixed, strict=True)
    ]


def _jump(problem: Problem, method: Jump, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment.adam import NEVER
    from copyhead.study.jump import jumps

    def train(wanted: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        runs: list[Any] = [(place, cells[k].seed, cells[k].start, problem.chi) for k, place in wanted]
        observed, trained = _trained(problem, method, runs)
        return np.asarray(observed.aG), trained.diverged.astype(float)

    found = jumps(bracket_of(problem, method), len(cells), method.sections, train)
    return found._asdict(), [
        DIVERGED if step != NEVER else OK if np.isfinite(low) else NOT_CONVERGED
        for step, low in zip(found.diverged, found.low, strict=True)
    ]


# F(aG) is given at these parts of the P that was sampled.
AROUND = (0.97, 0.985, 1.0, 1.015, 1.03)


def _ladder(problem: Problem, method: Ladder, cells: list[Cell]) -> tuple[dict[str, Any], list[str]]:
    from copyhead.experiment import umbrella
    from copyhead.experiment.hamiltonian import HamiltonianSettings
    from copyhead.study.sampling import data_for

    settings = HamiltonianSettings(warmup=method.warmup, draws=method.draws, losses=False)
    rows = []
    for cell in cells:
        sampled, expected = problem.replace(sequences=cell.sequences), cell.seed == EXPECTED
        seed = 0 if expected else cell.seed
        trace, rung = umbrella.climb(sampled, data_for(sampled, seed, expected), method.repeats, settings, seed)
        parts = umbrella.repeats(trace, rung, 0)
        one = umbrella.free_energy(trace, rung, sampled, _whole(cell), 0, parts)
        curves = umbrella.around(parts, rung, sampled, AROUND)
        rows.append({
            "P_star": one.P_star.mean,
            "P_star_error": one.P_star.error,
            "log_ratio": one.log_ratio.mean,
            "log_ratio_error": one.log_ratio.error,
            "height_below": one.heights[0].mean,
            "height_below_error": one.heights[0].error,
            "height_above": one.heights[1].mean,
            "height_above_error": one.heights[1].error,
            "exchange": one.exchange,
            "ladder": one.status,
            "free_energy": [curve.mean for curve in curves],
            "free_energy_error": [curve.error for curve in curves],
            "bin_aG": curves[0].center,
        })  # fmt: skip
    bins = max(len(row["bin_aG"]) for row in rows)
    for row in rows:  # each data set has windows of its own
        for name in ("free_energy", "free_energy_error", "bin_aG"):
            short = np.asarray(row[name], float)
            room = [(0, 0)] * (short.ndim - 1) + [(0, bins - short.shape[-1])]
            row[name] = np.pad(short, room, constant_values=np.nan)
    values: dict[str, Any] = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    values["ladder"] = values["ladder"].astype(object)
    return values, [OK if row["ladder"] == umbrella.GOOD else NOT_CONVERGED for row in rows]


_METHODS: dict[str, Callable[[Problem, Any, list[Cell]], tuple[dict[str, Any], list[str]]]] = {
    "theory": _theory,
    "exact": _exact,
    "adam": _adam,
    "sgld": _langevin,
    "jump": _jump,
    "ladder": _ladder,
}


def _whole(cell: Cell) -> int:
    assert cell.sequences is not None
    return round(cell.sequences)


def _runs(problem: Problem, cells: list[Cell]) -> list[Any]:
    return [(_whole(cell), cell.seed, cell.start, problem.chi) for cell in cells]


def _fresh(problem: Problem) -> int:
    from copyhead.study.exact import FRESH_CONTENT, FRESH_SEQUENCES

    return FRESH_CONTENT if problem.content else FRESH_SEQUENCES


def _turned(observed: dict[str, Any], problem: Problem, draws: bool = False) -> dict[str, Any]:
    """In the sector of positive tr W, as `branch.signed`."""
    from copyhead.study.branch import signed

    dims = ("cell", "draw") if draws else ("cell",)
    found = xr.Dataset(
        {name: ((*dims, *(f"axis of {name}" for _ in range(np.ndim(v) - len(dims)))), v) for name, v in observed.items()}
    )
    turned = signed(found, problem.attention)
    return {name: turned[name].values for name in observed}
