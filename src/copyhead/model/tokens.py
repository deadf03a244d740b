"""Token statistics: the laws that tokens are drawn from, their pair probabilities, and data sets drawn with a seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int

from copyhead import files
from copyhead.model import corpus
from copyhead.model.markov import Markov, refuse_not_square
from copyhead.problem import Problem
from copyhead.record import ProblemError

# Names of the random streams of one integer seed; a new use takes a new name, so no two uses share draws.
STREAMS = {"train": 0, "fresh": 1, "init": 2, "langevin": 3, "embedding": 4, "batch": 5}


def stream(seed: int, name: str, *parts: int) -> np.random.SeedSequence:
    """The source of randomness for one named use of a seed; `parts` tell runs of the same use apart."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS[name], *parts))


def uniform(vocab: int) -> Float[np.ndarray, "V"]:
    """Equal probability for each of V tokens."""
    return np.full(vocab, 1 / vocab)


def zipf(vocab: int, exponent: float) -> Float[np.ndarray, "V"]:
    """p_k = k^-S / sum_j j^-S for k = 1..V, the law of Zipf (1949)."""
    weight = np.arange(1, vocab + 1, dtype=float) ** -exponent
    return weight / weight.sum()


def sample(source: np.random.SeedSequence, sequences: int, length: int, law: Float[np.ndarray, "V"]) -> Int[np.ndarray, "P L"]:
    """P sequences of L i.i.d. tokens, drawn one after the other: the data set of P = 300 is the prefix of that of P = 400.

    Tokens of zero probability are never drawn.
    """
    edges = np.cumsum(law)
    draws = np.random.default_rng(source).random((sequences, length))
    return np.searchsorted(edges / edges[-1], draws, side="right")


class Law(Protocol):
    """A law of sequences of tokens x_0 .. x_{L-1}, each a number in 0..V-1."""

    @property
    def vocab(self) -> int:
        """V, number of tokens."""
        ...

    @property
    def names(self) -> tuple[str, ...] | None:
        """What the V tokens are; None where they are numbers only."""
        ...

    @property
    def independent(self) -> bool:
        """Whether the tokens of a sequence are i.i.d."""
        ...

    def marginal(self, length: int, cyclic: bool) -> Float[np.ndarray, "V"]:
        """The law of one token in sequences of L, the same at every position.

        Raises:
            ProblemError: if the law has no sequences of this length.
        """
        ...

    def draw(self, source: np.random.SeedSequence, sequences: int, length: int, cyclic: bool) -> Int[np.ndarray, "P L"]:
        """P sequences, drawn one after the other: the data set of P = 300 is the prefix of that of P = 400.

        Tokens of zero probability are never drawn.

        Raises:
            ProblemError: if the law has no sequences of this length.
        """
        ...

    def pairs(self, length: int, cyclic: bool) -> Float[np.ndarray, "L V V"]:
        """Entry (d, u, v) is Prob(x_i = u, x_{i+d} = v), d = 0..L-1; entry 0 is diag p.

        Cyclic: i + d is taken mod L, and the probability is averaged over i = 0..L-1.

        Raises:
            ProblemError: if the law has no sequences of this length.
        """
        ...


@dataclass(frozen=True, eq=False)
class Independent:
    """I.i.d. tokens, so a sequence and a ring have one law."""

    probability: Float[np.ndarray, "V"]

    @property
    def vocab(self) -> int:
        return len(self.probability)

    @property
    def names(self) -> None:
        return None

    @property
    def independent(self) -> bool:
        return True

    def marginal(self, length: int, cyclic: bool) -> Float[np.ndarray, "V"]:
        """The law of one token; it depends on neither argument."""
        return self.probability.copy()

    def draw(self, source: np.random.SeedSequence, sequences: int, length: int, cyclic: bool) -> Int[np.ndarray, "P L"]:
        """As `sample` draws them, to the bit."""
        return sample(source, sequences, length, self.probability)

    def pairs(self, length: int, cyclic: bool) -> Float[np.ndarray, "L V V"]:
        """diag p at d = 0, p p^T at every other lag."""
        found = np.empty((length, self.vocab, self.vocab))
        found[:] = np.outer(self.probability, self.probability)
        found[0] = np.diag(self.probability)
        return found


def law(problem: Problem) -> Law:
    """The law of the tokens of a problem; the same object as long as its fields and its file are the same.

    Raises:
        ProblemError: for a file that cannot be read, or does not give a law of `vocab` tokens.
    """
    kind, _ = _kind(problem.tokens)
    return _law(problem.tokens, problem.vocab, problem.unit if kind == "corpus" else "", problem.digests.get("tokens", ""))


@lru_cache(maxsize=8)
def _law(tokens: str, vocab: int, unit: str, digest: str) -> Law:
    # The digest is there for the cache: a file that has changed is another law.
    kind, rest = _kind(tokens)
    match kind:
        case "uniform":
            return Independent(uniform(vocab))
        case "zipf":
            return Independent(zipf(vocab, float(rest)))
        case "counts":
            return Independent(_counts(rest, vocab))
        case "markov":
            return Markov(_sized(rest, files.matrix("tokens", rest), (vocab, vocab)), _origin(rest))
        case _:
            return corpus.read(rest, unit, vocab)


def _kind(tokens: str) -> tuple[str, str]:
    kind, _, rest = tokens.partition(":")
    return kind, rest


def _origin(path: str) -> str:
    return f"tokens file = {path!r}"


def _sized(path: str, table: Float[np.ndarray, "r c"], shape: tuple[int, int]) -> Float[np.ndarray, "r c"]:
    if table.shape != shape:
        raise ProblemError(f"{_origin(path)}: must be {shape[0]} x {shape[1]} (vocab), is {table.shape}")
    return table


def _line(path: str) -> Float[np.ndarray, "V"]:
    """The numbers of a counts file, in one row or one column."""
    table = files.matrix("tokens", path)
    if 1 not in table.shape:
        raise ProblemError(f"{_origin(path)}: must be one row or one column of counts, is {table.shape}")
    return table.ravel()


def _counts(path: str, vocab: int) -> Float[np.ndarray, "V"]:
    found = _line(path)
    if len(found) != vocab:
        raise ProblemError(f"{_origin(path)}: must have vocab = {vocab} counts, has {len(found)}")
    if np.any(found < 0) or not np.any(found):
        raise ProblemError(f"{_origin(path)}: must be counts >= 0, not all zero, has {found.min():g}")
    found = found / found.max()
    return found / found.sum()


def vocab_of(tokens: str) -> int | None:
    """V of the file of a law: the number of counts, or of rows of a transition table; None for every other law.

    Raises:
        ProblemError: for a file that cannot be read, or is no row, column or square of numbers.
    """
    kind, path = _kind(tokens)
    if kind == "counts":
        return len(_line(path))
    if kind == "markov":
        table = files.matrix("tokens", path)
        refuse_not_square(_origin(path), table)
        return len(table)
    return None


def describe(problem: Problem) -> dict[str, Any]:
    """What to say of the tokens of a problem, in numbers that JSON can hold.

    entropy_bits: -sum p log2 p of one token. collision: sum p^2, the probability that two independent tokens are equal.
    occurring: number of tokens with p > 0. For a corpus also text_tokens (N), text_units (different units), other_share (the
    share of units that are one token `<other>`), and unit.

    Raises:
        ProblemError: as `law`, and if the law has no sequences of the length.
    """
    found = law(problem)
    p = found.marginal(problem.length, problem.cyclic)
    some = p[p > 0]
    said: dict[str, Any] = {
        "tokens": problem.tokens,
        "vocab": found.vocab,
        "independent": found.independent,
        # max: a law of one token gives -0.0
        "entropy_bits": max(0.0, -float(some @ np.log2(some))),
        "collision": float(p @ p),
        "occurring": len(some),
    }
    if isinstance(found, corpus.Corpus):
        said |= {
            "unit": problem.unit,
            "text_tokens": len(found.ring),
            "text_units": found.units,
            "other_share": found.other_share,
        }
    return said
