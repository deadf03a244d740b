"""Stationary points of the reduced action, by Newton in whitened coordinates z and u = ln P.

In z the prior is proportional to |z|^2. A stationary point is a minimum only if the lowest eigenvalue of its Hessian is
positive.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.theory.action import AnyTask, Kind, at, reduced_action, row_entries
from copyhead.theory.descent import descend
from copyhead.theory.recipe import RecipeTask
from copyhead.theory.symmetric import SymmetricTask, excess_weights

NEWTON_STEPS = 12
# The gradient is that of S / unit, of order one; float64 Newton ends near 1e-15 times the cancelled terms of S.
RESIDUAL_TOLERANCE = 1e-9
# Systems solved in one call: the time of a call is mostly its fixed cost, so the starts of a search share it.
BATCH = 5
# Above this dimension the Hessian costs more than the call: one system at a time.
LARGEST_BATCHED = 8
# The kernel works on a handful of numbers: optimising it takes XLA half a second and gains nothing.
QUICK_COMPILATION = {"xla_backend_optimization_level": 0}
# Longest step along a branch of order parameters, in (z, ln P).
LARGEST_STEP = 0.5
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


@partial(jax.vmap, in_axes=(0, 0, 0, None, None, None, None))
def _newton(
    vector: Float[Array, "d+1"],
    normal: Float[Array, "d+1"],
    offset: Float[Array, ""],
    whitening: Float[Array, "d d"],
    unit: Float[Array, ""],
    task: AnyTask,
    kind: Kind,
) -> tuple[Float[Array, "d+1"], Float[Array, "d+1 d+1"], Float[Array, "d+1"], Float[Array, ""]]:
    """Newton on [grad_z S / unit = 0, normal . (z, u) = offset]: the solution, bordered Hessian, residual, and S."""

    def scaled(y: Float[Array, "d+1"]) -> Float[Array, ""]:
        return reduced_action(whitening @ y[:-1], at(task, jnp.exp(y[-1])), kind) / unit

    def with_values(y: Float[Array, "d+1"]) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(scaled)(y)
        return gradient, (value, gradient)

    def step(state: tuple) -> tuple:
        y, *_, change, count = state
        hessian, (value, gradient) = jax.jacfwd(with_values, has_aux=True)(y)
        matrix, residual = hessian.at[-1].set(normal), gradient.at[-1].set(normal @ y - offset)
        # A pitchfork on the branch z = 0 can be hit exactly: the matrix is singular there, and nothing needs to be changed.
        solved = _solve_bordered(matrix, residual)
        change = jnp.where(jnp.all(residual == 0) | ~jnp.all(jnp.isfinite(solved)), 0.0, solved)
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


_correct = jax.jit(_newton, static_argnames="kind", compiler_options=QUICK_COMPILATION)
# The weights of a recipe are hundreds of numbers: there an optimised kernel takes half the time.
_correct_recipe = jax.jit(_newton, static_argnames="kind")


def in_double(leaf: Array) -> np.ndarray:
    """A leaf of a task in float64; whole numbers, which are indices, stay what they are."""
    found = np.asarray(leaf)
    return found if np.issubdtype(found.dtype, np.integer) else found.astype(np.float64)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _value_and_gradient(
    z: Float[Array, "d"], log_p: float, whitening: Float[Array, "d d"], unit: float, task: AnyTask, kind: Kind
) -> tuple[Float[Array, ""], Float[Array, "d"]]:
    return jax.value_and_grad(lambda z: reduced_action(whitening @ z, at(task, jnp.exp(log_p)), kind) / unit)(z)


@dataclass(frozen=True)
class System:
    """The action of one task on its symmetric subspace, ready for Newton. Every call runs in float64.

    whitening: (c1, cG, ...) = whitening z, upper triangular. unit: the action is measured in it, so that its prior part is
    |z|^2 / 2.
    """

    task: AnyTask
    kind: Kind
    whitening: Float[np.ndarray, "d d"]
    unit: float

    @classmethod
    def of(cls, task: AnyTask, kind: Kind) -> System:
        """Whitens the task; `task` holds the moments of one sequence, or any number: P replaces it."""
        with jax.enable_x64(True):
            task = jax.device_put(jax.tree.map(in_double, task))
        dimension = len(row_entries(task, kind))
        bare = cls(task, kind, np.eye(dimension), 1.0)
        along = np.append(np.zeros(dimension), 1.0)
        no_data = bare._solve(along[None] * LOG_P_ZERO, along[None], np.array([LOG_P_ZERO]))
        root = np.linalg.cholesky(no_data[1][0, :-1, :-1])
        if isinstance(task, RecipeTask):
            return cls(task, kind, np.linalg.inv(root.T), 1.0)
        # The size of z is set by what the data ask of the logits: order one for softmax, and (tau_p^2 g_W / g_O)^(1/4) for
        # linear attention, where only the product of G and W matters. On the scale of a wide prior the curve is a needle.
        widths = task.prior.position_scale**2 * task.prior.logit_variance / task.prior.output_variance
        balance = float(widths) ** 0.25
        size = 1.0 if kind == "softmax" else balance
        # the unit is the cost of a copy entry: of cG, or of the first entry beyond the paper's task
        norm = (root[0, 0] if isinstance(task, SymmetricTask) else root[1, 1]) * size
        return cls(task, kind, np.linalg.inv(root.T) * norm, norm**2)

    @property
    def dimension(self) -> int:
        return self.whitening.shape[0]

    @property
    def stride(self) -> float:
        """Longest step along a branch; with all weights of a recipe |z| is larger than with order parameters alone."""
        return 4 * LARGEST_STEP if isinstance(self.task, RecipeTask) else LARGEST_STEP

    def _solve(self, vectors: np.ndarray, normals: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, ...]:
        """_newton on BATCH systems at a time: one compilation, and a batch costs hardly more than one system."""
        count, size = len(vectors), BATCH if self.dimension <= LARGEST_BATCHED else 1
        padded = -(-count // size) * size
        inputs = [np.concatenate([part, np.repeat(part[-1:], padded - count, 0)]) for part in (vectors, normals, offsets)]
        with jax.enable_x64(True):
            solve = _correct_recipe if isinstance(self.task, RecipeTask) else _correct
            batches = [
                solve(
                    *(part[i : i + size] for part in inputs),
                    self.whitening,
                    np.float64(self.unit),
                    self.task,
                    self.kind,
                )
                for i in range(0, padded, size)
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
        along = np.append(np.zeros(self.dimension), 1.0)
        try:
            tangent = np.linalg.solve(matrix, along)
        except np.linalg.LinAlgError:  # exactly on a pitchfork: the least of all solutions follows the branch straight on
            tangent = np.linalg.lstsq(matrix, along)[0]
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

    def descend(self, start: np.ndarray, log_p: float) -> np.ndarray:
        """z of the minimum at P = exp(log_p) in the basin of a start, as well as a descent finds it."""

        def function(z: np.ndarray) -> tuple[float, np.ndarray]:
            with jax.enable_x64(True):
                return _value_and_gradient(z, log_p, self.whitening, np.float64(self.unit), self.task, self.kind)

        return descend(function, start, 1e-7).place

    def advance(self, point: Point, arclength: float) -> Point:
        """The solution in the plane orthogonal to the tangent of `point`, at a distance."""
        predicted = point.vector + arclength * point.tangent
        return self.correct(predicted[None], point.tangent[None], np.array([point.tangent @ predicted]))[0]

    def coordinates(self, z: np.ndarray) -> np.ndarray:
        """Order parameters (c1, cG, ...) of whitened coordinates."""
        return self.whitening @ z

    @cached_property
    def order(self) -> Float[np.ndarray, "d"]:
        """cG as a linear function of the coordinates.

        Beyond the paper's task its mean over heads of softmax, and that of the first head of linear attention.
        """
        if isinstance(self.task, RecipeTask):
            return row_entries(self.task, self.kind)
        if not isinstance(self.task, SymmetricTask):
            return np.eye(self.dimension)[1]
        return excess_weights(self.task, self.kind)

    def slope(self, point: Point) -> float:
        """d cG / d ln P along the branch."""
        with np.errstate(divide="ignore"):
            return float(self.order @ self.whitening @ point.tangent[:-1] / point.tangent[-1])
