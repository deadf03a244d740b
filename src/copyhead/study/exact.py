"""Theory without the equivalent-kernel approximation: the minimum of S over all logits on the very data sets of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from copyhead.model.network import Start
from copyhead.problem import Problem

if TYPE_CHECKING:
    from copyhead.theory.transition import Minimum

# Fresh sequences that losses are measured on where attention reads them: as many as a step through them allows.
FRESH_CONTENT = 2048
# And where they are measured through moments, at equal cost for any number.
FRESH_SEQUENCES = 4096
# G = 0 is stationary at any P in linear attention: a search starts beside it, or a saddle would pass for a minimum.
BESIDE_ZERO = 0.01


def exact_minima(problem: Problem, sequences: list[int], seeds: list[int], starts: tuple[Start, ...]) -> xr.Dataset:
    """The minimum of S over all logits (or blocks of logits) on each data set.

    Started from the population minimum of the branch that each start of a training run belongs to.
    """
    from copyhead.experiment.cells import data_sets
    from copyhead.experiment.observables import axes
    from copyhead.study.branch import branch_state
    from copyhead.theory.solution import solve

    found = solve(problem, reach=sequences)
    minimum = _minimum_of(problem)
    known: dict[str, np.ndarray] = {}
    for column, seed in enumerate(seeds):
        for row, data in enumerate(data_sets(problem, sequences, seed)):
            solved: list[tuple[Minimum, dict[str, Any]]] = []
            for layer, start in enumerate(starts):
                state = branch_state(found, sequences[row], start)
                observed = next((values for other, values in solved if other.action == state.action), None)
                if observed is None:
                    values, gradient, converged = minimum(data, state)
                    hidden = 1.0 if converged else np.nan
                    observed = {name: hidden * np.asarray(value, float) for name, value in values.items()}
                    observed["gradient"] = np.asarray(gradient)
                    solved.append((state, observed))
                for name, value in observed.items():
                    shape = len(sequences), len(seeds), len(starts), *value.shape
                    known.setdefault(name, np.full(shape, np.nan))[row, column, layer] = value
    dims, own = ("P", "seed", "start"), axes(problem)
    coords = {"P": sequences, "seed": seeds, "start": list(starts), **dict(own.values())}
    named = {name: ((*dims, own[name][0]) if name in own else dims, values) for name, values in known.items()}
    return xr.Dataset(named, coords=coords)


def _minimum_of(problem: Problem) -> Callable[..., tuple[dict[str, Any], float, bool]]:
    if problem.beyond:
        return _beyond(problem)
    return _with_tokens(problem) if problem.content else _positional(problem)


def _beyond(problem: Problem) -> Callable[..., tuple[dict[str, Any], float, bool]]:
    from copyhead.model import moments, targets, tokens
    from copyhead.theory.own_data import minimise, read
    from copyhead.theory.unreduced import expanded, unreduced_task

    population = moments.expected_of(tokens.law(problem), problem.length, problem.cyclic)
    lags = [targets.shift(problem.length, lag, problem.cyclic) for lag in problem.lags or {}]
    shifts = np.array(lags).reshape(-1, problem.length, problem.length)

    def minimum(data: np.ndarray, state: Minimum) -> tuple[dict[str, Any], float, bool]:
        assert state.logits is not None
        start = expanded(state.logits, problem)
        if problem.attention == "linear":  # G = 0 is stationary at any P, and so is a head that does nothing
            start = start + BESIDE_ZERO * np.random.default_rng(0).normal(size=start.shape)
        task = unreduced_task(problem, moments.empirical(data, problem.vocab))
        found = minimise(task, start, problem.attention, population, shifts)
        return read(found, problem), found.gradient, found.converged

    return minimum


def _positional(problem: Problem) -> Callable[..., tuple[dict[str, float], float, bool]]:
    from copyhead.model import moments, tokens
    from copyhead.theory.action import full_task
    from copyhead.theory.full_matrix import measure, minimise
    from copyhead.theory.order_parameters import lift

    population = moments.population(tokens.uniform(problem.vocab))

    def minimum(data: np.ndarray, branch: Minimum) -> tuple[dict[str, float], float, bool]:
        state: Any = branch.order_parameters
        task = full_task(problem, moments.empirical(data, problem.vocab))
        place = np.array([state.c1, state.cG], float)
        place = place if np.hypot(*place) > 1e-3 else np.full(2, BESIDE_ZERO)
        found = minimise(task, np.asarray(lift(place, task.target)), problem.attention)
        observed = measure(found.logits, task, population, problem.attention)
        return observed._asdict(), found.gradient, found.converged

    return minimum


def _with_tokens(problem: Problem) -> Callable[..., tuple[dict[str, float], float, bool]]:
    from copyhead.experiment.observables import ATTENTION_SEQUENCES
    from copyhead.model import tokens
    from copyhead.theory.full_network import measure_network, minimise_network, symmetric

    fresh = tokens.sample(tokens.stream(0, "fresh"), FRESH_CONTENT, problem.length, tokens.uniform(problem.vocab))

    def minimum(data: np.ndarray, branch: Minimum) -> tuple[dict[str, float], float, bool]:
        state: Any = branch.order_parameters
        if np.hypot(float(state.c1), float(state.cG)) < 1e-3:
            state = state._replace(c1=BESIDE_ZERO, cG=BESIDE_ZERO)
        found = minimise_network(problem, data, symmetric(state, problem))
        observed, error = measure_network(found.blocks, problem, fresh, ATTENTION_SEQUENCES)
        return {**observed._asdict(), "loss_error": error}, found.gradient, found.converged

    return minimum
