"""The front of copying under a causal mask: rows that meet only through the output map (docs/theory.md, section 14).

At given W the rows of softmax attention are independent. Row r, which may attend to n positions, costs

    (n - 1) / n c^2 / (2 g_W) + (a t_r(c) - 2 b m_r(c)) / (2 kappa)

with c its copy logit over the others, t_r and m_r the square of its attention and the part on the target. a = -dQ/dt and
2 b = dQ/dm are those of the best W, which depends on the rows only through t = sum t_r and m = sum m_r. So a stationary point
is a solution of two equations, however many rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.interpolate import CubicSpline, PchipInterpolator
from scipy.optimize import brentq, root

from copyhead.model import tokens
from copyhead.model.moments import Independent
from copyhead.problem import Problem
from copyhead.theory.order_parameters import OrderParameters, order_of
from copyhead.theory.symmetric import Parts, SymmetricTask, at_sequences, lift, parts, symmetric_task
from copyhead.theory.transition import Minimum, Transition, Verdict, described

# Nodes of c in which the minima of a row are bracketed, and Newton steps from the best node.
NODES, NEWTON_STEPS = 300, 7
# Halvings of brackets in ln P.
HALVINGS = 45
# Ratio of neighbouring P in the scan; least residual of the two equations, relative, at which a state counts as converged.
RATIO, ACCEPTED = 1.05, 1e-8
# A cell of the scan is halved while ln a or ln b in its middle is further from the interpolation, and wider than the second.
INTERPOLATION, NARROW_CELL = 1e-4, 1e-4
# Turns of the alternating minimisation over rows and W where the root finder fails.
TURNS = 2000
# Points of the curve P(c) of a row, and the least width of a window, in ln P, that is told from the error of interpolation.
CURVE, NARROWEST = 300, 1e-6
# Least d ln P / dc at fixed W below which the response of W, of order 1 / L, may make a fold.
NEARLY_FOLDED = 0.2

Choice = Literal["lowest", "highest", "best"]


class Rows(NamedTuple):
    """All scored rows at one P. excess: cG of each. action: S. residual: of the two equations, relative."""

    P: float
    excess: Float[np.ndarray, "R"]
    t: float
    m: float
    pull: tuple[float, float]
    action: float
    residual: float

    @property
    def converged(self) -> bool:
        return self.residual < ACCEPTED


class Passing(NamedTuple):
    """Where one row passes cG = 1. n: positions it may attend to. P: nan where it does not in the range.

    jump: P where it jumps, sides: its cG below and above, window: P of the folds between which it has two minima, the other
    rows following it in their best ones; all None where its cG grows smoothly.
    """

    n: int
    P: float
    jump: float | None
    sides: tuple[float, float] | None
    window: tuple[float, float] | None


def has_front(problem: Problem) -> bool:
    """Whether the rows of a problem are of the kind that `Front` knows: softmax, one head, one entry of T = 1 in each row."""
    simple = problem.causal and problem.attention == "softmax" and problem.heads == 1 and problem.token_scale == 0
    return simple and problem.lags is not None and list(problem.lags.values()) == [1.0] and tokens.law(problem).independent


@dataclass(frozen=True)
class Front:
    """The rows of a causal problem over a range of P (ln P from lower to upper), see `has_front`.

    up, down: states on a grid of ln P in which every row is in its lowest, or highest, minimum, followed from below and from
    above.
    """

    task: SymmetricTask
    lower: float
    upper: float

    @classmethod
    def of(cls, problem: Problem, lower: float, upper: float) -> Front:
        """Nothing is solved yet; ln P is the range."""
        return cls(symmetric_task(problem), lower, upper)

    @cached_property
    def lengths(self) -> Float[np.ndarray, "R"]:
        """n of each row."""
        return np.asarray(self.task.layout.columns).sum(axis=1)

    @cached_property
    def _explained(self) -> Callable[[float, float, float], tuple[Array, tuple[Array, Array]]]:
        """Q of (t, m, P) and its derivatives by t and m; the rows of A and of T sum to one."""
        count = jnp.ones(1) * float(np.sum(np.asarray(self.task.layout.scored)))

        def value(t: Array, m: Array, sequences: Array) -> Array:
            moments = at_sequences(self.task, sequences).moments
            assert isinstance(moments, Independent)
            return moments.explained_by(t[None, None], m[None], count[:, None], count, self.task.prior.ridge)

        return jax.jit(jax.value_and_grad(value, (0, 1)))

    def pull(self, t: float, m: float, sequences: float) -> tuple[float, float]:
        """a and b of the best W."""
        with jax.enable_x64(True):
            _, (by_t, by_m) = self._explained(float(t), float(m), float(sequences))
        return -float(by_t), float(by_m) / 2

    def action(self, excess: np.ndarray, t: float, m: float, sequences: float) -> float:
        """S of given rows."""
        with jax.enable_x64(True):
            explained = float(self._explained(float(t), float(m), float(sequences))[0])
        square = sequences * float(np.sum(np.asarray(self.task.layout.scored)))
        return float(np.sum(self._prior_cost(excess)) + (square - explained) / (2 * self.task.prior.kappa))

    def _attention(self, excess: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """t_r and m_r, also their part T m; excess (..., R)."""
        others = (self.lengths - 1) * np.exp(-excess)
        on = 1 / (1 + others)
        return on**2 + (self.lengths - 1) * (on * np.exp(-excess)) ** 2, on

    def _prior_cost(self, excess: np.ndarray) -> np.ndarray:
        prior = self.task.prior
        return (self.lengths - 1) / self.lengths * excess**2 / (2 * prior.logit_variance * prior.position_scale**2)

    def rows(self, pull: tuple[float, float], choice: Choice) -> Float[np.ndarray, "R"]:
        """The minimum of each row that is lowest or highest in c, or the best one."""
        grid, own, square, on = self._nodes
        cost = own + (pull[0] * square - 2 * pull[1] * on) / (2 * self.task.prior.kappa)
        inner = (cost[1:-1] <= cost[:-2]) & (cost[1:-1] <= cost[2:])
        if choice == "best":
            index = np.argmin(np.where(inner, cost[1:-1], np.inf), axis=0)
        else:
            index = np.argmax(inner, axis=0) if choice == "lowest" else len(inner) - 1 - np.argmax(inner[::-1], axis=0)
        return self._polish(grid[index + 1, np.arange(len(self.lengths))], pull, grid[1] - grid[0])

    @cached_property
    def _nodes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """c of the nodes of every row, with the cost of the prior, t_r and m_r there."""
        grid = -3 + (np.log(self.lengths) + 11) * np.linspace(0, 1, NODES)[:, None]
        return grid, self._prior_cost(grid), *self._attention(grid)

    def _polish(self, start: np.ndarray, pull: tuple[float, float], width: np.ndarray) -> np.ndarray:
        """The root of the slope between the neighbouring nodes: Newton, halving where it would leave them."""
        low, high, place = start - width, start + width, start
        for _ in range(NEWTON_STEPS):
            slope, curvature = self._derivatives(place, pull)
            low, high = np.where(slope < 0, place, low), np.where(slope < 0, high, place)
            wanted = place - slope / np.where(curvature == 0, 1.0, curvature)
            place = np.where((wanted >= low) & (wanted <= high), wanted, (low + high) / 2)
        return np.where(self.lengths > 1, place, 0.0)  # a row that sees one position has no choice

    def solve(self, sequences: float, choice: Choice, start: tuple[float, float]) -> Rows:
        """The self-consistent state in which every row is in the chosen minimum, from a guess of (t, m)."""

        def turned(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            t, m = np.abs(sums)
            excess = self.rows(self.pull(t, m, sequences), choice)
            square, on = self._attention(excess)
            return excess, np.array([square.sum(), on.sum()])

        found = root(lambda sums: turned(sums)[1] / np.abs(sums) - 1, np.array(start), method="hybr", options={"xtol": 1e-12})
        sums = np.abs(found.x)
        excess, again = turned(sums)
        residual = float(np.max(np.abs(again / sums - 1)))
        if not residual < ACCEPTED:  # a row changes its minimum close to here: every turn lowers E(G, W)
            sums = np.array(start)
            for _ in range(TURNS):
                excess, again = turned(sums)
                residual = float(np.max(np.abs(again / sums - 1)))
                sums = again
                if residual < ACCEPTED / 10:
                    break
        t, m = (float(value) for value in again)
        pull = self.pull(t, m, sequences)
        return Rows(sequences, excess, t, m, pull, self.action(excess, t, m, sequences), residual)

    def _slope(self, excess: np.ndarray, pull: tuple[float, float]) -> np.ndarray:
        """Derivative of the cost of a row by c."""
        return self._derivatives(excess, pull)[0]

    def _derivatives(self, excess: np.ndarray, pull: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
        """First and second derivative of the cost of a row by c."""
        prior, n = self.task.prior, self.lengths
        on = 1 / (1 + (n - 1) * np.exp(-excess))
        change = on * (1 - on)
        # t = m^2 + (1 - m)^2 / (n - 1) and dm/dc = m (1 - m)
        others = np.maximum(n - 1, 1)
        gain = (pull[0] * (2 * on - 2 * (1 - on) / others) - 2 * pull[1]) / (2 * prior.kappa)
        bend = pull[0] * (1 + 1 / others) / prior.kappa
        own = (n - 1) / n / (prior.logit_variance * prior.position_scale**2)
        return own * excess + gain * change, own + (bend * change + gain * (1 - 2 * on)) * change

    @cached_property
    def grid(self) -> Float[np.ndarray, "g"]:
        """ln P of the scan."""
        return np.linspace(self.lower, self.upper, 2 + int((self.upper - self.lower) / math.log(RATIO)))

    @cached_property
    def up(self) -> list[Rows]:
        return self._scan("lowest", self.grid, (float(np.sum(1 / self.lengths)),) * 2)

    @cached_property
    def down(self) -> list[Rows]:
        return self._scan("highest", self.grid[::-1], (self.up[-1].t, self.up[-1].m))[::-1]

    @cached_property
    def best(self) -> list[Rows]:
        """States of lowest action, every row in its best minimum, in order of P; closer where they change fast."""
        found = []
        for log_p, *both in zip(self.grid, self.up, self.down, strict=True):
            found.append(both[0] if np.allclose(*(one.excess for one in both), atol=1e-8) else self._best(log_p, *both))
        waiting = [(one, other) for one, other in pairwise(found)]
        while waiting:
            left, right = waiting.pop()
            ends = math.log(left.P), math.log(right.P)
            middle = self._best(sum(ends) / 2, left, right)
            found.append(middle)
            error = np.abs(np.log(middle.pull) - (np.log(left.pull) + np.log(right.pull)) / 2)
            curved = np.max(np.abs(np.log(left.pull) - np.log(right.pull)))
            # a smooth curve is off by a quarter of its bend, which interpolation through four points takes away
            if np.max(error) > max(INTERPOLATION, 0.01 * curved) and ends[1] - ends[0] > NARROW_CELL:
                waiting += [(left, middle), (middle, right)]
        return sorted(found, key=lambda one: one.P)

    def _best(self, log_p: float, *near: Rows) -> Rows:
        states = [self.solve(math.exp(log_p), "best", (one.t, one.m)) for one in near]
        return min(states, key=lambda one: one.action)

    def _scan(self, choice: Choice, grid: np.ndarray, start: tuple[float, float]) -> list[Rows]:
        found = []
        for log_p in grid:
            found.append(self.solve(math.exp(log_p), choice, start))
            start = found[-1].t, found[-1].m
        return found

    @cached_property
    def complete(self) -> bool:
        """Whether every state of the scan is self-consistent."""
        return all(one.converged for one in (*self.up, *self.down, *self.best))

    def at(self, sequences: float) -> list[Rows]:
        """The states at P, lowest action first: one where those followed from below and from above agree.

        Raises:
            ValueError: if P is outside the range.
        """
        log_p = math.log(sequences)
        if not self.lower <= log_p <= self.upper:
            low, high = math.exp(self.lower), math.exp(self.upper)
            raise ValueError(f"sequences = {sequences:g}: must be within the searched range {low:.3g} .. {high:.3g}")
        index = int(np.clip(np.searchsorted(self.grid, log_p), 1, len(self.grid) - 1))
        near = min(self.best, key=lambda one: abs(math.log(one.P) - log_p))
        found: list[Rows] = []
        choices: tuple[Choice, ...] = ("lowest", "highest", "best")
        for choice, state in zip(choices, (self.up[index - 1], self.down[index], near), strict=True):
            one = self.solve(sequences, choice, (state.t, state.m))
            if not any(np.allclose(one.excess, other.excess, atol=1e-6) for other in found):
                found.append(one)
        return sorted(found, key=lambda one: one.action)

    def logits(self, excess: Float[np.ndarray, "R"]) -> Float[np.ndarray, "1 R 2"]:
        """Logits of given rows."""
        with jax.enable_x64(True):
            return np.asarray(lift(excess, self.task, "softmax"))

    def observe(self, excess: Float[np.ndarray, "R"], sequences: float) -> Parts:
        """Order parameters of given rows."""
        with jax.enable_x64(True):
            found = parts(self.logits(excess), at_sequences(self.task, sequences), "softmax")
            return Parts(*map(np.asarray, found))

    def _order(self, excess: Float[np.ndarray, "R"], sequences: float) -> OrderParameters:
        """Order parameters as floats, which JSON holds."""
        return OrderParameters(*map(float, order_of(self.observe(excess, sequences))))

    def minima(self, sequences: float) -> list[Minimum]:
        """As `Phases.minima`; the lowest eigenvalue is that of one row, W fixed.

        Raises:
            ValueError: if P is outside the range.
        """
        return [self._minimum(one, index > 0) for index, one in enumerate(self.at(sequences))]

    def _minimum(self, state: Rows, metastable: bool) -> Minimum:
        found = self.observe(state.excess, state.P)
        return described(
            self.logits(state.excess), found, self.task, "softmax", state.action, metastable, self._stiffness(state)
        )

    def _stiffness(self, state: Rows) -> float:
        """The least curvature of a row by c, over that of the prior."""
        bare = (self.lengths - 1) / self.lengths / (self.task.prior.logit_variance * self.task.prior.position_scale**2)
        curvature = self._derivatives(state.excess, state.pull)[1]
        seeing = bare > 0
        return float(np.min(curvature[seeing] / bare[seeing])) if np.any(seeing) else 1.0

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """The jumps of rows; without any, the crossover where the mean cG is steepest in ln P."""
        found = []
        for row, one in zip(np.argsort(self.lengths), self.passing, strict=True):
            if one.jump is not None and one.sides is not None:
                others = self._interpolated(math.log(one.jump))
                both = (np.where(np.arange(len(others)) == row, side, others) for side in one.sides)
                before, after = (self._order(excess, one.jump) for excess in both)
                found.append(Transition("first-order", one.jump, one.window, before, after))
        if found:
            return tuple(sorted(found, key=lambda transition: transition.P))
        mean = CubicSpline([math.log(one.P) for one in self.best], [one.excess.mean() for one in self.best])
        fine = np.linspace(self.lower, self.upper, 4000)
        slopes = mean(fine, 1)
        top = int(np.argmax(slopes))
        if top in (0, len(fine) - 1):
            return ()
        place = math.exp(fine[top])
        state = self._order(self._interpolated(fine[top]), place)
        return (Transition("crossover", place, None, state, state),)

    @property
    def verdict(self) -> Verdict:
        """First-order if any row jumps."""
        if not self.complete:
            return "undetermined"
        return "first-order" if any(one.jump is not None for one in self.passing) else "crossover"

    @cached_property
    def _pull(self) -> PchipInterpolator:
        return PchipInterpolator([math.log(one.P) for one in self.best], np.log([one.pull for one in self.best]))

    def _interpolated(self, log_p: float) -> Float[np.ndarray, "R"]:
        """cG of the rows in the state of lowest action."""
        a, b = np.exp(self._pull(log_p))
        return self.rows((a, b), "best")

    @cached_property
    def passing(self) -> tuple[Passing, ...]:
        """Where each row passes cG = 1 in the state of lowest action, and where it jumps; short rows first.

        Between the states of the scan ln a and ln b are interpolated. Each value of c then is stationary at one P; the folds of
        a row are the extrema of P(c), with the response of the others and of W where it may matter.
        """

        def pull(log_p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            both = np.exp(self._pull(log_p))
            return both[..., 0], both[..., 1]

        def cG(log_p: np.ndarray) -> np.ndarray:
            return self.rows(pull(log_p), "best")

        # short rows pass, recede, and pass again: the first time counts
        excess = np.array([one.excess for one in self.best])
        rises = (excess[1:] >= 1) & (excess[:-1] < 1)
        index = rises.argmax(axis=0)
        places = np.array([math.log(one.P) for one in self.best])
        high = _halved(lambda log_p: cG(log_p) >= 1, places[index], places[index + 1])[1]
        c = np.linspace(0.02, 1, CURVE)[:, None] * (np.log(self.lengths) + 1)
        shape = np.ones(c.shape)
        place = _halved(lambda log_p: self._slope(c, pull(log_p)) <= 0, self.lower * shape, self.upper * shape)[1]
        steep = np.min(np.diff(place, axis=0) / np.diff(c, axis=0), axis=0)
        found = []
        for row in np.argsort(self.lengths):
            jump = self._jump(row, c[:, row]) if steep[row] < NEARLY_FOLDED else None
            where, sides, window = (None, None, None) if jump is None else jump
            found.append(
                Passing(int(self.lengths[row]), math.exp(high[row]) if rises[:, row].any() else math.nan, where, sides, window)
            )
        return tuple(found)

    @cached_property
    def _response(self) -> Float[np.ndarray, "g R 6"]:
        """In every state of `best`, what ln a and ln b are when one row is at c and the others follow, to first order.

        Two numbers and a 2 x 2 matrix, by row: ln (a, b) = numbers + matrix (t_r(c), m_r(c)), smooth where the row jumps.
        """
        found = []
        for one in self.best:
            by_sums = np.empty((2, 2))
            for k, step in enumerate(1e-4 * np.array([one.t, one.m])):
                ends = [
                    np.log(self.pull(one.t + sign * step * (k == 0), one.m + sign * step * (k == 1), one.P)) for sign in (1, -1)
                ]
                by_sums[:, k] = (ends[0] - ends[1]) / (2 * step)
            square, on = self._attention(one.excess)
            by_c = np.stack([2 * on - 2 * (1 - on) / np.maximum(self.lengths - 1, 1), np.ones_like(on)], -1)
            by_c *= (on * (1 - on))[:, None]
            stiffness = np.where(self.lengths > 1, self._derivatives(one.excess, one.pull)[1], 1.0)
            force = np.array([one.pull[0], -2 * one.pull[1]]) * by_c / (2 * self.task.prior.kappa)
            by_pull = by_c[:, :, None] * (-force / stiffness[:, None])[:, None, :]
            others = by_pull.sum(axis=0) - by_pull
            matrix = by_sums @ np.linalg.inv(np.eye(2) - others @ by_sums)
            numbers = np.log(one.pull) - np.einsum("rij,rj->ri", matrix, np.stack([square, on], -1))
            found.append(np.concatenate([numbers, matrix.reshape(-1, 4)], axis=-1))
        return np.array(found)

    def _jump(self, row: int, c: np.ndarray) -> tuple[float, tuple[float, float], tuple[float, float]] | None:
        """P where a row jumps, its c on both sides, and its window, the other rows and W following it; None without folds.

        Equal action: the slope by c has no integral between the two minima.
        """
        response = PchipInterpolator([math.log(one.P) for one in self.best], self._response[:, row])
        one_row = replace(self, task=self.task)
        one_row.__dict__["lengths"] = self.lengths[row : row + 1]
        sums = np.stack(one_row._attention(c[:, None]), -1)[:, 0]

        def slope(log_p: np.ndarray) -> np.ndarray:
            numbers = response(log_p)
            matrix = numbers[..., 2:].reshape(*numbers.shape[:-1], 2, 2)
            pull = np.exp(numbers[..., :2] + np.einsum("...ij,...j->...i", matrix, sums))
            return one_row._slope(c[:, None], (pull[:, :1], pull[:, 1:]))[:, 0]

        ends = (np.full(len(c), end) for end in (self.lower, self.upper))
        fold = _fold(c, _halved(lambda log_p: slope(log_p) <= 0, *ends)[1])
        if fold is None:
            return None
        lower, upper = fold
        if not self.lower + NARROW_CELL < lower < upper < self.upper - NARROW_CELL:
            return None  # the range cuts the window

        def sides(log_p: float) -> tuple[float, float, float]:
            curve = CubicSpline(c, slope(np.full(len(c), log_p)))
            roots = curve.roots(extrapolate=False)
            return float(roots[0]), float(roots[-1]), float(curve.integrate(roots[0], roots[-1]))

        # at the ends of the window one minimum is flat, and the integral has the sign of the other one
        inside = 1e-2 * (upper - lower)
        first, last = lower + inside, upper - inside
        # a window as narrow as the error of interpolation has no two sides to compare
        resolved = sides(first)[2] > 0 > sides(last)[2]
        place = brentq(lambda log_p: sides(log_p)[2], first, last, xtol=1e-12) if resolved else (lower + upper) / 2
        return math.exp(place), sides(place)[:2], (math.exp(lower), math.exp(upper))


def _fold(c: np.ndarray, place: np.ndarray) -> tuple[float, float] | None:
    """Of a curve ln P(c): ln P of its lower and of its upper fold; None without folds."""
    top = np.flatnonzero((place[1:-1] > place[:-2]) & (place[1:-1] > place[2:])) + 1
    if not top.size:
        return None
    first = int(top[0])
    last = first + int(np.argmin(place[first:]))
    if not place[first] - place[last] > NARROWEST:
        return None
    ends = [_extremum(c[i - 1 : i + 2], place[i - 1 : i + 2]) for i in (last, first) if i + 1 < len(c)]
    return None if len(ends) < 2 else (ends[0], ends[1])


def _extremum(x: np.ndarray, y: np.ndarray) -> float:
    """The extremum of the parabola through three points."""
    a, b, constant = np.polyfit(x - x[1], y, 2)
    return float(constant - b * b / (4 * a))


def _halved(passed: Callable[[np.ndarray], np.ndarray], low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bisection, for every row, for the place between low and high where a condition becomes true."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        true = passed(middle)
        low, high = np.where(true, low, middle), np.where(true, middle, high)
    return low, high
