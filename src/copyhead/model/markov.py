"""Markov chains of tokens: stationary, or closed to a ring, with exact draws and pair probabilities in both cases."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse.csgraph import connected_components

from copyhead.record import ProblemError

# Entries of one temporary array in `Markov.draw` on a ring: 32 MiB.
CHUNK = 2**22


@dataclass(frozen=True, eq=False)
class Markov:
    """A Markov chain, M_uv = Prob(next token is v | token is u); rows are normalised to one.

    Open sequences are the stationary chain. Cyclic sequences are the chain closed to a ring of L, the law of a sequence being
    prod_i M[x_i, x_{i+1 mod L}] / tr M^L (the transfer matrix of a ring, as in Baxter, Exactly Solved Models, section 2.1).
    The law of one token on the ring, diag M^L / tr M^L, is not the stationary law unless L is large.

    Raises:
        ProblemError: for a table that is not square, has a negative number or a row of zeros, or has more than one stationary
            law. `origin` is what errors call the table.
    """

    transition: Float[np.ndarray, "V V"]
    origin: str = "transition"

    def __post_init__(self) -> None:
        table = np.asarray(self.transition, float)
        refuse_not_square(self.origin, table)
        if np.any(table < 0):
            row = int(np.flatnonzero(np.any(table < 0, axis=1))[0])
            raise ProblemError(f"{self.origin}, row {row + 1}: must be numbers >= 0, has {table[row].min():g}")
        if not np.all(np.any(table > 0, axis=1)):
            row = int(np.flatnonzero(~np.any(table > 0, axis=1))[0])
            raise ProblemError(f"{self.origin}, row {row + 1}: must have a number > 0, is zero everywhere")
        # The first division keeps the sum finite.
        table = table / table.max(axis=1, keepdims=True)
        object.__setattr__(self, "transition", table / table.sum(axis=1, keepdims=True))
        if self._closed is None:
            raise ProblemError(f"{self.origin}: must have one stationary law, has several sets of tokens that it never leaves")

    @property
    def vocab(self) -> int:
        return len(self.transition)

    @property
    def names(self) -> None:
        return None

    @property
    def independent(self) -> bool:
        return False

    @cached_property
    def _closed(self) -> Int[np.ndarray, "r"] | None:
        """The tokens of the only communicating class that is never left; None if there are several."""
        count, label = connected_components(self.transition > 0, connection="strong")
        origin, target = np.nonzero(self.transition)
        left = np.unique(label[origin[label[origin] != label[target]]])
        return np.flatnonzero(~np.isin(label, left)) if len(left) == count - 1 else None

    @cached_property
    def stationary(self) -> Float[np.ndarray, "V"]:
        """pi = pi M, zero for tokens that are not recurrent.

        By elimination without subtractions (Grassmann, Taksar and Heyman 1985), which keeps the relative accuracy of small
        entries and is indifferent to the period.
        """
        closed = self._closed
        assert closed is not None
        rest = self.transition[np.ix_(closed, closed)]
        for k in range(len(closed) - 1, 0, -1):
            rest[:k, k] /= rest[k, :k].sum()
            rest[:k, :k] += np.outer(rest[:k, k], rest[k, :k])
        weight = np.ones(len(closed))
        for k in range(1, len(closed)):
            weight[k] = weight[:k] @ rest[:k, k]
        found = np.zeros(self.vocab)
        found[closed] = weight / weight.sum()
        return found

    def marginal(self, length: int, cyclic: bool) -> Float[np.ndarray, "V"]:
        """The stationary law; on a ring diag M^L / tr M^L.

        Raises:
            ProblemError: if tr M^L = 0, as for a chain whose period does not divide L.
        """
        return self._on_ring(np.linalg.matrix_power(self.transition, length), length) if cyclic else self.stationary.copy()

    def draw(self, source: np.random.SeedSequence, sequences: int, length: int, cyclic: bool) -> Int[np.ndarray, "P L"]:
        """P sequences, exact in both cases; on a ring x_0 comes first and the others conditionally on it.

        Prob(x_i = v | x_{i-1} = u, x_0 = a) = M_uv (M^{L-i})_va / (M^{L-i+1})_ua.

        Raises:
            ProblemError: if tr M^L = 0 for a ring.
        """
        draws = np.random.default_rng(source).random((sequences, length))
        found = np.empty((sequences, length), np.int64)
        if cyclic:
            powers = _powers(self, length)
            found[:, 0] = _chosen(self._on_ring(powers[length], length)[None], draws[:, 0])
            step = max(1, CHUNK // self.vocab)
            for begin in range(0, sequences, step):
                some = found[begin : begin + step]
                for i in range(1, length):
                    weight = self.transition[some[:, i - 1]] * powers[length - i].T[some[:, 0]]
                    some[:, i] = _chosen(weight, draws[begin : begin + step, i])
            return found
        found[:, 0] = _chosen(self.stationary[None], draws[:, 0])
        edges = _edges(self.transition)
        for i in range(1, length):
            found[:, i] = _in_rows(edges, found[:, i - 1], draws[:, i])
        return found

    def pairs(self, length: int, cyclic: bool) -> Float[np.ndarray, "L V V"]:
        """pi_u (M^d)_uv; on a ring (M^d)_uv (M^{L-d})_vu / tr M^L.

        Raises:
            ProblemError: if tr M^L = 0 for a ring.
        """
        found = np.empty((length, self.vocab, self.vocab))
        if cyclic:
            powers = _powers(self, length)
            self._on_ring(powers[length], length)
            for d in range(length):
                found[d] = powers[d] * powers[length - d].T
            found /= np.trace(powers[length])
            return found
        found[0] = np.diag(self.stationary)
        for d in range(1, length):
            found[d] = found[d - 1] @ self.transition
        return found

    def _on_ring(self, power: Float[np.ndarray, "V V"], length: int) -> Float[np.ndarray, "V"]:
        """The law of one token on the ring, from M^L."""
        weight = np.diag(power)
        if not weight.sum() > 0:
            raise ProblemError(
                f"length = {length}: {self.origin} has no sequence of this length that closes to a ring (its period does not "
                "divide it); needs a multiple of the period, or cyclic = False"
            )
        return weight / weight.sum()


@lru_cache(maxsize=1)
def _powers(chain: Markov, length: int) -> Float[np.ndarray, "L+1 V V"]:
    """M^0 .. M^L, kept for the next data set of the same chain."""
    found = np.empty((length + 1, chain.vocab, chain.vocab))
    found[0] = np.eye(chain.vocab)
    for d in range(length):
        found[d + 1] = chain.transition @ found[d]
    return found


def _edges(weight: Float[np.ndarray, "r V"]) -> Float[np.ndarray, "r V"]:
    """The distribution function of each row, exactly one from its last token of positive probability on."""
    edges = np.cumsum(weight, axis=1)
    return edges / edges[:, -1:]


def _in_rows(edges: Float[np.ndarray, "r V"], row: Int[np.ndarray, "P"], draws: Float[np.ndarray, "P"]) -> Int[np.ndarray, "P"]:
    """The token at which the distribution function of the given row first exceeds the draw, by one search in all rows."""
    rows, vocab = edges.shape
    line = (edges + np.arange(rows)[:, None]).ravel()
    # A draw close to one would be rounded up into the next row.
    place = np.minimum(row + draws, np.nextafter(row + 1.0, 0))
    return np.searchsorted(line, place, side="right") - row * vocab


def _chosen(weight: Float[np.ndarray, "r V"], draws: Float[np.ndarray, "P"]) -> Int[np.ndarray, "P"]:
    """One token for each draw, from the row of its own or from the only row."""
    edges = _edges(weight)
    if len(weight) == 1:
        return np.searchsorted(edges[0], draws, side="right")
    return np.sum(edges <= draws[:, None], axis=1)


def refuse_not_square(origin: str, table: Float[np.ndarray, "r c"]) -> None:
    """Raises:
    ProblemError: unless the table is square.
    """
    if table.ndim != 2 or table.shape[0] != table.shape[1]:
        raise ProblemError(f"{origin}: must have as many rows as columns, is {table.shape}")
