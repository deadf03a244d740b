"""Next-token prediction on sequences with repeated segments, and the least loss that any predictor can have on them.

The law, for tokens x_0 .. x_{L-1} with a hidden source s_a (none: the token is fresh, uniform over V):

    a copy goes on with probability 1 - stop:    s_a = s_{a-1} + 1
    otherwise one starts with probability begin: s_a uniform in 0 .. a - 1;   else the token is fresh
    x_a = x_{s_a}

A segment is 1/stop tokens long in the mean and comes from anywhere before, so that every offset is possible and no head that
attends by position alone finds the source. Given the law, the ideal predictor is the filter of this hidden Markov chain: it is
exact, and its mean loss over drawn sequences is the floor, with a statistical error only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from copyhead.record import ProblemError

# Random numbers that are held at once; the draws do not depend on it.
CHUNK = 2**22
BEGIN, STOP = 0.25, 0.2
FRESH = -1


class Repeated(NamedTuple):
    """tokens: sequences. copied: s_a, the position that a token was copied from; FRESH if it was not."""

    tokens: Int[np.ndarray, "P L"]
    copied: Int[np.ndarray, "P L"]


class Floor(NamedTuple):
    """Least mean loss over positions 1 .. L-1, and standard errors by sampling. cross_entropy: in nats.

    squared: sum over the V outputs, of the probability vector against the one-hot token.
    """

    squared: float
    squared_error: float
    cross_entropy: float
    cross_entropy_error: float


def _refuse(begin: float, stop: float) -> None:
    for name, value in (("begin", begin), ("stop", stop)):
        if not 0 < value < 1:
            raise ProblemError(f"{name} = {value:g}: must be > 0 and < 1")


def draw(
    source: np.random.SeedSequence, sequences: int, length: int, vocab: int, begin: float = BEGIN, stop: float = STOP
) -> Repeated:
    """P sequences, drawn one after the other: the data set of P = 300 is the prefix of that of P = 400.

    Raises:
        ProblemError: for a probability outside 0 .. 1.
    """
    _refuse(begin, stop)
    generator = np.random.default_rng(source)
    tokens, copied = np.empty((sequences, length), np.int32), np.full((sequences, length), FRESH, np.int32)
    step = max(1, CHUNK // (4 * length))
    for first in range(0, sequences, step):
        size = min(step, sequences - first)
        ends, starts, places, values = np.moveaxis(generator.random((size, length, 4)), 2, 0)
        row, some = np.arange(size), slice(first, first + size)
        x, s = tokens[some], copied[some]
        for a in range(length):
            x[:, a] = np.floor(values[:, a] * vocab)
            if a == 0:
                continue
            goes_on = (s[:, a - 1] != FRESH) & (ends[:, a] >= stop)
            begins = ~goes_on & (starts[:, a] < begin)
            s[:, a] = np.where(goes_on, s[:, a - 1] + 1, np.where(begins, np.floor(places[:, a] * a), FRESH))
            x[:, a] = np.where(s[:, a] == FRESH, x[:, a], x[row, s[:, a]])
    return Repeated(tokens, copied)


def ideal(tokens: Int[np.ndarray, "P L"], vocab: int, begin: float = BEGIN, stop: float = STOP) -> Float[np.ndarray, "P L-1 V"]:
    """Prob(x_{a+1} = v | x_0 .. x_a), a = 0 .. L-2, for one who knows the law but not the sources.

    Filter: from Prob(s_a | x_0..x_a) to the prediction of s_{a+1} by the law, to that of x_{a+1}, and on by Bayes.
    """
    _refuse(begin, stop)
    count, length = tokens.shape
    row = np.arange(count)
    found = np.empty((count, length - 1, vocab))
    # Columns 0 .. L-1: copied from there; the last one: fresh.
    belief = np.zeros((count, length + 1))
    belief[:, -1] = 1.0
    for a in range(1, length):
        ended = belief[:, -1] + stop * belief[:, :-1].sum(axis=1)
        ahead = np.zeros_like(belief)
        ahead[:, 1:a] = (1 - stop) * belief[:, : a - 1]
        ahead[:, :a] += (begin * ended / a)[:, None]
        ahead[:, -1] = (1 - begin) * ended
        forecast = np.repeat(ahead[:, -1:] / vocab, vocab, axis=1)
        for place in range(a):
            forecast[row, tokens[:, place]] += ahead[:, place]
        found[:, a - 1] = forecast
        fits = np.zeros_like(belief)
        fits[:, :a] = tokens[:, :a] == tokens[:, a : a + 1]
        fits[:, -1] = 1 / vocab
        belief = ahead * fits / forecast[row, tokens[:, a]][:, None]
    return found


def floor(
    source: np.random.SeedSequence,
    length: int,
    vocab: int,
    begin: float = BEGIN,
    stop: float = STOP,
    sequences: int = 20000,
) -> Floor:
    """The loss of the ideal predictor on drawn sequences; lower is not possible but for chance.

    Squared error 1 - sum_v p_v^2 and cross-entropy -sum_v p_v ln p_v are expectations over the next token: they have the
    mean of the loss on the token that came, and less scatter.
    """
    p = ideal(draw(source, sequences, length, vocab, begin, stop).tokens, vocab, begin, stop)
    squared = np.mean(1 - np.sum(p**2, axis=2), axis=1)
    entropy = np.mean(-np.sum(p * np.log(p), axis=2), axis=1)
    root = sequences**0.5
    return Floor(
        float(squared.mean()), float(squared.std(ddof=1) / root), float(entropy.mean()), float(entropy.std(ddof=1) / root)
    )
