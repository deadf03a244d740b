"""Minima of S(G) over all H L^2 logits beyond the paper's task, as a check of the symmetric subspaces and in their place.

The minima of the symmetric subspace and many other starts are descended from without any ansatz; saddles are left along their
most unstable direction. What is found is the lowest of those minima, which no finite number of starts proves to be global.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from copyhead.model import layout, targets
from copyhead.problem import Attention, Problem
from copyhead.theory.descent import Descent, descend
from copyhead.theory.solution import Solution, solve
from copyhead.theory.symmetric import (
    NoSubspace,
    SymmetricTask,
    action_of,
    at_sequences,
    lags_by_class,
    parts,
    symmetric_task,
    turned,
)
from copyhead.theory.transition import Minimum, described
from copyhead.theory.unreduced import expanded, unreduced_task, value_and_gradient

# Standard deviations of random starts, and of what is added to all others.
SCALES, NOISE = (0.3, 1.0, 3.0), 0.05
# On the largest entry of the gradient; S is of order L.
TOLERANCE = 1e-6
# An eigenvalue of the Hessian below this, over that of the prior, is a way down; heads of linear attention rotate freely.
UNSTABLE = -1e-5
# Distance at which a saddle is left, in logits, and how many times.
LEAVE, DEPARTURES = 0.1, 4
# Change of S, relative, and of aG that tell two minima apart.
SAME_ACTION, SAME_ORDER = 1e-6, 1e-3

Verdict = Literal["symmetric", "asymmetric", "no symmetric subspace"]


class State(NamedTuple):
    """A minimum over all logits, one of those that a permutation of heads or positions turns into one another.

    minimum: as on the symmetric subspace; its lowest eigenvalue is one for the bare prior. gradient: largest entry of |grad S|.
    spread: largest distance of a logit from the mean of its class, over all starts that ended here; None without known classes.
    starts: their number.
    """

    logits: Float[np.ndarray, "H L L"]
    minimum: Minimum
    gradient: float
    spread: float | None
    starts: int


@dataclass(frozen=True)
class Check:
    """What was found over all logits at P = sequences. states: lowest action first.

    symmetric_action: the lowest on the symmetric subspace, None where none is known, for the reason given. starts: number of
    descents. lost: how many of them did not end in a minimum, for want of convergence.
    """

    sequences: float
    states: tuple[State, ...]
    symmetric_action: float | None
    reason: str | None
    starts: int
    lost: int

    @property
    def action(self) -> float:
        """The lowest S; nan if no start ended in a minimum."""
        return self.states[0].minimum.action if self.states else math.nan

    @property
    def difference(self) -> float | None:
        """By how much the lowest S is below that of the symmetric subspace."""
        return None if self.symmetric_action is None else self.symmetric_action - self.action

    @property
    def verdict(self) -> Verdict:
        """Asymmetric: a minimum without the symmetry is lower. Symmetric: the lowest one found has it."""
        if self.symmetric_action is None or self.difference is None:
            return "no symmetric subspace"
        return "asymmetric" if self.difference > SAME_ACTION * max(1.0, abs(self.symmetric_action)) else "symmetric"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return {
            "P": self.sequences,
            "verdict": self.verdict,
            "action": self.action if self.states else None,
            "symmetric_action": self.symmetric_action,
            "difference": self.difference if self.states else None,
            "reason": self.reason,
            "starts": self.starts,
            "lost": self.lost,
            "states": [
                {
                    **one.minimum.order_parameters._asdict(),
                    "action": one.minimum.action,
                    "lowest_eigenvalue": one.minimum.lowest,
                    "heads": list(one.minimum.heads),
                    "gradient": one.gradient,
                    "spread": one.spread,
                    "starts": one.starts,
                }
                for one in self.states
            ],
        }

    def lines(self) -> list[str]:
        """What to print."""
        found = [f"  all logits at P = {self.sequences:g}: {self.verdict}, {self.starts} starts, {self.lost} without a minimum"]
        if self.symmetric_action is not None:
            found.append(f"    lowest S {self.action:.9g}, on the symmetric subspace {self.symmetric_action:.9g}")
        for one in self.states:
            spread = "" if one.spread is None else f"  spread {one.spread:.2g}"
            state = one.minimum
            heads = ", ".join(f"{value:.4g}" for value in state.heads)
            found.append(
                f"    S {state.action:.9g}  aG {state.order_parameters.aG:.5g}  cG by head {heads}  "
                f"loss {state.order_parameters.loss:.5g}{spread}  lowest eigenvalue {state.lowest:.3g}  {one.starts} starts"
            )
        return found


def classes_of(problem: Problem) -> Int[np.ndarray, "L L"]:
    """Number of the class of each entry, -1 where it is masked or its row is not scored.

    Raises:
        NoSubspace: where no symmetric subspace is known.
    """
    task = symmetric_task(problem)
    if task.class_of is not None:
        return np.asarray(task.class_of)
    found = layout.compressed(targets.operator(problem), targets.allowed(problem))
    return np.where(found.entry >= 0, found.row[:, None] * found.target.shape[1] + found.entry, -1)


def spread(logits: Float[np.ndarray, "H L L"], classes: Int[np.ndarray, "L L"]) -> float:
    """Largest distance of a logit from the mean of its class in its head."""
    inside = classes >= 0
    number = np.bincount(classes[inside])
    largest = 0.0
    for one in logits:
        mean = np.bincount(classes[inside], one[inside]) / np.maximum(number, 1)
        largest = max(largest, float(np.max(np.abs(one[inside] - mean[classes[inside]]))))
    return largest


def starts_of(problem: Problem, task: SymmetricTask, number: int, rng: np.random.Generator) -> list[Float[np.ndarray, "H L L"]]:
    """Random logits at several scales, and logits that copy: some heads, single lags, some rows; linear also pools."""
    heads, length = len(task.heads), problem.length
    allowed, target = np.asarray(task.layout.columns) > 0, np.asarray(task.target)
    if problem.attention == "softmax":
        size = 1.2 * np.log(np.maximum(allowed.sum(axis=1), 2))[:, None]
    else:
        widths = problem.position_scale**2 * problem.logit_variance / problem.output_variance
        size = np.full((length, 1), (length * problem.vocab * widths) ** 0.25)
    copy = size * target / np.abs(target).max()
    lags = problem.lags or {}
    single = [size * (targets.shift(length, lag, problem.cyclic) != 0) for lag in lags] if len(lags) > 1 else []
    row = np.arange(length)[:, None]
    some = [copy * part for part in (row < length / 2, row >= length / 2, row % 2 == 0)]
    nothing = np.zeros((length, length))
    patterns = [[copy] * k for k in range(1, heads + 1)] + [[one] for one in (*single, *some)]
    if heads > 1:
        patterns += [some[:2]] + ([single[:heads]] if single else [])
    if problem.attention == "linear":
        pooling = size * allowed / np.sqrt(length)
        patterns += [[pooling], [copy + pooling], [copy - pooling], *([[copy, pooling]] if heads > 1 else [])]
    shape = (heads, length, length)
    made = [np.stack([*one, *[nothing] * (heads - len(one))]) + NOISE * rng.standard_normal(shape) for one in patterns]
    made += [scale * rng.standard_normal(shape) for scale in SCALES for _ in range(number)]
    return [one * allowed for one in made]


@partial(jax.jit, static_argnames="kind")
def _curvature(logits: Array, direction: Array, task: SymmetricTask, kind: Attention) -> Array:
    return jax.jvp(lambda place: jax.grad(action_of)(place, task, kind), (logits,), (direction,))[1]


@dataclass(frozen=True)
class Landscape:
    """S over the entries that the mask leaves, at the P of the task."""

    task: SymmetricTask
    kind: Attention

    @property
    def inside(self) -> Bool[np.ndarray, "H L L"]:
        """Which entries are variables."""
        allowed = np.asarray(self.task.layout.columns) > 0
        return np.broadcast_to(allowed, (len(self.task.heads), *allowed.shape))

    def expand(self, flat: Float[np.ndarray, "n"]) -> Float[np.ndarray, "H L L"]:
        """Logits of given variables; zero where the mask is."""
        found = np.zeros(self.inside.shape)
        found[self.inside] = flat
        return found

    def descend(self, start: Float[np.ndarray, "H L L"]) -> Descent:
        """To the minimum, or saddle, of the basin of a start."""

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = value_and_gradient(self.expand(flat), self.task, self.kind)
            return float(value), np.asarray(gradient)[self.inside]

        with jax.enable_x64(True):
            return descend(objective, start[self.inside], TOLERANCE)

    def lowest(self, flat: Float[np.ndarray, "n"], rng: np.random.Generator) -> tuple[float, Float[np.ndarray, "n"]]:
        """Lowest eigenvalue of the Hessian, one for the bare prior without token part, and its direction (Lanczos).

        nan and zero if it does not converge.
        """
        logits = self.expand(flat)
        variance = float(self.task.prior.logit_variance * self.task.prior.position_scale**2)

        def product(direction: np.ndarray) -> np.ndarray:
            found = _curvature(logits, self.expand(direction.ravel()), self.task, self.kind)
            return variance * np.asarray(found)[self.inside]

        size = len(flat)
        with jax.enable_x64(True):
            operator = LinearOperator((size, size), matvec=product, dtype=np.float64)  # type: ignore[call-arg]
            try:
                values, vectors = eigsh(
                    operator, 1, which="SA", tol=1e-6, v0=rng.standard_normal(size), ncv=min(size, 40), maxiter=100
                )
            except ArpackNoConvergence:
                return math.nan, np.zeros(size)
        return float(values[0]), vectors[:, 0]

    def settle(self, start: Float[np.ndarray, "H L L"], rng: np.random.Generator) -> tuple[Descent, float]:
        """Descends until the Hessian has no way down; also its lowest eigenvalue."""
        found = self.descend(start)
        value, direction = self.lowest(found.place, rng)
        for _ in range(DEPARTURES):
            if not value < UNSTABLE:
                break
            ends = [self.descend(self.expand(found.place + sign * LEAVE * direction)) for sign in (1, -1)]
            found = min(ends, key=lambda one: one.value)
            value, direction = self.lowest(found.place, rng)
        return found, value

    def minimum(self, logits: Float[np.ndarray, "H L L"], value: float, lowest: float, lags: list[list[int]]) -> Minimum:
        """Order parameters of given logits; its classes are the mean attention on the lags of each list."""
        with jax.enable_x64(True):
            found = parts(logits, self.task, self.kind)
            matrices = np.asarray(turned(logits, self.task, self.kind)[1])
        # without classes every row has its own cG
        plain = self.task._replace(class_of=None)
        state = described(np.asarray(logits), type(found)(*map(np.asarray, found)), plain, self.kind, value, False, lowest)
        leading = int(np.argmax(np.asarray(found.aG)))
        scored, row = np.asarray(self.task.layout.scored) > 0, np.arange(len(self.task.target))
        distance = np.subtract.outer(row, row) % len(row)
        places = [np.isin(distance, some) & scored[:, None] for some in lags]
        return state._replace(classes=tuple(float(matrices[leading][place].mean()) for place in places))


def check(
    problem: Problem,
    sequences: float,
    starts: int = 3,
    seed: int = 0,
    solution: Solution | None = None,
    task: SymmetricTask | None = None,
) -> Check:
    """Minimises S over all logits from many starts, and compares with the symmetric subspace where one is known.

    Args:
        starts: random ones of each of SCALES, beside those that copy and the minima of the symmetric subspace.
        solution: of the problem, over a range that holds `sequences`; default: solved here.
        task: other moments on all logits at P = 1; default: `unreduced_task`.

    Raises:
        ProblemError: see `unreduced_task`.
    """
    task = unreduced_task(problem) if task is None else task
    classes, symmetric, reason = None, [], None
    try:
        classes = classes_of(problem)
        solution = solve(problem.replace(sequences=None), reach=[sequences]) if solution is None else solution
        for one in solution.minima(sequences):
            assert one.logits is not None
            symmetric.append((one.action, expanded(one.logits, problem)))
    except NoSubspace as error:
        reason = str(error)
    rng = np.random.default_rng(seed)
    landscape = Landscape(at_sequences(task, sequences), problem.attention)
    inside = landscape.inside
    begin = [logits for _, logits in symmetric]
    begin += [logits + NOISE * inside * rng.standard_normal(logits.shape) for logits in begin]
    begin += starts_of(problem, task, starts, rng)
    found: list[State] = []
    lost, lags = 0, lags_by_class(problem)
    for start in begin:
        reached, lowest = landscape.settle(start, rng)
        if not reached.converged or not lowest >= UNSTABLE:
            lost += 1
            continue
        logits = landscape.expand(reached.place)
        state = landscape.minimum(logits, reached.value, lowest, lags)
        known = next((k for k, one in enumerate(found) if _same(one.minimum, state)), None)
        width = None if classes is None else spread(logits, classes)
        if known is None:
            found.append(State(logits, state, reached.gradient, width, 1))
        else:
            one = found[known]
            wider = None if one.spread is None or width is None else max(one.spread, width)
            found[known] = one._replace(spread=wider, starts=one.starts + 1)
    found.sort(key=lambda one: one.minimum.action)
    ordered = tuple(one._replace(minimum=one.minimum._replace(metastable=k > 0)) for k, one in enumerate(found))
    lowest_symmetric = min((value for value, _ in symmetric), default=None)
    return Check(sequences, ordered, lowest_symmetric, reason, len(begin), lost)


def _same(one: Minimum, other: Minimum) -> bool:
    """Whether two minima agree up to a permutation of heads or positions."""
    close = abs(one.action - other.action) <= SAME_ACTION * max(1.0, abs(one.action))
    both = np.array(one.heads), np.array(other.heads)
    return close and bool(np.allclose(*both, rtol=SAME_ORDER, atol=10 * SAME_ORDER))
