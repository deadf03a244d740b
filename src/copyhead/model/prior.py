"""Priors of the logits (kernel K, variance g_W) and of the output map W (variance g_O), and the noise kappa.

The logits are G = K^(1/2) M K^(1/2) with entries of M of variance g_W / chi: Gaussian ones (one fused query-key matrix), or
M = sqrt(g_W / chi) Q K^T / sqrt(d_h) with standard normal Q and K of d_h = nu chi columns (theory.md section 13).

All energies here are multiplied by chi in the posterior exp(-chi E): prior variances are g / chi, noise is kappa / chi.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.layout import Layout
from copyhead.problem import Problem

Scalar = Float[Array, ""] | float


class Prior(NamedTuple):
    """The numbers of prior and likelihood (theory.md section 2), all scalars.

    logit_variance: g_W. output_variance: g_O. kappa: noise variance of one scalar output, scored * sigma^2.
    position_scale: tau_p. token_coupling: tau_x |p|^2, so that K = tau_p I + token_coupling 1 1^T.
    length: L. chi: mean-field scale. head_ratio: nu = d_h / chi, None for the fused query-key matrix (nu -> infinity).
    """

    logit_variance: Scalar
    output_variance: Scalar
    kappa: Scalar
    position_scale: Scalar
    token_coupling: Scalar
    length: Scalar
    chi: Scalar
    # None is no leaf of a pytree: which of the two priors it is stays known while a function is traced
    head_ratio: Scalar | None = None

    @property
    def ridge(self) -> Scalar:
        """kappa / g_O: what is added to F when W is marginalised or optimised."""
        return self.kappa / self.output_variance


def prior(problem: Problem, collision: float | None = None) -> Prior:
    """The prior of a problem; `collision` is |p|^2, the probability that two tokens agree (default: uniform, 1/V)."""
    collision = 1 / problem.vocab if collision is None else collision
    return Prior(
        problem.logit_variance,
        problem.output_variance,
        problem.kappa,
        problem.position_scale,
        problem.token_scale * collision,
        problem.length,
        problem.chi,
        None if problem.head_dimension is None else problem.head_dimension / problem.chi,
    )


def rate(squared: Float[Array, "..."]) -> Float[Array, "..."]:
    """I(m) as a function of m^2: the rate function of a singular value m of Q K^T / d_h at speed d_h.

    The Gram matrix [[A, m], [m, B]] of a query and a key direction is Wishart, with rate (tr - log det - 2) / 2. Its minimum is
    at A = B = 1 + t with t (1 + t) = m^2, which leaves I = t - log(1 + t) / 2: m^2/2 for small m, m - log(m)/2 for large m.
    Equal to x m + log(1 - x^2) / 2 with x = dI/dm = t / m, but without 0 / 0 at m = 0.
    """
    excess = 2 * squared / (1 + jnp.sqrt(1 + 4 * squared))
    return excess - jnp.log1p(excess) / 2


@jax.custom_jvp
def _trace_rate(gram: Float[Array, "n n"]) -> Float[Array, ""]:
    """tr rate(M M^T) of a positive semidefinite matrix, twice differentiable also where eigenvalues are equal.

    The derivatives of single eigenvalues and eigenvectors do not exist there, those of the trace do (Daleckii-Krein).
    """
    return jnp.sum(rate(jnp.linalg.eigvalsh(gram)))


@_trace_rate.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _trace_rate(*primals), jnp.sum(_rate_slope(*primals) * tangents[0])


@jax.custom_jvp
def _rate_slope(gram: Float[Array, "n n"]) -> Float[Array, "n n"]:
    """The matrix function d rate / d m^2 = 1 / (1 + r) with r = sqrt(1 + 4 m^2)."""
    values, vectors = jnp.linalg.eigh(gram)
    return (vectors / (1 + jnp.sqrt(1 + 4 * values))) @ vectors.T


@_rate_slope.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(*primals)
    root = jnp.sqrt(1 + 4 * values)
    slope = 1 / (1 + root)
    # the divided differences of 1 / (1 + r), in a form without differences
    quotient = -4 * slope[:, None] * slope / (root[:, None] + root)
    change = vectors @ (quotient * (vectors.T @ tangents[0] @ vectors)) @ vectors.T
    return (vectors * slope) @ vectors.T, change


def spectral_energy(squared: Float[Array, "n"], multiplicity: Float[Array, "n"], prior: Prior) -> Float[Array, ""]:
    """Logit energy of given squared singular values of K^(-1/2) G K^(-1/2), each with its multiplicity.

    Fused: sum s^2 / (2 g_W). Separate: nu sum I(s / sqrt(g_W nu)), which is the former for nu -> infinity, and
    sqrt(nu / g_W) sum s (the nuclear norm) up to logarithms for nu -> 0.
    """
    if prior.head_ratio is None:
        return jnp.sum(multiplicity * squared) / (2 * prior.logit_variance)
    return prior.head_ratio * jnp.sum(multiplicity * rate(squared / (prior.logit_variance * prior.head_ratio)))


def matrix_energy(whitened: Float[Array, "n n"], prior: Prior) -> Float[Array, ""]:
    """`spectral_energy` of the singular values of a matrix, with derivatives also where they are equal."""
    if prior.head_ratio is None:
        return jnp.sum(whitened**2) / (2 * prior.logit_variance)
    return prior.head_ratio * _trace_rate(whitened @ whitened.T / (prior.logit_variance * prior.head_ratio))


def logit_energy(logits: Float[Array, "R K"], layout: Layout, prior: Prior) -> Float[Array, ""]:
    """The energy of the logits: minus the log of their prior density, divided by chi, for chi -> infinity.

    Fused: 1/2 <G, K^-1 G K^-1> / g_W for K = tau_p I + c 1 1^T. Separate: `spectral_energy` of K^(-1/2) G K^(-1/2).
    The latter is a large deviation at d_h, chi -> infinity with L fixed: where d_h is not above L, it does not know that Q K^T
    has rank d_h at most. Every row counts, scored or not.
    """
    if prior.head_ratio is None:
        return _gaussian_energy(logits, layout, prior)
    # K^(-1/2) = (I - gamma 1 1^T) / sqrt(tau_p)
    shrinkage = jnp.sqrt(prior.position_scale / (prior.position_scale + prior.token_coupling * prior.length))
    gamma = (1 - shrinkage) / prior.length
    rows, columns = layout.row_sums(logits), layout.column_sums(logits)[0]
    edges = gamma * (rows[:, None] + columns) - gamma**2 * jnp.sum(layout.rows * rows)
    whitened = (logits - edges) / prior.position_scale
    if logits.shape[0] == logits.shape[1]:
        return matrix_energy(whitened, prior)
    return spectral_energy(*layout.squared_singular_values(whitened), prior)


def _gaussian_energy(logits: Float[Array, "R K"], layout: Layout, prior: Prior) -> Float[Array, ""]:
    """1/2 <G, K^-1 G K^-1> / g_W.

    K^-1 = (I - beta 1 1^T) / tau_p with beta = c / (tau_p + c L), so only the row sums, the column sums and the total
    of G are needed beside its norm.
    """
    beta = prior.token_coupling / (prior.position_scale + prior.token_coupling * prior.length)
    rows = layout.row_sums(logits)
    columns, column_count = layout.column_sums(logits)
    norm = jnp.sum(layout.rows * layout.row_sums(logits**2))
    edges = jnp.sum(layout.rows * rows**2) + jnp.sum(column_count * columns**2)
    form = norm - beta * edges + beta**2 * jnp.sum(layout.rows * rows) ** 2
    return form / (2 * prior.position_scale**2 * prior.logit_variance)


def output_energy(output: Float[Array, "*H V V"], prior: Prior) -> Float[Array, ""]:
    """|W|^2 / (2 g_O), summed over heads."""
    return jnp.sum(output**2) / (2 * prior.output_variance)
