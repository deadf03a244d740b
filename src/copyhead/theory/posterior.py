"""Closed-form posterior over the attention logits, W marginalised exactly (theory.md section 3).

V x V algebra only: no P L x P L kernel is ever built, and no cost depends on P once the moments are there. The same
functions take the full L x L logits (layout.full) or a compressed layout, with population or empirical moments.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.energy import target_square
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.prior import Prior, Scalar, logit_energy
from copyhead.problem import Attention


class Task(NamedTuple):
    """What is fixed while the logits vary. target: T in the layout's shape. prior: all scalars."""

    target: Float[Array, "R K"]
    moments: Moments
    layout: Layout
    prior: Prior


class TokenBlocks(NamedTuple):
    """Y2 = tr Q(T^T T), F = Q(A^T A) and N = Q(A^T T), token matrices in blocks (n, v, v) with multiplicities (n,)."""

    target_square: Float[Array, ""]
    attention_square: Float[Array, "n v v"]
    overlap: Float[Array, "n v v"]
    multiplicity: Float[Array, "n"]

    def inner(self, left: Float[Array, "n v v"], right: Float[Array, "n v v"]) -> Float[Array, ""]:
        """tr left^T right over the whole token space."""
        return jnp.sum(self.multiplicity * jnp.sum(left * right, axis=(-2, -1)))


def token_blocks(logits: Float[Array, "R K"], task: Task, kind: Attention) -> TokenBlocks:
    """The token matrices that the posterior of `logits` depends on."""
    layout, moments = task.layout, task.moments
    matrix = attention(logits, kind, task.prior.length, layout.columns)
    return TokenBlocks(
        target_square(task.target, moments, layout),
        moments.contract(matrix, matrix, layout),
        moments.contract(matrix, task.target, layout),
        moments.multiplicity,
    )


def best_output(blocks: TokenBlocks, prior: Prior) -> Float[Array, "n v v"]:
    """W that minimises E at given attention, (F + kappa/g_O I)^-1 N: also the posterior mean of W given G."""
    size = blocks.overlap.shape[-1]
    if size == 1:
        return blocks.overlap / (blocks.attention_square + prior.ridge)
    return jnp.linalg.solve(blocks.attention_square + prior.ridge * jnp.eye(size), blocks.overlap)


def action(logits: Float[Array, "R K"], task: Task, kind: Attention) -> Float[Array, ""]:
    """S(G) = logit prior + [Y2 - tr N^T (F + kappa/g_O I)^-1 N] / (2 kappa): the minimum over W of E(G, W)."""
    return logit_energy(logits, task.layout, task.prior) + data_energy(token_blocks(logits, task, kind), task.prior)


def data_energy(blocks: TokenBlocks, prior: Prior) -> Float[Array, ""]:
    """[Y2 - tr N^T (F + kappa/g_O I)^-1 N] / (2 kappa): squared error and cost of W, at the best W."""
    return (blocks.target_square - blocks.inner(blocks.overlap, best_output(blocks, prior))) / (2 * prior.kappa)


def negative_log_posterior(logits: Float[Array, "R K"], task: Task, kind: Attention) -> Float[Array, ""]:
    """-log p(G | data) = chi S(G) + (V/2) log det(I + (g_O/kappa) F), up to a constant; exact at any chi.

    The determinant is the entropy of the V columns of W; it does not grow with chi.
    """
    blocks = token_blocks(logits, task, kind)
    size = blocks.overlap.shape[-1]
    log_det = jnp.linalg.slogdet(jnp.eye(size) + blocks.attention_square / task.prior.ridge)[1]
    vocab = blocks.multiplicity.sum() * size
    return task.prior.chi * action(logits, task, kind) + 0.5 * vocab * jnp.sum(blocks.multiplicity * log_det)


def loss_per_token(logits: Float[Array, "R K"], task: Task, kind: Attention) -> Float[Array, ""]:
    """Loss per scored position on the task's own moments, with W at its optimum."""
    return mean_loss(token_blocks(logits, task, kind), task.prior, task.moments.sequences * jnp.sum(task.layout.scored))


def mean_loss(blocks: TokenBlocks, prior: Prior, count: Scalar) -> Float[Array, ""]:
    """Squared error at the best W over `count`, the number of scored positions of all sequences."""
    output = best_output(blocks, prior)
    # with the best W, F W = N - ridge W, so 2 tr N^T W - tr W^T F W = tr N^T W + ridge |W|^2
    return (blocks.target_square - blocks.inner(output, blocks.overlap + prior.ridge * output)) / count
