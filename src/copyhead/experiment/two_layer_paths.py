"""The energy of two-layer networks on a data set, as the step loop evaluates it: through sequences, or packed for recall.

Packed (minimal network, recall): tokens of a context are distinct, so each token has at most one place in it. Taking the
entries of a row of M in the order of the context and summing attention by tokens are then permutations, each other's
transpose, and both the energy and its gradient need gathers only, no scatter; all else are products of L x L or V x V
matrices with one column for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copyhead.induction import Induction
from copyhead.model import recall, repeated, two_layer
from copyhead.model.tokens import stream
from copyhead.model.two_layer import Minimal, TwoLayer, Weights, causal, losses


class Sequences(NamedTuple):
    """tokens; target of each scored position; share: 1 for a sequence, 0 for filling, P / batch in a mini-batch."""

    tokens: Int[np.ndarray, "*n P L"]
    target: Int[np.ndarray, "*n P q"]
    share: Float[np.ndarray, "*n P"]


class Packed(NamedTuple):
    """order: tokens, by position. place: of each token in the context, L - 1 if absent. last, target: one-hot."""

    order: Int[np.ndarray, "*n L P"]
    place: Int[np.ndarray, "*n V P"]
    last: Float[np.ndarray, "*n V P"]
    target: Float[np.ndarray, "*n V P"]
    share: Float[np.ndarray, "*n P"]


def drawn(problem: Induction, source: np.random.SeedSequence, sequences: int) -> Sequences:
    """Sequences of the task with their targets, one after the other.

    Raises:
        ProblemError: if the task has no sequences of this length.
    """
    if problem.task == "recall":
        found = recall.draw(source, sequences, problem.length, problem.vocab)
        tokens, target = found.tokens, found.target[:, None]
    else:
        tokens = repeated.draw(source, sequences, problem.length, problem.vocab).tokens
        target = tokens[:, 1:]
    return Sequences(tokens, target, np.ones(sequences, np.float32))


def training_set(problem: Induction, sequences: int, seed: int) -> Sequences:
    """Nested data sets: that of P = 300 is the prefix of that of P = 400 at the same seed."""
    return drawn(problem, stream(seed, "train"), sequences)


def filled(data: Sequences, count: int) -> Sequences:
    """`count` sequences, the added ones of share zero."""
    more = count - len(data.share)
    tokens, target = (np.concatenate([part, np.repeat(part[:1], more, axis=0)]) for part in data[:2])
    return Sequences(tokens, target, np.pad(data.share, (0, more)))


@jax.custom_vjp
def in_order(rows: Float[Array, "V P"], data: Packed) -> Float[Array, "L P"]:
    """Entry (k, p) is that of the token at position k."""
    return jnp.take_along_axis(rows, data.order, axis=0)


@jax.custom_vjp
def by_token(attention: Float[Array, "L P"], data: Packed) -> Float[Array, "V P"]:
    """Sum of the entries of the positions that have the token; the transpose of `in_order`."""
    context = attention.at[-1].set(0.0)
    return jnp.take_along_axis(context, data.place, axis=0) + data.last * attention[-1]


in_order.defvjp(lambda rows, data: (in_order(rows, data), data), lambda data, slope: (by_token(slope, data), None))
by_token.defvjp(lambda rows, data: (by_token(rows, data), data), lambda data, slope: (in_order(slope, data), None))


@dataclass(frozen=True)
class TwoLayerPath:
    """How E is evaluated for one network and task; hashable, because a step loop is compiled for it.

    batch: sequences of a mini-batch, drawn with replacement; None: all.
    """

    problem: Induction
    network: TwoLayer
    batch: int | None = None

    @property
    def packed(self) -> bool:
        """Whether the packed form is there and used."""
        return self.network.kind == "minimal" and self.problem.task == "recall" and self.batch is None

    def collect(self, data: list[Sequences]) -> Any:
        """Data sets along a leading axis, filled up to one size."""
        sizes = [len(one.share) for one in data]
        # Few sizes, so that few loops are compiled: three leading bits of P, rounded up.
        grain = 1 << max(0, max(sizes).bit_length() - 4)
        size = -(-max(sizes) // grain) * grain
        whole = [filled(one, size) for one in data]
        parts = [self._pack(one) for one in whole] if self.packed else whole
        return jax.tree.map(lambda *leaves: np.stack(leaves), *parts)

    def _pack(self, data: Sequences) -> Packed:
        length, vocab = self.problem.length, self.problem.vocab
        place = np.full((len(data.share), vocab), length - 1, np.int32)
        np.put_along_axis(place, data.tokens[:, :-1], np.arange(length - 1, dtype=np.int32)[None], axis=1)
        hot = np.eye(vocab, dtype=np.float32)
        return Packed(
            np.ascontiguousarray(data.tokens.T),
            np.ascontiguousarray(place.T),
            np.ascontiguousarray(hot[data.tokens[:, -1]].T),
            np.ascontiguousarray(hot[data.target[:, 0]].T),
            data.share,
        )

    def energy(self, weights: Weights, data: Any) -> Float[Array, ""]:
        """E of one network on its data set."""
        factor = two_layer.weight_of_loss(self.problem, self.network)
        if self.packed:
            assert isinstance(weights, Minimal)
            found = self._losses(weights, data)
        else:
            output = two_layer.forward(weights, data.tokens, self.problem).output
            found = jnp.sum(losses(output, data.target, self.network.loss), axis=1)
        return factor * jnp.sum(data.share * found) + two_layer.prior_energy(weights, self.network, self.problem)

    def _losses(self, weights: Minimal, data: Packed) -> Float[Array, "P"]:
        length = self.problem.length
        first = causal(weights.first, np.arange(length))
        logits = first @ in_order(weights.match.T @ data.last, data) + weights.second[:, None]
        weight = jnp.exp(logits - jax.lax.stop_gradient(jnp.max(logits, axis=0)))
        output = weights.output.T @ by_token(weight / jnp.sum(weight, axis=0), data)
        if self.network.loss == "squared":
            return jnp.sum((output - data.target) ** 2, axis=0)
        return jax.nn.logsumexp(output, axis=0) - jnp.sum(output * data.target, axis=0)

    def chosen(self, data: Any, key: Array) -> Any:
        """The mini-batch of one cell at one step."""
        if self.batch is None:
            return data
        count = jnp.sum(data.share)
        index = jnp.floor(jax.random.uniform(key, (self.batch,)) * count).astype(jnp.int32)
        return Sequences(data.tokens[index], data.target[index], jnp.full(self.batch, count / self.batch))

    def curvature(self, sequences: Any) -> Any:
        """1/g + P scored / (V kappa): a bound on the order of the curvature of E, by the stiffest prior and by W."""
        narrow = min(two_layer.variances(self.network, self.problem))
        return 1 / narrow + sequences * self.problem.scored / (self.problem.vocab * self.problem.kappa)
