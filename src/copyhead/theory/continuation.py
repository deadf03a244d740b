"""Branches of stationary points in P: through folds, to pitchforks and the branches that leave them; their stable pieces.

A branch is a curve of solutions of grad_z S = 0 in (z, u = ln P), followed by pseudo-arclength continuation: predictor along
the tangent, Newton corrector in the plane orthogonal to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from copyhead.theory import scalar
from copyhead.theory.action import row_entries
from copyhead.theory.saddle_point import Point, System

FIRST_STEP, SMALLEST_STEP = 0.05, 1e-7
# Cosine of the angle between successive tangents: below the first a step is taken again, above the second it may grow.
SHARPEST_TURN, STRAIGHT = 0.97, 0.995
# Newton may move a predicted point by this part of the step; a turn of SHARPEST_TURN moves it by half as much.
LARGEST_CORRECTION = 0.25
MAX_POINTS = 5000

EventKind = Literal["fold", "pitchfork"]


@dataclass(frozen=True, eq=False)
class Event:
    """A point of a branch where the lowest eigenvalue of the Hessian passes zero."""

    kind: EventKind
    point: Point


@dataclass(frozen=True, eq=False)
class Segment:
    """A maximal piece of a branch on which every point is a minimum, in order of growing P.

    start, end: the events that bound it; None where the piece goes on beyond the range of P that was searched.
    """

    points: tuple[Point, ...]
    start: Event | None
    end: Event | None

    @property
    def lower(self) -> float:
        """ln P where the minimum appears (or the search began)."""
        return self.points[0].log_p

    @property
    def upper(self) -> float:
        return self.points[-1].log_p


class Branch(NamedTuple):
    """Points along one curve of solutions, the events on it, and whether the search reached its end."""

    points: tuple[Point, ...]
    events: tuple[Event, ...]
    complete: bool


def follow(system: System, start: Point, lower: float, upper: float, stable: bool = False) -> Branch:
    """Follows a branch from `start` along its tangent until ln P leaves [lower, upper].

    If `stable`, only until it is no minimum.

    Near-misses count: where the tangent comes close to a fold between two points, the point closest to it is added, so
    that a pair of folds narrower than the step is not stepped over.
    """
    points, events, step = [start], [], FIRST_STEP
    while lower <= points[-1].log_p <= upper and len(points) < MAX_POINTS and step > SMALLEST_STEP:
        here = points[-1]
        there = system.advance(here, step)
        turn = here.tangent @ there.tangent
        far = np.linalg.norm(there.vector - here.vector - step * here.tangent) > LARGEST_CORRECTION * step
        if not there.converged or far or turn < SHARPEST_TURN:
            step /= 2
            continue
        if here.lowest > 0 and there.lowest > 0 and here.tangent[-1] * there.tangent[-1] < 0:
            break  # through a pitchfork into the mirror image of the branch just followed
        points.append(there)
        if stable and there.lowest <= 0:
            break
        if turn > STRAIGHT:
            step = min(1.5 * step, system.stride)
    points = _insert_near_folds(system, points)
    for here, there in pairwise(points):
        if (here.lowest > 0) != (there.lowest > 0):
            events.append(_locate(system, here, there))
    stuck = len(points) == MAX_POINTS or step <= SMALLEST_STEP
    return Branch(tuple(points), tuple(events), not stuck)


def _insert_near_folds(system: System, points: list[Point]) -> list[Point]:
    """Adds the point of least |du/ds| wherever three points show a minimum of it without a change of sign."""
    inserted: list[tuple[int, Point]] = []
    for index in range(1, len(points) - 1):
        before, here, after = points[index - 1 : index + 2]
        sign = np.sign(here.tangent[-1])
        speeds = [sign * point.tangent[-1] for point in (before, here, after)]
        lengths = [np.linalg.norm(there.vector - here.vector) for there in (before, after)]
        # the parabola through the three values tells whether the minimum between them can come near zero
        parabola = np.polyfit(np.array([-lengths[0], 0.0, lengths[1]]), np.array(speeds), 2)
        lowest = speeds[1] if parabola[0] <= 0 else parabola[2] - parabola[1] ** 2 / (4 * parabola[0])
        if not (0 < speeds[1] <= min(speeds[0], speeds[2]) and lowest < 0.5 * speeds[1]):
            continue
        best = slowest(system, before, float(sum(lengths)), sign)
        if best.converged and sign * best.tangent[-1] < speeds[1]:
            ahead = (best.vector - here.vector) @ here.tangent > 0
            inserted.append((index + 1 if ahead else index, best))
    for index, point in reversed(inserted):
        points.insert(index, point)
    return points


def slowest(system: System, before: Point, span: float, sign: float = 1.0) -> Point:
    """The point of a branch, from `before` over a length `span`, where sign * du/ds is least."""
    return system.advance(before, scalar.minimum(lambda s: sign * system.advance(before, s).tangent[-1], 0.0, span))


def _locate(system: System, here: Point, there: Point) -> Event:
    """The root of the lowest eigenvalue between two points of a branch."""
    span = float((there.vector - here.vector) @ here.tangent)
    place = scalar.root(lambda s: system.advance(here, s).lowest, 0.0, span)
    point = system.advance(here, place)
    kind: EventKind = "fold" if here.tangent[-1] * there.tangent[-1] < 0 else "pitchfork"
    return Event(kind, point)


def switch(system: System, event: Event, lower: float, upper: float, sign: int = 1, stable: bool = False) -> Branch | None:
    """The branch that leaves a pitchfork along the soft direction, towards positive order parameters, or negative ones.

    Args:
        sign: 1 or -1.
        stable: as in `follow`.

    Returns:
        None if no other branch is found there.
    """
    soft = event.point.soft
    positive = system.coordinates(soft) @ row_entries(system.task, system.kind) >= 0
    soft = sign * soft if positive else -sign * soft
    normal = np.append(soft, 0.0)
    offset = 1e-3
    guess = np.append(event.point.z + offset * soft, event.point.log_p)
    first = system.correct(guess[None], normal[None], np.array([normal @ guess]))[0]
    if not first.converged or abs(first.log_p - event.point.log_p) > 0.1:
        return None
    # away from the pitchfork, whichever way P goes
    first = first if first.tangent[:-1] @ soft >= 0 else first._replace(tangent=-first.tangent)
    branch = follow(system, first, lower, upper, stable)
    at_event = event.point._replace(tangent=first.tangent, lowest=0.0)
    return branch._replace(points=(at_event, *branch.points))


def segments(branch: Branch, origin: Event | None = None) -> list[Segment]:
    """The stable pieces of a branch, each in order of growing P; `origin` is the pitchfork that it started from."""
    pieces: list[Segment] = []
    events = iter(branch.events)
    current: list[Point] = []
    start = origin
    points = branch.points[1:] if origin else branch.points
    if origin and points[0].lowest > 0:
        current = [branch.points[0]]
    previous = points[0].lowest > 0
    for point in points:
        stable = point.lowest > 0
        if stable != previous:
            event = next(events)
            if stable:
                current, start = [event.point], event
            else:
                pieces.append(_ordered([*current, event.point], start, event))
                current = []
        if stable:
            current.append(point)
        previous = stable
    if current:
        pieces.append(_ordered(current, start, None))
    return pieces


def _ordered(points: list[Point], start: Event | None, end: Event | None) -> Segment:
    if points[0].log_p > points[-1].log_p:
        return Segment(tuple(reversed(points)), end, start)
    return Segment(tuple(points), start, end)


def minimum_on(system: System, segment: Segment, log_p: float) -> Point | None:
    """The minimum of a segment at P = exp(log_p); None outside the segment."""
    if not segment.lower <= log_p <= segment.upper:
        return None
    for end in (segment.points[0], segment.points[-1]):
        if abs(log_p - end.log_p) < 1e-13:
            return end
    grid = np.array([point.log_p for point in segment.points])
    index = int(np.clip(np.searchsorted(grid, log_p) - 1, 0, len(grid) - 2))
    left, right = segment.points[index], segment.points[index + 1]
    weight = (log_p - left.log_p) / max(right.log_p - left.log_p, 1e-300)
    guess = left.z + weight * (right.z - left.z)
    found = system.at_fixed_p(guess[None], log_p)[0]
    near = np.linalg.norm(found.z - guess) <= np.linalg.norm(right.z - left.z) + 1e-9
    if found.converged and found.lowest > 0 and near:
        return found
    # Next to a fold z grows like a square root of P, and Newton at fixed P may leave the branch: go along the arc instead.
    anchor, other = (left, right) if left.lowest > right.lowest else (right, left)
    span = float((other.vector - anchor.vector) @ anchor.tangent)
    return system.advance(anchor, scalar.root(lambda s: system.advance(anchor, s).log_p - log_p, 0.0, span))
