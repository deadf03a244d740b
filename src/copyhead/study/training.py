"""Training time: the gradient flow of the theory beside gradient descent step by step, on population moments and on data sets.

Gradient descent and flow share the time tau = eta * step. Adam has its own step size in every direction, so its steps are shown
for comparison only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from copyhead.experiment import recorded
from copyhead.experiment.adam import AdamSettings
from copyhead.experiment.cells import data_sets
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.recorded import DescentSettings, Recorded
from copyhead.model import moments, network, targets, tokens
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Positional, Start
from copyhead.problem import Problem, ProblemError
from copyhead.study.memory import refuse_too_large
from copyhead.study.training_record import (
    COMPARED,
    MOST_STEPS,
    RECORDS,
    Curves,
    Line,
    Place,
    Sweep,
    Training,
    TrainingSettings,
    of_jumps,
)
from copyhead.theory import flow
from copyhead.theory.flow import Levels, Passage, State, Trajectory
from copyhead.theory.transition import Phases, phases

# Learning rate by default: this part of the largest stable one, and of the time of the fastest growth. The error of a curve is
# of first order in eta; with these it stays below 2%.
OF_LIMIT, OF_GROWTH = 0.1, 0.01
# Time that is trained for, in times of the jump of the theory; data sets of late jumps need more than one.
BEYOND = 2.5
# Time trained for where the theory has no jump, in units of the slower decay by the prior.
WAIT = 20.0
ADAM = AdamSettings(4000, 0.03)
# Default P: factors of the two folds, and of the place of the last transition if it is continuous.
BELOW, ABOVE, AROUND = (0.7, 0.9), (1.03, 1.08, 1.2, 1.4, 1.7, 2.2), (0.6, 0.8, 1.05, 1.3, 1.7, 2.3)
# Points of the theory against P, from this distance to the fold, relative.
POINTS, NEAR = 24, 3e-3
DISTANCES = np.geomspace(1e-1, 1e-4, 13)
SCALES = (1e-4, 1e-3, 1e-2, 0.05, 0.2)
FRACTIONS = (0.02, 0.05, 0.1, 0.2, 0.4)


def check(problem: Problem, settings: TrainingSettings) -> None:
    """What can be said before anything is solved.

    Raises:
        ProblemError: for a problem that the theory does not cover, a P that is no integer, or data that need too much memory.
    """
    flow.task_of(problem.replace(sequences=problem.sequences or 1.0))
    given = [*(settings.grid or ()), *([] if problem.sequences is None else [problem.sequences])]
    for value in given:
        if value < 1 or value != round(value):
            raise ProblemError(f"sequences = {value:g}: must be an integer >= 1, since data sets are drawn")
    refuse_too_large(problem, Network(), max(given, default=0.0))


def grid_of(problem: Problem, settings: TrainingSettings, found: Phases) -> tuple[list[int], int]:
    """All P of a study in ascending order, and the main one."""
    jump = flow.jump_of(found)
    if jump is not None and jump.window is not None:
        lower, upper = jump.window
        default = [*(lower * factor for factor in BELOW), math.sqrt(lower * upper), *(upper * factor for factor in ABOVE)]
        main = 1.2 * upper
    else:
        place = found.transitions[-1].P if found.transitions else math.exp((found.lower + found.upper) / 2)
        default, main = [place * factor for factor in AROUND], 1.05 * place
    asked = list(settings.grid or ())
    if problem.sequences is not None:
        main = problem.sequences
    elif asked:
        main = min(asked, key=lambda value: abs(math.log(value / main)))
    chosen = asked or [max(1, round(value)) for value in default]
    return sorted({int(value) for value in (*chosen, round(main))}), max(1, round(main))


def stages(problem: Problem, settings: TrainingSettings) -> int:
    """At most as many times does `study` report."""
    count = len(settings.grid) if settings.grid else max(len(BELOW) + 1 + len(ABOVE), len(AROUND))
    return count + 3 + (problem.sequences is not None)


def study(
    problem: Problem, settings: TrainingSettings | None = None, report: Callable[[str], None] = lambda stage: None
) -> Training:
    """Training times at every P: by the theory, by gradient descent and by Adam.

    Above the upper fold training begins with small weights, below the lower one with a copy head: elsewhere it does not jump.

    Raises:
        ProblemError: see `check`; for a learning rate that is unstable, or too small.
    """
    begun, settings = time.perf_counter(), settings or TrainingSettings()
    check(problem, settings)
    found = phases(problem, reach=settings.grid or ())
    grid, main = grid_of(problem, settings, found)
    found = phases(problem, reach=grid) if max(grid) > math.exp(found.upper) else found
    jump = flow.jump_of(found)
    plans = []
    for place in grid:
        start: Start = "copy" if jump is not None and jump.window is not None and place < jump.window[0] else "small"
        plans.append(_plan(problem.replace(sequences=float(place)), start, settings, found))
    lines = _lines(problem, settings, found, grid)
    report("theory")
    places, kept = [], None
    chosen = plans[grid.index(main)]
    for plan in plans:
        one, curves = _place(plan, settings)
        places.append(one)
        if plan is chosen:
            kept = one, plan, curves
        report(f"P = {one.P}")
    assert kept is not None
    scales, rates = _sweeps(kept[1], settings)
    report("scale and learning rate")
    anywhere = problem.replace(sequences=float(main))
    slow = [flow.slowing(anywhere, start, DISTANCES, settings.scale, found) for start in ("small", "copy")]
    report("slowing down")
    seconds = time.perf_counter() - begun
    kept_slow = tuple(one for one in slow if one is not None)
    return Training(problem, settings, lines, tuple(places), kept[0], kept[2], scales, rates, kept_slow, seconds)


def _lines(problem: Problem, settings: TrainingSettings, found: Phases, grid: list[int]) -> tuple[Line, ...]:
    jump = flow.jump_of(found)
    wanted: list[tuple[Start, Float[np.ndarray, "n"]]] = []
    if jump is None or jump.window is None:
        wanted.append(("small", np.geomspace(grid[0], grid[-1], POINTS)))
    else:
        below, above = 1 - grid[0] / jump.window[0], grid[-1] / jump.window[1] - 1
        if below > NEAR:
            wanted.append(("copy", jump.window[0] * (1 - np.geomspace(NEAR, below, POINTS))))
        if above > NEAR:
            wanted.append(("small", jump.window[1] * (1 + np.geomspace(NEAR, above, POINTS))))
    lines = []
    for start, sequences in wanted:
        passages = []
        for value in sequences:
            here = problem.replace(sequences=float(value))
            begin = flow.initial(here, start, settings.scale)
            passages.append(flow.passage(here, begin, flow.levels(here, start, found)))
        lines.append(Line(start, sequences, *(np.array([getattr(one, key) for one in passages]) for key in Line._fields[2:])))
    return tuple(lines)


class _Plan(NamedTuple):
    """What is trained at one P, by the theory. begin: the symmetric start. duration: in tau."""

    problem: Problem
    start: Start
    levels: Levels
    begin: State
    theory: Passage
    duration: float
    rate: float
    limit: float
    steps: int


def _plan(problem: Problem, start: Start, settings: TrainingSettings, found: Phases) -> _Plan:
    """Flow, learning rate and number of steps.

    Raises:
        ProblemError: if the learning rate is unstable, or so small that the jump takes too many steps.
    """
    between, begin = flow.levels(problem, start, found), flow.initial(problem, start, settings.scale)
    theory = flow.passage(problem, begin, between)
    unit = max(problem.position_scale**2 * problem.logit_variance, problem.output_variance)
    duration = BEYOND * theory.time if theory.status == "jumped" else WAIT * unit
    limit, growth = flow.learning_rates(problem, flow.flow(problem, begin, np.linspace(0, duration, flow.LOOKS)))
    rate = settings.rate or min(OF_LIMIT * limit, OF_GROWTH / growth if growth else math.inf)
    at = f"at P = {problem.sequences:g}"
    if rate >= limit:
        raise ProblemError(f"rate = {rate:g}: must be below {limit:.4g} {at}, the stability limit 2 / (largest curvature of E)")
    steps = settings.steps or max(RECORDS - 1, math.ceil(duration / rate))
    if steps > MOST_STEPS:
        least = duration / MOST_STEPS
        raise ProblemError(
            f"rate = {rate:g}: must be at least {least:.2g} {at}, where the jump takes more than {MOST_STEPS} steps"
        )
    return _Plan(problem, start, between, begin, theory, duration, rate, limit, steps)


def _place(plan: _Plan, settings: TrainingSettings) -> tuple[Place, Curves]:
    problem, P = plan.problem, round(float(plan.problem.sequences or 0))
    seeds = list(range(settings.seeds))
    records = _records(plan.steps)
    population, expected, deviation = _population(plan, plan.begin, plan.rate, records)
    starts = _starts(plan, settings, seeds)
    data = PackedPath(problem).collect([data_sets(problem, [P], seed)[0] for seed in seeds])
    descended = recorded.train(problem, starts, data, DescentSettings(plan.rate), records)
    adam = recorded.train(problem, starts, data, ADAM, _records(ADAM.steps))
    begins = [flow.projected(problem, *(part[seed] for part in starts)) for seed in seeds]
    theory = [flow.passage(problem, begin, plan.levels, plateau=False).time for begin in begins]
    taken, steps = jump_times(descended, plan.levels) * plan.rate, jump_times(adam, plan.levels)
    paired, apart = of_jumps(np.array(theory)), of_jumps(taken - np.array(theory))
    place = Place(
        P,
        plan.start,
        plan.levels,
        plan.theory,
        plan.rate,
        plan.limit,
        plan.steps,
        float(jump_times(population, plan.levels)[0] * plan.rate),
        deviation,
        of_jumps(taken),
        paired,
        apart.mean / apart.error if apart.jumped == len(seeds) and apart.error > 0 else math.nan,
        of_jumps(steps),
    )
    return place, Curves(expected, population, descended, adam)


def _records(steps: int) -> Int[np.ndarray, "r"]:
    return np.round(np.linspace(0, steps, RECORDS)).astype(int)


def _starts(plan: _Plan, settings: TrainingSettings, seeds: list[int]) -> Positional:
    """Random small weights by seed, or copies of the copy head."""
    problem = plan.problem
    if plan.start == "small":
        return recorded.small_starts(problem, settings.scale, seeds)
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    return network.stacked([network.start(Network(), problem, target, "copy", seed) for seed in seeds])  # type: ignore[return-value]


def _population(
    plan: _Plan, begin: State, rate: float, records: Int[np.ndarray, "r"]
) -> tuple[Recorded, Trajectory, dict[str, float]]:
    """Gradient descent on population moments from a symmetric start, the flow at its records, and how far they are apart."""
    problem, vocab = plan.problem, plan.problem.vocab
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    scored = np.any(target != 0, axis=1, keepdims=True)  # the other rows stay zero
    logits = scored * (begin.c1 + begin.cG * target)
    output = begin.w_o * np.eye(vocab) + (begin.w_u - begin.w_o) / vocab
    expected = moments.expected(tokens.uniform(vocab), float(problem.sequences or 0), problem.length)
    data: Empirical = jax.tree.map(lambda leaf: np.asarray(leaf)[None], expected)
    weights = Positional(logits[None].astype(np.float32), output[None].astype(np.float32))
    seen = recorded.train(problem, weights, data, DescentSettings(rate), records)
    theory = flow.flow(problem, begin, rate * records)
    return seen, theory, deviations(seen, theory)


def deviations(seen: Recorded, theory: Trajectory) -> dict[str, float]:
    """Largest distance between two curves at equal times, over the range of the second; of the first cell."""
    found = {}
    for name in COMPARED:
        curve, expected = getattr(seen.observables, name)[0], getattr(theory, name)
        found[name] = float(np.max(np.abs(curve - expected)) / np.ptp(expected))
    return found


def jump_times(seen: Recorded, between: Levels) -> Float[np.ndarray, "cell"]:
    """Steps when |aG| first passes the level of the jump, linear between records; nan for cells that do not, or diverge."""
    rising = 1.0 if between.after > between.before else -1.0
    excess = rising * (np.abs(np.asarray(seen.observables.aG, float)) - between.middle)
    found = np.full(len(excess), np.nan)
    for cell, values in enumerate(excess):
        after = np.flatnonzero(values > 0)
        if seen.finite[cell] and after.size and after[0] > 0:
            index = after[0]
            part = values[index - 1] / (values[index - 1] - values[index])
            found[cell] = seen.step[index - 1] + part * (seen.step[index] - seen.step[index - 1])
    return found


def _sweeps(plan: _Plan, settings: TrainingSettings) -> tuple[Sweep, Sweep]:
    """Against the initial scale at the learning rate of the plan, and against the learning rate at its initial scale."""
    problem = plan.problem
    rows = []
    for scale in SCALES:
        begin = flow.initial(problem, "small", scale)
        time = flow.passage(problem, begin, plan.levels, plateau=False).time
        steps = math.ceil(max(plan.duration, (1.5 * time) if math.isfinite(time) else 0.0) / plan.rate)
        rows.append((scale, time, *_seen(plan, begin, plan.rate, steps)))
    by_rate = []
    for fraction in FRACTIONS:
        rate = fraction * plan.limit
        steps = max(RECORDS - 1, math.ceil(plan.duration / rate))
        by_rate.append((rate, plan.theory.time, *_seen(plan, plan.begin, rate, steps)))
    return Sweep(*np.array(rows).T), Sweep(*np.array(by_rate).T)


def _seen(plan: _Plan, begin: State, rate: float, steps: int) -> tuple[float, float]:
    """tau of the jump on population moments, and the largest deviation from the flow."""
    seen, _, deviation = _population(plan, begin, rate, _records(max(steps, RECORDS - 1)))
    return float(jump_times(seen, plan.levels)[0] * rate), max(deviation.values())
