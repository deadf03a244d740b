"""Token moments S_ij = sum_m x_i^m x_j^mT (V x V each), and their contractions with position or token matrices.

Everything that theory or training needs of the data goes through S, so no cost depends on P once it is there. Two
kinds stand behind one interface: Empirical (one data set, exact) and Population (P times the expectation, which is the
equivalent-kernel approximation). Both hold the sum over P sequences.

Token matrices come in blocks (n, v, v) with multiplicities (n,): one block of size V in general, and for uniform tokens the
two scalar blocks of the permutation symmetry of tokens, V - 1 zero-sum directions and the uniform one. The trace of a
function of a token matrix is the sum over blocks weighted by `multiplicity`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copyhead.model.layout import Layout

if TYPE_CHECKING:
    from copyhead.model.tokens import Law


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Population:
    """S_ij = P [delta_ij Sigma + p p^T] for i.i.d. tokens of law p; Sigma = diag p - p p^T."""

    sequences: Float[Array, ""]
    covariance: Float[Array, "n v v"]
    mean_square: Float[Array, "n v v"]
    multiplicity: Float[Array, "n"]

    def contract(self, left: Float[Array, "R K"], right: Float[Array, "R K"], layout: Layout) -> Float[Array, "n v v"]:
        """Q(B) = sum_ij B_ij S_ij for B = left^T right over the scored rows, never forming B."""
        trace = jnp.sum(layout.scored * layout.row_sums(left * right))
        total = jnp.sum(layout.scored * layout.row_sums(left) * layout.row_sums(right))
        return self.sequences * (trace * self.covariance + total * self.mean_square)

    def contract_tokens(self, matrix: Float[Array, "V V"], length: int) -> Float[Array, "L L"]:
        """The L x L matrix <S_ij, M> for a V x V matrix M; for the one-block form only."""
        return self.sequences * (
            jnp.eye(length, dtype=matrix.dtype) * jnp.vdot(self.covariance[0], matrix) + jnp.vdot(self.mean_square[0], matrix)
        )

    def scaled(self, sequences: Float[Array, ""] | float) -> Self:
        """The same statistics at another P."""
        return replace(self, sequences=sequences)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Empirical:
    """S_ij of one data set of P sequences, as a (L, L, V, V) array."""

    sequences: Float[Array, ""]
    tensor: Float[Array, "L L V V"]

    @property
    def multiplicity(self) -> Float[Array, "1"]:
        return jnp.ones(1, self.tensor.dtype)

    def contract(self, left: Float[Array, "L L"], right: Float[Array, "L L"], layout: Layout) -> Float[Array, "1 V V"]:
        """Q(B) = sum_ij B_ij S_ij for B = left^T right over the scored rows."""
        gram = left.T @ (layout.scored[:, None] * right)
        return jnp.einsum("ij,ijuv->uv", gram, self.tensor)[None]

    def explained(
        self, attention: Float[Array, "H L L"], target: Float[Array, "L L"], ridge: Float[Array, ""]
    ) -> Float[Array, ""]:
        """tr N^T (F + ridge)^-1 N, F_hh' = Q(A_h^T A_h') and N_h = Q(A_h^T T), zero in rows that are not scored."""
        return _explained(self._contract, attention, target, ridge)

    def best_output(
        self, attention: Float[Array, "H L L"], target: Float[Array, "L L"], ridge: Float[Array, ""]
    ) -> Float[Array, "H V V"]:
        """W = (F + ridge)^-1 N of all heads."""
        square, overlap = _blocks(self._contract, attention, target, ridge)
        return jnp.linalg.solve(square, overlap).reshape(len(attention), -1, overlap.shape[-1])

    def _contract(self, left: Float[Array, "... L L"], right: Float[Array, "... L L"]) -> Float[Array, "... V V"]:
        return jnp.einsum("...ij,ijuv->...uv", jnp.einsum("...ai,...aj->...ij", left, right), self.tensor)

    def contract_tokens(self, matrix: Float[Array, "V V"], length: int) -> Float[Array, "L L"]:
        """The L x L matrix <S_ij, M> for a V x V matrix M."""
        return jnp.einsum("ijuv,uv->ij", self.tensor, matrix)

    def scaled(self, sequences: Float[Array, ""] | float) -> Self:
        """The same token statistics, weighted as if they came from another number of sequences."""
        return replace(self, sequences=sequences, tensor=self.tensor * (sequences / self.sequences))


Moments = Population | Empirical


def population(law: Float[np.ndarray, "V"], sequences: float = 1.0) -> Population:
    """Moments of i.i.d. tokens of any law, as one V x V block."""
    law = np.asarray(law, float)
    square = np.outer(law, law)
    return Population(np.float64(sequences), (np.diag(law) - square)[None], square[None], np.ones(1))


def uniform_population(vocab: float, sequences: float = 1.0) -> Population:
    """Moments of uniform tokens in the two modes of the token symmetry; V enters as a number, not as a shape."""
    covariance, mean_square = np.array([1 / vocab, 0.0]), np.array([0.0, 1 / vocab])
    return Population(
        np.float64(sequences), covariance[:, None, None], mean_square[:, None, None], np.array([vocab - 1.0, 1.0])
    )


def expected(law: Float[np.ndarray, "V"], sequences: float, length: int) -> Empirical:
    """The moments that a data set of P sequences has on average, in the form of one; `Population` without its shortcuts."""
    law = np.asarray(law, float)
    square = np.outer(law, law)
    tensor = np.eye(length)[:, :, None, None] * (np.diag(law) - square) + square
    return Empirical(np.float32(sequences), (sequences * tensor).astype(np.float32))


def independent(law: Float[np.ndarray, "V"]) -> Independent:
    """I.i.d. tokens of any law at P = 1; those of equal probability are one kind, and those of none are left out."""
    kinds, count = np.unique(law[law > 0], return_counts=True)
    return Independent(np.float64(1), kinds, count.astype(float))


def stationary(pairs: Float[np.ndarray, "L V V"], sequences: float, cyclic: bool) -> Empirical:
    """The expected moments of P sequences of a stationary law, in the form of a data set.

    Args:
        pairs: E[x_i x_(i+d)^T], d modulo L if cyclic.
    """
    length = len(pairs)
    i, j = np.indices((length, length))
    ahead = pairs[(j - i) % length] if cyclic else pairs[np.abs(j - i)]
    if not cyclic:
        ahead = np.where((j < i)[:, :, None, None], np.swapaxes(ahead, -1, -2), ahead)
    return Empirical(np.float32(sequences), (sequences * ahead).astype(np.float32))


def expected_of(law: Law, length: int, cyclic: bool) -> Moments:
    """The moments of one sequence, on average over a law of tokens.

    Raises:
        ProblemError: if the law has no sequences of this length.
    """
    if law.independent:
        return population(law.marginal(length, cyclic))
    return stationary(law.pairs(length, cyclic), 1.0, cyclic)


def empirical(tokens: Int[np.ndarray, "P L"], vocab: int) -> Empirical:
    """Moments of a data set, in float32: counts below 2^24 are exact in it."""
    sequences, length = tokens.shape
    one_hot = (tokens[..., None] == np.arange(vocab)).reshape(sequences, length * vocab).astype(np.float32)
    gram = (one_hot.T @ one_hot).reshape(length, vocab, length, vocab)
    return Empirical(np.float32(sequences), np.ascontiguousarray(gram.transpose(0, 2, 1, 3)))


def of_each(data: list[Int[np.ndarray, "P L"]], vocab: int) -> Empirical:
    """Moments of several data sets, along a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *(empirical(part, vocab) for part in data))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Independent:
    """I.i.d. tokens of any law: probability of each kind of token and how many tokens are of that kind; P sequences.

    Uniform tokens are one kind, V of them, so that V is a number. Nothing is ever V x V.
    """

    sequences: Float[Array, ""]
    probability: Float[Array, "k"]
    multiplicity: Float[Array, "k"]

    def scaled(self, sequences: Float[Array, ""] | float) -> Self:
        """The same statistics at another P."""
        return replace(self, sequences=sequences)

    @property
    def collision(self) -> Float[Array, ""]:
        """|p|^2, the probability that two tokens agree."""
        return jnp.sum(self.multiplicity * self.probability**2)

    def target_square(self, target: Float[Array, "R K"], layout: Layout) -> Float[Array, ""]:
        """Y2 = sum_m |T x^m|^2 over the scored rows."""
        square = jnp.sum(layout.scored * layout.row_sums(target**2))
        total = jnp.sum(layout.scored * layout.row_sums(target) ** 2)
        return self.sequences * ((1 - self.collision) * square + self.collision * total)

    def explained(
        self,
        attention: Float[Array, "H R K"],
        target: Float[Array, "R K"],
        layout: Layout,
        ridge: Float[Array, ""],
    ) -> Float[Array, ""]:
        """tr N^T (F + ridge)^-1 N, F_hh' = Q(A_h^T A_h') and N_h = Q(A_h^T T), in closed form.

        F = P [t (x) diag p + (s - t) (x) p p^T] and N likewise, with the H x H matrices t = tr A_h^T A_h' and s of the row
        sums: a matrix H x H for each token, and one of rank H that joins them (Woodbury).
        """
        sums, target_sums = layout.row_sums(attention), layout.row_sums(target)
        weight = layout.scored[:, None] * layout.columns
        return self.explained_by(
            jnp.einsum("hrk,rk,grk->hg", attention, weight, attention),
            jnp.einsum("hrk,rk,rk->h", attention, weight, target),
            jnp.einsum("hr,r,gr->hg", sums, layout.scored, sums),
            jnp.einsum("hr,r,r->h", sums, layout.scored, target_sums),
            ridge,
        )

    def explained_by(
        self,
        square: Float[Array, "H H"],
        overlap: Float[Array, "H"],
        sum_square: Float[Array, "H H"],
        sum_overlap: Float[Array, "H"],
        ridge: Float[Array, ""],
    ) -> Float[Array, ""]:
        """The same from t = tr A_h^T A_h', m = tr A_h^T T, and those of the row sums."""
        t, m, s, q = (self.sequences * part for part in (square, overlap, sum_square, sum_overlap))
        p, count = self.probability, self.multiplicity
        inverse = jnp.linalg.inv(p[:, None, None] * t + ridge * jnp.eye(len(t)))
        joined = jnp.einsum("k,k,khg->hg", count, p**2, inverse)
        excess = s - t
        # (F + ridge)^-1 = D^-1 - D^-1 p coupling p^T D^-1
        coupling = jnp.linalg.solve(jnp.eye(len(t)) + excess @ joined, excess)
        own = jnp.einsum("khg,g->kh", inverse, m)
        column = p[:, None] ** 2 * own + p[:, None] * (joined @ (q - m))
        diagonal = jnp.sum(count * p**2 * (own @ m)) + 2 * jnp.sum(count * p**3 * (own @ (q - m)))
        diagonal = diagonal + jnp.sum(count * p**2) * ((q - m) @ joined @ (q - m))
        return diagonal - jnp.sum(count * jnp.einsum("kh,hg,kg->k", column, coupling, column))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Correlated:
    """Tokens whose law does not change along the sequence: S_ij depends on j - i only; P sequences.

    pairs: E[x_i x_(i+d)^T]. On a ring (L, V, V), d = 0 .. L - 1 modulo L; open (2 L - 1, V, V), d = 1 - L .. L - 1.
    """

    sequences: Float[Array, ""]
    pairs: Float[Array, "D V V"]

    def scaled(self, sequences: Float[Array, ""] | float) -> Self:
        """The same statistics at another P."""
        return replace(self, sequences=sequences)

    def contract(self, left: Float[Array, "... L L"], right: Float[Array, "... L L"]) -> Float[Array, "... V V"]:
        """Q(B) for B = left^T right: the sums of B along its diagonals are all that counts."""
        length = left.shape[-1]
        gram = jnp.einsum("...ai,...aj->...ij", left, right)
        lags = np.arange(length) - np.arange(length)[:, None]
        # index of the lag j - i, modulo L on a ring
        index = lags % length if len(self.pairs) == length else lags + length - 1
        flat = gram.reshape(*gram.shape[:-2], -1)
        by_lag = jnp.zeros((*flat.shape[:-1], len(self.pairs))).at[..., index.ravel()].add(flat)
        return self.sequences * jnp.einsum("...d,duv->...uv", by_lag, self.pairs)

    def explained(
        self, attention: Float[Array, "H L L"], target: Float[Array, "L L"], ridge: Float[Array, ""]
    ) -> Float[Array, ""]:
        """tr N^T (F + ridge)^-1 N; rows that are not scored are zero in attention and target."""
        return _explained(self.contract, attention, target, ridge)


def _explained(
    contract: Callable[[Array, Array], Array],
    attention: Float[Array, "H L L"],
    target: Float[Array, "L L"],
    ridge: Float[Array, ""],
) -> Float[Array, ""]:
    """tr N^T (F + ridge)^-1 N from V x V blocks."""
    square, overlap = _blocks(contract, attention, target, ridge)
    half = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(square), overlap, lower=True)
    return jnp.sum(half**2)


def _blocks(
    contract: Callable[[Array, Array], Array],
    attention: Float[Array, "H L L"],
    target: Float[Array, "L L"],
    ridge: Float[Array, ""],
) -> tuple[Float[Array, "HV HV"], Float[Array, "HV V"]]:
    """F + ridge and N over heads and tokens; `contract` is Q(left^T right)."""
    pairs = contract(attention[:, None], attention[None])
    heads, vocab = len(attention), pairs.shape[-1]
    square = pairs.transpose(0, 2, 1, 3).reshape(heads * vocab, heads * vocab)
    overlap = contract(attention, jnp.broadcast_to(target, attention.shape)).reshape(heads * vocab, vocab)
    return square + ridge * jnp.eye(heads * vocab), overlap
