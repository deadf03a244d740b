"""E(G, W) and the loss from the moments: the one place where the squared error is written down.

A network of H heads, f = sum_h A_h x W_h, has attention (H, L, L) and output (H, V, V); without that axis it has one head.

Convention traps (theory.md section 2), each with a test: the 1/2 of the Gaussian; the loss is a mean over scored
positions and a SUM over the V outputs, so the noise variance of one scalar output is kappa = scored * sigma^2.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.prior import Prior, logit_energy, output_energy
from copyhead.problem import Attention


def squared_error(
    attention_matrix: Float[Array, "*H L L"],
    output: Float[Array, "*H V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
) -> Float[Array, ""]:
    """sum_m |T x^m - sum_h A_h x^m W_h|^2 over the scored positions, a sum over sequences, positions and outputs.

    With K_hk,ij = <S_ij, W_h W_k^T>, J_h,ij = <S_ij, W_h>: Y2 - 2 sum_h <A_h^T T, J_h> + sum_hk <A_h^T A_k, K_hk>.
    """
    length = target.shape[0]
    heads = list(zip(by_head(attention_matrix), by_head(output), strict=True))
    scored = layout.scored[:, None]
    model = []
    for matrix, by in heads:
        cross = moments.contract_tokens(by, length)
        # <A^T T, J> = <A, T J^T> and <A_h^T A_k, K_hk> = <A_h, A_k K_kh>: one L x L product each.
        seen = reduce(add, (other @ moments.contract_tokens(its @ by.T, length) for other, its in heads))
        model.append(jnp.sum(scored * matrix * (seen - 2 * target @ cross.T)))
    return target_square(target, moments, layout) + reduce(add, model)


def by_head(stack: Float[Array, "*H m n"]) -> list[Float[Array, "m n"]]:
    """The matrices of the heads; of one head where there is no such axis."""
    return [stack] if stack.ndim == 2 else list(stack)


def target_square(target: Float[Array, "R K"], moments: Moments, layout: Layout) -> Float[Array, ""]:
    """Y2 = sum_m |T x^m|^2 = tr Q(T^T T) over the scored positions."""
    blocks = moments.contract(target, target, layout)
    return jnp.sum(moments.multiplicity * jnp.trace(blocks, axis1=-2, axis2=-1))


def loss_per_token(
    attention_matrix: Float[Array, "*H L L"],
    output: Float[Array, "*H V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
) -> Float[Array, ""]:
    """Mean squared error per scored position: sum over outputs, mean over sequences and scored positions."""
    error = squared_error(attention_matrix, output, target, moments, layout)
    return error / (moments.sequences * jnp.sum(layout.scored))


def energy(
    logits: Float[Array, "*H L L"],
    output: Float[Array, "*H V V"],
    target: Float[Array, "L L"],
    moments: Moments,
    layout: Layout,
    prior: Prior,
    kind: Attention,
    masked: bool = False,
) -> Float[Array, ""]:
    """E(G, W) = squared error / (2 kappa) + sum_h |W_h|^2 / (2 g_O) + logit energies (posterior exp(-chi E)).

    masked: whether entries of multiplicity zero in `layout` are hidden from attention; the prior does not count them at all.
    """
    seen = attention(logits, kind, prior.length, layout.columns if masked else None)
    error = squared_error(seen, output, target, moments, layout)
    by_logits = reduce(add, (logit_energy(one, layout, prior) for one in by_head(logits)))
    return error / (2 * prior.kappa) + output_energy(output, prior) + by_logits
