"""Minima of the recall task against P: empty, pooling and induction branches, folds, equal action, where training leaves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float

from copyhead.induction import Induction
from copyhead.record import ProblemError
from copyhead.theory.continuation import Branch, Segment, follow, minimum_on, segments, switch
from copyhead.theory.recall import Attended, Recall, RecallData, Weights, recall_task
from copyhead.theory.recipe import RecipeTask
from copyhead.theory.saddle_point import QUICK_COMPILATION, Point, System
from copyhead.theory.search import both_ways, is_known
from copyhead.theory.transition import Minimum, Phases, Transition

# The range of P, in units of `onset`, holds the folds of the induction branch (at 0.3 to 0.7 for L = 6 .. 32) and goes on far
# above those of all others.
BELOW, ABOVE = 0.05, 15.0
# P, in units of `onset`, at which all starts are tried.
PLACES = (0.6, 1.3, 3.0, 12.0)
# |w| below which nothing is attended to: the root of rounding, as for any place of a minimum.
NOTHING = 1e-6
# A copy head is there if the previous-token score is this many times that of uniform attention.
FORMED = 2.0
# Longest sequence: an evaluation of the Hessian takes (L^2 / 2)^2 numbers.
LONGEST = 40
# Beyond a fold: ln P, and the step along the direction that the Hessian loses, from which the descent starts.
BEYOND, NUDGE = 0.02, 0.1


class RecallParameters(NamedTuple):
    """beta, w, u; previous: mean attention of layer 1 to the previous token; induction: of layer 2 to the target.

    loss: per sequence.
    """

    beta: float
    w: float
    u: float
    previous: float
    induction: float
    loss: float


class Escape(NamedTuple):
    """The end of a branch without a copy head in growing P. leads: the branch that a descent from there ends on."""

    branch: str
    P: float
    leads: str


def uniform_score(length: int) -> float:
    """Previous-token score of uniform causal attention, the mean of 1 / (a + 1) over a = 1 .. L - 1."""
    return float(np.mean(1 / (np.arange(1, length) + 1)))


def branch_name(state: RecallParameters, length: int) -> str:
    """Which branch a state is on.

    With a copy head in layer 1: induction (beta > 0) or anti-induction. Without: empty (w = 0), pooling (w > 0: positions that
    may hold the target) or anti-pooling (w < 0: all others, subtracted).
    """
    if state.previous > FORMED * uniform_score(length):
        return "induction" if state.beta > 0 else "anti-induction"
    if abs(state.w) < NOTHING:
        return "empty"
    return "pooling" if state.w > 0 else "anti-pooling"


def onset(problem: Induction) -> float:
    """P_c at which the empty state of L = V loses stability; for L < V, where it is never exactly empty, a scale.

    To second order around uniform attention S couples w to a linear form l of C2 and beta; eliminating them leaves
    w^2 / 2 [p Q + (V - 1) / g_O - p^2 Lambda], p = P / kappa, Q = E |o|^2 - 1/V = (L + 2) / L^2 - 1/V at uniform o,
    Lambda = g_W1 |l_C2|^2 + g_W2 l_beta^2 / (V - 1), which is zero at P_c (docs/induction.md).
    """
    length, vocab = problem.length, problem.vocab
    onto = np.zeros(length)
    onto[1:-1] = 1 / (length - 2)
    positions = (onto - 1 / length) / length
    j = np.arange(length - 2)
    tail = np.cumsum(1 / np.arange(length, 0, -1))[::-1][j]  # sum of 1 / (k + 1) over k >= j
    match = np.mean((1 / (j + 2) - (tail + 1 / length) / length) / length)
    coupling = problem.position_variance * positions @ positions + problem.match_variance * match**2 / (vocab - 1)
    square, stiffness = (length + 2) / length**2 - 1 / vocab, (vocab - 1) / problem.output_variance
    return float(problem.kappa * (square + math.sqrt(square**2 + 4 * coupling * stiffness)) / (2 * coupling))


class Seen(NamedTuple):
    """A point of the recall task with all that its weights do."""

    weights: Weights
    attended: Attended
    loss: Float[np.ndarray, ""]


@partial(jax.jit, static_argnames="recipe", compiler_options=QUICK_COMPILATION)
def _see(coordinates: Float[Array, "d"], data: RecallData, recipe: Recall) -> Seen:
    weights = recipe.weights(coordinates)
    return Seen(weights, recipe.attention(weights), recipe.loss(coordinates, data))


@dataclass(frozen=True)
class RecallPhases(Phases):
    """Every minimum that was found over a range of P; see `Phases`."""

    @property
    def length(self) -> int:
        recipe = self.system.kind
        assert isinstance(recipe, Recall)
        return recipe.length

    def seen(self, point: Point) -> Seen:
        """Weights, attention of both layers and loss of a point, in float64."""
        assert isinstance(self.system.kind, Recall)
        assert isinstance(self.system.task, RecipeTask)
        with jax.enable_x64(True):
            found = _see(self.system.coordinates(point.z), self.system.task.data, self.system.kind)
            return jax.tree.map(np.asarray, found)

    # The order parameters of two layers are others than those of one.
    def observe(self, point: Point) -> RecallParameters:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Order parameters and loss of a point."""
        weights, attended, loss = self.seen(point)
        j = np.arange(self.length - 2)
        previous, hit = np.mean(np.diagonal(attended.first, -1)), np.mean(attended.second[j, j + 1])
        values = (weights.beta, weights.w, weights.u, previous, hit, loss)
        return RecallParameters(*(float(value) for value in values))

    def name(self, point: Point) -> str:
        """Branch of a point."""
        return branch_name(self.observe(point), self.length)

    def _minimum(self, point: Point, metastable: bool) -> Minimum:
        return Minimum(self.observe(point), point.action, metastable, point.lowest)

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """Where the global minimum jumps, in order of P."""
        return tuple(sorted(self._first_order(), key=lambda transition: transition.P))

    @cached_property
    def escapes(self) -> tuple[Escape, ...]:
        """Where branches without a copy head end in growing P, and where a descent from just beyond ends."""
        found = []
        for piece in self.segments:
            event = piece.end
            if event is None or event.kind != "fold":
                continue
            name = self.name(piece.points[-1])
            if name not in ("induction", "anti-induction"):
                found.append(Escape(name, math.exp(piece.upper), self._leads(event.point, piece.upper + BEYOND)))
        return tuple(sorted(found, key=lambda escape: escape.P))

    def _leads(self, fold: Point, log_p: float) -> str:
        """Branches that descents from either side of a fold end on."""
        begin = (fold.z + side * NUDGE * fold.soft for side in (1, -1))
        (points,) = zip(*(self.system.at_fixed_p(self.system.descend(z, log_p)[None], log_p) for z in begin), strict=True)
        reached = {self.name(point) for point in points if point.converged and point.lowest > 0}
        return " or ".join(sorted(reached)) or "unknown"


def _starts(recipe: Recall) -> Float[np.ndarray, "n d"]:
    """Copying layer 1 with either sign of match and output, and positions weighted for or against being a target."""
    length = recipe.length
    copying = np.zeros((length, length))
    copying[np.arange(1, length), np.arange(length - 1)] = 4.0
    nothing, none = np.zeros((length, length)), np.zeros(length)
    may_be = np.zeros(length)
    may_be[1:-1] = 1.0
    chosen = [
        Weights(copying, none, 3.0, 2.0, 1.0),
        Weights(copying, none, -4.0, -5.0, 1.0),
        Weights(nothing, 0.3 * may_be, 0.1, 0.3, 1.0),
        Weights(nothing, -0.3 * may_be, -0.1, -0.3, 1.0),
    ]
    return np.stack([recipe.coordinates(one) for one in chosen])


def recall_phases(problem: Induction, reach: Iterable[float] = ()) -> RecallPhases:
    """Finds the minima of the recall task over a range of P.

    The minimum of P -> 0 is followed as far as it is one; so are the branches that leave it where it ends at L = V, and those
    that descents from induction, anti-induction and pooling starts find at several P. Branches are followed while they are
    minima, so that a minimum which only an unstable piece leads to may be missing.

    Args:
        reach: values of P that the range must hold.

    Raises:
        ProblemError: for another task, and for sequences too long.
    """
    if problem.task != "recall":
        raise ProblemError(f"task = {problem.task!r}: must be recall; the population loss of next-token is no finite sum")
    if problem.length > LONGEST:
        raise ProblemError(f"length = {problem.length}: must be <= {LONGEST} for the theory of recall")
    recipe, scale = Recall(problem.length), onset(problem)
    system = System.of(recall_task(problem), recipe)
    wanted = [BELOW * scale, ABOVE * scale, *reach]
    lower, upper = math.log(min(wanted)), math.log(max(wanted))
    first = system.at_fixed_p(np.zeros((1, system.dimension)), lower)[0]
    branches = [follow(system, first, lower, upper, stable=True)]
    pieces = segments(branches[0])
    for event in branches[0].events:
        for sign in (1, -1) if event.kind == "pitchfork" else ():
            grown = switch(system, event, lower, upper, sign, stable=True)
            if grown is not None and grown.points[1].lowest > 0:
                branches.append(grown)
                pieces += segments(grown, event)
    begin = np.linalg.solve(system.whitening, _starts(recipe).T).T
    for log_p in (math.log(scale * place) for place in sorted(PLACES, reverse=True)):
        _search(system, begin, log_p, branches, pieces, lower, upper)
    complete = first.converged and all(branch.complete for branch in branches)
    return RecallPhases(system, tuple(pieces), lower, upper, complete)


def _search(
    system: System,
    begin: Float[np.ndarray, "n d"],
    log_p: float,
    branches: list[Branch],
    pieces: list[Segment],
    lower: float,
    upper: float,
) -> None:
    """Adds the minima that descents find at one P and that no piece explains."""
    known = [other.z for piece in pieces if (other := minimum_on(system, piece, log_p)) is not None]
    for start in begin:
        place = system.descend(start, log_p)
        if is_known(place, known, (1,), 1e-2):
            continue
        (point,) = system.at_fixed_p(place[None], log_p)
        if not point.converged or point.lowest <= 0 or is_known(point.z, known, (1,)):
            continue
        pieces += both_ways(system, point, branches, lower, upper, stable=True)
        known.append(point.z)
