"""The collapsed posterior of the logits for many chains at once: W integrated out, through the moments of the step loop.

Given G the columns of W are Gaussian: inverse covariance chi (F/kappa + 1/g_O), mean W* = (F/kappa + 1/g_O)^-1 N/kappa. So

    -log p(G | data) = chi [ logit energy + (Y2/kappa - tr N^T W*/kappa) / 2 ] + (V/2) log det(1 + g_O F/kappa)

and its gradient is chi times the mean of grad_G E over W, which needs the first two moments of W only. The posterior of
theory.posterior in float32 and in other words; a test holds them together.

A chain samples its `Rung`: its own chi, a factor on the moments, and a harmonic bias on the place s along the order parameter
aG. Softmax: s = log(p / y), with p and y the mean attention on and off the target, so that aG = p - y, and s is the cG that
would give the same attention. Linear: s = L aG = cG. Both are monotonic in aG.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float

from copyhead.experiment.packed import (
    Attended,
    Packed,
    Rows,
    attend,
    fields,
    prior_energy,
    pull_back,
    rows,
    token_blocks,
)
from copyhead.model import layout, targets
from copyhead.model.prior import Prior, prior
from copyhead.problem import Attention, Problem


class Rung(NamedTuple):
    """What a chain samples, beside its data: scalars by chain.

    chi: mean-field scale. weight: the data count as weight * P sequences. center, stiffness: of the bias
    stiffness (s - center)^2 / 2 in -log p.
    """

    chi: Float[Array, "chain"]
    weight: Float[Array, "chain"]
    center: Float[Array, "chain"]
    stiffness: Float[Array, "chain"]


class Seen(NamedTuple):
    """What the density of a state depends on. prior: logit energy. square, overlap: F/kappa and N/kappa. place: s."""

    prior: Float[Array, "chain"]
    square: Float[Array, "chain V V"]
    overlap: Float[Array, "chain V V"]
    place: Float[Array, "chain"]


class Marks(NamedTuple):
    """`Seen` in the 2 V + 2 numbers that its density at any rung takes: the eigenvalues of F/kappa, and |rows of N/kappa|^2 in
    its eigenbasis."""

    prior: Float[Array, "... chain"]
    values: Float[Array, "... chain V"]
    gains: Float[Array, "... chain V"]
    place: Float[Array, "... chain"]


class Sizes(NamedTuple):
    """The problem as plain numbers, fixed when a loop is compiled."""

    rows: Rows
    prior: Prior
    kind: Attention
    length: int
    vocab: int
    scored: int


def sizes(problem: Problem) -> Sizes:
    """Raises:
    ProblemError: for attention that reads tokens and for separate query and key matrices, whose logits are no Gaussian.
    """
    problem.require_positional("the collapsed posterior is sampled")
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    whole = layout.full(problem.length, problem.cyclic, jnp.float32)
    return Sizes(rows(target, whole), prior(problem), problem.attention, problem.length, problem.vocab, problem.scored)


def _target(sizes: Sizes) -> Float[Array, "L L"]:
    """T^T over the scored rows, as the logits are held."""
    return jnp.asarray(targets.shift(sizes.length, cyclic=sizes.scored == sizes.length).T, jnp.float32)


def place(seen: Attended, sizes: Sizes) -> Float[Array, "chain"]:
    """s, see the module."""
    on = jnp.sum(seen.matrix * _target(sizes), axis=(-2, -1)) / sizes.scored
    if sizes.kind == "softmax":
        return jnp.log(on) - jnp.log1p(-on) + np.log(sizes.length - 1)
    total = jnp.sum(seen.matrix * np.array(sizes.rows.scored, np.float32), axis=(-2, -1)) / sizes.scored
    return sizes.length * (on - (total - on) / (sizes.length - 1))


def place_of(aG: Float[np.ndarray, "..."], problem: Problem) -> Float[np.ndarray, "..."]:
    """s as a function of aG; for softmax p - y = aG and p + (L - 1) y = 1."""
    length = problem.length
    if problem.attention == "linear":
        return length * np.asarray(aG)
    return np.log1p(length * np.asarray(aG) / (1 - np.asarray(aG)))


def order_parameter(place: Float[np.ndarray, "..."], problem: Problem) -> Float[np.ndarray, "..."]:
    """aG as a function of s."""
    length = problem.length
    if problem.attention == "linear":
        return np.asarray(place) / length
    grown = np.expm1(place)
    return grown / (grown + length)


def _place_gradient(seen: Attended, sizes: Sizes) -> Float[Array, "chain L L"]:
    """The gradient of s by A^T; for softmax up to what depends on the row only."""
    target = _target(sizes)
    if sizes.kind == "softmax":
        on = jnp.sum(seen.matrix * target, axis=(-2, -1)) / sizes.scored
        return target / (sizes.scored * on * (1 - on))[:, None, None]
    off = np.array(sizes.rows.scored, np.float32) - target
    return jnp.broadcast_to(sizes.length / sizes.scored * (target - off / (sizes.length - 1)), seen.matrix.shape)


class OutputLaw(NamedTuple):
    """The Gaussian of each column of W given G, at the weight of the rung: mean W*, and (F/kappa + 1/g_O)^-1 with its log det.

    chi times its covariance is that inverse.
    """

    mean: Float[Array, "chain V V"]
    inverse: Float[Array, "chain V V"]
    log_det: Float[Array, "chain"]


# Up to this V the elimination is unrolled into one kernel: LAPACK, called chain by chain, would cost more than the force.
UNROLLED = 8


def inverse_and_log_det(matrix: Float[Array, "chain V V"]) -> tuple[Float[Array, "chain V V"], Float[Array, "chain"]]:
    """Of positive definite matrices, whose inverse has log det minus that of the matrix: Gauss and Jordan need no pivots."""
    size = matrix.shape[-1]

    def eliminate(k: Array | int, carried: tuple[Array, Array]) -> tuple[Array, Array]:
        rest, log_det = carried
        unit = jnp.arange(size) == k
        pivot = jnp.take(jnp.take(rest, k, axis=-1), k, axis=-1)[..., None, None]
        row = jnp.where(unit, 1.0, jnp.take(rest, k, axis=-2))[..., None, :] / pivot
        column = jnp.where(unit, 0.0, jnp.take(rest, k, axis=-1))[..., :, None]
        others = jnp.where(unit[:, None] | unit[None], 0.0, rest) - jnp.where(unit, 0.0, 1.0) * column * row
        # the pivot's row is the row itself, its column minus the column over the pivot
        swept = jnp.where(unit[:, None], row, jnp.where(unit[None], -column / pivot, others))
        return swept, log_det + jnp.log(pivot[..., 0, 0])

    begin = matrix, jnp.zeros(matrix.shape[:-2], matrix.dtype)
    if size <= UNROLLED:
        for k in range(size):
            begin = eliminate(k, begin)
        # or XLA would eliminate again wherever the result is used
        return optimization_barrier(begin)
    factor = jnp.linalg.cholesky(matrix)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=matrix.dtype), matrix.shape)
    log_det = 2 * jnp.sum(jnp.log(jnp.diagonal(factor, axis1=-2, axis2=-1)), axis=-1)
    return jax.scipy.linalg.cho_solve((factor, True), identity), log_det


def _precision(seen: Seen, rung: Rung, sizes: Sizes) -> Float[Array, "chain V V"]:
    return rung.weight[..., None, None] * seen.square + jnp.eye(sizes.vocab) / sizes.prior.output_variance


def output_law(seen: Seen, rung: Rung, sizes: Sizes) -> OutputLaw:
    inverse, log_det = inverse_and_log_det(_precision(seen, rung, sizes))
    return OutputLaw(rung.weight[..., None, None] * inverse @ seen.overlap, inverse, log_det)


def data_term(seen: Seen, rung: Rung, law: OutputLaw, sizes: Sizes) -> Float[Array, "chain"]:
    """-log p without the prior of the logits, without Y2 and constants of the rung, and with the bias."""
    gain = jnp.sum(rung.weight[..., None, None] * seen.overlap * law.mean, axis=(-2, -1)) / 2
    entropy = sizes.vocab / 2 * (law.log_det + sizes.vocab * np.log(sizes.prior.output_variance))
    return entropy - rung.chi * gain + rung.stiffness * (seen.place - rung.center) ** 2 / 2


def negative_log_density(seen: Seen, rung: Rung, sizes: Sizes) -> Float[Array, "chain"]:
    """-log p at a rung, up to a constant of data set and rung (chi weight Y2 / (2 kappa) and normalisations)."""
    return rung.chi * seen.prior + data_term(seen, rung, output_law(seen, rung, sizes), sizes)


def marks(seen: Seen) -> Marks:
    values, vectors = jnp.linalg.eigh(seen.square)
    gains = jnp.sum((vectors.mT @ seen.overlap) ** 2, axis=-1)
    return Marks(seen.prior, jnp.maximum(values, 0), gains, seen.place)


def density_of_marks(marks: Marks, rung: Rung, sizes: Sizes) -> Float[Array, "... chain"]:
    """`negative_log_density`, from the marks of a draw."""
    weight = jnp.asarray(rung.weight)[..., None]
    variance = sizes.prior.output_variance
    gain = jnp.sum(weight**2 * marks.gains / (weight * marks.values + 1 / variance), axis=-1) / 2
    entropy = sizes.vocab / 2 * jnp.sum(jnp.log1p(variance * weight * marks.values), axis=-1)
    bias = rung.stiffness * (marks.place - rung.center) ** 2 / 2
    return rung.chi * (marks.prior - gain) + entropy + bias


def look(logits: Float[Array, "chain L L"], data: Packed, sizes: Sizes) -> tuple[Seen, Attended]:
    """`Seen` of transposed logits."""
    attended = attend(logits, sizes.rows, sizes.kind)
    square, overlap = token_blocks(attended, data, sizes.rows, sizes.prior, sizes.kind)
    return Seen(prior_energy(logits, sizes.prior), square, overlap, place(attended, sizes)), attended


def look_and_force(
    logits: Float[Array, "chain L L"], data: Packed, rung: Rung, sizes: Sizes
) -> tuple[Seen, Float[Array, "chain"], Float[Array, "chain L L"]]:
    """`Seen`, `data_term`, and the gradient of the latter by the transposed logits."""
    seen, attended = look(logits, data, sizes)
    law = output_law(seen, rung, sizes)
    second = law.mean @ law.mean.mT + sizes.vocab * law.inverse / rung.chi[:, None, None]
    by_attention = fields(attended, second, law.mean, data, sizes.rows, sizes.prior, sizes.kind)
    by_attention *= (rung.chi * rung.weight)[:, None, None]
    by_attention += (rung.stiffness * (seen.place - rung.center))[:, None, None] * _place_gradient(attended, sizes)
    return seen, data_term(seen, rung, law, sizes), pull_back(by_attention, attended, sizes.rows, sizes.kind)


def draw_output(seen: Seen, rung: Rung, noise: Float[Array, "chain V V"], sizes: Sizes) -> Float[Array, "chain V V"]:
    """W given the logits, exactly: with it a draw of G becomes one of the joint posterior."""
    law = output_law(seen, rung, sizes)
    factor = jnp.linalg.cholesky(_precision(seen, rung, sizes))
    spread = jax.scipy.linalg.solve_triangular(factor, noise, lower=True, trans=1)
    return law.mean + spread / jnp.sqrt(rung.chi)[..., None, None]
