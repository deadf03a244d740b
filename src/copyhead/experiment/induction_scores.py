"""Order parameters of two-layer networks on fresh sequences, with their errors by sampling of sequences.

previous:    attention of layer 1 to the previous position, mean over positions 1 .. L-1 (Elhage et al. 2021)
induction:   attention of layer 2 to the tokens after earlier occurrences of the query's token (Olsson et al. 2022);
             chance: the same for uniform attention
in_context:  recall: loss with the target less the mean loss with another token of the context in its place;
             next-token: loss in the last quarter of scored positions less that in the first one
copying:     sum of eigenvalues over sum of their sizes, of the value-output circuit on zero-sum token vectors; matching: of the
             query-key circuit. From -1 to 1
beta, w:     coefficients of I - 11^T/V in the two circuits; u: of 11^T/V in the second
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.experiment.two_layer_paths import Sequences, TwoLayerPath, drawn
from copyhead.induction import Induction
from copyhead.model import two_layer
from copyhead.model.tokens import stream
from copyhead.model.two_layer import Circuits, TwoLayer, Weights

# A circuit whose eigenvalues are smaller in the mean has neither sign.
SMALLEST_EIGENVALUE = 0.05


class Scores(NamedTuple):
    """Of each cell, see the module; `*_error`: standard error over test sequences."""

    previous: Float[np.ndarray, "*n"]
    previous_error: Float[np.ndarray, "*n"]
    induction: Float[np.ndarray, "*n"]
    induction_error: Float[np.ndarray, "*n"]
    chance: Float[np.ndarray, "*n"]
    in_context: Float[np.ndarray, "*n"]
    in_context_error: Float[np.ndarray, "*n"]
    loss: Float[np.ndarray, "*n"]
    loss_error: Float[np.ndarray, "*n"]
    beta: Float[np.ndarray, "*n"]
    w: Float[np.ndarray, "*n"]
    u: Float[np.ndarray, "*n"]
    matching: Float[np.ndarray, "*n"]
    copying: Float[np.ndarray, "*n"]


def fresh(problem: Induction, sequences: int, seed: int = 0) -> Sequences:
    """Fresh sequences, of which no training set has any part but by chance."""
    return drawn(problem, stream(seed, "fresh"), sequences)


def measure(weights: Weights, test: Sequences, problem: Induction, network: TwoLayer) -> Scores:
    """Scores of every network along the leading axis."""
    seen, circuits = _seen(weights, test, problem, network)
    match, output = (np.asarray(part, float) for part in circuits)
    beta, _ = coefficients(match)
    w, u = coefficients(output)
    values = [np.asarray(part) for part in seen] + [beta, w, u, eigenvalue_score(match), eigenvalue_score(output)]
    return Scores(*values)


def coefficients(circuit: Float[np.ndarray, "*n V V"]) -> tuple[Float[np.ndarray, "*n"], Float[np.ndarray, "*n"]]:
    """((tr M - 1^T M 1 / V) / (V - 1), 1^T M 1 / V): projections on I - 11^T/V and on 11^T/V."""
    uniform = circuit.sum(axis=(-2, -1)) / circuit.shape[-1]
    return (np.trace(circuit, axis1=-2, axis2=-1) - uniform) / (circuit.shape[-1] - 1), uniform


def eigenvalue_score(circuit: Float[np.ndarray, "*n V V"]) -> Float[np.ndarray, "*n"]:
    """sum of eigenvalues / sum of |eigenvalues| on zero-sum vectors; tends to zero for circuits that are next to nothing."""
    vocab = circuit.shape[-1]
    centre = np.eye(vocab) - 1 / vocab
    values = np.linalg.eigvals(centre @ circuit @ centre)
    size = np.maximum(np.abs(values).sum(axis=-1), SMALLEST_EIGENVALUE * (vocab - 1))
    return values.sum(axis=-1).real / size


@partial(jax.jit, static_argnames=("problem", "network"))
def _seen(weights: Any, test: Any, problem: Induction, network: TwoLayer) -> tuple[tuple, Circuits]:
    one = partial(_one, test=test, problem=problem, network=network)
    # One network after the other: attention of all test sequences is held for one only.
    return jax.lax.map(one, weights)


def _one(weights: Weights, test: Any, problem: Induction, network: TwoLayer) -> tuple[tuple, Circuits]:
    length, queries = problem.length, two_layer.scored(problem)
    tokens, target = test.tokens, test.target
    found = two_layer.forward(weights, tokens, problem)
    previous = jnp.mean(jnp.diagonal(found.first, offset=-1, axis1=1, axis2=2), axis=1)
    # Position k follows an earlier occurrence of the token of query a: x_(k-1) = x_a with k - 1 < a.
    same = tokens[:, queries, None] == tokens[:, None, :-1]
    after = jnp.pad(same & (np.arange(length - 1) < queries[:, None]), ((0, 0), (0, 0), (1, 0)))
    there = jnp.any(after, axis=2)
    loss = two_layer.losses(found.output, target, network.loss)
    if problem.task == "recall":
        every = two_layer.losses(
            jnp.broadcast_to(found.output, (len(tokens), length - 1, problem.vocab)), tokens[:, :-1], network.loss
        )
        context = loss[:, 0] - (jnp.sum(every, axis=1) - loss[:, 0]) / (length - 2)
    else:
        quarter = max(1, len(queries) // 4)
        context = jnp.mean(loss[:, -quarter:], axis=1) - jnp.mean(loss[:, :quarter], axis=1)
    ones = jnp.ones(len(tokens))
    matched, chance = (
        ratio(jnp.sum(there * jnp.sum(after * part, axis=2), axis=1), jnp.sum(there, axis=1))
        for part in (found.second, 1 / (1 + queries[:, None]))
    )
    seen = (*ratio(previous, ones), *matched, chance[0], *ratio(context, ones), *ratio(jnp.mean(loss, axis=1), ones))
    return seen, two_layer.circuits(weights)


def ratio(part: Float[Array, "P"], count: Float[Array, "P"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """sum part / sum count over sequences, and its standard error to first order."""
    value = jnp.sum(part) / jnp.sum(count)
    return value, jnp.sqrt(jnp.sum((part - value * count) ** 2)) / jnp.sum(count)


class Maps(NamedTuple):
    """Attention, mean over test sequences. first: layer 1. second: of the last position, by the place j of its match."""

    first: Float[np.ndarray, "n L L"]
    second: Float[np.ndarray, "n J L"]


def attention_maps(weights: Weights, test: Sequences, path: TwoLayerPath) -> Maps:
    """Maps of every network along the leading axis; of the recall task."""
    return Maps(*(np.asarray(part) for part in _maps(weights, test, path.problem)))


@partial(jax.jit, static_argnames="problem")
def _maps(weights: Any, test: Any, problem: Induction) -> tuple[Array, Array]:
    place = jnp.argmax(test.tokens[:, :-1] == test.tokens[:, -1:], axis=1)
    member = jax.nn.one_hot(place, problem.length - 2)

    def one(weights: Weights) -> tuple[Array, Array]:
        found = two_layer.forward(weights, test.tokens, problem)
        return jnp.mean(found.first, axis=0), member.T @ found.second[:, 0] / jnp.sum(member, axis=0)[:, None]

    return jax.lax.map(one, weights)
