"""Tokens of a text: its units, the V tokens that stand for them, and windows of it with their exact pair frequencies.

The text is a ring of N tokens, its end joined to its start. So windows of L consecutive tokens, begun anywhere with equal
probability, are exactly stationary, and every expectation over them is a sum of N terms.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Int

from copyhead import files
from copyhead.record import ProblemError

OTHER = "<other>"

# A run of letters, digits and apostrophes (straight or typographic), or any other single character that is not blank.
WORD = re.compile(r"(?:[^\W_]|['\u2019])+|\S")


@dataclass(frozen=True, eq=False)
class Corpus:
    """The law of windows of L tokens of a text that is joined to a ring.

    Attributes:
        ring: the text as numbers of tokens.
        names: what the V tokens are. `<other>` is the last if there is one; `<unused k>` does not occur in the text.
        units: number of different units of the text.
        origin: what errors call the text.
    """

    ring: Int[np.ndarray, "N"]
    names: tuple[str, ...]
    units: int
    origin: str = "text"
    # lag -> (codes u V + v that occur, how often); most pairs of a large vocabulary never occur
    _found: dict[int, tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]] = field(default_factory=dict, repr=False)

    @property
    def vocab(self) -> int:
        return len(self.names)

    @property
    def independent(self) -> bool:
        return False

    @property
    def other_share(self) -> float:
        """Share of the units of the text that `<other>` stands for; zero where there is no such token."""
        return float(np.mean(self.ring == self.vocab - 1)) if self.units > self.vocab else 0.0

    def marginal(self, length: int, cyclic: bool) -> Float[np.ndarray, "V"]:
        """The frequencies of the tokens in the text; they depend on neither argument.

        Raises:
            ProblemError: for a text shorter than L + 1 tokens.
        """
        self._long_enough(length)
        return np.bincount(self.ring, minlength=self.vocab) / len(self.ring)

    def draw(self, source: np.random.SeedSequence, sequences: int, length: int, cyclic: bool) -> Int[np.ndarray, "P L"]:
        """P windows of the text, begun anywhere with equal probability, with replacement; cyclic or not, the same ones.

        The data set of P = 300 is the prefix of that of P = 400.

        Raises:
            ProblemError: for a text shorter than L + 1 tokens.
        """
        self._long_enough(length)
        begin = np.random.default_rng(source).integers(len(self.ring), size=sequences)
        return self.ring[(begin[:, None] + np.arange(length)) % len(self.ring)].astype(np.int64)

    def pairs(self, length: int, cyclic: bool) -> Float[np.ndarray, "L V V"]:
        """C_d[u, v] = #{s: x_s = u, x_{s+d} = v} / N, exact averages over the N windows, d = 0..L-1.

        Cyclic: the average over positions i of the pair (i, i + d mod L). Windows are no rings, so this is
        ((L - d) C_d + d C_{L-d}^T) / L: L - d of the pairs are d apart, and d of them are L - d apart the other way round.

        Raises:
            ProblemError: for a text shorter than L + 1 tokens.
        """
        self._long_enough(length)
        vocab = self.vocab
        found = np.zeros((length, vocab * vocab))
        for d in range(length):
            codes, counts = self._counts(d)
            # Whole numbers as long as possible, so that exact fractions are rounded once.
            found[d, codes] += (length - d) * counts if cyclic else counts
            if cyclic and d:
                codes, counts = self._counts(length - d)
                found[d, codes % vocab * vocab + codes // vocab] += d * counts
        found /= len(self.ring) * (length if cyclic else 1)
        return found.reshape(length, vocab, vocab)

    def _counts(self, lag: int) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        if lag not in self._found:
            counts = np.bincount(self.ring.astype(np.int64) * self.vocab + np.roll(self.ring, -lag))
            codes = np.flatnonzero(counts)
            self._found[lag] = codes, counts[codes]
        return self._found[lag]

    def _long_enough(self, length: int) -> None:
        if len(self.ring) <= length:
            raise ProblemError(
                f"{self.origin}: must have at least {length + 1} tokens for length = {length}, has {len(self.ring)}"
            )


def read(path: str, unit: str, vocab: int) -> Corpus:
    """The law of a text file, with V = `vocab` tokens.

    Units: `char` is a Unicode character as it is; `byte` is a byte, of any file; `word` is a lower-cased run of letters, digits
    and apostrophes, and every other character that is not blank is a word of its own (letters and digits as in str.isalnum,
    after composition to NFC).

    At most V different units: each is a token, by falling count and then by the unit itself, and the tokens left over have
    probability zero. More: the V - 1 first in this order are tokens, and the last token stands for all others.

    Raises:
        ProblemError: for a file that cannot be read, is empty, or, but for bytes, is no text.
    """
    values, names = _units(path, unit)
    counts = np.bincount(values)
    present = np.flatnonzero(counts)
    # Stable, so ties stay in the order of the units.
    order = present[np.argsort(-counts[present], kind="stable")]
    rank = np.zeros(len(counts), np.int32)
    rank[order] = np.minimum(np.arange(len(order)), vocab - 1)
    if len(order) > vocab:
        kept = [*(_name(value, unit, names) for value in order[: vocab - 1]), OTHER]
    else:
        kept = [*(_name(value, unit, names) for value in order), *(f"<unused {k + 1}>" for k in range(vocab - len(order)))]
    return Corpus(rank[values], tuple(kept), len(order), f"tokens file = {path!r}")


def _units(path: str, unit: str) -> tuple[Int[np.ndarray, "N"], list[str]]:
    """The text as whole numbers that sort as its units do; words also need their list."""
    if unit == "byte":
        return np.frombuffer(files.content("tokens", path), np.uint8), []
    found = files.text("tokens", path)
    if unit == "char":
        return np.frombuffer(found.encode("utf-32-le"), np.uint32), []
    words = [word.lower() for word in WORD.findall(unicodedata.normalize("NFC", found))]
    if not words:
        raise ProblemError(f"tokens file = {path!r}: has no words")
    names = sorted(set(words))
    place = {name: k for k, name in enumerate(names)}
    return np.fromiter((place[word] for word in words), np.int64, len(words)), names


def _name(value: int, unit: str, names: list[str]) -> str:
    if unit == "byte":
        return f"0x{value:02x}"
    return chr(value) if unit == "char" else names[value]
