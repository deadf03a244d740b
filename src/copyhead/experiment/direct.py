"""The gradient of E through sequences of tokens, for networks whose attention reads them, and for mini-batches.

With one-hot tokens softmax factorises: exp(pp[a,b] + tp[u,b]) exp(pt[a,v] + tt[u,v]) for own token u = x_a and v = x_b. So the
exponentials are taken in two small tables (u, a, b) and (v, u, a) and not for every sequence, and what the attention of all
sequences gives to each token v is a matrix product, (V L, L) times (L, P) with the product of the two tables, of which the rows
with u = x_a are used. The gradient by that table is a matrix product, too, and gives the gradients by all blocks. Finite width
comes on top as a map from weights to the blocks (model.network.circuits), whatever P is.

Cost for one cell: 2 L^2 V^2 P operations for each of the two products (forward, backward), and of order L V^2 P besides.
Sequences are taken a chunk at a time; memory and result do not depend on P and on the chunk beyond rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from copyhead.experiment.path import Shared
from copyhead.model import targets
from copyhead.model.network import Circuits, Network, Positional, Split, Weights, circuits, prior_energy, scales
from copyhead.problem import Attention, Problem, ProblemError

# Working memory of one chunk of sequences for one cell, in float32 numbers: about the fastest.
CHUNK_NUMBERS = 3e5
# Cells at a time: the rest of a step (weights, optimiser) is then shared by as many.
CELLS = 4
# A token that no one-hot vector has: it fills up the data sets of a smaller P.
NO_TOKEN = -1


class Sequences(NamedTuple):
    """Data sets of P sequences. tokens: filled up with NO_TOKEN. counts: P."""

    tokens: Int[np.ndarray, "cell Pmax L"]
    counts: Int[np.ndarray, "cell"]


def sequences_at_a_time(length: int, vocab: int) -> int:
    """Chunk of sequences whose tables fit CHUNK_NUMBERS, at least 16."""
    return max(16, int(CHUNK_NUMBERS / (length * vocab**2)))


def equal_parts(count: int, most: int) -> int:
    """The size of chunks none of which is nearly empty, about `most`; a multiple of 16, the numbers in a vector register."""
    return 16 * -(-count // (16 * -(-count // most)))


def filled_to(count: int) -> int:
    """The next of few sizes, a quarter apart: data sets are cut to it, and a step loop is compiled for each."""
    steps = max(0, math.ceil(math.log(count / 16) / math.log(1.25) - 1e-9))
    return 16 * math.ceil(1.25**steps - 1e-9)


def _sum(terms: Iterable[Array]) -> Array:
    """A sum over tokens written out: XLA is slow on reductions of an axis that is not the last."""
    return reduce(add, terms)


def squared_error_gradient(
    net: Circuits,
    tokens: Int[Array, "B L"],
    target: Float[np.ndarray, "L L"],
    kind: Attention,
) -> tuple[Float[Array, ""], Circuits]:
    """sum_m |T x^m - f(x^m)|^2 over the scored rows of T, and its gradient by the circuits.

    A sequence of NO_TOKEN adds nothing. T copies: a row has one entry, 1, or none.
    """
    return _gradient(net, tokens.T.reshape(-1), tokens.T[target.argmax(axis=1)].reshape(-1), target.any(axis=1), kind)


def _gradient(
    net: Circuits, tokens: Int[Array, "n"], wanted: Int[Array, "n"], scored: Bool[np.ndarray, "L"], kind: Attention
) -> tuple[Float[Array, ""], Circuits]:
    """squared_error_gradient from the tokens of position 0, then those of position 1, and so on, and the tokens wanted there.

    Arrays are (key token v, own token u, position a, sequence m), the last two mostly as the one axis n: an index that has to
    be split into two is what XLA's loops are slowest at.
    """
    length, vocab = net.pp.shape[-1], net.output.shape[-1]
    letters = range(vocab)
    # 1 / 1 and 1 / inf: XLA repeats a comparison wherever its result is used, a division it does not
    one, other = jnp.ones((), net.pp.dtype), jnp.array(jnp.inf, net.pp.dtype)
    own, right_answer = (
        one / jnp.where(part == jnp.arange(vocab, dtype=tokens.dtype)[:, None], one, other) for part in (tokens, wanted)
    )
    keys = own.reshape(vocab, length, -1)
    left, right = net.pp + net.tp[:, None], net.pt.T[:, None] + net.tt.T[:, :, None]
    if kind == "softmax":
        left = jnp.exp(left - jnp.max(left, axis=-1, keepdims=True))
        right = jnp.exp(right - jnp.max(right, axis=0, keepdims=True))
        table = left * right[..., None]
    else:
        table = left + right[..., None]
    seen = (table.reshape(vocab, -1, length) @ keys).reshape(vocab, vocab, -1)
    heads = _sum(seen[:, u] * own[u] for u in letters)  # attention to token v, up to its divisor
    if kind == "softmax":
        # attention this thin is lost: its gradient would not be finite
        thin = 1e6 * jnp.finfo(left.dtype).tiny
        inverse = 1 / jnp.maximum(_sum(heads[v] for v in letters), thin)
    else:
        inverse = jnp.full(own.shape[1:], 1 / length, left.dtype)
    output = (net.output.T @ heads) * inverse
    error = output - right_answer
    if not scored.all():
        error = error * jnp.repeat(scored, len(tokens) // length)
    pull = 2 * error * inverse
    by_output = heads @ pull.T
    if kind == "softmax":
        # W pull - sum_w output_w pull_w, from the normalisation. As one product it stays out of the loop over u that follows.
        normalisation = _sum(output[w] * pull[w] for w in letters)
        by_heads = jnp.pad(net.output, ((0, 0), (0, 1)), constant_values=-1) @ jnp.concatenate([pull, normalisation[None]])
    else:
        by_heads = net.output @ pull
    selected = (own * by_heads[:, None]).reshape(vocab, vocab * length, -1)
    by_table = (selected @ keys.mT).reshape(table.shape)
    if kind == "softmax":
        by_left = _sum(by_table[v] * right[v][..., None] for v in letters) * left
        by_right = jnp.sum(by_table * left, axis=-1) * right
    else:
        by_left, by_right = _sum(by_table[v] for v in letters), jnp.sum(by_table, axis=-1)
    by_pp, by_tt = _sum(by_left[u] for u in letters), by_right.sum(axis=2).T
    by_pt, by_tp = _sum(by_right[:, u] for u in letters).T, by_left.sum(axis=1)
    return jnp.sum(error**2), Circuits(by_pp, by_pt, by_tp, by_tt, by_output)


def in_chunks_of(
    size: int, count: Int[Array, ""] | int, net: Circuits, tokens: Int[Array, "P L"], problem: Problem
) -> tuple[Float[Array, ""], Circuits]:
    """squared_error_gradient of the first `count` sequences, `size` at a time; those after them must be NO_TOKEN."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    filled = jnp.pad(tokens, ((0, -len(tokens) % size), (0, 0)), constant_values=NO_TOKEN)
    if len(filled) == size:  # without a loop the one-hot vectors are the same in every step, and computed once
        return squared_error_gradient(net, filled, target, problem.attention)
    parts = filled.reshape(-1, size, problem.length).mT.astype(jnp.int32)
    own, wanted = (part.reshape(len(parts), -1) for part in (parts, parts[:, target.argmax(axis=1)]))

    def plus(index: Array, total: tuple[Array, Circuits]) -> tuple[Array, Circuits]:
        part = _gradient(net, own[index], wanted[index], target.any(axis=1), problem.attention)
        return jax.tree.map(jnp.add, total, part)

    nothing = (jnp.zeros((), net.pp.dtype), jax.tree.map(jnp.zeros_like, net))
    return jax.lax.fori_loop(0, -(-count // size), plus, nothing)


class Anchored(NamedTuple):
    """What a cell's energy depends on beside its weights. start: centre of the anchored priors. key: of its mini-batches."""

    tokens: Int[Array, "cell Pmax L"]
    counts: Int[Array, "cell"]
    start: Weights
    key: UInt32[Array, "cell 2"]


@dataclass(frozen=True)
class DirectPath:
    """Gradient of E by all weights of a network, full batch or mini-batch. Fixed when a step loop is compiled.

    batch: sequences in a step's gradient, drawn without replacement and scaled by P / batch; None, or P or more: all of them.
    chunk: sequences at a time; results do not depend on it beyond rounding.
    """

    problem: Problem
    network: Network
    batch: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        self.problem.require_paper("gradients through sequences (attention that reads tokens, mini-batches) are")
        for name in ("batch", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ProblemError(f"{name} = {value}: must be an integer >= 1")
        scales(self.network, self.problem)  # refuses what does not go together

    @property
    def unroll(self) -> int:
        return 1

    @property
    def cells(self) -> int:
        return CELLS

    def collect(self, data: list[Int[np.ndarray, "P L"]]) -> Sequences:
        """Data sets of different P, filled up to the largest."""
        kind = np.int8 if self.problem.vocab <= 128 else np.int32
        filled = np.full((len(data), max(map(len, data)), self.problem.length), NO_TOKEN, kind)
        for row, part in zip(filled, data, strict=True):
            row[: len(part)] = part
        return Sequences(filled, np.array([len(part) for part in data], np.int32))

    def prepare(self, start: Weights, data: Sequences, key: UInt32[np.ndarray, "cell 2"]) -> tuple[Weights, Anchored]:
        tokens = data.tokens[:, : filled_to(int(np.max(data.counts)))]
        return start, Anchored(jnp.asarray(tokens), jnp.asarray(data.counts), start, jnp.asarray(key))

    def restore(self, weights: Weights) -> Weights:
        return weights

    def slope(self, weights: Weights, data: Anchored, number: UInt32[Array, ""] | None) -> Weights:
        """grad E by cell; with a batch that of step `number`, without bias. None: of the full batch."""
        width = data.tokens.shape[1]
        batch = width if self.batch is None or number is None else min(self.batch, width)
        size = self.chunk or equal_parts(batch, sequences_at_a_time(self.problem.length, self.problem.vocab))
        largest = jnp.minimum(jnp.max(data.counts), batch)

        def one(cell: Weights, tokens: Array, count: Array, start: Weights, key: Array) -> Weights:
            factor: Any = 1.0
            if batch < width:
                tokens, factor = self._drawn(tokens, count, key, number, batch)
            net, pull = jax.vjp(lambda given: circuits(given, self.problem), cell)
            _, total = in_chunks_of(size, largest, net, tokens, self.problem)
            weight = factor / (2 * self.problem.kappa)
            (by_weights,) = pull(jax.tree.map(lambda part: weight * part, total))
            by_prior = jax.grad(prior_energy)(cell, start, scales(self.network, self.problem))
            return self._trained(jax.tree.map(jnp.add, by_weights, by_prior))

        return jax.vmap(one)(weights, data.tokens, data.counts, data.start, data.key)

    def _drawn(self, tokens: Array, count: Array, key: Array, number: Any, batch: int) -> tuple[Array, Array]:
        """The sequences of a step, and the factor P / batch; all of them and 1 where there are no more than `batch`."""
        mixed = jax.random.fold_in(jax.random.wrap_key_data(key), number)
        rank = jnp.where(jnp.arange(len(tokens)) < count, jax.random.uniform(mixed, (len(tokens),)), -1.0)
        _, chosen = jax.lax.top_k(rank, batch)
        whole = count <= batch
        picked = tokens[jnp.where(whole, jnp.arange(batch), chosen)]
        return picked, jnp.where(whole, 1.0, count / batch)

    def _trained(self, slope: Weights) -> Weights:
        """Nothing along the weights that are not trained."""
        parts = (0.0 * by if g is None else by for by, g in zip(slope, self.variances, strict=True))
        return type(slope)(*parts)  # type: ignore[call-arg]

    def sequences(self, data: Anchored) -> Int[Array, "cell"]:
        return data.counts

    def shared(self, start: Weights) -> list[Shared | None]:
        """A row of pp, or of tp, has L keys; a token is a key at L / V positions, +- (L / V)^(1/2), and as many queries."""
        problem, cells = self.problem, len(start[0])
        length, vocab = problem.length, problem.vocab
        position, token = problem.position_scale, problem.token_scale
        tokens, mixed, query = (1 / vocab + 1 / length) / vocab, 1 / (length * vocab), 1 / length**2
        query = query if problem.attention == "linear" else 0.0  # softmax: a position is the target of one query only
        if isinstance(start, Positional):
            return [None, None]
        if isinstance(start, Circuits):
            uniform = jnp.full((cells, length, 1), length**-0.5)
            every = jnp.broadcast_to(jnp.eye(vocab), (cells, vocab, vocab))
            return [
                Shared(uniform, 1 / length**2), Shared(every, mixed + 1 / length**2), Shared(uniform, mixed, query),
                Shared(every, tokens), None,
            ]  # fmt: skip
        leverage = (position / length + token / vocab) ** 2 + token**2 * tokens
        if isinstance(start, Split):
            # a factor moves U by its change times the other, whose square is d_h g / chi per row, and some times that with data
            square = 4 * (start.query.shape[-1] * problem.logit_variance / problem.chi) ** 0.5
            return [Shared(None, 0.0, leverage * square) if name in ("query", "key") else None for name in start._fields]
        # in the embedded network all keys share one matrix: the mean of the positions, and the tokens
        mean = position**0.5 * start.positions.mean(axis=-2, keepdims=True)
        frame, _ = jnp.linalg.qr(jnp.concatenate([mean, token**0.5 * start.tokens], axis=-2).mT)
        known = Shared(frame, leverage, position * token * query)
        return [known if name == "query_key" else None for name in start._fields]

    @property
    def variances(self) -> Any:
        """g of each weight; None if it is not trained."""
        how = scales(self.network, self.problem)
        return type(how)(*(scale.variance for scale in how))

    @property
    def rates(self) -> Any:
        """Factors on Adam's learning rate."""
        how = scales(self.network, self.problem)
        return type(how)(*(0.0 if scale.variance is None else scale.rate for scale in how))
