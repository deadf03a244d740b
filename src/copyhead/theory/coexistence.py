"""Two branches at finite chi: where they have equal weight, the barrier between them, and how long each of them lives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.action import at, reduced_action
from copyhead.theory.effective_action import free_energy, gaussian_task, rates, spectrum
from copyhead.theory.fluctuations import Fluctuations, branch, weighted
from copyhead.theory.posterior import Task
from copyhead.theory.saddle_point import QUICK_COMPILATION
from copyhead.theory.transition import Phases, phases

# F is tabulated from a little below the lower to a little above the upper branch; its step enters the barrier squared.
MARGIN, GRID = 0.5, 4001
# P*(chi) is sought this far in ln P, in steps of SEARCH, if the branches do not coexist where the leading order puts it.
REACH, SEARCH = 0.3, 0.01
TOLERANCE = 1e-11


class Barrier(NamedTuple):
    """From one branch of softmax attention to the other, by the free energy F of cG; see `barrier`.

    wells, top: cG at the minima of F and at the maximum between them. heights: chi (F(top) - F(well)), from below and above.
    lifetimes: of either branch, in units of eps times the steps of Langevin dynamics.
    symmetric: whether H has no other negative direction between the wells. Otherwise, as at L = 64, rows can cross one by
    one, the path over the symmetric top is not the cheapest, and heights and lifetimes are nan.
    """

    wells: tuple[float, float]
    top: float
    heights: tuple[float, float]
    lifetimes: tuple[float, float]
    symmetric: bool


class FiniteChi(NamedTuple):
    """Where two branches have equal Gamma. P: P*(chi), nan if they do not coexist with equal Gamma at this chi.

    limit: P* for chi -> infinity. slope: d P*/d(1/chi) there. before, after: the branches at P; at P* if P is nan.
    barrier: None for linear attention, where P is nan, and where F has no barrier.
    """

    P: float
    limit: float
    slope: float
    before: Fluctuations
    after: Fluctuations
    barrier: Barrier | None


@partial(jax.jit, compiler_options=QUICK_COMPILATION)
def _profile(cG: Float[Array, "n"], task: Task) -> tuple[Float[Array, "n"], Float[Array, "n"]]:
    """F along cG, and the lowest eigenvalue of H among the modes that leave the symmetric subspace."""

    def one(value: Array) -> tuple[Array, Array]:
        coordinates = jnp.stack([-value / task.prior.length, value])
        return free_energy(value, task), spectrum(coordinates, task, "softmax").lowest_asymmetric()

    return jax.vmap(one)(cG)


@partial(jax.jit, compiler_options=QUICK_COMPILATION)
def _descent(top: Array, task: Task, mobility: tuple[float, float]) -> Array:
    """The negative rate of Langevin dynamics of (G, W) at a maximum of S in cG."""
    return rates(jnp.stack([-top / task.prior.length, top]), task, "softmax", mobility)[0]


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _by_log_p(saddle: Array, log_p: float, task: Task, kind: Attention) -> Array:
    """dS / d ln P along a branch of stationary points."""
    return jax.grad(lambda u: reduced_action(saddle, at(task, jnp.exp(u)), kind))(log_p)


def barrier(
    problem: Problem, sequences: float, before: float, after: float, mobility: tuple[float, float] = (1.0, 1.0)
) -> Barrier | None:
    """The barrier of F between two values of cG, one in either well, and the lifetimes of the wells.

    The rate of escape is Kramers' in the form of Langer,

        |lambda| / (2 pi)  sqrt(F''(well) / |F''(top)|)  exp(-chi [F(top) - F(well)]),

    with lambda the negative rate of (G, W) at the top, so that W need not be faster than G. It needs heights well above one.

    Args:
        mobility: of G and W, their step sizes in units of eps.

    Returns:
        None if F has no barrier between the two.

    Raises:
        ProblemError: for linear attention, content = True, or separate query and key matrices.
    """
    if problem.attention != "softmax":
        raise ProblemError("attention = linear: the free energy of cG alone is known for softmax only")
    with jax.enable_x64(True):
        here = at(gaussian_task(problem), np.float64(sequences))
        cG = np.linspace(before - MARGIN, after + MARGIN, GRID)
        energy, lowest = (np.asarray(part) for part in _profile(cG, here))
        first, last = (int(np.searchsorted(cG, end)) for end in (before, after))
        top = first + int(np.argmax(energy[first : last + 1]))
        wells = int(np.argmin(energy[: top + 1])), top + int(np.argmin(energy[top:]))
        if top in (first, last, *wells) or wells[0] == 0 or wells[1] == GRID - 1:
            return None
        rate = abs(float(_descent(cG[top], here, mobility))) / (2 * math.pi)
    places = (float(cG[wells[0]]), float(cG[wells[1]]))
    if np.min(lowest[wells[0] : wells[1] + 1]) <= 0:
        return Barrier(places, float(cG[top]), (math.nan, math.nan), (math.nan, math.nan), False)

    def bend(index: int) -> float:
        return abs(float(energy[index - 1] - 2 * energy[index] + energy[index + 1]))

    low, high = (problem.chi * float(energy[top] - energy[well]) for well in wells)
    short, long = (math.sqrt(bend(top) / bend(well)) / rate for well in wells)
    # beyond exp(700) a lifetime is infinite for every purpose, and for float64
    lifetimes = (short * math.exp(min(low, 700.0)), long * math.exp(min(high, 700.0)))
    return Barrier(places, float(cG[top]), (low, high), lifetimes, True)


def maxwell(problem: Problem, found: Phases | None = None, mobility: tuple[float, float] = (1.0, 1.0)) -> FiniteChi | None:
    """P*(chi) of the first first-order transition: where its two branches have equal Gamma, hence equal weight.

    Args:
        found: what `phases` found for this problem, at any chi, if it is known already.
        mobility: of G and W, their step sizes in units of eps, for rates and lifetimes.

    Returns:
        None if the problem has no first-order transition for chi -> infinity.

    Raises:
        ProblemError: for content = True or separate query and key matrices.
    """
    task = gaussian_task(problem)
    found = phases(problem) if found is None else found
    jump = next((transition for transition in found.transitions if transition.kind == "first-order"), None)
    if jump is None:
        return None
    system, limit = found.system, math.log(jump.P)
    ordered = sorted(found.points(limit)[:2], key=lambda pair: float(system.coordinates(pair[1].z)[1]))
    segments = [segment for segment, _ in ordered]

    def pair(log_p: float) -> tuple[Fluctuations, Fluctuations]:
        first, second = (branch(found, segment, task, log_p, mobility) for segment in segments)
        return first, second

    def difference(log_p: float) -> float:
        first, second = pair(log_p)
        return first.gamma - second.gamma

    # S + loop / chi is equal on both branches, and S is at the limit
    at_limit = pair(limit)
    with jax.enable_x64(True):
        rises = [float(_by_log_p(one.saddle, limit, task, system.kind)) for one in at_limit]
    shift = (at_limit[1].loop - at_limit[0].loop) / (rises[0] - rises[1])
    place = _root(difference, limit + shift / problem.chi, limit)
    slope = jump.P * shift
    if place is None:
        return FiniteChi(math.nan, jump.P, slope, *at_limit, None)
    first, second = pair(place)
    total = weighted([first, second], problem.chi)
    first, second = (one._replace(weight=next(w.weight for w in total if w.gamma == one.gamma)) for one in (first, second))
    over = barrier(problem, math.exp(place), first.cG, second.cG, mobility) if problem.attention == "softmax" else None
    return FiniteChi(math.exp(place), jump.P, slope, first, second, over)


def _root(function: Callable[[float], float], guess: float, limit: float) -> float | None:
    """The root of a nearly linear function that is nan outside some interval; None if that holds no root."""
    near = sorted((k * SEARCH for k in range(-round(REACH / SEARCH), round(REACH / SEARCH) + 1)), key=abs)
    starts = [guess, limit, *(limit + offset for offset in near)]
    here = next((place for place in starts if math.isfinite(function(place))), None)
    if here is None:
        return None
    value = function(here)
    there = here + (1e-4 if math.isfinite(function(here + 1e-4)) else -1e-4)
    for _ in range(50):
        other = function(there)
        if not math.isfinite(other):
            there = (here + there) / 2  # the secant has left the interval of coexistence
            if abs(there - here) < 1e-6:
                return None
            continue
        if abs(there - here) < TOLERANCE or other == value:
            return there
        here, value, there = there, other, there - other * (there - here) / (other - value)
    return None
