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
from jaxtyping import Array, Float, Int
from scipy.optimize import minimize

from copyhead.model import targets
from copyhead.model.attention import attention
from copyhead.model.network import Circuits
from copyhead.model.prior import Prior, matrix_energy, prior
from copyhead.problem import Attention, Problem
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.full_matrix import ACCEPTED
from copyhead.theory.posterior import TokenBlocks, best_output, data_energy

# Data sets are filled up with sequences of no token to sizes a step of this ratio apart, so that few sizes are compiled.
LADDER = 2**0.5
# Fresh sequences at a time: their logits are held explicitly.
MEASURED_TOGETHER = 512


class NetworkMinimum(NamedTuple):
    """blocks: pp, pt, tp, tt and the best W. gradient: largest entry of |grad S|; converged: whether it is below ACCEPTED."""

    blocks: Circuits
    action: float
    gradient: float
    converged: bool


def _heads(blocks: Circuits, one_hot: Float[Array, "P L V"], kind: Attention) -> tuple[Array, Array]:
    """Attention (P, L, L) and h = A x (P, L, V); logits by products with one-hot vectors, whose derivatives need no scatter."""
    by_key = jnp.einsum("av,pbv->pab", blocks.pt, one_hot)
    by_query = jnp.einsum("pau,ub->pab", one_hot, blocks.tp)
    logits = blocks.pp + by_key + by_query + (one_hot @ blocks.tt) @ jnp.swapaxes(one_hot, 1, 2)
    matrix = attention(logits, kind, one_hot.shape[1])
    return matrix, matrix @ one_hot


def _token_blocks(blocks: Circuits, one_hot: Array, target: Array, kind: Attention) -> TokenBlocks:
    scored = (jnp.sum(jnp.abs(target), axis=1) > 0)[:, None]
    _, heads = _heads(blocks, one_hot, kind)
    heads, wanted = heads * scored, jnp.einsum("ab,pbv->pav", target, one_hot)
    square, overlap = (jnp.einsum("pau,pav->uv", heads, other)[None] for other in (heads, wanted))
    return TokenBlocks(jnp.sum(wanted**2), square, overlap, jnp.ones(1))


@partial(jax.jit, static_argnames="kind")
def _attention_and_error(blocks: Circuits, one_hot: Array, target: Array, kind: Attention) -> tuple[Array, Array]:
    """Attention of each sequence, and its squared error over the scored positions."""
    scored = (jnp.sum(jnp.abs(target), axis=1) > 0)[:, None]
    matrix, heads = _heads(blocks, one_hot, kind)
    misses = (jnp.einsum("ab,pbv->pav", target, one_hot) - heads @ blocks.output) ** 2
    return matrix, jnp.sum(misses * scored, axis=(1, 2))


def _logit_energy(blocks: Circuits, problem: Problem, numbers: Prior) -> Array:
    """Cost of U in units of the embeddings' lengths, U_ij / (tau_i tau_j)^(1/2)."""
    length, vocab = problem.length, problem.vocab
    scale = np.repeat([problem.position_scale**-0.5, problem.token_scale**-0.5], [length, vocab])
    whole = jnp.block([[blocks.pp, blocks.pt], [blocks.tp, blocks.tt]])
    return matrix_energy(scale[:, None] * whole * scale, numbers)


@partial(jax.jit, static_argnames=("problem", "numbers"))
def _value_and_gradient(
    blocks: Circuits, one_hot: Array, target: Array, problem: Problem, numbers: Prior
) -> tuple[Array, Circuits]:
    def action(given: Circuits) -> Array:
        token_blocks = _token_blocks(given, one_hot, target, problem.attention)
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
    shapes = [np.shape(part) for part in start[:-1]]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
    numbers = prior(problem)
    with jax.enable_x64(True):
        size = int(np.ceil(LADDER ** np.ceil(np.log(len(tokens)) / np.log(LADDER) - 1e-9)))
        filled = np.pad(tokens, ((0, size - len(tokens)), (0, 0)), constant_values=-1)
        one_hot = jnp.asarray(filled[..., None] == np.arange(problem.vocab), jnp.float64)
        target = jnp.asarray(targets.shift(problem.length, cyclic=problem.cyclic))

        def blocks(flat: np.ndarray) -> Circuits:
            parts = (part.reshape(shape) for part, shape in zip(np.split(flat, ends), shapes, strict=True))
            pp, pt, tp, tt = parts
            return Circuits(pp, pt, tp, tt, np.zeros((problem.vocab, problem.vocab)))

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            value, gradient = _value_and_gradient(blocks(flat), one_hot, target, problem, numbers)
            return float(value), np.concatenate([np.asarray(part).ravel() for part in gradient[:-1]])

        found = minimize(
            objective,
            np.concatenate([np.asarray(part, np.float64).ravel() for part in start[:-1]]),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 10000, "maxcor": 30, "gtol": tolerance, "ftol": 1e-15},
        )
        gradient = float(np.max(np.abs(objective(found.x)[1])))
        best = blocks(found.x)
        output = best_output(_token_blocks(best, one_hot, target, problem.attention), numbers)[0]
    return NetworkMinimum(best._replace(output=np.asarray(output)), float(found.fun), gradient, gradient < ACCEPTED)


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
            one_hot = jnp.asarray(fresh[first : first + MEASURED_TOGETHER, :, None] == np.arange(vocab), jnp.float64)
            matrices, misses = _attention_and_error(net, one_hot, jnp.asarray(target), problem.attention)
            total += np.asarray(matrices[: max(0, most - first)].sum(axis=0))
            errors.append(np.asarray(misses) / problem.scored)
    average = total / most
    off = mean(average, 1 - target)
    losses = np.concatenate(errors)
    found = ContentOrderParameters(
        other + float(rows @ blocks.pt.mean(axis=1)) + float(blocks.tp.mean()) + different,
        mean(blocks.pp, target) - other,
        float(np.trace(blocks.tt)) / vocab - different,
        mean(blocks.pp, own) - other,
        length * off,
        mean(average, target) - off,
        float(losses.mean()),
    )
    return found, float(losses.std(ddof=1) / len(fresh) ** 0.5)
