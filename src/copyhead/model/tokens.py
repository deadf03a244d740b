"""Token statistics: the law that tokens are drawn from, and data sets drawn with a seed."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

# Names of the random streams of one integer seed; a new use takes a new name, so no two uses share draws.
STREAMS = {"train": 0, "fresh": 1, "init": 2, "langevin": 3, "embedding": 4, "batch": 5}


def stream(seed: int, name: str, *parts: int) -> np.random.SeedSequence:
    """The source of randomness for one named use of a seed; `parts` tell runs of the same use apart."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS[name], *parts))


def uniform(vocab: int) -> Float[np.ndarray, "V"]:
    """Equal probability for each of V tokens."""
    return np.full(vocab, 1 / vocab)


def sample(source: np.random.SeedSequence, sequences: int, length: int, law: Float[np.ndarray, "V"]) -> Int[np.ndarray, "P L"]:
    """P sequences of L i.i.d. tokens, drawn one after the other: the data set of P = 300 is the prefix of that of P = 400.

    Tokens of zero probability are never drawn.
    """
    edges = np.cumsum(law)
    draws = np.random.default_rng(source).random((sequences, length))
    return np.searchsorted(edges / edges[-1], draws, side="right")
