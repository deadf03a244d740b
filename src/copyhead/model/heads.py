"""What is read off a head, whoever reads it: the share of the target in a matrix, and heads of linear attention."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def weighted_mean(matrix: Float[Array, "*B R K"], weight: Float[Array, "*B R K"]) -> Float[Array, "*B"]:
    """Mean under a weight; zero where there is none."""
    total = jnp.sum(weight, axis=(-2, -1))
    return jnp.sum(weight * matrix, axis=(-2, -1)) / jnp.where(total > 0, total, 1.0)


def coefficient(
    matrix: Float[Array, "R K"], weight: Float[Array, "R K"], target: Float[Array, "R K"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean where the target is zero, and least-squares coefficient of the target in what is above it.

    Args:
        weight: multiplicity of each entry, zero where it is not scored or not allowed.
    """
    off = weighted_mean(matrix, weight * (target == 0))
    square = jnp.sum(weight * target**2)
    return off, jnp.sum(weight * target * (matrix - off)) / jnp.where(square > 0, square, 1.0)


def principal(logits: Float[Array, "H R K"], weight: Float[Array, "R K"]) -> Float[Array, "H H"]:
    """The rotation O that makes the heads sum_h O_hg G_h orthogonal, largest first, each with a mean row sum >= 0.

    Rotating heads of linear attention into one another, with their W, and turning signs of single heads changes nothing else.
    """
    turn = jnp.linalg.eigh(jnp.einsum("hrk,rk,grk->hg", logits, weight, logits))[1][:, ::-1]
    sums = jnp.einsum("hg,hrk,rk->g", turn, logits, weight)
    return turn * jnp.where(sums < 0, -1.0, 1.0)
