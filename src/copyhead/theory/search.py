"""Minima that no branch from P = 0 leads to: searched for from many starts, at several P, and followed both ways."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from copyhead.theory.continuation import Branch, Segment, follow, minimum_on, segments
from copyhead.theory.saddle_point import Point, System
from copyhead.theory.symmetric import SymmetricTask, canonical, starts

# Values of P between the events at which beyond the paper's task all starts are tried.
PLACES = 8


def search_disconnected(system: System, branches: list[Branch], pieces: list[Segment], lower: float, upper: float) -> None:
    """Adds to `branches` and `pieces` the minima that Newton finds from a grid of starts and that no piece explains."""
    if isinstance(system.task, SymmetricTask):
        _search_symmetric(system, system.task, branches, pieces, lower, upper)
        return
    reach = 1.5 * np.max(np.abs([point.z for branch in branches for point in branch.points]), axis=0)
    events = sorted(event.point.log_p for branch in branches for event in branch.events) or [(lower + upper) / 2]
    between = [(first + second) / 2 for first, second in pairwise(events)]
    beyond = np.arange(events[-1] + 1, upper, 3.0)  # a branch may be born at a fold far above the last event known
    wanted = [events[0] - 1, *(place + 0.01 for place in events), *between, *beyond]
    places = [place for place in wanted if lower < place < upper]
    # Softmax does not depend on the first coordinate (the mean of a row); linear attention is odd, so half a plane will do.
    linear = system.kind == "linear"
    nodes = product((-0.5, 0, 0.5), (0.5, 1)) if linear else product((0,), (-1, -0.3, 0.2, 0.6, 1))
    grid = np.array([(*node, *(0,) * (system.dimension - 2)) for node in nodes])
    grid, mirrored = grid * reach, (1, -1) if linear else (1,)
    for log_p in places:
        known = [other.z for piece in pieces if (other := minimum_on(system, piece, log_p)) is not None]
        # The row sums of A can also have the other sign than the copy entries: start there from the minima that are known.
        opposite = [np.append(factor * z[:1], z[1:]) for z in known if linear for factor in (-1.0, -0.6)]
        for point in system.at_fixed_p(np.array([*grid, *opposite]), log_p):
            if not point.converged or point.lowest <= 0 or is_known(point.z, known, mirrored):
                continue
            if linear and system.coordinates(point.z)[1] < 0:
                point = _mirrored(point)
            pieces += both_ways(system, point, branches, lower, upper)
            known.append(point.z)


def _search_symmetric(
    system: System, task: SymmetricTask, branches: list[Branch], pieces: list[Segment], lower: float, upper: float
) -> None:
    """The same beyond the paper's task: descents from `symmetric.starts`; equivalent minima are kept once."""
    begin = np.linalg.solve(system.whitening, starts(task, system.kind).T).T
    events = [event.point.log_p for branch in branches for event in branch.events]
    places = [*np.linspace(lower, upper, PLACES + 2)[1:-1], *(place + sign * 0.02 for place in events for sign in (-1, 1))]
    _keep_one_of_each(system, task, pieces)
    for log_p in sorted(place for place in places if lower < place < upper):
        known = [
            canonical(other.z, system.order, task, system.kind)
            for piece in pieces
            if (other := minimum_on(system, piece, log_p))
        ]
        for start in begin:
            place = canonical(system.descend(start, log_p), system.order, task, system.kind)
            if is_known(place, known, (1,), 1e-2):
                continue
            (point,) = system.at_fixed_p(place[None], log_p)
            if not point.converged or point.lowest <= 0 or is_known(point.z, known, (1,)):
                continue
            pieces += both_ways(system, point, branches, lower, upper)
            _keep_one_of_each(system, task, pieces)
            known.append(canonical(point.z, system.order, task, system.kind))


def _keep_one_of_each(system: System, task: SymmetricTask, pieces: list[Segment]) -> None:
    """Removes pieces that another one is equivalent to over all of their common range of P, and that end where it does."""
    kept: list[Segment] = []
    for piece in sorted(pieces, key=lambda piece: piece.lower - piece.upper):
        middle = (piece.lower + piece.upper) / 2
        here = minimum_on(system, piece, middle)
        others = [found for other in kept if (found := minimum_on(system, other, middle))]
        known = [canonical(found.z, system.order, task, system.kind) for found in others]
        if here is None or not is_known(canonical(here.z, system.order, task, system.kind), known, (1,)):
            kept.append(piece)
    pieces[:] = [piece for piece in pieces if any(piece is other for other in kept)]


def is_known(z: np.ndarray, known: list[np.ndarray], mirrored: tuple[int, ...], tolerance: float = 1e-4) -> bool:
    """Whether a minimum is one of those that are known, or the mirror image of one."""
    # two minima as close as this have a saddle between them within a relative 1e-12 of their action: not resolvable
    return any(np.allclose(sign * z, other, atol=tolerance, rtol=tolerance) for other in known for sign in mirrored)


def _mirrored(point: Point) -> Point:
    """The same minimum in the other sector of linear attention, (-c1, -cG)."""
    turned = np.append(-point.tangent[:-1], point.tangent[-1])
    return point._replace(z=-point.z, tangent=turned, soft=-point.soft)


def both_ways(
    system: System, point: Point, branches: list[Branch], lower: float, upper: float, stable: bool = False
) -> list[Segment]:
    """Follows the branch through `point` in both directions and adds it to `branches`; its stable pieces.

    Args:
        stable: only as far as it is a minimum.
    """
    back = follow(system, point._replace(tangent=-point.tangent), lower, upper, stable)
    ahead = follow(system, point, lower, upper, stable)
    turned = [other._replace(tangent=-other.tangent) for other in reversed(back.points[1:])]
    whole = Branch((*turned, *ahead.points), (*reversed(back.events), *ahead.events), back.complete and ahead.complete)
    branches.append(whole)
    return segments(whole)
