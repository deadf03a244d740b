"""Finite chi: Gaussian fluctuations of all L^2 logits around the symmetric saddle points (theory.md section 10).

W being marginalised exactly, the effective action of the logits to one loop, at G = c1 1 1^T + cG G* of c = (c1, cG), is

    Gamma(c) = S + (1/chi) [ (V/2) log det(I + g_O F/kappa) + 1/2 log det(H_0^-1 H) ],     H = Hessian of S over all L^2 logits

H_0, the Hessian of the prior, does not depend on c; with it exp(-chi Gamma) at a minimum is the evidence of that branch under
the normalised prior (up to the normalisation of the noise). Where c is not stationary, Gamma is the Legendre transform: the
least free energy at which the mean of G is this matrix. It is defined where H > 0. Its minimum is the mean of G to order
1/chi, its second derivative there the inverse covariance, because the symmetry lets no other mode mix with c.

The free energy of cG alone, p(cG) ~ exp(-chi F(cG)), leaves the mode cG out of the determinant, and is defined through a
barrier as well. Gamma has the mean as its minimum, F the mode; weights agree up to terms of order 1/chi.

With population moments the data enter S through sums over rows of |A_a|^2, A_a . T_a and row sums only. Hence H consists, by
the symmetry of positions, of few blocks, see `Spectrum`, and nothing here has a cost that depends on L.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.moments import Population
from copyhead.model.prior import Scalar
from copyhead.problem import Attention, Problem
from copyhead.theory.action import copy_task, reduced_action
from copyhead.theory.order_parameters import lift
from copyhead.theory.posterior import Task, best_output, data_energy, token_blocks


def gaussian_task(problem: Problem) -> Task:
    """The copy task on its symmetric subspace, in float64 and at P = 1, if this module covers it.

    Raises:
        ProblemError: for content = True or separate query and key matrices.
    """
    problem.require_positional("fluctuations are known")
    task = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), copy_task(problem))
    assert isinstance(task, Task)
    return task


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
        pair = jnp.log(jnp.abs(symmetric)) + self.copies * jnp.log(jnp.abs(determinant(self.edges)))
        return pair + self.copies * jnp.log(jnp.abs(self.rows)) + self.others * jnp.log(jnp.abs(self.rest))

    def lowest(self) -> Float[Array, ""]:
        """The lowest eigenvalue; H is positive where it is."""
        return jnp.min(jnp.stack([lowest_eigenvalue(self.symmetric), self.lowest_asymmetric()]))

    def lowest_asymmetric(self) -> Float[Array, ""]:
        """The lowest eigenvalue of the modes that leave the symmetric subspace."""
        return jnp.min(jnp.stack([lowest_eigenvalue(self.edges), self.rows, self.rest]))


# 2 x 2 by hand: LAPACK under three derivatives would take seconds to compile
def determinant(matrix: Float[Array, "2 2"]) -> Float[Array, ""]:
    return matrix[0, 0] * matrix[1, 1] - matrix[0, 1] * matrix[1, 0]


def inverse(matrix: Float[Array, "2 2"]) -> Float[Array, "2 2"]:
    (a, b), (c, d) = matrix
    return jnp.array([[d, -b], [-c, a]]) / determinant(matrix)


def lowest_eigenvalue(matrix: Float[Array, "2 2"]) -> Float[Array, ""]:
    """Of a matrix with real eigenvalues."""
    half = (matrix[0, 0] - matrix[1, 1]) / 2
    return (matrix[0, 0] + matrix[1, 1]) / 2 - jnp.sqrt(jnp.abs(half**2 + matrix[0, 1] * matrix[1, 0]))


def hessian(function: Callable) -> Callable:
    """Forward over forward: for two arguments the smaller program."""
    return jax.jacfwd(jax.jacfwd(function))


def directions(task: Task) -> Float[Array, "2 2"]:
    """Columns: the (c1, cG) of the unit matrices along 1 1^T and G* - 1 1^T/L over the scored rows."""
    length, rows = task.prior.length, task.layout.rows[0]
    size = jnp.sqrt(length / (rows * (length - 1)))
    return jnp.array([[1 / jnp.sqrt(rows * length), -size / length], [0.0, size]])


def _coupling(task: Task) -> Scalar:
    """tau_x |p|^2 / tau_p: K is tau_p (I + it times 1 1^T)."""
    return task.prior.token_coupling / task.prior.position_scale


def variance(task: Task) -> Scalar:
    """chi times the prior variance of a logit without token coupling."""
    return task.prior.logit_variance * task.prior.position_scale**2


def whitening(task: Task) -> Float[Array, "2 2"]:
    """`directions` in units of the standard deviation of the prior at chi = 1."""
    uniform = 1 + _coupling(task) * task.prior.length
    return directions(task) * jnp.stack([jnp.asarray(uniform), jnp.ones(())]) * jnp.sqrt(variance(task))


def edge_kernel(task: Task) -> Float[Array, "2 2"]:
    """Covariance of the unit matrices of `edges` under the prior, divided by `variance`.

    K acts through their column sums, (1^T X)_b = sums[i] rho_b for amplitudes rho over the rows. Without token coupling the
    second of them is no different from `rest`; at L = 2 it does not exist, and `others` takes it out again.
    """
    length = task.prior.length
    sums = jnp.sqrt(jnp.stack([length / (length - 1), length * (length - 2) / (length - 1)]))
    return jnp.eye(2) + _coupling(task) * jnp.outer(sums, sums)


def spectrum(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Spectrum:
    """The Hessian of S over all logits at c, block by block.

    The data see sums over the rows of t = |A_a|^2, m = A_a . T_a and, for linear attention, of the row sums. To first order
    only the symmetric modes change these. So every block is the second derivative of one row, along 1, u (copy entry minus
    mean) or v (any zero sum over the others), plus the prior, and the symmetric one has the response of w in addition.
    """
    length, rows, moments = task.prior.length, task.layout.rows[0], task.moments
    assert isinstance(moments, Population)
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
        copy, sums = (by_t * bend_square + by_m * bend) * length / (length - 1), jnp.zeros(())
    # The best w gives way: d2S = (w^2 d2F - 2 w d2N) / (2 kappa) - (dN - w dF)^2 / (F + ridge) / kappa. Without data the unit.
    units = whitening(task)
    by_square, by_overlap = jax.jacfwd(lambda c: token_blocks(lift(c, task.target), task, kind)[1:3])(coordinates)
    pull = (by_overlap - output[..., None] * by_square)[:, 0, 0] @ units
    gain = blocks.multiplicity / (blocks.attention_square[:, 0, 0] + task.prior.ridge) / task.prior.kappa
    uniform = variance(task) * sums * (1 + _coupling(task) * length)
    along = jnp.stack([uniform * (1 + _coupling(task) * length), variance(task) * copy])
    return Spectrum(
        jnp.eye(2) + jnp.diag(along) - pull.T @ (gain[:, None] * pull),
        jnp.eye(2) + variance(task) * edge_kernel(task) * jnp.stack([copy, other]),
        1 + uniform,
        1 + variance(task) * other,
        rows - 1,
        rows * (length - 2) - (rows - 1),
    )


def entropy(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Float[Array, ""]:
    """(V/2) log det(I + g_O F/kappa): the V columns of W, each a Gaussian of inverse covariance F/kappa + 1/g_O."""
    blocks = token_blocks(lift(coordinates, task.target), task, kind)
    vocab = jnp.sum(blocks.multiplicity)
    return vocab / 2 * jnp.sum(blocks.multiplicity * jnp.log1p(blocks.attention_square[:, 0, 0] / task.prior.ridge))


def loop(coordinates: Float[Array, "2"], task: Task, kind: Attention) -> Float[Array, ""]:
    """chi (Gamma - S): the entropy of W and half the log determinant of H_0^-1 H."""
    found = spectrum(coordinates, task, kind)
    return entropy(coordinates, task, kind) + found.log_det(determinant(found.symmetric)) / 2


def effective_action(
    coordinates: Float[Array, "2"], task: Task, kind: Attention, part: float | Array = 1.0
) -> Float[Array, ""]:
    """Gamma(c), with `part` of its term of order 1/chi; see the module for what it means away from its minima.

    A negative determinant counts by its absolute value: the caller holds `Spectrum.lowest` against it.
    """
    return reduced_action(coordinates, task, kind) + part * loop(coordinates, task, kind) / task.prior.chi


def free_energy(cG: Float[Array, ""], task: Task) -> Float[Array, ""]:
    """F(cG) of softmax attention, where the rows of G sum to zero: minus the log density of cG over chi, up to a constant."""
    coordinates = jnp.stack([-cG / task.prior.length, cG])
    found = spectrum(coordinates, task, "softmax")
    others = entropy(coordinates, task, "softmax") + found.log_det(found.symmetric[0, 0]) / 2
    return reduced_action(coordinates, task, "softmax") + others / task.prior.chi


def rates(
    coordinates: Float[Array, "2"],
    task: Task,
    kind: Attention,
    mobility: tuple[float, float],
    stiffening: Float[Array, "2 2"] | float = 0.0,
) -> Float[Array, "n"]:
    """Rates of Langevin dynamics of (G, W) linearised around c and the best W, lowest first, for the modes that move cG.

    Those are c and the two amplitudes of W, on zero-sum token vectors and on the uniform one. With softmax, row sums of G and
    the uniform token mode, which nothing couples to cG, are left out.

    Args:
        mobility: step sizes of G and W. stiffening: Gamma'' - S'' in c, the mean force of fluctuations that are faster than c.
    """
    blocks = token_blocks(lift(coordinates, task.target), task, kind)

    def energy(y: Array) -> Array:
        there, output = token_blocks(lift(y[:2], task.target), task, kind), y[2:, None, None]
        prior = reduced_action(y[:2], task, kind) - data_energy(there, task.prior)
        error = there.inner(output, output * (there.attention_square + task.prior.ridge) - 2 * there.overlap)
        return prior + error / (2 * task.prior.kappa)

    point = jnp.concatenate([coordinates, best_output(blocks, task.prior)[:, 0, 0]])
    frame = jnp.diag(jnp.sqrt(jnp.concatenate([jnp.ones(2), mobility[1] / blocks.multiplicity])))
    frame = frame.at[:2, :2].set(directions(task) * jnp.sqrt(mobility[0]))
    modes = frame.T @ hessian(energy)(point).at[:2, :2].add(stiffening) @ frame
    return jnp.linalg.eigvalsh(modes[1:3, 1:3] if kind == "softmax" else modes)
