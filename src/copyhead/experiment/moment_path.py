"""The gradient of E(G, W) of H positional heads with a mask and any target, for many cells at once, from token moments.

It is the gradient of model.energy.energy (a test holds them together), arranged for the CPU like that of packed.py, which is
faster for the paper's task and knows no other:

- x_i = B^T (x'_i; 1), with x'_i the first n = V - 1 token indicators and the last rows of B (V x V) e, the last unit vector. So
  <S_ij, M> for any M takes n^2 numbers for each pair of positions, two lines and a constant, with coefficients B M B^T.
- The target enters once, in the cross moments R_ia = sum_j T_aj S_ij.
- Logits are held transposed, as G_h^T and A_h^T (i, a): the heads then are one matrix (H L, L) without moving anything. With
  K (H L, H L) of the blocks K_hk,ij = <S_ij, W_h W_k^T> and J^T_h,ia = <R_ia, W_h>, the squared error has the gradient
  2 (K A^T - J^T) by A^T and, by W_h, 2 (sum_k F_hk W_k - N_h), where S and R contracted with A_h^T A_k and A_h^T
  are F_hk and N_h.

Cost of a step for one cell: 4 H^2 L^3 + 4 H (H + 1) n^2 L^2 multiplications and additions, whatever P is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier
from jaxtyping import Array, Bool, Float, Int, UInt32

from copyhead.experiment.packed import CHUNK_BYTES, prior_gradient
from copyhead.experiment.path import Shared
from copyhead.model import moments, targets
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Positional
from copyhead.model.prior import Prior, prior
from copyhead.problem import Problem, ProblemError


class Reduced(NamedTuple):
    """Moments of data sets in the first n = V - 1 token indicators x'.

    pairs: S'_ij. cross: R'_ia = sum_j T_aj S'_ij. counts: sum of x'_i. cross_counts: of sum_j T_aj x'_j. sequences: P.
    """

    pairs: Float[Array, "cell n*n L*L"]
    cross: Float[Array, "cell n*n L*L"]
    counts: Float[Array, "cell n L"]
    cross_counts: Float[Array, "cell n L"]
    sequences: Float[Array, "cell"]


class Heads(NamedTuple):
    """Weights as the step loop holds them. logits: G_h^T, zero where they are masked. output: W_h."""

    logits: Float[Array, "cell H L L"]
    output: Float[Array, "cell H V V"]


def reduce(data: Empirical, target: Float[np.ndarray, "L L"]) -> Reduced:
    """Moments of data sets (leading axis: cell) as the step loop holds them, of the same precision."""
    tensor = np.asarray(data.tensor)
    cells, length, _, vocab, _ = tensor.shape
    n, kind = vocab - 1, tensor.dtype
    pairs = np.ascontiguousarray(tensor[..., :n, :n].transpose(0, 3, 4, 1, 2))
    counts = np.ascontiguousarray(tensor[:, :, 0, :n, :].sum(axis=-1).transpose(0, 2, 1))
    by_target = np.asarray(target.T, kind)
    flat = cells, n * n, length * length
    arrays = (
        pairs.reshape(flat),
        (pairs @ by_target).reshape(flat),
        counts,
        counts @ by_target,
        np.asarray(data.sequences, kind),
    )
    return Reduced(*map(jnp.asarray, arrays))


def chunk_size(length: int, vocab: int, heads: int) -> int:
    """How many cells to run at a time: a power of two whose moments and fields fit CHUNK_BYTES, from 1 to 32."""
    bytes_each = 4 * length**2 * (2 * (vocab - 1) ** 2 + 2 * heads**2)
    return int(2 ** np.clip(np.floor(np.log2(CHUNK_BYTES / bytes_each)), 0, 5))


@dataclass(frozen=True)
class MomentPath:
    """Gradient of E by (G_h, W_h) of positional heads through token moments. Fixed when a step loop is compiled.

    Weights have an axis of heads, also for one head.

    Raises:
        ProblemError: for attention that reads tokens, or separate query and key matrices.
    """

    problem: Problem

    def __post_init__(self) -> None:
        if self.problem.head_dimension is not None:
            raise ProblemError(f"head_dimension = {self.problem.head_dimension}: needs network = embedded")
        if self.problem.content:
            raise ProblemError("content = True: needs network = kernel or embedded")

    @property
    def network(self) -> Network:
        return Network()

    @property
    def unroll(self) -> int:
        return 1

    @property
    def cells(self) -> int:
        return chunk_size(self.problem.length, self.problem.vocab, self.problem.heads)

    @cached_property
    def _numbers(self) -> tuple[Float[np.ndarray, "L L"], Bool[np.ndarray, "L L"], Prior]:
        """T, the transposed mask, and the prior in plain numbers."""
        return targets.operator(self.problem), targets.allowed(self.problem).T, prior(self.problem)

    def collect(self, data: list[Int[np.ndarray, "P L"]]) -> Empirical:
        """Moments of data sets along a leading axis."""
        return moments.of_each(data, self.problem.vocab)

    def prepare(self, start: Positional, data: Empirical, key: UInt32[np.ndarray, "cell 2"]) -> tuple[Heads, Reduced]:
        """Weights and data as the step loop holds them; `key` is that of mini-batches, which moments have no use for."""
        target, inside, _ = self._numbers
        shape = len(start.logits), self.problem.heads
        logits, output = (np.reshape(part, (*shape, *part.shape[-2:])) for part in start)
        return Heads(np.where(inside, np.swapaxes(logits, -1, -2), 0), output), reduce(data, target)

    def restore(self, weights: Heads) -> Positional:
        return Positional(weights.logits.mT, weights.output)

    def slope(self, weights: Heads, data: Reduced, number: UInt32[Array, ""] | None) -> Heads:
        """grad E by cell; the same at every step."""
        _, inside, numbers = self._numbers
        seen = self._attend(weights.logits)
        by_attention = self._fields(seen, weights.output, data)
        if self.problem.attention == "linear":
            by_logits = by_attention * (inside * self._scored) / self.problem.length
        else:
            by_logits = seen * (by_attention - jnp.sum(seen * by_attention, axis=-2, keepdims=True))
        by_prior = inside * prior_gradient(weights.logits, numbers)
        by_output = self._by_output(seen, weights.output, data) + weights.output / numbers.output_variance
        return Heads(by_logits + by_prior, by_output)

    def sequences(self, data: Reduced) -> Float[Array, "cell"]:
        return data.sequences

    def shared(self, start: Heads) -> list[Shared | None]:
        """Nothing: a logit is that of one pair of positions."""
        return [None, None]

    @property
    def variances(self) -> Heads:
        """g of each weight."""
        problem = self.problem
        return Heads(problem.position_scale**2 * problem.logit_variance, problem.output_variance)

    @property
    def rates(self) -> Heads:
        """Factors on Adam's learning rate."""
        return Heads(1.0, 1.0)

    @cached_property
    def _scored(self) -> Float[np.ndarray, "L"]:
        return targets.scored(self._numbers[0]).astype(np.float32)

    @cached_property
    def _basis(self) -> Float[np.ndarray, "V V"]:
        """B of the module's docstring: rows e_u - e for u < n, and e."""
        basis = np.eye(self.problem.vocab)
        basis[:-1, -1] = -1
        return basis

    def _attend(self, logits: Float[Array, "cell H L L"]) -> Float[Array, "cell H L L"]:
        """A_h^T, zero where it is masked or its row is not scored."""
        _, inside, _ = self._numbers
        if self.problem.attention == "linear":
            return logits * (inside * self._scored) / self.problem.length
        open_ = jnp.where(inside, logits, -jnp.inf) if self.problem.causal else logits
        exponential = jnp.exp(open_ - jnp.max(open_, axis=-2, keepdims=True))
        total = exponential.sum(axis=-2, keepdims=True)
        if not self._scored.all():
            total = total / self._scored
        # A division by a materialised sum: XLA would otherwise compute A again wherever it is used.
        return exponential / optimization_barrier(jnp.broadcast_to(total, exponential.shape))

    def _fields(
        self, seen: Float[Array, "cell H L L"], output: Float[Array, "cell H V V"], data: Reduced
    ) -> Float[Array, "cell H L L"]:
        """The gradient of the squared error over 2 kappa by A_h^T: (sum_k K_hk A_k^T - J_h^T) / kappa."""
        cells, heads, length, _ = seen.shape
        n, sums = output.shape[-1] - 1, self._target_sums(seen)
        basis = jnp.asarray(self._basis, output.dtype)
        turned = basis @ output / self.problem.kappa**0.5
        of_pair = jnp.einsum("bhuw,bkvw->bhkuv", turned, turned)
        of_cross = basis @ output @ basis.T / self.problem.kappa
        many = data.sequences[:, None, None, None]
        pair = (of_pair[..., :n, :n].reshape(cells, -1, n * n) @ data.pairs).reshape(cells, heads, heads, length, length)
        key = jnp.einsum("bhku,bui->bhki", of_pair[..., :n, n], data.counts) + many * of_pair[..., n, n, None]
        query = jnp.einsum("bhku,bui->bhki", of_pair[..., n, :n], data.counts)
        block = pair + key[..., :, None] + query[..., None, :]
        block = block.swapaxes(2, 3).reshape(cells, heads * length, heads * length)
        cross = (of_cross[..., :n, :n].reshape(cells, heads, n * n) @ data.cross).reshape(seen.shape)
        key = jnp.einsum("bhu,bui->bhi", of_cross[..., :n, n], data.counts) + many[..., 0] * of_cross[..., n, n, None]
        query = jnp.einsum("bhu,bua->bha", of_cross[..., n, :n], data.cross_counts)
        wanted = cross + key[..., :, None] * sums + query[..., None, :]
        return (block @ seen.reshape(cells, heads * length, length)).reshape(seen.shape) - wanted

    def _by_output(
        self, seen: Float[Array, "cell H L L"], output: Float[Array, "cell H V V"], data: Reduced
    ) -> Float[Array, "cell H V V"]:
        """The gradient of the squared error over 2 kappa by W_h: (sum_k F_hk W_k - N_h) / kappa."""
        cells, heads, length, _ = seen.shape
        vocab, sums = output.shape[-1], self._target_sums(seen)
        n = vocab - 1
        basis = jnp.asarray(self._basis, output.dtype)
        many = data.sequences[:, None, None]
        flat = seen.reshape(cells, heads * length, length)
        gram = (flat @ flat.mT).reshape(cells, heads, length, heads, length).swapaxes(2, 3)
        by_key, by_query = gram.sum(axis=-1), gram.sum(axis=-2)
        square = _bordered(
            (gram.reshape(cells, -1, length**2) @ data.pairs.mT).reshape(cells, heads, heads, n, n),
            jnp.einsum("bhki,bui->bhku", by_key, data.counts),
            jnp.einsum("bhkj,buj->bhku", by_query, data.counts),
            many * by_key.sum(axis=-1),
        )
        by_row = seen.sum(axis=-2)
        overlap = _bordered(
            (seen.reshape(cells, heads, -1) @ data.cross.mT).reshape(cells, heads, n, n),
            jnp.einsum("bhi,bui->bhu", seen @ sums, data.counts),
            jnp.einsum("bha,bua->bhu", by_row, data.cross_counts),
            many[..., 0] * (by_row @ sums),
        )
        inner = jnp.einsum("bhkuv,bkvw->bhuw", square, basis @ output) - overlap @ basis
        return basis.T @ inner / self.problem.kappa

    def _target_sums(self, seen: Float[Array, "..."]) -> Float[Array, "L"]:
        """Sums of the rows of T."""
        return jnp.asarray(self._numbers[0].sum(axis=1), seen.dtype)


def _bordered(
    inside: Float[Array, "... n n"], right: Float[Array, "... n"], below: Float[Array, "... n"], corner: Float[Array, "..."]
) -> Float[Array, "... V V"]:
    """A matrix with one more column, one more row, and their corner."""
    upper = jnp.concatenate([inside, right[..., None]], axis=-1)
    lower = jnp.concatenate([below, corner[..., None]], axis=-1)
    return jnp.concatenate([upper, lower[..., None, :]], axis=-2)
