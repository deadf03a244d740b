"""phi: from logits G to attention A, in one place.

A[a, b] is the weight that position a puts on position b. Softmax normalises each row to one. Linear attention is
A = G / L, without normalisation and with either sign.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from copyhead.problem import Attention


def attention(
    logits: Float[Array, "... R K"],
    kind: Attention,
    length: float | Float[Array, ""],
    columns: Float[Array, "R K"] | None = None,
) -> Float[Array, "... R K"]:
    """A = phi(G).

    Args:
        logits: G, full (L x L) or in a compressed layout.
        kind: softmax or linear.
        length: L, the divisor of linear attention.
        columns: multiplicities of the entries in a row (Layout.columns); None means one each. An entry of
            multiplicity zero is masked, and zero.
    """
    if kind == "linear":
        return (logits if columns is None else logits * (columns > 0)) / length
    if columns is None:
        return jax.nn.softmax(logits, axis=-1)
    return jnp.exp(logits - logsumexp(logits, axis=-1, b=columns, keepdims=True)) * (columns > 0)
