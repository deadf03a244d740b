"""Gradient flow on E(G, W), population moments: plateau, time of the jump, slowing down at the folds (theory.md section 15).

Gradient descent theta' = theta - eta grad E of all entries of G and W, small eta, is the flow d theta / d tau = -grad E in the
time tau = eta * steps. Population moments keep the weights in the symmetric subspace

    G = c1 1 1^T + cG T        W = w_o (I - 1 1^T / V) + w_u 1 1^T / V

where |dG|^2 and |dW|^2 are a metric M on y = (c1, cG, w_o, w_u): dy / d tau = -M^-1 grad_y E. E keeps its prior terms, as in
training with L2 terms; chi has no part in it. Every call runs in float64.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jaxtyping import Array, Float

from copyhead.model import layout, network, targets
from copyhead.model.attention import attention
from copyhead.model.network import Start
from copyhead.model.prior import logit_energy
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.action import at, copy_task
from copyhead.theory.order_parameters import lift, project
from copyhead.theory.posterior import Task, TokenBlocks, best_output, token_blocks
from copyhead.theory.saddle_point import QUICK_COMPILATION
from copyhead.theory.transition import Phases, Transition, phases

# Local error of one step, relative and absolute; coordinates that are nearly zero are of the size of the initial scale.
RELATIVE, ABSOLUTE = 1e-8, 1e-13
# Steps of the solver, explicit: 1 / (largest curvature) each at least, which is 10^4 times the slowest time outside the folds.
MAX_STEPS = 1_000_000
# Longest time that a jump is waited for, in units of the slower of the two decays by the prior.
LONGEST = 3000.0
# Times at which a passage is looked at for its plateau.
LOOKS = 2001
# A branch is evaluated this near its fold, relative in P: its aG is within the square root of that of the fold.
BESIDE = 1e-9

Status = Literal["jumped", "stays", "not converged"]


class State(NamedTuple):
    """A point of the symmetric subspace. w_o, w_u: W on zero-sum token vectors and on the uniform one."""

    c1: float
    cG: float
    w_o: float
    w_u: float


class Trajectory(NamedTuple):
    """The flow at given times (n). loss: per token on the population. energy: E. speed: |d theta / d tau| of all weights.

    converged: whether the solver reached the last time; what it did not reach is nan.
    """

    time: Float[np.ndarray, "n"]
    c1: Float[np.ndarray, "n"]
    cG: Float[np.ndarray, "n"]
    w_o: Float[np.ndarray, "n"]
    w_u: Float[np.ndarray, "n"]
    a1: Float[np.ndarray, "n"]
    aG: Float[np.ndarray, "n"]
    loss: Float[np.ndarray, "n"]
    energy: Float[np.ndarray, "n"]
    speed: Float[np.ndarray, "n"]
    converged: bool


class Levels(NamedTuple):
    """aG before and after the jump of a run from one start at one P, by the minima of the action; nan where it has no jump.

    before: at the fold that the branch of the start ends in (zero without a fold). after: on the other branch at this P.
    fold: its P.
    """

    start: Start
    before: float
    after: float
    fold: float

    @property
    def middle(self) -> float:
        """The aG whose first passage is the time of the jump."""
        return (self.before + self.after) / 2


class Passage(NamedTuple):
    """The jump of one flow. time: tau when aG passes halfway from the plateau to its new value, nan unless it jumped.

    plateau: aG where the weights move slowest before the jump. length: time for which their speed |d theta / d tau| is within
    twice that least speed. Both are nan if the slowest point is an end of the passage: then there is no plateau.
    """

    status: Status
    time: float
    plateau: float
    length: float


class Slowing(NamedTuple):
    """Times on the far side of a fold and relaxation rates on the near side, at equal distances |P - fold| / fold, falling.

    time_exponent, rate_exponent: d ln / d ln distance between neighbouring distances; they tend to -1/2 and 1/2. product: time
    times rate over 2 pi, which tends to one: d x / d tau = a + x^2 takes pi / sqrt(a), and relaxes at 2 sqrt(-a) for a < 0.
    """

    start: Start
    fold: float
    distance: Float[np.ndarray, "n"]
    time: Float[np.ndarray, "n"]
    rate: Float[np.ndarray, "n"]
    time_exponent: Float[np.ndarray, "n-1"]
    rate_exponent: Float[np.ndarray, "n-1"]
    product: Float[np.ndarray, "n"]


def task_of(problem: Problem) -> Task:
    """The compressed task of a problem at its P, in float64.

    Raises:
        ProblemError: beyond positional attention of the paper's task; for token_scale > 0, where training moves other weights
            than the logits; if `sequences` is None.
    """
    problem.require_positional("training time is known")
    if problem.token_scale > 0:
        raise ProblemError(
            f"token_scale = {problem.token_scale:g}: training time is known for token_scale = 0, where the weights are G and W"
        )
    if problem.sequences is None:
        raise ProblemError("sequences = None: must be given")
    task = copy_task(problem)
    assert isinstance(task, Task)
    with jax.enable_x64(True):
        return jax.device_put(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), at(task, problem.sequences)))


def metric(problem: Problem) -> Float[np.ndarray, "4 4"]:
    """M with |dG|^2 + |dW|^2 = dy^T M dy; G over its scored rows: the others only decay, apart from the rest."""
    gram = np.zeros((4, 4))
    gram[:2, :2] = problem.scored * np.array([[problem.length, 1.0], [1.0, 1.0]])
    gram[2, 2], gram[3, 3] = problem.vocab - 1, 1.0
    return gram


def from_projections(problem: Problem, projections: Float[np.ndarray, "4"]) -> State:
    """The point with given components along four orthonormal directions of the space of all weights.

    They are 1 1^T and T without its part along 1 1^T (scored rows, normalised), and the two parts of W. I.i.d. weights of
    standard deviation s have four independent components of standard deviation s.
    """
    return State(*(float(value) for value in np.linalg.solve(np.linalg.cholesky(metric(problem)).T, projections)))


def initial(problem: Problem, start: Start, scale: float) -> State:
    """small: the typical size `scale` along each of the four directions, see `from_projections`. copy: `network.copying`."""
    if start == "small":
        return from_projections(problem, np.full(4, scale))
    copying = network.copying(targets.shift(problem.length, cyclic=problem.cyclic), problem.vocab, problem.attention)
    return projected(problem, np.asarray(copying.logits), np.asarray(copying.output))


def projected(problem: Problem, logits: Float[np.ndarray, "L L"], output: Float[np.ndarray, "V V"]) -> State:
    """The orthogonal projection of any weights on the subspace."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    c1, cG = project(np.asarray(logits, float), target, layout.full(problem.length, problem.cyclic))
    uniform = float(np.sum(output)) / problem.vocab
    return State(float(c1), float(cG), (float(np.trace(output)) - uniform) / (problem.vocab - 1), uniform)


def _error(blocks: TokenBlocks, output: Float[Array, "n 1 1"]) -> Float[Array, ""]:
    """Y2 - 2 tr N^T W + tr W^T F W, the squared error at any W."""
    return blocks.target_square + blocks.inner(output, blocks.attention_square * output - 2 * blocks.overlap)


def reduced_energy(y: Float[Array, "4"], task: Task, kind: Attention) -> Float[Array, ""]:
    """E(G, W) at y = (c1, cG, w_o, w_u)."""
    logits, output = lift(y[:2], task.target), y[2:, None, None]
    blocks = token_blocks(logits, task, kind)
    of_output = blocks.inner(output, output) / (2 * task.prior.output_variance)
    return _error(blocks, output) / (2 * task.prior.kappa) + of_output + logit_energy(logits, task.layout, task.prior)


def _attended(y: Float[Array, "4"], task: Task, kind: Attention) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """a1 and aG."""
    matrix = attention(lift(y[:2], task.target), kind, task.prior.length, task.layout.columns)
    off, excess = project(matrix, task.target, task.layout)
    return task.prior.length * off, excess


def _velocity(y: Float[Array, "4"], task: Task, kind: Attention, inverse: Float[Array, "4 4"]) -> Float[Array, "4"]:
    return -inverse @ jax.grad(reduced_energy)(y, task, kind)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _solve(
    start: Float[Array, "4"],
    times: Float[Array, "n"],
    last: Float[Array, ""],
    level: Float[Array, ""],
    rising: Float[Array, ""],
    task: Task,
    gram: Float[Array, "4 4"],
    kind: Attention,
) -> tuple[Float[Array, "n 4"], Float[Array, ""], Array, Array]:
    """y at `times`, time of the end, whether |aG| passed `level` (upwards if rising = 1, downwards if -1), and success."""
    inverse = jnp.linalg.inv(gram)

    def passed(t: Any, y: Array, args: Any, **kwargs: Any) -> Array:
        return rising * (jnp.abs(_attended(y, task, kind)[1]) - level)

    found = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: _velocity(y, task, kind, inverse)),
        diffrax.Tsit5(),
        0.0,
        last,
        None,
        start,
        saveat=diffrax.SaveAt(subs=[diffrax.SubSaveAt(ts=times), diffrax.SubSaveAt(t1=True)]),
        stepsize_controller=diffrax.PIDController(rtol=RELATIVE, atol=ABSOLUTE),
        event=diffrax.Event(passed, optimistix.Newton(1e-10, 1e-10), direction=True),
        max_steps=MAX_STEPS,
        throw=False,
    )
    assert found.ts is not None
    assert found.ys is not None
    happened = found.result == diffrax.RESULTS.event_occurred
    return found.ys[0], found.ts[1][0], happened, happened | (found.result == diffrax.RESULTS.successful)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _observe(
    states: Float[Array, "n 4"], task: Task, gram: Float[Array, "4 4"], kind: Attention
) -> tuple[Float[Array, "n"], ...]:
    """a1, aG, loss, energy and speed of every state."""

    def one(y: Array) -> tuple[Array, ...]:
        slope = jax.grad(reduced_energy)(y, task, kind)
        blocks = token_blocks(lift(y[:2], task.target), task, kind)
        loss = _error(blocks, y[2:, None, None]) / (task.moments.sequences * jnp.sum(task.layout.scored))
        speed = jnp.sqrt(slope @ jnp.linalg.solve(gram, slope))
        return *_attended(y, task, kind), loss, reduced_energy(y, task, kind), speed

    return jax.vmap(one)(states)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _curvatures(states: Float[Array, "n 4"], task: Task, gram: Float[Array, "4 4"], kind: Attention) -> Float[Array, "n 4"]:
    root = jnp.linalg.inv(jnp.linalg.cholesky(gram))
    hessians = jax.vmap(lambda y: root @ jax.hessian(reduced_energy)(y, task, kind) @ root.T)(states)
    return jnp.linalg.eigvalsh(hessians)


def flow(problem: Problem, start: State, times: Float[np.ndarray, "n"]) -> Trajectory:
    """The flow from `start` at tau = 0, at increasing times.

    Raises:
        ProblemError: see `task_of`.
    """
    task, gram = task_of(problem), metric(problem)
    times = np.asarray(times, float)
    with jax.enable_x64(True):
        states, _, _, success = _solve(
            np.array(start), times, times[-1], np.float64(np.inf), np.float64(1), task, gram, problem.attention
        )
        kept = np.where(np.isfinite(states), states, np.nan)
        observed = [np.asarray(part) for part in _observe(kept, task, gram, problem.attention)]
    return Trajectory(times, *kept.T, *observed, converged=bool(success))


def curvatures(problem: Problem, states: Float[np.ndarray, "n 4"]) -> Float[np.ndarray, "n 4"]:
    """Eigenvalues of the Hessian of E within the subspace under the metric of the weights, ascending: rates per unit of tau."""
    with jax.enable_x64(True):
        return np.asarray(_curvatures(np.asarray(states, float), task_of(problem), metric(problem), problem.attention))


class Rates(NamedTuple):
    """What bounds the learning rate along a flow. limit: 2 / (largest curvature), beyond which gradient descent is unstable.

    growth: the fastest exponential growth, minus the lowest curvature; zero if that is positive.
    """

    limit: float
    growth: float


def learning_rates(problem: Problem, found: Trajectory) -> Rates:
    """What the curvatures along a flow say of the learning rate that follows it."""
    reached = np.isfinite(found.energy)
    values = curvatures(problem, np.column_stack([found.c1, found.cG, found.w_o, found.w_u])[reached])
    return Rates(2 / float(values.max()), max(0.0, -float(values.min())))


def jump_of(found: Phases) -> Transition | None:
    """The first-order transition to copying, if there is one."""
    return next((t for t in found.transitions if t.window and not t.pools), None)


def levels(problem: Problem, start: Start, found: Phases | None = None) -> Levels:
    """aG between which a run from `start` jumps at the P of the problem, by all minima of the action.

    Without a first-order transition to copying, the small start rises from zero to the global minimum, and the copy start
    has nowhere to fall to.
    """
    sequences = float(task_of(problem).moments.sequences)
    found = found or phases(problem)

    def extreme(place: float, most: bool) -> float:
        choose = max if most else min
        return float(choose((m.order_parameters for m in found.minima(place)), key=lambda one: float(one.cG)).aG)

    jump = jump_of(found)
    if jump is None or jump.window is None:
        after = float(found.minima(sequences)[0].order_parameters.aG)
        if start == "copy" or abs(after) < 1e-9:
            return Levels(start, math.nan, math.nan, math.nan)
        return Levels(start, 0.0, abs(after), math.nan)
    lower, upper = jump.window
    rising = start == "small"
    if sequences <= lower if rising else sequences >= upper:  # there is no other branch
        return Levels(start, math.nan, math.nan, upper if rising else lower)
    if rising:
        return Levels(start, extreme(min(sequences, upper * (1 - BESIDE)), False), extreme(sequences, True), upper)
    return Levels(start, extreme(max(sequences, lower * (1 + BESIDE)), True), extreme(sequences, False), lower)


def passage(problem: Problem, start: State, between: Levels, plateau: bool = True) -> Passage:
    """Time of the jump of the flow from `start`, and its plateau.

    Args:
        plateau: whether the plateau is wanted; without, both its numbers are nan.

    Raises:
        ProblemError: see `task_of`.
    """
    task, gram = task_of(problem), metric(problem)
    nothing = math.nan, math.nan, math.nan
    if math.isnan(between.middle):
        return Passage("stays", *nothing)
    last = np.float64(LONGEST * max(problem.position_scale**2 * problem.logit_variance, problem.output_variance))
    level, rising = np.float64(between.middle), np.float64(1 if between.after > between.before else -1)
    unused = np.linspace(0, 1e-9, LOOKS)  # of the shape that `flow` has here, so that one compilation serves both
    with jax.enable_x64(True):
        _, time, happened, success = _solve(np.array(start), unused, last, level, rising, task, gram, problem.attention)
    if not success:
        return Passage("not converged", *nothing)
    if not happened:
        return Passage("stays", *nothing)
    if not plateau:
        return Passage("jumped", float(time), math.nan, math.nan)
    return Passage("jumped", float(time), *_plateau(flow(problem, start, np.linspace(0, float(time), LOOKS))))


def _plateau(found: Trajectory) -> tuple[float, float]:
    """aG and length of the slowest stretch, see `Passage`."""
    slowest = int(np.argmin(found.speed))
    if not found.converged or slowest in (0, len(found.time) - 1):
        return math.nan, math.nan
    slow = found.speed <= 2 * found.speed[slowest]
    step = float(found.time[1] - found.time[0])
    return float(found.aG[slowest]), float(np.count_nonzero(slow)) * step


def relaxation(problem: Problem, most: bool, found: Phases) -> float:
    """Slowest rate at which the flow relaxes to the minimum of largest (`most`) or smallest cG at the P of the problem."""
    task = task_of(problem)
    choose = max if most else min
    place = choose((m.order_parameters for m in found.minima(float(task.moments.sequences))), key=lambda one: float(one.cG))
    return float(curvatures(problem, _with_best_output(problem, float(place.c1), float(place.cG))[None])[0, 0])


def _with_best_output(problem: Problem, c1: float, cG: float) -> Float[np.ndarray, "4"]:
    """y with the W that minimises E."""
    task = task_of(problem)
    with jax.enable_x64(True):
        blocks = token_blocks(lift(jnp.array([c1, cG]), task.target), task, problem.attention)
        return np.array([c1, cG, *np.asarray(best_output(blocks, task.prior)).ravel()])


def slowing(
    problem: Problem,
    start: Start,
    distances: Float[np.ndarray, "n"],
    scale: float = 0.01,
    found: Phases | None = None,
) -> Slowing | None:
    """Times of the jump beyond the fold that the branch of `start` ends in, rates before it; None if there are no folds.

    Raises:
        ProblemError: see `task_of`; unless the distances fall, between 0 and 1.
    """
    distances = np.asarray(distances, float)
    if len(distances) < 2 or not (np.all(np.diff(distances) < 0) and distances[-1] > 0 and distances[0] < 1):
        raise ProblemError("distances: must be at least two numbers between 0 and 1 that fall")
    found = found or phases(problem)
    jump = jump_of(found)
    if jump is None or jump.window is None:
        return None
    small = start == "small"
    fold, side = jump.window[1 if small else 0], 1 if small else -1
    times, rates = [], []
    for distance in distances:
        beyond, before = (problem.replace(sequences=fold * (1 + sign * side * distance)) for sign in (1, -1))
        times.append(passage(beyond, initial(beyond, start, scale), levels(beyond, start, found), plateau=False).time)
        inside = jump.window[0] < fold * (1 - side * distance) < jump.window[1]
        rates.append(relaxation(before, not small, found) if inside else math.nan)
    time, rate = np.array(times), np.array(rates)
    exponents = _local(distances, time), _local(distances, rate)
    return Slowing(start, fold, distances, time, rate, *exponents, product=time * rate / (2 * math.pi))


def _local(distances: Float[np.ndarray, "n"], values: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n-1"]:
    """d ln values / d ln distance between neighbours."""
    return np.diff(np.log(values)) / np.diff(np.log(distances))
