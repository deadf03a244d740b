"""The gradient of E(G, W) for many cells at once, from moments packed for the step loop of training and sampling.

It is the gradient of model.energy.energy (a test holds them together), arranged for the CPU:

- Of V token indicators one is redundant: x_i = e + D x'_i with e the last unit vector, D = (1, -1^T)^T and x'_i the first
  n = V - 1 indicators. K_ij = <S_ij, M> for symmetric M then takes n (n + 1) / 2 numbers for each pair of positions instead
  of V^2, and the cross moments n^2; the rest depends on one position only.
- The target enters once, in the cross moments R_ia = sum_j T_aj S_ij, so the loop needs no product with T.
- Logits are held transposed, as G^T and A^T (i, a), so that no large array is transposed in the loop.

Cost of a step for one cell: 4 L^3 + 2 L^2 (n (n + 1) + 2 n^2) multiplications and additions, whatever P is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Float, Int, UInt32

from copyhead.experiment.path import Shared
from copyhead.model import layout, moments, targets
from copyhead.model.layout import Layout
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Positional
from copyhead.model.prior import Prior, prior
from copyhead.problem import Attention, Problem, ProblemError

# Moments of one chunk of cells that still stay in the second and third level cache of a CPU core.
CHUNK_BYTES = 2.5e6


class Packed(NamedTuple):
    """Moments of n_cells data sets, n = V - 1, p = n (n + 1) / 2.

    pairs: S'_ij + S'_ij^T over pairs u <= v (the diagonal once). cross: R'_ia. counts: sum of x'_i. cross_counts: counts of
    the targets. sequences: P.
    """

    pairs: Float[Array, "cell p L*L"]
    cross: Float[Array, "cell n*n L*L"]
    counts: Float[Array, "cell n L"]
    cross_counts: Float[Array, "cell n L"]
    sequences: Float[Array, "cell"]


class Transposed(NamedTuple):
    """Weights as the step loop holds them. logits: G^T. output: W."""

    logits: Float[Array, "cell L L"]
    output: Float[Array, "cell V V"]


def pack(data: Empirical, target: Float[np.ndarray, "L L"]) -> Packed:
    """Packs the moments of data sets (leading axis: cell)."""
    tensor = np.asarray(data.tensor)
    cells, length, _, vocab, _ = tensor.shape
    n = vocab - 1
    u, v = np.triu_indices(n)
    reduced = tensor[..., :n, :n].transpose(0, 3, 4, 1, 2)
    counts = tensor[:, :, 0, :n, :].sum(axis=-1).transpose(0, 2, 1)
    pairs = reduced[:, u, v] + reduced[:, v, u]
    pairs[:, u == v] /= 2
    cross = reduced.reshape(-1, length) @ np.asarray(target).T
    arrays = (
        pairs.reshape(cells, -1, length * length),
        cross.reshape(cells, n * n, length * length),
        counts,
        counts @ np.asarray(target).T,
        np.asarray(data.sequences),
    )
    return Packed(*(jnp.asarray(np.ascontiguousarray(array), jnp.float32) for array in arrays))


def chunk_size(length: int, vocab: int) -> int:
    """How many cells to run at a time: a power of two whose moments fit CHUNK_BYTES, from 2 to 32."""
    n = vocab - 1
    bytes_each = 4 * length**2 * (n * (n + 1) // 2 + n * n)
    return int(2 ** np.clip(np.floor(np.log2(CHUNK_BYTES / bytes_each)), 1, 5))


def _token_bases(vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Matrices E_f with S_ij = sum_f feature_f(i, j) E_f + P e e^T, flattened to (feature, V * V).

    The first is for contractions with a symmetric matrix, in the order pairs, counts; the second in the order cross,
    counts of i, counts of the target.
    """
    n = vocab - 1
    u, v = np.triu_indices(n)
    difference, last = np.vstack([np.eye(n), -np.ones((1, n))]), np.eye(vocab)[n]
    both = np.einsum("xu,yv->uvxy", difference, difference)
    one = np.einsum("xu,y->uxy", difference, last)
    symmetric = np.concatenate([(both[u, v] + both[v, u]) / 2, one + one.transpose(0, 2, 1)])
    general = np.concatenate([both.reshape(-1, vocab, vocab), one, one.transpose(0, 2, 1)])
    return symmetric.reshape(-1, vocab**2).astype(np.float32), general.reshape(-1, vocab**2).astype(np.float32)


@dataclass(frozen=True)
class PackedPath:
    """Gradient of E by (G, W) of the positional network through token moments. Fixed when a step loop is compiled."""

    problem: Problem

    def __post_init__(self) -> None:
        self.problem.require_paper("packed moments are")
        if self.problem.head_dimension is not None:
            raise ProblemError(f"head_dimension = {self.problem.head_dimension}: needs network = embedded")

    @property
    def network(self) -> Network:
        return Network()

    @property
    def unroll(self) -> int:
        return 2

    @property
    def cells(self) -> int:
        return chunk_size(self.problem.length, self.problem.vocab)

    @cached_property
    def _numbers(self) -> tuple[Float[np.ndarray, "L L"], Rows, Prior]:
        target = targets.shift(self.problem.length, cyclic=self.problem.cyclic).astype(np.float32)
        return target, rows(target, layout.full(self.problem.length, self.problem.cyclic, jnp.float32)), prior(self.problem)

    def collect(self, data: list[Int[np.ndarray, "P L"]]) -> Empirical:
        """Moments of data sets along a leading axis."""
        return moments.of_each(data, self.problem.vocab)

    def prepare(self, start: Positional, data: Empirical, key: UInt32[np.ndarray, "cell 2"]) -> tuple[Transposed, Packed]:
        """Weights and data as the step loop holds them; `key` is that of mini-batches, which moments have no use for."""
        return Transposed(np.swapaxes(start.logits, -1, -2), start.output), self.pack(data)

    def pack(self, data: Empirical) -> Packed:
        """Moments of data sets (leading axis) as the step loop holds them."""
        return pack(data, self._numbers[0])

    def restore(self, weights: Transposed) -> Positional:
        return Positional(weights.logits.mT, weights.output)

    def slope(self, weights: Transposed, data: Packed, number: UInt32[Array, ""] | None) -> Transposed:
        """grad E by cell; the same at every step."""
        _, sums, numbers = self._numbers
        return gradient(weights, data, sums, numbers, self.problem.attention)

    def energy_and_slope(self, weights: Transposed, data: Packed) -> tuple[Float[Array, "cell"], Transposed]:
        """E without its constant Y2 / (2 kappa), and grad E."""
        _, sums, numbers = self._numbers
        return energy_and_gradient(weights, data, sums, numbers, self.problem.attention)

    def sequences(self, data: Packed) -> Float[Array, "cell"]:
        return data.sequences

    def shared(self, start: Transposed) -> list[Shared | None]:
        """Nothing: a logit is that of one pair of positions."""
        return [None, None]

    @property
    def variances(self) -> Transposed:
        """g of each weight."""
        problem = self.problem
        return Transposed(problem.position_scale**2 * problem.logit_variance, problem.output_variance)

    @property
    def rates(self) -> Transposed:
        """Factors on Adam's learning rate."""
        return Transposed(1.0, 1.0)


class Rows(NamedTuple):
    """What the gradient needs to know of the rows of T and A; plain numbers, fixed when the loop is compiled.

    scored: one for a scored position, else zero. target: sums of the rows of T.
    """

    scored: tuple[float, ...]
    target: tuple[float, ...]


def rows(target: Float[np.ndarray, "L L"], layout: Layout) -> Rows:
    """The row sums of a target."""
    scored = np.asarray(layout.scored)
    return Rows(tuple(scored.tolist()), tuple((scored * np.asarray(target).sum(axis=1)).tolist()))


def gradient(weights: Transposed, data: Packed, rows: Rows, prior: Prior, kind: Attention) -> Transposed:
    """grad E by cell, with the logits part transposed. `prior` must hold plain numbers, not traced ones."""
    return energy_and_gradient(weights, data, rows, prior, kind)[1]


def energy_and_gradient(
    weights: Transposed, data: Packed, rows: Rows, prior: Prior, kind: Attention
) -> tuple[Float[Array, "cell"], Transposed]:
    """E without its constant Y2 / (2 kappa), and its gradient."""
    seen = attend(weights.logits, rows, kind)
    # W @ W.mT, not an einsum: XLA has a faster kernel for it.
    by_attention = fields(seen, weights.output @ weights.output.mT, weights.output, data, rows, prior, kind)
    by_logits = pull_back(by_attention, seen, rows, kind)
    square, overlap = token_blocks(seen, data, rows, prior, kind)
    by_prior = prior_gradient(weights.logits, prior)
    by_output = square @ weights.output - overlap + weights.output / prior.output_variance
    # both priors are quadratic: half the inner product of a weight with its slope
    of_output = weights.output * (by_output - overlap)
    energy = (jnp.sum(of_output, axis=(-2, -1)) + jnp.sum(weights.logits * by_prior, axis=(-2, -1))) / 2
    return energy, Transposed(by_logits + by_prior, by_output)


class Attended(NamedTuple):
    """matrix: A^T. sums: A 1, by row a; of one cell where they are the same for all."""

    matrix: Float[Array, "cell L L"]
    sums: Float[Array, "b L"]


def attend(logits: Float[Array, "cell L L"], rows: Rows, kind: Attention) -> Attended:
    """Attention of transposed logits."""
    scored = np.array(rows.scored, np.float32)
    matrix = _attention(logits, scored, kind)
    return Attended(matrix, jnp.asarray(scored)[None] if kind == "softmax" else matrix.sum(axis=1))


def _alike(rows: Rows, kind: Attention) -> bool:
    """Whether the rows of A and of T have equal sums, as those of softmax attention and of a shift: then two terms are one."""
    return kind == "softmax" and rows.scored == rows.target


def fields(
    seen: Attended,
    second: Float[Array, "cell V V"],
    output: Float[Array, "cell V V"],
    data: Packed,
    rows: Rows,
    prior: Prior,
    kind: Attention,
) -> Float[Array, "cell L L"]:
    """The gradient of the squared error over 2 kappa by A^T, where `second` is W W^T or its mean, `output` W or its mean.

    For softmax without what depends on the row a only, which its normalisation takes out.
    """
    matrix, sums = seen
    cells, length, vocab = len(matrix), matrix.shape[-1], output.shape[-1]
    n = vocab - 1
    p, square = n * (n + 1) // 2, n * n
    symmetric, general = (jnp.asarray(basis) / prior.kappa for basis in _token_bases(vocab))
    target_sums = np.array(rows.target, np.float32)
    # Coefficients of W W^T and of -W in the two bases; then the fields K_ij = <S_ij, W W^T> and -J'_ia = -<R_ia, W>.
    of_pair = second.reshape(cells, -1) @ symmetric.T
    of_cross = output.reshape(cells, -1) @ -general.T
    pair_field = jnp.einsum("bf,bfk->bk", of_pair[:, :p], data.pairs).reshape(cells, length, length)
    cross_field = jnp.einsum("bf,bfk->bk", of_cross[:, :square], data.cross).reshape(cells, length, length)
    pair_line = jnp.einsum("bf,bfi->bi", of_pair[:, p:] / 2, data.counts)
    cross_line = jnp.einsum("bf,bfi->bi", of_cross[:, square : square + n], data.counts)
    if _alike(rows, kind):
        lines = (pair_line + cross_line)[:, :, None]
    else:
        lines = pair_line[:, :, None] * sums[:, None] + cross_line[:, :, None] * target_sums
    by_attention = pair_field @ matrix + (cross_field + lines)
    if kind == "softmax":
        return by_attention
    weight = (data.sequences / prior.kappa)[:, None]  # P / kappa
    of_row = (
        jnp.einsum("bi,bia->ba", pair_line, matrix)
        + weight * second[:, -1, -1:] * sums
        + jnp.einsum("bf,bfa->ba", of_cross[:, square + n :], data.cross_counts)
        - weight * output[:, -1, -1:] * target_sums
    )
    return by_attention + of_row[:, None]


def pull_back(by_attention: Float[Array, "cell L L"], seen: Attended, rows: Rows, kind: Attention) -> Float[Array, "cell L L"]:
    """A gradient by A^T as one by G^T."""
    if kind == "linear":
        return by_attention * np.array(rows.scored, np.float32) / by_attention.shape[-1]
    return seen.matrix * (by_attention - jnp.sum(seen.matrix * by_attention, axis=1, keepdims=True))


def token_blocks(
    seen: Attended, data: Packed, rows: Rows, prior: Prior, kind: Attention
) -> tuple[Float[Array, "cell V V"], Float[Array, "cell V V"]]:
    """F / kappa and N / kappa, with F = Q(A^T A) and N = Q(A^T T): features of S contracted with A^T A and with A."""
    matrix, sums = seen
    cells, n = len(matrix), data.counts.shape[1]
    vocab = n + 1
    symmetric, general = (jnp.asarray(basis) / prior.kappa for basis in _token_bases(vocab))
    weight = (data.sequences / prior.kappa)[:, None]
    target_sums = np.array(rows.target, np.float32)
    gram = matrix @ matrix.mT
    if kind == "softmax":  # the rows of A that are not scored are zero, and so are those of the target
        gram_sums, target_overlap = matrix.sum(axis=2), data.cross_counts.sum(axis=2)
    else:
        gram_sums = jnp.einsum("bia,ba->bi", matrix, sums)
        target_overlap = jnp.einsum("bfa,ba->bf", data.cross_counts, sums)
    cross_sums = gram_sums if _alike(rows, kind) else jnp.einsum("bia,a->bi", matrix, target_sums)

    def contract(features: Float[Array, "cell f L*L"], with_: Float[Array, "cell L L"]) -> Float[Array, "cell f"]:
        return (features @ with_.reshape(cells, -1, 1))[..., 0]

    corner = jnp.zeros(vocab**2).at[-1].set(1.0)
    square_part = jnp.concatenate([contract(data.pairs, gram), jnp.einsum("bfi,bi->bf", data.counts, gram_sums)], 1)
    overlap_part = jnp.concatenate(
        [contract(data.cross, matrix), jnp.einsum("bfi,bi->bf", data.counts, cross_sums), target_overlap], 1
    )
    square_blocks = square_part @ symmetric + weight * jnp.sum(sums**2, axis=1, keepdims=True) * corner
    overlap_blocks = overlap_part @ general + weight * jnp.sum(sums * target_sums, axis=1, keepdims=True) * corner
    return square_blocks.reshape(cells, vocab, vocab), overlap_blocks.reshape(cells, vocab, vocab)


def _attention(logits: Float[Array, "cell L L"], scored: Float[np.ndarray, "L"], kind: Attention) -> Float[Array, "cell L L"]:
    """A^T with the rows that are not scored set to zero."""
    length = logits.shape[-1]
    if kind == "linear":
        return logits / length * scored
    exponential = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    # A division by a materialised sum: XLA would otherwise compute A again wherever it is used.
    total = optimization_barrier(jnp.broadcast_to(exponential.sum(axis=1, keepdims=True) / scored, exponential.shape))
    return exponential / total


def sandwich(matrix: Float[Array, "... L L"], prior: Prior, power: float) -> Float[Array, "... L L"]:
    """K^power X K^power for K = tau_p I + c 1 1^T: a function of K is known by its values on zero-sum vectors and on 1."""
    bulk = float(prior.position_scale) ** power
    if prior.token_coupling == 0:
        return bulk**2 * matrix
    extra = (float(prior.position_scale + prior.token_coupling * prior.length) ** power - bulk) / float(prior.length)
    rows, columns = matrix.sum(axis=-1, keepdims=True), matrix.sum(axis=-2, keepdims=True)
    return bulk**2 * matrix + bulk * extra * (rows + columns) + extra**2 * rows.sum(axis=-2, keepdims=True)


def prior_gradient(logits: Float[Array, "... L L"], prior: Prior) -> Float[Array, "... L L"]:
    """K^-1 G K^-1 / g_W, transposed like the logits (K is symmetric)."""
    return sandwich(logits, prior, -1.0) / prior.logit_variance


def prior_energy(logits: Float[Array, "... L L"], prior: Prior) -> Float[Array, "..."]:
    """Half the inner product of the logits with that gradient: the prior is quadratic."""
    return jnp.sum(logits * prior_gradient(logits, prior), axis=(-2, -1)) / 2
