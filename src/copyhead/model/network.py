"""Networks: from weights to logits and output map, and the forward pass on sequences.

Positional attention is the d_model -> infinity limit at tau_x = 0: the logits G (L x L) and the output map W (V x V) are
themselves the weights.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copyhead.model.attention import attention
from copyhead.problem import Attention


class Positional(NamedTuple):
    """Weights of the positional network. logits: G, prior variance g_W / chi. output: W, prior variance g_O / chi."""

    logits: Float[Array, "... L L"]
    output: Float[Array, "... V V"]


def small_start(source: np.random.SeedSequence, length: int, vocab: int, scale: float = 0.01) -> Positional:
    """Independent normal weights of standard deviation `scale`."""
    draw = np.random.default_rng(source).standard_normal
    logits, output = scale * draw((length, length), np.float32), scale * draw((vocab, vocab), np.float32)
    return Positional(logits, output)


def copy_start(target: Float[np.ndarray, "L L"], vocab: int, kind: Attention) -> Positional:
    """A network that copies, A x W close to T x, whatever the data.

    Softmax: the logit of the copy entry is ln L + 2 above the rest, so it takes 88% of the attention. Linear: G = g T with
    W = (L / g) I, and g = (V L)^(1/4), where |G|^2 = |W|^2.
    """
    length = target.shape[0]
    if kind == "softmax":
        return Positional((np.log(length) + 2.0) * target, np.eye(vocab))
    gain = (length * vocab) ** 0.25
    return Positional(gain * target, (length / gain) * np.eye(vocab))


def forward(weights: Positional, tokens: Int[Array, "P L"], kind: Attention) -> Float[Array, "P L V"]:
    """f = A x W on sequences of tokens; the direct path, with a cost that grows with P."""
    length, vocab = weights.logits.shape[-1], weights.output.shape[-1]
    matrix = attention(weights.logits, kind, length)
    return jnp.einsum("ab,pbu->pau", matrix, jax.nn.one_hot(tokens, vocab) @ weights.output)
