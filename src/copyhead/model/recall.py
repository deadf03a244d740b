"""Recall: draws of the task. A context of L - 1 distinct tokens, then one of them once more; the target is its successor.

tokens[0 .. L-2] distinct, tokens[L-1] = tokens[j], j uniform in 0 .. L-3, target = tokens[j + 1]
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from copyhead.record import ProblemError

# Random numbers that are held at once; the draws do not depend on it.
CHUNK = 2**22


class Recall(NamedTuple):
    """tokens: sequences. match: j, the earlier position of the last token; the token at j + 1 is the target."""

    tokens: Int[np.ndarray, "P L"]
    match: Int[np.ndarray, "P"]

    @property
    def target(self) -> Int[np.ndarray, "P"]:
        """tokens[j + 1]."""
        return self.tokens[np.arange(len(self.match)), self.match + 1]


def draw(source: np.random.SeedSequence, sequences: int, length: int, vocab: int) -> Recall:
    """P sequences, drawn one after the other: the data set of P = 300 is the prefix of that of P = 400.

    Raises:
        ProblemError: if length > vocab, or length < 4.
    """
    if not 4 <= length <= vocab:
        raise ProblemError(f"length = {length}: must be >= 4 and <= vocab = {vocab} for recall")
    generator = np.random.default_rng(source)
    tokens, match = np.empty((sequences, length), np.int32), np.empty(sequences, np.int32)
    step = max(1, CHUNK // (vocab + 1))
    for begin in range(0, sequences, step):
        size = min(step, sequences - begin)
        # One row of numbers for each sequence: its order of the V tokens, then its j.
        numbers = generator.random((size, vocab + 1))
        some = slice(begin, begin + size)
        tokens[some, :-1] = np.argsort(numbers[:, :vocab], axis=1)[:, : length - 1]
        match[some] = np.floor(numbers[:, vocab] * (length - 2))
    tokens[:, -1] = tokens[np.arange(sequences), match]
    return Recall(tokens, match)
