"""Gaussian prior of the logits (kernel K, variance g_W) and of the output map W (variance g_O), and the noise kappa.

All energies here are multiplied by chi in the posterior exp(-chi E): prior variances are g / chi, noise is kappa / chi.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.layout import Layout
from copyhead.problem import Problem

Scalar = Float[Array, ""] | float


class Prior(NamedTuple):
    """The numbers of prior and likelihood (theory.md section 2), all scalars.

    logit_variance: g_W. output_variance: g_O. kappa: noise variance of one scalar output, scored * sigma^2.
    position_scale: tau_p. token_coupling: tau_x |p|^2, so that K = tau_p I + token_coupling 1 1^T.
    length: L. chi: mean-field scale.
    """

    logit_variance: Scalar
    output_variance: Scalar
    kappa: Scalar
    position_scale: Scalar
    token_coupling: Scalar
    length: Scalar
    chi: Scalar

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
    )


def logit_energy(logits: Float[Array, "R K"], layout: Layout, prior: Prior) -> Float[Array, ""]:
    """1/2 <G, K^-1 G K^-1> / g_W for K = tau_p I + c 1 1^T.

    K^-1 = (I - beta 1 1^T) / tau_p with beta = c / (tau_p + c L), so only the row sums, the column sums and the total
    of G are needed beside its norm. Every row counts, scored or not.
    """
    beta = prior.token_coupling / (prior.position_scale + prior.token_coupling * prior.length)
    rows = layout.row_sums(logits)
    columns, column_count = layout.column_sums(logits)
    norm = jnp.sum(layout.rows * layout.row_sums(logits**2))
    edges = jnp.sum(layout.rows * rows**2) + jnp.sum(column_count * columns**2)
    form = norm - beta * edges + beta**2 * jnp.sum(layout.rows * rows) ** 2
    return form / (2 * prior.position_scale**2 * prior.logit_variance)


def output_energy(output: Float[Array, "V V"], prior: Prior) -> Float[Array, ""]:
    """|W|^2 / (2 g_O)."""
    return jnp.sum(output**2) / (2 * prior.output_variance)
