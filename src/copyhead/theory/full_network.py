"""Minima of S over all blocks of the query-key circuit, for attention that reads tokens: one data set, no symmetric ansatz.

W is at its optimum, (F + kappa/g_O I)^-1 N, with F = sum h h^T and N = sum h y^T over sequences and scored positions, where
h = A x is what a head reads. The counterpart of `full_matrix`, whose attention is the same for all sequences.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int

from copyhead.model import targets
from copyhead.model.attention import attention
from copyhead.model.layout import full
from copyhead.model.network import Circuits, logits
from copyhead.model.prior import Prior, matrix_energy, prior
from copyhead.problem import Attention, Problem
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.descent import descend
from copyhead.theory.order_parameters import project
from copyhead.theory.posterior import TokenBlocks, best_output, data_energy

# Data sets are filled up with sequences of no token to sizes a step of this ratio apart, so that few sizes are compiled.
LADDER = 2**0.5
# Fresh sequences at a time: their logits are held explicitly.
MEASURED_TOGETHER = 512


class NetworkMinimum(NamedTuple):
    """blocks: pp, pt, tp, tt and the best W. gradient: largest entry of |grad S|; converged: see `Descent`."""

    blocks: Circuits
    action: float
    gradient: float
    converged: bool


def _heads(blocks: Circuits, tokens: Int[Array, "P L"], target: Array, kind: Attention) -> tuple[Array, Array, Array]:
    """Attention (P, L, L), h = A x (P, L, V), and what is wanted, T x; h and T x are zero for a sequence of no token."""
    one_hot = jax.nn.one_hot(tokens, blocks.output.shape[-1], dtype=blocks.pp.dtype)
    matrix = attention(logits(blocks, tokens), kind, tokens.shape[1])
    return matrix, matrix @ one_hot, jnp.einsum("ab,pbv->pav", target, one_hot)


def _scored(target: Array) -> Array:
    return (jnp.sum(jnp.abs(target), axis=1) > 0)[:, None]


def _token_blocks(blocks: Circuits, tokens: Array, target: Array, kind: Attention) -> TokenBlocks:
    _, heads, wanted = _heads(blocks, tokens, target, kind)
    heads = heads * _scored(target)
    square, overlap = (jnp.einsum("pau,pav->uv", heads, other)[None] for other in (heads, wanted))
    return TokenBlocks(jnp.sum(wanted**2), square, overlap, jnp.ones(1))


@partial(jax.jit, static_argnames="kind")
def _attention_and_error(blocks: Circuits, tokens: Array, target: Array, kind: Attention) -> tuple[Array, Array]:
    """Attention of each sequence, and its squared error over the scored positions."""
    matrix, heads, wanted = _heads(blocks, tokens, target, kind)
    return matrix, jnp.sum((wanted - heads @ blocks.output) ** 2 * _scored(target), axis=(1, 2))


def _logit_energy(blocks: Circuits, problem: Problem, numbers: Prior) -> Array:
    """Cost of U in units of the embeddings' lengths, U_ij / (tau_i tau_j)^(1/2)."""
    length, vocab = problem.length, problem.vocab
    scale = np.repeat([problem.position_scale**-0.5, problem.token_scale**-0.5], [length, vocab])
    whole = jnp.block([[blocks.pp, blocks.pt], [blocks.tp, blocks.tt]])
    return matrix_energy(scale[:, None] * whole * scale, numbers)


@partial(jax.jit, static_argnames=("problem", "numbers"))
def _value_and_gradient(
    blocks: Circuits, tokens: Array, target: Array, problem: Problem, numbers: Prior
) -> tuple[Array, Circuits]:
    def action(given: Circuits) -> Array:
        token_blocks = _token_blocks(given, tokens, target, problem.attention)
        return _logit_energy(given, problem, numbers) + data_energy(token_blocks, numbers)

    return jax.value_and_grad(action)(blocks)


def symmetric(state: ContentOrderParameters, problem: Problem) -> Circuits:
    """Blocks with the logits c1 + cG T_ab + cI [x_a = x_b] + cS [a = b]; c1 is put into pp."""
    length, vocab = problem.length, problem.vocab
    target = targets.shift(length, cyclic=problem.cyclic)
    pp = float(state.c1) + float(state.cG) * target + float(state.cS) * np.eye(length)
    return Circuits(
        pp, np.zeros((length, vocab)), np.zeros((vocab, length)), float(state.cI) * np.eye(vocab), np.zeros((vocab, vocab))
    )


def minimise_network(
    problem: Problem, tokens: Int[np.ndarray, "P L"], start: Circuits, tolerance: float = 1e-6
) -> NetworkMinimum:
    """Minimises S on a data set from a start (L-BFGS in float64), within the basin that the start lies in."""
    numbers, target = prior(problem), targets.shift(problem.length, cyclic=problem.cyclic)
    size = int(np.ceil(LADDER ** np.ceil(np.log(len(tokens)) / np.log(LADDER) - 1e-9)))
    filled = np.pad(tokens, ((0, size - len(tokens)), (0, 0)), constant_values=-1)
    with jax.enable_x64(True):
        # W follows from the logits, so only these are varied
        flat, unravel = ravel_pytree(jax.tree.map(lambda part: jnp.asarray(part, jnp.float64), start[:-1]))

        def blocks(place: np.ndarray) -> Circuits:
            pp, pt, tp, tt = unravel(jnp.asarray(place))
            return Circuits(pp, pt, tp, tt, jnp.zeros((problem.vocab, problem.vocab)))

        def objective(place: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = _value_and_gradient(blocks(place), filled, target, problem, numbers)
            return value, np.concatenate([np.ravel(part) for part in gradient[:-1]])

        found = descend(objective, np.asarray(flat), tolerance)
        best = blocks(found.place)
        best = best._replace(output=best_output(_token_blocks(best, filled, target, problem.attention), numbers)[0])
    return NetworkMinimum(jax.tree.map(np.asarray, best), found.value, found.gradient, found.converged)


def measure_network(
    blocks: Circuits, problem: Problem, fresh: Int[np.ndarray, "S L"], attended: int | None = None
) -> tuple[ContentOrderParameters, float]:
    """Order parameters of any blocks (cG, cS from pp, cI from tt), with attention and loss averaged over fresh sequences.

    Args:
        attended: how many of the sequences attention is averaged over, by default all.

    Returns:
        They, and the standard error of the loss that comes from the number of fresh sequences.
    """
    length, vocab = problem.length, problem.vocab
    target = targets.shift(length, cyclic=problem.cyclic)
    scored = np.any(target, axis=1)[:, None] * np.ones(length)

    def mean(matrix: np.ndarray, mask: np.ndarray) -> float:
        return float(np.sum(scored * mask * matrix) / np.sum(scored * mask))

    own, equal = np.eye(length), np.eye(vocab)
    other = mean(blocks.pp, (1 - own) * (1 - target))
    different = float(np.sum(blocks.tt * (1 - equal)) / (vocab * (vocab - 1)))
    rows = scored[:, 0] / scored[:, 0].sum()
    most = min(len(fresh), attended or len(fresh))
    with jax.enable_x64(True):
        net = Circuits(*(jnp.asarray(part, jnp.float64) for part in blocks))
        total, errors = np.zeros((length, length)), []
        for first in range(0, len(fresh), MEASURED_TOGETHER):
            matrices, misses = _attention_and_error(net, fresh[first : first + MEASURED_TOGETHER], target, problem.attention)
            total += np.asarray(matrices[: max(0, most - first)].sum(axis=0))
            errors.append(np.asarray(misses) / problem.scored)
        off, excess = project(jnp.asarray(total / most), jnp.asarray(target), full(length, problem.cyclic))
    losses = np.concatenate(errors)
    found = ContentOrderParameters(
        other + float(rows @ blocks.pt.mean(axis=1)) + float(blocks.tp.mean()) + different,
        mean(blocks.pp, target) - other,
        float(np.trace(blocks.tt)) / vocab - different,
        mean(blocks.pp, own) - other,
        length * float(off),
        float(excess),
        float(losses.mean()),
    )
    return found, float(losses.std(ddof=1) / len(fresh) ** 0.5)
