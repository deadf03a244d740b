"""Token statistics: the law that tokens are drawn from, and data sets drawn with a seed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Names of the random streams of one integer seed; a new use takes a new name, so no two uses share draws.
STREAMS = {"train": 0, "fresh": 1, "init": 2, "langevin": 3}


def stream(seed: int, name: str) -> Array:
    """The key of one named use of a seed."""
    return jax.random.fold_in(jax.random.key(seed), STREAMS[name])


def uniform(vocab: int) -> Float[np.ndarray, "V"]:
    """Equal probability for each of V tokens."""
    return np.full(vocab, 1 / vocab)


def sample(key: Array, sequences: int, length: int, law: Float[np.ndarray, "V"]) -> Int[Array, "P L"]:
    """P sequences of L i.i.d. tokens.

    Sequence m depends on (key, m) only: the data set of P = 300 is the prefix of that of P = 400. Tokens of zero
    probability are never drawn.
    """
    edges = jnp.asarray(np.cumsum(law) / np.sum(law), jnp.float32)

    def one(index: Int[Array, ""]) -> Int[Array, "L"]:
        draw = jax.random.uniform(jax.random.fold_in(key, index), (length,), jnp.float32)
        return jnp.searchsorted(edges, draw, side="right").astype(jnp.int32)

    return jax.vmap(one)(jnp.arange(sequences))
