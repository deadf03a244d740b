"""E(G, W) and the loss from the moments: the one place where the squared error is written down.

Convention traps (theory.md section 2), each with a test: the 1/2 of the Gaussian; the loss is a mean over scored
positions and a SUM over the V outputs, so the noise variance of one scalar output is kappa = scored * sigma^2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.prior import Prior, logit_energy, output_energy
from copyhead.problem import Attention


def squared_error(
    attention_matrix: Float[Array, "L L"],
    output: Float[Array, "V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
) -> Float[Array, ""]:
    """sum_m |T x^m - A x^m W|^2 over the scored positions, a sum over sequences, positions and outputs.

    With K_ij = <S_ij, W W^T>, J_ij = <S_ij, W>: Y2 - 2 <A^T T, J> + <A^T A, K>.
    """
    length = target.shape[0]
    pair = moments.contract_tokens(output @ output.T, length)
    cross = moments.contract_tokens(output, length)
    scored = layout.scored[:, None]
    # <A^T T, J> = <A, T J^T> and <A^T A, K> = <A, A K>: one L x L product each, and K is symmetric.
    model = jnp.sum(scored * attention_matrix * (attention_matrix @ pair - 2 * target @ cross.T))
    return target_square(target, moments, layout) + model


def target_square(target: Float[Array, "R K"], moments: Moments, layout: Layout) -> Float[Array, ""]:
    """Y2 = sum_m |T x^m|^2 = tr Q(T^T T) over the scored positions."""
    blocks = moments.contract(target, target, layout)
    return jnp.sum(moments.multiplicity * jnp.trace(blocks, axis1=-2, axis2=-1))


def loss_per_token(
    attention_matrix: Float[Array, "L L"],
    output: Float[Array, "V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
) -> Float[Array, ""]:
    """Mean squared error per scored position: sum over outputs, mean over sequences and scored positions."""
    error = squared_error(attention_matrix, output, target, moments, layout)
    return error / (moments.sequences * jnp.sum(layout.scored))


def energy(
    logits: Float[Array, "L L"],
    output: Float[Array, "V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
    prior: Prior,
    kind: Attention,
) -> Float[Array, ""]:
    """E(G, W) = squared error / (2 kappa) + |W|^2 / (2 g_O) + logit energy (posterior exp(-chi E))."""
    error = squared_error(attention(logits, kind, prior.length), output, target, moments, layout)
    return error / (2 * prior.kappa) + output_energy(output, prior) + logit_energy(logits, layout, prior)
