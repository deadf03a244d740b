"""Finite chi: Gaussian fluctuations of all L^2 logits around the symmetric saddle points (theory.md section 10).

W being marginalised exactly, the effective action of the logits to one loop, at G = c1 1 1^T + cG G* of c = (c1, cG), is

    Gamma(c) = S + (1/chi) [ (V/2) log det(I + g_O F/kappa) + 1/2 log det(H_0^-1 H) ],     H = Hessian of S over all L^2 logits

H_0, the Hessian of the prior, does not depend on c; with it exp(-chi Gamma) at a minimum is the evidence of that branch under the
normalised prior (up to the normalisation of the noise). Where c is not stationary, Gamma is the Legendre transform: the least
free energy at which the mean of G is this matrix. It is defined where H > 0. Its minimum is the mean of G to order 1/chi, its
second derivative there the inverse covariance, because the symmetry lets no other mode mix with c.

The free energy of cG alone, p(cG) ~ exp(-chi F(cG)), leaves the mode cG out of the determinant, and is defined through a barrier
as well. Gamma has the mean as its minimum, F the mode; weights agree up to terms of order 1/chi.

With population moments the data enter S through sums over rows of |A_a|^2, A_a . T_a and row sums only. Hence H consists, by the
symmetry of positions, of few blocks, see `Spectrum`, and nothing here has a cost that depends on L.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.prior import Scalar
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory import scalar
from copyhead.theory.action import at, reduced_action
from copyhead.theory.continuation import Segment, minimum_on
from copyhead.theory.order_parameters import lift, project
from copyhead.theory.posterior import Task, best_output, data_energy, token_blocks
from copyhead.theory.saddle_point import QUICK_COMPILATION
from copyhead.theory.transition import Phases, phases

Status = Literal["good", "correction not small", "no minimum"]

# Newton on Gamma follows the minimum from chi = infinity in this many steps of 1 / chi.
STEPS, NEWTON_STEPS = 40, 8
# In one step a minimum moves by little; a longer move has crossed a line where H is singular.
LONGEST_MOVE = 0.1
# Gamma'' may differ from S'' by this part of it before the expansion is called unreliable; it vanishes at a part of one.
LARGEST_CORRECTION = 0.5
# From a fold or pitchfork the path to finite chi keeps this distance in ln P, and this part of the length of the branch.
CLEARANCE, CLEAR_PART = 0.1, 0.3
GRID = 4001


class Spectrum(NamedTuple):
    """H_0^-1 H at a symmetric point, by irreducible parts: without data every part is the unit.

    symmetric: (c1, cG), in the directions 1 1^T and G* - 1 1^T/L; occurs once.
    edges: a copy entry and the rest of its column, with amplitudes over the rows that add up to zero; rows: the row sum, the
    same way. Both occur `copies` = R - 1 times, R being the number of scored rows.
    rest: what has neither row sums nor column sums nor copy entries; occurs `others` times.
    """

    symmetric: Float[Array, "2 2"]
    edges: Float[Array, "2 2"]
    rows: Float[Array, ""]
    rest: Float[Array, ""]
    copies: Float[Array, ""]
    others: Float[Array, ""]

    def log_det(self, symmetric: Float[Array, ""]) -> Float[Array, ""]:
        """log |det H_0^-1 H|, with `symmetric` in place of the determinant of the first block."""
        pair = jnp.log(jnp.abs(symmetric)) + self.copies * jnp.log(jnp.abs(_det(self.edges)))
        return pair + self.copies * jnp.log(jnp.abs(self.rows)) + self.others * jnp.log(jnp.abs(self.rest))

    def lowest(self) -> Float[Array, ""]:
        """The lowest eigenvalue; H is positive where it is."""
        return jnp.min(jnp.stack([_lowest(self.symmetric), self.lowest_asymmetric()]))

    def lowest_asymmetric(self) -> Float[Array, ""]:
        """The lowest eigenvalue of the modes that leave the symmetric subspace."""
        return jnp.min(jnp.stack([_lowest(self.edges), self.rows, self.rest]))


# 2 x 2 by hand: LAPACK under three derivatives would take seconds to compile
def _det(matrix: Float[Array, "2 2"]) -> Float[Array, ""]:
    return matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]


def _inverse(matrix: Float[Array, "2 2"]) -> Float[Array, "2 2"]:
    (a, b), (c, d) = matrix
    return jnp.array([[d, -b], [-c, a]]) / _det(matrix)


def _lowest(matrix: Float[Array, "2 2"]) -> Float[Array, ""]:
    """Of a matrix with real eigenvalues."""
    half = (matrix[0, 0] - matrix[1, 1]) / 2
    return (matrix[0, 0] + matrix[1, 1]) / 2 - jnp.sqrt(jnp.abs(half**2 + matrix[0, 1] * matrix[1, 0]))


def _hessian(function: Callable) -> Callable:
    """Forward over forward: for two arguments the smaller program."""
    return jax.jacfwd(jax.jacfwd(function))


def _directions(task: Task) -> Float[Array, "2 2"]:
    """Columns: the (c1, cG) of the unit matrices along 1 1^T and G* - 1 1^T/L over the scored rows."""
    length, rows = task.prior.length, task.layout.rows[0]
    size = jnp.sqrt(length / (rows * (length - 1)))
    return jnp.array([[1 / jnp.sqrt(rows * length), -size / length], [0.0, size]])


def _coupling(task: Task) -> Scalar:
    """tau_x |p|^2 / tau_p: K is tau_p (I + it times 1 1^T)."""
    return task.prior.token_coupling / task.prior.position_scale


def _variance(task: Task) -> Scalar:
    """chi times the prior variance of a logit without token coupling."""
    return task.prior.logit_variance * task.prior.position_scale**2


def _whitening(task: Task) -> Float[Array, "2 2"]:
    """`_directions` in units of the standard deviation of the prior at chi = 1."""
    uniform = 1 + _coupling(task) * task.prior.length
    return _directions(task) * jnp.stack([jnp.asarray(uniform), jnp.ones(())]) * jnp.sqrt(_variance(task))


def _edge_kernel(task: Task) -> Float[Array, "2 2"]:
    """Covariance of the unit matrices of `edges` under the prior, divided by `_variance`.

    K acts through their column sums, (1^T X)_b = sums[i] rho_b for amplitudes rho over the rows. Without token coupling the second
    of them is no different from `rest`; at L = 2 it does not exist, and `others` takes it out again.
    """
    length = task.prior.length
    sums = jnp.sqrt(jnp.stack([length / (length - 1), length * (length - 2) / (length - 1)]))
    return jnp.eye(2) + _coupling(task) * jnp.outer(sums, sums)


def spectrum(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Spectrum:
    """The Hessian of S over all logits at c, block by block.

    The data see sums over the rows of t = |A_a|^2, m = A_a . T_a and, for linear attention, of the row sums. To first order only
    the symmetric modes change these. So every other block is the second derivative of one row, along u (copy entry minus
    mean) or along v (any zero sum over the others), plus the prior.
    """
    length, rows, moments = task.prior.length, task.layout.rows[0], task.moments
    logits = lift(coordinates, task.target)
    blocks = token_blocks(logits, task, kind)
    output = best_output(blocks, task.prior)
    # dS = (w^2 dF - 2 w dN) / (2 kappa) at the best w, with F = P (t Sigma + s p p^T) and N = P (m Sigma + q p p^T)
    scale = moments.sequences / (2 * task.prior.kappa)
    by_t = scale * blocks.inner(output**2, moments.covariance)
    by_m = -2 * scale * blocks.inner(output, moments.covariance)
    if kind == "linear":
        copy = other = 2 * by_t / length**2
        sums = 2 * (by_t + length * scale * blocks.inner(output**2, moments.mean_square)) / length**2
    else:
        p, y = attention(logits, kind, length, task.layout.columns)[0]
        square = p**2 + (length - 1) * y**2
        # along v, of unit length: m'' = -p y and t'' = 4 y^2 - 2 y t. A row sum of logits changes nothing.
        other = by_t * (4 * y**2 - 2 * square * y) - by_m * p * y
        slope = p * (1 - p)
        bend = slope * (1 - 2 * p)
        bend_square = 2 * (p - y) * bend + 2 * length / (length - 1) * slope**2
        copy, sums = (by_t * bend_square + by_m * bend) * length / (length - 1), 0.0
    whitening = _whitening(task)
    return Spectrum(
        whitening.T @ _hessian(reduced_action)(coordinates, task, kind) @ whitening,
        jnp.eye(2) + _variance(task) * _edge_kernel(task) * jnp.stack([copy, other]),
        jnp.asarray(1 + _variance(task) * sums * (1 + _coupling(task) * length)),
        1 + _variance(task) * other,
        rows - 1,
        rows * (length - 2) - (rows - 1),
    )


def entropy(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Float[Array, ""]:
    """(V/2) log det(I + g_O F/kappa): the V columns of W, each a Gaussian of inverse covariance F/kappa + 1/g_O."""
    blocks = token_blocks(lift(coordinates, task.target), task, kind)
    vocab = jnp.sum(blocks.multiplicity)
    return vocab / 2 * jnp.sum(blocks.multiplicity * jnp.log1p(blocks.attention_square[:, 0, 0] / task.prior.ridge))


def effective_action(
    coordinates: Float[Array, "2"], task: Task, kind: Attention, part: float | Array = 1.0
) -> Float[Array, ""]:
    """Gamma(c), with `part` of its term of order 1/chi; see the module for what it means away from its minima.

    A negative determinant counts by its absolute value: the caller holds `Spectrum.lowest` against it.
    """
    found = spectrum(coordinates, task, kind)
    loop = entropy(coordinates, task, kind) + found.log_det(_det(found.symmetric)) / 2
    return reduced_action(coordinates, task, kind) + part * loop / task.prior.chi


def free_energy(cG: Float[Array, ""], task: Task) -> Float[Array, ""]:
    """F(cG) of softmax attention, where the rows of G sum to zero: minus the log density of cG over chi, up to a constant."""
    coordinates = jnp.stack([-cG / task.prior.length, cG])
    found = spectrum(coordinates, task, "softmax")
    loop = entropy(coordinates, task, "softmax") + found.log_det(found.symmetric[0, 0]) / 2
    return reduced_action(coordinates, task, "softmax") + loop / task.prior.chi


class Expanded(NamedTuple):
    """Everything at one point c, see `Fluctuations`. curvature: S''; hessian: Gamma''; both in (c1, cG)."""

    gamma: Array
    attention: Float[Array, "2"]
    covariance: Float[Array, "2 2"]
    attention_covariance: Float[Array, "2 2"]
    curvature: Float[Array, "2 2"]
    hessian: Float[Array, "2 2"]
    relaxation: Array


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _expand(coordinates: Array, task: Task, kind: Attention, hessian: Array, mobility: tuple[float, float]) -> Expanded:
    length, rows, chi = task.prior.length, task.layout.rows[0], task.prior.chi

    def shape(c: Array) -> Array:
        off, excess = project(attention(lift(c, task.target), kind, length, task.layout.columns), task.target, task.layout)
        return jnp.stack([length * off, excess])

    found, variance = spectrum(coordinates, task, kind), _variance(task)
    covariance = _inverse(hessian) / chi
    means = shape(coordinates)
    if kind == "softmax":
        # Every row bends its own copy entry p: the mean over rows of its variances along u and along v, see `spectrum`.
        p, y = attention(lift(coordinates, task.target), kind, length, task.layout.columns)[0]
        edges = variance * _inverse(found.edges) @ _edge_kernel(task)
        along_copy = (variance / found.symmetric[1, 1] + found.copies * edges[0, 0]) / rows
        along_others = (found.copies * edges[1, 1] + found.others * variance / found.rest) / rows
        bend = p * (1 - p) * (1 - 2 * p) * length / (length - 1) * along_copy - p * y * along_others
        means = means + bend / (2 * chi) * length / (length - 1) * jnp.array([-1.0, 1.0])
    slope = jax.jacfwd(shape)(coordinates)
    dewhitening = _inverse(_whitening(task))
    return Expanded(
        effective_action(coordinates, task, kind),
        means,
        covariance,
        slope @ covariance @ slope.T,
        dewhitening.T @ found.symmetric @ dewhitening,
        hessian,
        rates(coordinates, task, kind, mobility)[0],
    )


def rates(
    coordinates: Float[Array, "2"], task: Task, kind: Attention, mobility: tuple[float, float]
) -> Float[Array, "n"]:
    """Rates of Langevin dynamics of (G, W) linearised around c and the best W, lowest first, for the modes that move cG.

    Those are c and the two amplitudes of W, on zero-sum token vectors and on the uniform one. With softmax, row sums of G and
    the uniform token mode, which nothing couples to cG, are left out. mobility: step sizes of G and W.
    """
    blocks = token_blocks(lift(coordinates, task.target), task, kind)

    def energy(y: Array) -> Array:
        there, output = token_blocks(lift(y[:2], task.target), task, kind), y[2:, None, None]
        prior = reduced_action(y[:2], task, kind) - data_energy(there, task.prior)
        error = there.inner(output, output * (there.attention_square + task.prior.ridge) - 2 * there.overlap)
        return prior + error / (2 * task.prior.kappa)

    point = jnp.concatenate([coordinates, best_output(blocks, task.prior)[:, 0, 0]])
    frame = jnp.diag(jnp.sqrt(jnp.concatenate([jnp.ones(2), mobility[1] / blocks.multiplicity])))
    frame = frame.at[:2, :2].set(_directions(task) * jnp.sqrt(mobility[0]))
    modes = frame.T @ _hessian(energy)(point) @ frame
    return jnp.linalg.eigvalsh(modes[1:3, 1:3] if kind == "softmax" else modes)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _follow(start: Array, log_ps: Array, parts: Array, task: Task, kind: Attention) -> tuple[Array, Array, Array]:
    """Newton on Gamma along a path of ln P and of the part of its 1/chi term.

    Returns:
        The end of the path, Gamma'' there, and whether it was a minimum all the way.
    """
    whitening = _whitening(task)

    def step(state: tuple[Array, Array, Array], place: tuple[Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        here = at(task, jnp.exp(place[0]))

        def slope(z: Array) -> tuple[Array, Array]:
            gradient = jax.jacfwd(lambda y: effective_action(whitening @ y, here, kind, place[1]))(z)
            return gradient, gradient

        def newton(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            z = state[0] - state[1]
            hessian, gradient = jax.jacfwd(slope, has_aux=True)(z)
            return z, _inverse(hessian) @ gradient, hessian

        before, _, good = state
        z, change, hessian = jax.lax.fori_loop(0, NEWTON_STEPS, newton, (before, jnp.zeros(2), jnp.zeros((2, 2))))
        stable = (_lowest(hessian) > 0) & (spectrum(whitening @ z, here, kind).lowest() > 0)
        moved = jnp.max(jnp.abs(whitening @ (z - before)))
        good = good & stable & (jnp.max(jnp.abs(change)) < 1e-9) & (moved < LONGEST_MOVE)
        return (jnp.where(good, z, before), hessian, good), None

    begin = (_inverse(whitening) @ start, jnp.zeros((2, 2)), jnp.array(True))
    (z, hessian, good), _ = jax.lax.scan(step, begin, (log_ps, parts))
    dewhitening = _inverse(whitening)
    return whitening @ z, dewhitening.T @ hessian @ dewhitening, good


class Fluctuations(NamedTuple):
    """One branch at finite chi. Everything but `saddle` and `susceptibility` is nan where the status is "no minimum".

    status: "correction not small" where Gamma'' differs from S'' by more than half of it, or S has no minimum here.
    saddle: (c1, cG) for chi -> infinity, nan if this branch does not exist there at this P.
    c1, cG, a1, aG: means to order 1/chi. covariance, attention_covariance: of (c1, cG) and (a1, aG), Gamma''^-1 / chi; the
    latter by the delta method.
    susceptibility: chi Var for chi -> infinity, S''^-1 in (c1, cG) at the saddle.
    gamma: Gamma at its minimum. weight: of this branch among those that have a minimum, mirror images not counted.
    correction: largest part by which Gamma'' differs from S''. relaxation: slowest rate of Langevin dynamics, per unit of
    eps times steps, with W moving too.
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
    weight: float
    correction: float
    relaxation: float


class Barrier(NamedTuple):
    """From one branch of softmax attention to the other, by the free energy F of cG; see `barrier`.

    top: cG at the maximum of F between the wells. heights: chi (F(top) - F(well)), from below and from above.
    lifetimes: of either branch, in units of eps times steps of Langevin dynamics.
    symmetric: whether H has one negative direction only at the top. Otherwise rows cross one by one, the path over the
    symmetric top is not the cheapest, and all numbers are nan.
    """

    top: float
    heights: tuple[float, float]
    lifetimes: tuple[float, float]
    symmetric: bool


class FiniteChi(NamedTuple):
    """Where two branches have equal Gamma. P: P*(chi), nan if they do not coexist with equal Gamma.

    limit: P* for chi -> infinity. slope: d P*/d(1/chi) there. before, after: the branches at P, or at P* if P is nan.
    barrier: None for linear attention, and where P is nan.
    """

    P: float
    limit: float
    slope: float
    before: Fluctuations
    after: Fluctuations
    barrier: Barrier | None


def _task(problem: Problem, found: Phases) -> Task:
    if problem.content or problem.head_dimension is not None:
        reason = "content = True" if problem.content else f"head_dimension = {problem.head_dimension}"
        raise ProblemError(f"{reason}: fluctuations are known for positional attention with a fused query-key matrix only")
    task = found.system.task
    assert isinstance(task, Task)
    return task


def _branch(found: Phases, task: Task, segment: Segment, log_p: float, mobility: tuple[float, float]) -> Fluctuations:
    """The minimum of Gamma that belongs to a branch of minima of S, which need not reach as far as P = exp(log_p)."""
    system, kind = found.system, found.system.kind
    clear = min(CLEARANCE, CLEAR_PART * (segment.upper - segment.lower))
    low = segment.lower + (clear if segment.start else 0.0)
    high = segment.upper - (clear if segment.end else 0.0)
    origin = float(np.clip(log_p, low, high))
    start, saddle = minimum_on(system, segment, origin), minimum_on(system, segment, log_p)
    nothing, square = np.full(2, np.nan), np.full((2, 2), np.nan)
    if start is None:
        raise ArithmeticError(f"no minimum at P = {math.exp(origin):g} on a branch that holds it")
    with jax.enable_x64(True):
        parts = np.linspace(0, 1, STEPS + 1)[1:]
        path = origin + parts * (log_p - origin)
        place, hessian, good = _follow(system.coordinates(start.z), path, parts, task, kind)
        here = at(task, np.float64(math.exp(log_p)))
        center, response = nothing, square
        if saddle is not None:
            center = system.coordinates(saddle.z)
            response = np.linalg.inv(np.asarray(_expand(center, here, kind, square, mobility).curvature))
        if not good:
            return Fluctuations("no minimum", center, *(np.nan,) * 4, square, square, response, np.nan, 0.0, np.nan, np.nan)
        values = jax.tree.map(np.asarray, _expand(place, here, kind, hessian, mobility))
    correction = float(np.max(np.abs(np.linalg.eigvals(np.linalg.solve(values.curvature, values.hessian)) - 1)))
    small = saddle is not None and correction < LARGEST_CORRECTION
    return Fluctuations(
        "good" if small else "correction not small",
        center,
        *(float(value) for value in (*place, *values.attention)),
        values.covariance,
        values.attention_covariance,
        response,
        float(values.gamma),
        1.0,
        correction,
        float(values.relaxation),
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
        found: what `phases` found for this problem, if known, over a range that holds P.
        mobility: of G and W, step sizes of Langevin dynamics in units of eps; for `relaxation` only.

    Returns:
        A branch of S that has no minimum of Gamma at this chi comes last. Branches beyond their end in P are there if Gamma
        still has a minimum.

    Raises:
        ProblemError: for content = True or separate query and key matrices; without a number of sequences.
    """
    sequences = problem.sequences if sequences is None else sequences
    if sequences is None:
        raise ProblemError("sequences = None: fluctuations are those at one number of sequences")
    found = phases(problem, reach=[sequences]) if found is None else found
    task = _task(problem, found)
    branches = [_branch(found, task, segment, math.log(sequences), mobility) for segment in found.segments]
    branches = [branch for branch in branches if branch.status != "no minimum" or np.isfinite(branch.saddle).all()]
    return _weighted(branches, problem.chi)


def _weighted(branches: list[Fluctuations], chi: float) -> tuple[Fluctuations, ...]:
    order = sorted(branches, key=lambda branch: (math.isnan(branch.gamma), branch.gamma))
    weights = [0.0 if math.isnan(one.gamma) else math.exp(-chi * (one.gamma - order[0].gamma)) for one in order]
    return tuple(one._replace(weight=weight / max(sum(weights), 1e-300)) for one, weight in zip(order, weights, strict=True))
