"""Stationary points of the reduced action: Newton, continuation in P through folds, pitchforks and branch switching.

All work is done in whitened coordinates z, in which the prior is proportional to |z|^2, and u = ln P. A branch is a curve of
solutions of grad_z S = 0 in (z, u), followed by pseudo-arclength continuation: predictor along the tangent, Newton corrector
in the plane orthogonal to it. A stationary point is a minimum only if the lowest eigenvalue of its Hessian is positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.problem import Attention
from copyhead.theory import scalar
from copyhead.theory.action import at, reduced_action
from copyhead.theory.posterior import Task

NEWTON_STEPS = 12
# The gradient is that of S / unit, of order one; float64 Newton ends near 1e-15 times the cancelled terms of S.
RESIDUAL_TOLERANCE = 1e-9
FIRST_STEP, LARGEST_STEP, SMALLEST_STEP = 0.05, 0.5, 1e-7
# Cosine of the angle between successive tangents: below the first a step is taken again, above the second it may grow.
SHARPEST_TURN, STRAIGHT = 0.97, 0.995
# Newton may move a predicted point by this part of the step; a turn of SHARPEST_TURN moves it by half as much.
LARGEST_CORRECTION = 0.25
MAX_POINTS = 5000
# Systems solved in one call: the time of a call is mostly its fixed cost, so the starts of a search share it.
BATCH = 5
# The kernel works on a handful of numbers: optimising it takes XLA half a second and gains nothing.
QUICK_COMPILATION = {"xla_backend_optimization_level": 0}
# ln P that stands for P = 0 where the action is its prior; exp(-700) is above the smallest normal float64.
LOG_P_ZERO = -700.0


class Point(NamedTuple):
    """A solution of grad_z S = 0 at P = exp(log_p), with what the neighbouring solutions need.

    tangent: unit vector (z, u) along the branch. lowest: lowest eigenvalue of the Hessian of S / unit in z (one for the bare
    prior). soft: its eigenvector. residual: norm of the gradient of S / unit.
    """

    z: Float[np.ndarray, "d"]
    log_p: float
    tangent: Float[np.ndarray, "d+1"]
    lowest: float
    soft: Float[np.ndarray, "d"]
    action: float
    residual: float

    @property
    def converged(self) -> bool:
        return bool(self.residual < RESIDUAL_TOLERANCE)

    @property
    def vector(self) -> Float[np.ndarray, "d+1"]:
        return np.append(self.z, self.log_p)


def _solve_bordered(matrix: Float[Array, "n n"], right: Float[Array, "n"]) -> Float[Array, "n"]:
    """matrix^-1 right; 3 x 3 by cross products, because the fixed cost of LAPACK would be most of a Newton step."""
    if matrix.shape != (3, 3):
        return jnp.linalg.solve(matrix, right)
    a, b, c = matrix.T
    volume = jnp.dot(a, jnp.cross(b, c))
    return (
        jnp.stack([jnp.dot(right, jnp.cross(b, c)), jnp.dot(a, jnp.cross(right, c)), jnp.dot(a, jnp.cross(b, right))]) / volume
    )


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
@partial(jax.vmap, in_axes=(0, 0, 0, None, None, None, None))
def _correct(
    vector: Float[Array, "3"],
    normal: Float[Array, "3"],
    offset: Float[Array, ""],
    whitening: Float[Array, "2 2"],
    unit: Float[Array, ""],
    task: Task,
    kind: Attention,
) -> tuple[Float[Array, "3"], Float[Array, "3 3"], Float[Array, "3"], Float[Array, ""]]:
    """Newton on [grad_z S / unit = 0, normal . (z, u) = offset]: the solution, bordered Hessian, residual, and S."""

    def scaled(y: Float[Array, "3"]) -> Float[Array, ""]:
        return reduced_action(whitening @ y[:-1], at(task, jnp.exp(y[-1])), kind) / unit

    def with_values(y: Float[Array, "3"]) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(scaled)(y)
        return gradient, (value, gradient)

    def step(state: tuple) -> tuple:
        y, *_, change, count = state
        hessian, (value, gradient) = jax.jacfwd(with_values, has_aux=True)(y)
        matrix, residual = hessian.at[-1].set(normal), gradient.at[-1].set(normal @ y - offset)
        change = _solve_bordered(matrix, residual)
        # The last pass evaluates only: a converged point keeps its own Hessian and residual.
        done = jnp.max(jnp.abs(change)) < 1e-13
        return jnp.where(done, y, y - change), matrix, residual, value * unit, change, count + 1

    def going(state: tuple) -> Array:
        *_, change, count = state
        return (count < NEWTON_STEPS) & (jnp.max(jnp.abs(change)) >= 1e-13)

    size = vector.shape[0]
    start = (vector, jnp.zeros((size, size)), vector, jnp.zeros(()), jnp.full(size, jnp.inf), 0)
    y, matrix, residual, value, *_ = jax.lax.while_loop(going, step, start)
    return y, matrix, residual, value


@dataclass(frozen=True)
class System:
    """The action of one task on its symmetric subspace, ready for Newton. Every call runs in float64.

    whitening: (c1, cG) = whitening z. unit: the action is measured in it, so that its prior part is |z|^2 / 2.
    """

    task: Task
    kind: Attention
    whitening: Float[np.ndarray, "2 2"]
    unit: float

    @classmethod
    def of(cls, task: Task, kind: Attention) -> System:
        """Whitens the task; `task` holds the moments of one sequence, or any number: P replaces it."""
        with jax.enable_x64(True):
            task = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), task)
        bare = cls(task, kind, np.eye(2), 1.0)
        no_data = bare._solve(np.array([[0.0, 0.0, LOG_P_ZERO]]), np.array([[0.0, 0.0, 1.0]]), np.array([LOG_P_ZERO]))
        root = np.linalg.cholesky(no_data[1][0, :2, :2])
        # The size of z is set by what the data ask of the logits: order one for softmax, and (tau_p^2 g_W / g_O)^(1/4) for
        # linear attention, where only the product of G and W matters. On the scale of a wide prior the curve is a needle.
        widths = task.prior.position_scale**2 * task.prior.logit_variance / task.prior.output_variance
        balance = float(widths) ** 0.25
        size = 1.0 if kind == "softmax" else balance
        norm = root[1, 1] * size
        return cls(task, kind, np.linalg.inv(root.T) * norm, norm**2)

    @property
    def dimension(self) -> int:
        return self.whitening.shape[0]

    def _solve(self, vectors: np.ndarray, normals: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
        """_correct on BATCH systems at a time: one compilation, and a batch costs hardly more than one system."""
        count = len(vectors)
        padded = -(-count // BATCH) * BATCH
        inputs = [np.concatenate([part, np.repeat(part[-1:], padded - count, 0)]) for part in (vectors, normals, offsets)]
        with jax.enable_x64(True):
            batches = [
                _correct(
                    *(part[i : i + BATCH] for part in inputs),
                    self.whitening,
                    np.float64(self.unit),
                    self.task,
                    self.kind,
                )
                for i in range(0, padded, BATCH)
            ]
            return tuple(np.concatenate(parts)[:count] for parts in zip(*batches, strict=True))

    def correct(self, vectors: np.ndarray, normals: np.ndarray, offsets: np.ndarray) -> list[Point]:
        """Newton from each of `vectors` (n, d + 1) onto a branch, inside the plane normal . y = offset."""
        solved = self._solve(vectors, normals, offsets)
        return [self._point(*parts) for parts in zip(*solved, strict=True)]

    def _point(self, y: np.ndarray, matrix: np.ndarray, residual: np.ndarray, action: np.ndarray) -> Point:
        if not (np.isfinite(y).all() and np.isfinite(matrix).all()):
            nothing = np.full_like(y, np.nan)
            return Point(nothing[:-1], np.nan, nothing, np.nan, nothing[:-1], np.nan, np.inf)
        tangent = np.linalg.solve(matrix, np.append(np.zeros(self.dimension), 1.0))
        eigenvalues, eigenvectors = np.linalg.eigh(matrix[:-1, :-1])
        return Point(
            y[:-1],
            float(y[-1]),
            tangent / np.linalg.norm(tangent),
            float(eigenvalues[0]),
            eigenvectors[:, 0],
            float(action),
            float(np.linalg.norm(residual)),
        )

    def at_fixed_p(self, starts: np.ndarray, log_p: float) -> list[Point]:
        """The stationary points at P = exp(log_p) that Newton reaches from each of `starts` (n, d)."""
        count = len(starts)
        normals = np.tile(np.append(np.zeros(self.dimension), 1.0), (count, 1))
        offsets = np.full(count, log_p)
        return self.correct(np.column_stack([starts, offsets]), normals, offsets)

    def advance(self, point: Point, arclength: float) -> Point:
        """The solution in the plane orthogonal to the tangent of `point`, at a distance."""
        predicted = point.vector + arclength * point.tangent
        return self.correct(predicted[None], point.tangent[None], np.array([point.tangent @ predicted]))[0]

    def coordinates(self, z: np.ndarray) -> np.ndarray:
        """Order parameters (c1, cG) of whitened coordinates."""
        return self.whitening @ z

    def whitened(self, coordinates: np.ndarray) -> np.ndarray:
        return np.linalg.solve(self.whitening, coordinates)

    def slope(self, point: Point) -> float:
        """d cG / d ln P along the branch."""
        with np.errstate(divide="ignore"):
            return float((self.whitening @ point.tangent[:-1])[1] / point.tangent[-1])


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


def follow(system: System, start: Point, lower: float, upper: float) -> Branch:
    """Follows a branch from `start` along its tangent until ln P leaves [lower, upper].

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
        if turn > STRAIGHT:
            step = min(1.5 * step, LARGEST_STEP)
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
    if not point.converged:  # exactly on a pitchfork the bordered matrix is singular: step off it by rounding
        point = system.advance(here, place * (1 - 1e-9))
    kind: EventKind = "fold" if here.tangent[-1] * there.tangent[-1] < 0 else "pitchfork"
    return Event(kind, point)


def switch(system: System, event: Event, lower: float, upper: float) -> Branch | None:
    """The branch that leaves a pitchfork along the soft direction, towards positive order parameters.

    Returns:
        None if no other branch is found there.
    """
    soft = event.point.soft
    row_sum = system.coordinates(soft) @ np.array([system.task.prior.length, 1.0])
    soft = soft if row_sum >= 0 else -soft
    normal = np.append(soft, 0.0)
    offset = 1e-3
    guess = np.append(event.point.z + offset * soft, event.point.log_p)
    first = system.correct(guess[None], normal[None], np.array([normal @ guess]))[0]
    if not first.converged or abs(first.log_p - event.point.log_p) > 0.1:
        return None
    branch = follow(system, first, lower, upper)
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
