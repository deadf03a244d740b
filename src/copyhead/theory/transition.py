"""Verdicts: all minima of the reduced action against P, and the order and the place of each transition.

First-order: two minima coexist; P* is where their actions are equal (Maxwell point), and the window lies between the two
folds (spinodals). Second-order: a minimum loses stability at a pitchfork and a new one grows from it. Crossover: one
minimum throughout, its place being where d cG / d ln P has an interior maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from copyhead.model.targets import operator
from copyhead.problem import Attention, Problem
from copyhead.theory import scalar
from copyhead.theory.action import CopyTask, at, copy_task
from copyhead.theory.continuation import Segment, follow, minimum_on, segments, switch
from copyhead.theory.leading_order import cost_ratio, leading_order
from copyhead.theory.order_parameters import AnyOrderParameters, OrderParameters, order_parameters
from copyhead.theory.order_parameters import lift as lift_copy
from copyhead.theory.posterior import Task
from copyhead.theory.saddle_point import QUICK_COMPILATION, Point, System
from copyhead.theory.search import search_disconnected
from copyhead.theory.symmetric import Parts, SymmetricTask, at_sequences, lags_by_class, lift, parts

Kind = Literal["first-order", "second-order", "crossover"]
Verdict = Literal["first-order", "second-order", "crossover", "undetermined"]


class Transition(NamedTuple):
    """One transition. P: its place. window: P of the two folds (None unless first-order).

    before, after: the global minimum on either side; equal for second-order and crossover.
    """

    kind: Kind
    P: float
    window: tuple[float, float] | None
    before: AnyOrderParameters
    after: AnyOrderParameters

    @property
    def pools(self) -> bool:
        """Whether it begins to pool, from zero attention, as linear attention does, be it by a pitchfork or in a jump."""
        return self.kind == "second-order" or float(self.before.aG) == 0


class Minimum(NamedTuple):
    """A minimum of the action at one P. lowest: lowest Hessian eigenvalue in whitened coordinates, one for the bare prior.

    Beyond the paper's task. rows: cG of the leading head by position, None where a position is not scored. heads: cG by head,
    in falling order of aG. classes: mean attention of the leading head on each class of entries.
    logits: in the layout of the task; None where attention reads the tokens.
    """

    order_parameters: AnyOrderParameters
    action: float
    metastable: bool
    lowest: float
    rows: tuple[float | None, ...] = ()
    heads: tuple[float, ...] = ()
    classes: tuple[float, ...] = ()
    logits: Float[np.ndarray, "H R K"] | None = None


def described(
    logits: Float[np.ndarray, "H R K"],
    found: Parts,
    task: SymmetricTask,
    kind: Attention,
    action: float,
    metastable: bool,
    lowest: float,
) -> Minimum:
    """A minimum beyond the paper's task, from its logits in the layout of the task and what is read off them."""
    order = np.argsort(-np.asarray(found.aG), kind="stable")
    first = order[0]
    c1, cG, a1, aG = (float(np.asarray(part)[first]) for part in (found.c1, found.cG, found.a1, found.aG))
    state = OrderParameters(c1, cG, a1, aG, float(found.loss))
    rows = np.asarray(found.rows)[first] if task.class_of is None else np.repeat(cG, len(task.row))
    positions = tuple(float(rows[row]) if row >= 0 else None for row in np.asarray(task.row))
    by_head = tuple(float(value) for value in np.asarray(found.cG)[order])
    by_class = tuple(float(value) for value in np.asarray(found.classes)[first])
    return Minimum(state, action, metastable, lowest, positions, by_head, by_class, logits)


def attention_by_lag(problem: Problem, minimum: Minimum) -> dict[str, float]:
    """Mean attention of the leading head on one position of each lag of the target."""
    found = {lag: minimum.classes[k] for k, some in enumerate(lags_by_class(problem)) for lag in some}
    return {str(lag): found[lag] for lag in sorted(found)}


def numbers(minimum: Minimum, problem: Problem) -> dict[str, float]:
    """All that a minimum says, by name: its order parameters, and beyond the paper's task those by row, head and lag.

    rows[a]: cG at position a, for rows that may attend to 2, 4, 8, ... positions and for the last. heads[i], lags[k]: where
    there are several.
    """
    found = {name: float(value) for name, value in minimum.order_parameters._asdict().items()}
    if problem.causal:
        found |= {f"rows[{a}]": float(minimum.rows[a] or 0) for a in shown_rows(minimum.rows)}
    if problem.heads > 1:
        found |= {f"heads[{index}]": value for index, value in enumerate(minimum.heads)}
    if problem.lags is not None and len(problem.lags) > 1:
        found |= {f"lags[{lag}]": value for lag, value in attention_by_lag(problem, minimum).items()}
    return found


def shown_rows(rows: tuple[float | None, ...]) -> list[int]:
    """Positions that may attend to a power of two of positions, and the last one, if they are scored."""
    last = len(rows) - 1
    return [a for a in range(last + 1) if rows[a] is not None and shown_length(a + 1, last + 1)]


def shown_length(n: int, longest: int) -> bool:
    """Whether a row of n positions is one of those that are printed and compared: powers of two, and the longest."""
    return n & (n - 1) == 0 or n == longest


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _observe(coordinates: np.ndarray, task: CopyTask, sequences: float, kind: Attention) -> AnyOrderParameters:
    return order_parameters(coordinates, at(task, sequences), kind)


# Branches that are followed from pitchforks. A chain of two is known (heads of linear attention); one of more is cut.
MOST_GROWN = 8


def search_range(problem: Problem) -> tuple[float, float]:
    """Range of P that holds every transition: beyond all scales of the action."""
    scales = leading_order(problem)
    weights = list((problem.lags or {}).values()) or operator(problem)
    size = np.max(np.abs(weights))  # S depends on P times the square of T
    return min(scales) * cost_ratio(problem) / 100 / size**2, max(scales) * 50 / size**2


@dataclass(frozen=True)
class Phases:
    """Every minimum of the reduced action over a range of P, and what follows from them.

    segments: the minima, each a curve in P. lower, upper: the range of ln P. complete: whether every branch was followed
    to its end, and there is a minimum at every P.
    """

    system: System
    segments: tuple[Segment, ...]
    lower: float
    upper: float
    complete: bool

    def observe(self, point: Point) -> AnyOrderParameters:
        """Order parameters and loss of a point, as floats."""
        with jax.enable_x64(True):
            values = _observe(self.system.coordinates(point.z), self.system.task, np.exp(point.log_p), self.system.kind)
            return type(values)(*(float(value) for value in values))

    def points(self, log_p: float) -> list[tuple[Segment, Point]]:
        """The minima at P = exp(log_p), lowest action first."""
        found = [(segment, minimum_on(self.system, segment, log_p)) for segment in self.segments]
        return sorted(((s, p) for s, p in found if p is not None), key=lambda pair: pair[1].action)

    def minima(self, sequences: float) -> list[Minimum]:
        """Every minimum at P, the global one first.

        Raises:
            ValueError: if P is outside the range that was searched.
        """
        log_p = math.log(sequences)
        if not self.lower <= log_p <= self.upper:
            raise ValueError(
                f"sequences = {sequences:g}: must be within the searched range "
                f"{math.exp(self.lower):.3g} .. {math.exp(self.upper):.3g}"
            )
        return [self._minimum(point, index > 0) for index, (_, point) in enumerate(self.points(log_p))]

    def _minimum(self, point: Point, metastable: bool) -> Minimum:
        task, kind = self.system.task, self.system.kind
        if not isinstance(task, SymmetricTask):
            found = Minimum(self.observe(point), point.action, metastable, point.lowest)
            if not isinstance(task, Task):
                return found
            with jax.enable_x64(True):
                return found._replace(logits=np.asarray(lift_copy(self.system.coordinates(point.z), task.target))[None])
        with jax.enable_x64(True):
            logits = lift(self.system.coordinates(point.z), task, kind)
            found = Parts(*map(np.asarray, parts(logits, at_sequences(task, np.exp(point.log_p)), kind)))
        return described(np.asarray(logits), found, task, kind, point.action, metastable, point.lowest)

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """All transitions of the global minimum, in order of P."""
        found = [*self._first_order(), *self._second_order()]
        # Pooling of linear attention may be a jump and copying still a crossover, at a larger P.
        last_jump = max((transition.P for transition in found if transition.kind == "first-order"), default=0.0)
        found += [crossover for crossover in self._crossover() if last_jump < crossover.P]
        return tuple(sorted(found, key=lambda transition: transition.P))

    @property
    def verdict(self) -> Verdict:
        """The strongest transition: first-order before second-order before crossover."""
        kinds = {transition.kind for transition in self.transitions}
        order: tuple[Kind, ...] = ("first-order", "second-order", "crossover")
        found: list[Verdict] = [kind for kind in order if kind in kinds]
        if not self.complete:
            return "undetermined"
        # One minimum of softmax throughout is a crossover also where cG has no steepest place inside the range.
        alone = self.system.kind == "softmax" and len(self.segments) == 1
        return found[0] if found else "crossover" if alone else "undetermined"

    def _global(self, log_p: float) -> Segment:
        return self.points(log_p)[0][0]

    def _first_order(self) -> list[Transition]:
        found = []
        for first, second in product(self.segments, repeat=2):
            lower, upper = max(first.lower, second.lower), min(first.upper, second.upper)
            if first is second or first.lower >= second.lower or lower >= upper:
                continue

            def difference(log_p: float, first: Segment = first, second: Segment = second) -> float:
                ends = (minimum_on(self.system, segment, log_p) for segment in (first, second))
                before, after = (math.nan if point is None else point.action for point in ends)
                return before - after

            if difference(lower) * difference(upper) >= 0:
                continue
            log_p = scalar.root(difference, lower, upper)
            lowest = [segment for segment, _ in self.points(log_p)[:2]]
            if first in lowest and second in lowest:
                before, after = (minimum_on(self.system, segment, log_p) for segment in (first, second))
                window = (math.exp(lower), math.exp(upper))
                if before is None or after is None:
                    continue
                found.append(Transition("first-order", math.exp(log_p), window, self.observe(before), self.observe(after)))
        return found

    def _second_order(self) -> list[Transition]:
        found = []
        for segment in self.segments:
            event = segment.end
            if event is None or event.kind != "pitchfork":
                continue
            grown = [s for s in self.segments if s.start is not None and s.start is event]
            if grown and self._global(event.point.log_p + 1e-9) in (*grown, segment):
                state = self.observe(event.point)
                found.append(Transition("second-order", math.exp(event.point.log_p), None, state, state))
        return found

    def _crossover(self) -> list[Transition]:
        """The steepest interior maximum of d cG / d ln P on a segment that is the global minimum there."""
        best: tuple[float, Point] | None = None
        for segment in self.segments:
            log_ps, slopes = _slopes(self.system, segment)
            peaks = np.flatnonzero((slopes[1:-1] > slopes[:-2]) & (slopes[1:-1] >= slopes[2:])) + 1
            # Next to a pitchfork cG grows like a square root, so its slope falls from infinity: no maximum is sought there.
            grown = segment.start is not None and segment.start.kind == "pitchfork"
            first = segment.points[min(2, len(segment.points) - 1)].log_p if grown else -math.inf
            for peak in peaks:
                bounds = log_ps[peak - 1], log_ps[peak + 1]
                if bounds[0] < first:
                    continue

                def falling(log_p: float, segment: Segment = segment) -> float:
                    point = minimum_on(self.system, segment, log_p)
                    return math.inf if point is None else -self.system.slope(point)

                point = minimum_on(self.system, segment, scalar.minimum(falling, *bounds))
                if point is None or self._global(point.log_p) is not segment:
                    continue
                if best is None or self.system.slope(point) > best[0]:
                    best = self.system.slope(point), point
        if best is None:
            return []
        state = self.observe(best[1])
        return [Transition("crossover", math.exp(best[1].log_p), None, state, state)]


def _slopes(system: System, segment: Segment) -> tuple[np.ndarray, np.ndarray]:
    """ln P and d cG / d ln P along a segment, four values a step from the cubic Hermite curve through its points."""
    log_ps, slopes = [], []
    for left, right in pairwise(segment.points):
        chord = right.vector - left.vector
        length = np.linalg.norm(chord)
        # tangents point along the branch, which a segment in order of growing P may run against
        ends = [point.tangent * np.sign(point.tangent @ chord) * length for point in (left, right)]
        for t in (0.125, 0.375, 0.625, 0.875):
            velocity = 6 * t * (1 - t) * chord + (1 - t) * (1 - 3 * t) * ends[0] + t * (3 * t - 2) * ends[1]
            position = t * t * (3 - 2 * t) * chord + t * (1 - t) ** 2 * ends[0] - t * t * (1 - t) * ends[1]
            log_ps.append(left.log_p + position[-1])
            slopes.append(system.order @ system.coordinates(velocity[:-1]) / velocity[-1])
    return np.array(log_ps), np.array(slopes)


def phases(problem: Problem, task: CopyTask | None = None, reach: Iterable[float] = ()) -> Phases:
    """Finds every minimum over the range of P that holds the transitions.

    The minimum that exists at P -> 0 is followed through its folds; at each pitchfork the new branch is followed too.
    Then Newton from a grid of starts, at several P, looks for minima on branches that are not connected to these.

    Args:
        problem: its `sequences`, if given, only widens the range of P.
        task: other moments on the symmetric subspace, such as those of one data set; default: the population.
        reach: values of P that the range must hold.
    """
    system = System.of(copy_task(problem) if task is None else task, problem.attention)
    wanted = [*search_range(problem), *reach, *([] if problem.sequences is None else [problem.sequences])]
    lower, upper = math.log(min(wanted)), math.log(max(wanted))
    first = system.at_fixed_p(np.zeros((1, system.dimension)), lower)[0]
    branches = [follow(system, first, lower, upper)]
    pieces = segments(branches[0])
    for branch in branches:  # grows: a branch that leaves a pitchfork may have one of its own
        for event in branch.events:
            if event.kind == "pitchfork" and len(branches) <= MOST_GROWN:
                grown = switch(system, event, lower, upper)
                if grown is not None:
                    branches.append(grown)
                    pieces += segments(grown, event)
    search_disconnected(system, branches, pieces, lower, upper)
    complete = first.converged and all(branch.complete for branch in branches)
    return Phases(system, tuple(pieces), lower, upper, complete and _covered(pieces, lower, upper))


def _covered(pieces: list[Segment], lower: float, upper: float) -> bool:
    """Whether there is a minimum at every P of the range, as there must be: S is bounded below and grows with G."""
    reached = lower
    for piece in sorted(pieces, key=lambda piece: piece.lower):
        if piece.lower > reached + 1e-6:
            return False
        reached = max(reached, piece.upper)
    return reached >= upper - 1e-9
