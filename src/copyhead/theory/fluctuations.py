"""Means, variances and weights of the branches at finite chi, to one loop (see `effective_action`)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory import effective_action as one_loop
from copyhead.theory.action import at
from copyhead.theory.continuation import Segment, minimum_on
from copyhead.theory.effective_action import effective_action, inverse, spectrum
from copyhead.theory.order_parameters import lift, project
from copyhead.theory.posterior import Task
from copyhead.theory.saddle_point import QUICK_COMPILATION
from copyhead.theory.transition import Phases, phases

Status = Literal["good", "correction not small", "no minimum"]

# Newton on Gamma follows the minimum from chi = infinity in this many steps of 1 / chi.
STEPS, NEWTON_STEPS = 40, 8
# A minimum moves by little in one step, in c1 or cG; a longer move has crossed a line where H is singular.
LONGEST_MOVE = 0.1
# Gamma'' may differ from S'' by this part of it before the expansion is called unreliable; at a part of one it may vanish.
LARGEST_CORRECTION = 0.5
# The path to finite chi begins this far in ln P from a fold or pitchfork, or at this part of the branch.
CLEARANCE, CLEAR_PART = 0.1, 0.3


class Fluctuations(NamedTuple):
    """One branch at finite chi. With status "no minimum" only `saddle`, what belongs to it, and `loop` are numbers.

    status: "no minimum" where Gamma has lost it, that is where fluctuations carry the system off the branch; "correction not
    small" where Gamma'' differs from S'' by more than half of it, or where S itself has no minimum at this P.
    saddle: (c1, cG) for chi -> infinity, nan if S has no minimum on this branch at this P.
    c1, cG, a1, aG: means to order 1/chi. covariance, attention_covariance: of (c1, cG) and of (a1, aG), Gamma''^-1 / chi, the
    latter by the delta method.
    susceptibility: chi times the covariance of (c1, cG) for chi -> infinity, S''^-1 at the saddle.
    gamma: Gamma at its minimum. loop: chi (Gamma - S) at the saddle, of order one.
    weight: of this branch among those that have a minimum; a mirror image of linear attention is not counted.
    correction: largest relative difference of Gamma'' from S''.
    relaxation: the slowest rate at which Langevin dynamics of (G, W), linearised around the mean, restores c, per unit of eps
    times steps; with Gamma'' in place of S'', which takes all other fluctuations to be faster. saddle_relaxation: the same for
    chi -> infinity.
    """

    status: Status
    saddle: Float[np.ndarray, "2"]
    c1: float
    cG: float
    a1: float
    aG: float
    covariance: Float[np.ndarray, "2 2"]
    attention_covariance: Float[np.ndarray, "2 2"]
    susceptibility: Float[np.ndarray, "2 2"]
    gamma: float
    loop: float
    weight: float
    correction: float
    relaxation: float
    saddle_relaxation: float

    @property
    def deviations(self) -> dict[str, float]:
        """Standard deviations of c1, cG, a1 and aG."""
        variances = [*np.diag(self.covariance), *np.diag(self.attention_covariance)]
        return dict(zip(("c1", "cG", "a1", "aG"), map(float, np.sqrt(variances)), strict=True))

    def to_dict(self, chi: float) -> dict[str, Any]:
        """Everything by name, at the chi that it was found at."""
        deviations = self.deviations
        return {
            "status": self.status,
            "saddle": dict(zip(("c1", "cG"), self.saddle, strict=True)),
            "mean": {name: getattr(self, name) for name in deviations},
            "standard_deviation": deviations,
            "weight": self.weight,
            "susceptibility": dict(zip(("c1", "cG"), chi * np.diag(self.covariance), strict=True)),
            "saddle_susceptibility": dict(zip(("c1", "cG"), np.diag(self.susceptibility), strict=True)),
            "relaxation": self.relaxation,
            "saddle_relaxation": self.saddle_relaxation,
            "correction": self.correction,
            "gamma": self.gamma,
        }


class Expanded(NamedTuple):
    """Everything at one point c, see `Fluctuations`. curvature: S'' in (c1, cG)."""

    gamma: Array
    loop: Array
    attention: Float[Array, "2"]
    covariance: Float[Array, "2 2"]
    attention_covariance: Float[Array, "2 2"]
    curvature: Float[Array, "2 2"]
    relaxation: Array


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _expand(coordinates: Array, task: Task, kind: Attention, hessian: Array, mobility: tuple[float, float]) -> Expanded:
    """hessian: Gamma'' in (c1, cG); nan for the rate of S alone."""
    length, rows, chi = task.prior.length, task.layout.rows[0], task.prior.chi

    def shape(c: Array) -> Array:
        off, excess = project(attention(lift(c, task.target), kind, length, task.layout.columns), task.target, task.layout)
        return jnp.stack([length * off, excess])

    found, variance = spectrum(coordinates, task, kind), one_loop.variance(task)
    covariance = inverse(hessian) / chi
    means = shape(coordinates)
    if kind == "softmax":
        # Every row bends its own copy entry p: the mean over rows of its variances along u and along v, see `spectrum`.
        p, y = attention(lift(coordinates, task.target), kind, length, task.layout.columns)[0]
        edges = variance * inverse(found.edges) @ one_loop.edge_kernel(task)
        along_copy = (variance / found.symmetric[1, 1] + found.copies * edges[0, 0]) / rows
        along_others = (found.copies * edges[1, 1] + found.others * variance / found.rest) / rows
        bend = p * (1 - p) * (1 - 2 * p) * length / (length - 1) * along_copy - p * y * along_others
        means = means + bend / (2 * chi) * length / (length - 1) * jnp.array([-1.0, 1.0])
    slope = jax.jacfwd(shape)(coordinates)
    units = inverse(one_loop.whitening(task))
    curvature = units.T @ found.symmetric @ units
    stiffening = jnp.where(jnp.isnan(hessian), 0.0, hessian - curvature)
    return Expanded(
        effective_action(coordinates, task, kind),
        one_loop.loop(coordinates, task, kind),
        means,
        covariance,
        slope @ covariance @ slope.T,
        curvature,
        one_loop.rates(coordinates, task, kind, mobility, stiffening)[0],
    )


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _follow(start: Array, log_ps: Array, parts: Array, task: Task, kind: Attention) -> tuple[Array, Array, Array]:
    """Newton on Gamma along a path of ln P and of the part of its 1/chi term.

    Returns:
        The end of the path, Gamma'' there, and whether it was a minimum all the way.
    """
    units = one_loop.whitening(task)

    def step(state: tuple[Array, Array, Array], place: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        here = at(task, jnp.exp(place[0]))

        def slope(z: Array) -> tuple[Array, Array]:
            gradient = jax.jacfwd(lambda y: effective_action(units @ y, here, kind, place[1]))(z)
            return gradient, gradient

        def newton(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z = state[0] - state[1]
            hessian, gradient = jax.jacfwd(slope, has_aux=True)(z)
            return z, inverse(hessian) @ gradient, hessian

        before, _, good = state
        z, change, hessian = jax.lax.fori_loop(0, NEWTON_STEPS, newton, (before, jnp.zeros(2), jnp.zeros((2, 2))))
        stable = (one_loop.lowest_eigenvalue(hessian) > 0) & (spectrum(units @ z, here, kind).lowest() > 0)
        moved = jnp.max(jnp.abs(units @ (z - before)))
        good = good & stable & (jnp.max(jnp.abs(change)) < 1e-9) & (moved < LONGEST_MOVE)
        return (jnp.where(good, z, before), hessian, good), None

    begin = (inverse(units) @ start, jnp.zeros((2, 2)), jnp.array(True))
    (z, hessian, good), _ = jax.lax.scan(step, begin, (log_ps, parts))
    return units @ z, inverse(units).T @ hessian @ inverse(units), good


def branch(
    found: Phases, segment: Segment, task: Task, log_p: float, mobility: tuple[float, float] = (1.0, 1.0)
) -> Fluctuations:
    """The minimum of Gamma that belongs to a branch of minima of S, which need not reach as far as P = exp(log_p).

    Args:
        found: of the same problem, at any chi. task: from `gaussian_task`, with the chi that is meant.
    """
    system, kind = found.system, found.system.kind
    clear = min(CLEARANCE, CLEAR_PART * (segment.upper - segment.lower))
    low = segment.lower + (clear if segment.start else 0.0)
    high = segment.upper - (clear if segment.end else 0.0)
    origin = float(np.clip(log_p, low, high))
    start, saddle = minimum_on(system, segment, origin), minimum_on(system, segment, log_p)
    if start is None:
        raise ArithmeticError(f"no minimum at P = {math.exp(origin):g} on a branch that holds it")
    nothing = np.full((2, 2), np.nan)
    center, response, loop, bare = nothing[0], nothing, math.nan, math.nan
    with jax.enable_x64(True):
        here = at(task, np.float64(math.exp(log_p)))
        if saddle is not None:
            center = system.coordinates(saddle.z)
            values = _expand(center, here, kind, nothing, mobility)
            response = np.linalg.inv(values.curvature)
            loop, bare = float(values.loop), float(values.relaxation)
        parts = np.linspace(0, 1, STEPS + 1)[1:]
        place, hessian, good = _follow(system.coordinates(start.z), origin + parts * (log_p - origin), parts, task, kind)
        if not good:
            nan = math.nan
            lost = "no minimum", center, nan, nan, nan, nan, nothing, nothing, response, nan, loop, 0.0, nan, nan, bare
            return Fluctuations(*lost)
        values = jax.tree.map(np.asarray, _expand(place, here, kind, hessian, mobility))
        correction = float(np.max(np.abs(np.linalg.eigvals(np.linalg.solve(values.curvature, hessian)) - 1)))
    c1, cG, a1, aG = (float(value) for value in (*place, *values.attention))
    return Fluctuations(
        "good" if saddle is not None and correction < LARGEST_CORRECTION else "correction not small",
        center,
        c1,
        cG,
        a1,
        aG,
        values.covariance,
        values.attention_covariance,
        response,
        float(values.gamma),
        loop,
        1.0,
        correction,
        float(values.relaxation),
        bare,
    )


def fluctuations(
    problem: Problem,
    sequences: float | None = None,
    found: Phases | None = None,
    mobility: tuple[float, float] = (1.0, 1.0),
) -> tuple[Fluctuations, ...]:
    """Means, variances and weights of every branch at the chi of the problem, the one of least Gamma first.

    Args:
        sequences: P; default: that of the problem.
        found: what `phases` found for this problem, at any chi, if it is known already, over a range that holds P.
        mobility: of G and W, their step sizes in units of eps; for `relaxation` only.

    Returns:
        Branches of S that have no minimum of Gamma come last. A branch that S does not have at this P, but Gamma has, is there.

    Raises:
        ProblemError: for content = True or separate query and key matrices; without a number of sequences.
    """
    sequences = problem.sequences if sequences is None else sequences
    if sequences is None:
        raise ProblemError("sequences = None: fluctuations are those at one number of sequences")
    task = one_loop.gaussian_task(problem)
    found = phases(problem, reach=[sequences]) if found is None else found
    branches = [branch(found, segment, task, math.log(sequences), mobility) for segment in found.segments]
    return weighted([one for one in branches if one.status != "no minimum" or np.isfinite(one.loop)], problem.chi)


def weighted(branches: list[Fluctuations], chi: float) -> tuple[Fluctuations, ...]:
    """In order of Gamma, with weights exp(-chi Gamma) that add up to one."""
    order = sorted(branches, key=lambda one: (math.isnan(one.gamma), one.gamma))
    weights = [0.0 if math.isnan(one.gamma) else math.exp(-chi * (one.gamma - order[0].gamma)) for one in order]
    return tuple(one._replace(weight=weight / max(sum(weights), 1e-300)) for one, weight in zip(order, weights, strict=True))
