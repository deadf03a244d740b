"""Order parameters and loss per token, measured on weights."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copyhead.experiment.cells import drawn
from copyhead.experiment.direct import in_chunks_of, sequences_at_a_time
from copyhead.model import layout, moments, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.energy import loss_per_token
from copyhead.model.heads import coefficient, principal, weighted_mean
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.network import Circuits, Network, Positional, Weights, circuits, logits
from copyhead.problem import Attention, Problem

# Sequences on which attention that reads tokens is averaged: it differs little from one to the next, the loss much more.
ATTENTION_SEQUENCES = 256


class Observables(NamedTuple):
    """c1: mean logit off the target. cG: mean on the target minus c1. a1, aG: likewise for attention, a1 times L.

    loss: per token on the population; fresh: per token on sequences that were not trained on.
    overlap: trace of W / V; its sign tells (G, W) from its mirror image (-G, -W) in linear attention.
    """

    c1: Float[Array, "..."]
    cG: Float[Array, "..."]
    a1: Float[Array, "..."]
    aG: Float[Array, "..."]
    loss: Float[Array, "..."]
    fresh: Float[Array, "..."]
    overlap: Float[Array, "..."]


class ContentObservables(NamedTuple):
    """Of attention that reads tokens: logits c1 + cG T_ab + cI [x_a = x_b] + cS [a = b], and what deviates from that.

    c1: mean logit between other positions with other tokens, all blocks. cG, cS: from block pp. cI: from block tt. a1, aG: of
    attention averaged over fresh sequences. loss, fresh: both on fresh sequences, there being no closed form. pt, tp: means of
    the token-position blocks. content: root mean square of how far the logits of these two blocks depend on the token.
    signs: |sum of the signs of W_vv| / V, one if all tokens are served with the same sign (docs/theory.md, section 8).
    """

    c1: Float[Array, "..."]
    cG: Float[Array, "..."]
    cI: Float[Array, "..."]
    cS: Float[Array, "..."]
    a1: Float[Array, "..."]
    aG: Float[Array, "..."]
    loss: Float[Array, "..."]
    fresh: Float[Array, "..."]
    overlap: Float[Array, "..."]
    pt: Float[Array, "..."]
    tp: Float[Array, "..."]
    content: Float[Array, "..."]
    signs: Float[Array, "..."]


class HeadObservables(NamedTuple):
    """Of positional heads with a mask and any target. `Observables` of the leading head, the one of largest aG, and arrays.

    c1, a1: mean of the allowed entries where T is zero, in scored rows. cG, aG: coefficient of T in what is above it.
    rows: cG by scored row, of the leading head. heads, heads_a: cG and aG by head, in falling order of aG, so that they do not
    depend on which head took which part. Heads of linear attention can be rotated into one another: they are taken with
    orthogonal logits, largest first, and each with a mean row sum >= 0.
    lags: mean attention on each lag of the target over the rows that have it, leading
    head; empty for a matrix. The losses are those of all heads together.
    """

    c1: Float[Array, "..."]
    cG: Float[Array, "..."]
    a1: Float[Array, "..."]
    aG: Float[Array, "..."]
    loss: Float[Array, "..."]
    fresh: Float[Array, "..."]
    overlap: Float[Array, "..."]
    rows: Float[Array, "... R"]
    heads: Float[Array, "... H"]
    heads_a: Float[Array, "... H"]
    lags: Float[Array, "... K"]


def axes(problem: Problem) -> dict[str, tuple[str, list[int]]]:
    """Name and coordinates of the last axis of each array in `HeadObservables`; of other observables there are none.

    row: position a. head: rank by aG, from 0. lag: as in the target.
    """
    if not problem.beyond:
        return {}
    row = ("row", np.flatnonzero(targets.scored(targets.operator(problem))).tolist())
    head = ("head", list(range(problem.heads)))
    return {"rows": row, "heads": head, "heads_a": head, "lags": ("lag", list(problem.lags or {}))}


class Yardstick(NamedTuple):
    """What weights are measured against. target: T. population, fresh: moments for the two losses; None where tokens are read.

    sequences: the fresh sequences themselves.
    """

    target: Float[Array, "L L"]
    layout: Layout
    population: Moments | None
    fresh: Moments | None
    sequences: Int[Array, "S L"]


def yardstick(problem: Problem, network: Network, fresh: int) -> Yardstick:
    """The yardstick of a network, with `fresh` sequences that no data set holds.

    Raises:
        ProblemError: for a token law that cannot be drawn from, or whose moments are not known.
    """
    target = targets.operator(problem).astype(np.float32)
    entries = layout.masked(target, targets.allowed(problem))
    entries = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), entries)
    sequences = drawn(problem, tokens.stream(0, "fresh"), fresh)
    if network.kind != "positional":
        return Yardstick(target, entries, None, None, sequences.astype(np.int32))
    found = moments.empirical(sequences, problem.vocab)
    population = moments.expected_of(tokens.law(problem), problem.length, problem.cyclic)
    population = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), population)
    return Yardstick(target, entries, population, found, sequences[:0].astype(np.int32))


def measure(weights: Weights, yardstick: Yardstick, problem: Problem) -> Observables | ContentObservables | HeadObservables:
    """Observables of one network."""
    if isinstance(weights, Positional):
        if problem.beyond:
            return _heads(weights, yardstick, problem)
        return _positional(weights, yardstick, problem.attention)
    return _content(circuits(weights, problem), yardstick, problem)


def _means(matrix: Float[Array, "L L"], yardstick: Yardstick) -> tuple[Array, Array]:
    """Mean off the target, and mean on it minus that, over the scored rows."""
    target = yardstick.target
    scored = jnp.broadcast_to(yardstick.layout.scored[:, None], target.shape)
    on, off = scored * target, scored * (1 - target)
    mean_off = jnp.sum(off * matrix) / jnp.sum(off)
    return mean_off, jnp.sum(on * matrix) / jnp.sum(on) - mean_off


def order_parameters(
    logits: Float[Array, "L L"], matrix: Float[Array, "L L"], yardstick: Yardstick
) -> tuple[Array, Array, Array, Array]:
    """c1, cG, a1, aG of positional attention."""
    off_attention, aG = _means(matrix, yardstick)
    return *_means(logits, yardstick), matrix.shape[0] * off_attention, aG


def _positional(weights: Positional, yardstick: Yardstick, kind: Attention) -> Observables:
    matrix = attention(weights.logits, kind, len(weights.logits))
    loss, fresh = _losses(matrix, weights.output, yardstick)
    overlap = jnp.trace(weights.output) / weights.output.shape[-1]
    return Observables(*order_parameters(weights.logits, matrix, yardstick), loss, fresh, overlap)


def _losses(matrix: Float[Array, "*H L L"], output: Float[Array, "*H V V"], yardstick: Yardstick) -> tuple[Array, Array]:
    """Per token, on the population and on fresh sequences."""
    assert yardstick.population is not None
    assert yardstick.fresh is not None
    loss, fresh = (
        loss_per_token(matrix, output, yardstick.target, moments, yardstick.layout)
        for moments in (yardstick.population, yardstick.fresh)
    )
    return loss, fresh


def _heads(weights: Positional, yardstick: Yardstick, problem: Problem) -> HeadObservables:
    target, entries, length = yardstick.target, yardstick.layout, problem.length
    logits, output = weights
    weight = entries.scored[:, None] * entries.columns
    if problem.attention == "linear":
        turn = principal(logits, weight)
        logits, output = (jnp.einsum("hg,hab->gab", turn, part) for part in (logits, output))
    matrix = attention(logits, problem.attention, length, entries.columns)
    scored = targets.scored(targets.operator(problem)) > 0
    c1, cG = jax.vmap(lambda one: coefficient(one, weight, target))(logits)
    a1, aG = jax.vmap(lambda one: coefficient(one, weight, target))(matrix)
    order = jnp.argsort(-aG)
    first = order[0]
    by_row = weight * jnp.eye(length)[:, :, None]
    _, rows = jax.vmap(lambda row: coefficient(logits[first], row, target))(by_row)
    shifts = [targets.shift(length, lag, problem.cyclic) for lag in problem.lags or {}]
    return HeadObservables(
        c1[first],
        cG[first],
        length * a1[first],
        aG[first],
        *_losses(matrix, output, yardstick),
        jnp.trace(output[first]) / problem.vocab,
        rows[scored],
        cG[order],
        aG[order],
        jnp.array([weighted_mean(matrix[first], shift.astype(np.float32)) for shift in shifts]),
    )


def _content(net: Circuits, yardstick: Yardstick, problem: Problem) -> ContentObservables:
    target, length, vocab, kind = yardstick.target, problem.length, problem.vocab, problem.attention
    scored = jnp.broadcast_to(yardstick.layout.scored[:, None], net.pp.shape)
    own = jnp.eye(length)
    other, on, own = (
        jnp.sum(scored * mask * net.pp) / jnp.sum(scored * mask) for mask in ((1 - own) * (1 - target), target, own)
    )
    rows = yardstick.layout.scored / jnp.sum(yardstick.layout.scored)
    same = jnp.trace(net.tt) / vocab
    different = (jnp.sum(net.tt) - jnp.trace(net.tt)) / (vocab * (vocab - 1))
    by_key, by_query = rows @ net.pt, net.tp.mean(axis=1)
    matrix = attention(logits(net, yardstick.sequences[:ATTENTION_SEQUENCES]), kind, length).mean(axis=0)
    off_attention, aG = _means(matrix, yardstick)
    fresh = yardstick.sequences
    error, _ = in_chunks_of(min(len(fresh), sequences_at_a_time(length, vocab)), len(fresh), net, fresh, problem)
    loss = error / (len(fresh) * problem.scored)
    deviations = (net.pt - net.pt.mean(axis=-1, keepdims=True), net.tp - net.tp.mean(axis=-2, keepdims=True))
    return ContentObservables(
        other + by_key.mean() + by_query.mean() + different,
        on - other,
        same - different,
        own - other,
        length * off_attention,
        aG,
        loss,
        loss,
        jnp.trace(net.output) / vocab,
        by_key.mean(),
        by_query.mean(),
        jnp.sqrt(sum(jnp.mean(part**2) for part in deviations)),
        jnp.abs(jnp.sum(jnp.sign(jnp.diagonal(net.output)))) / vocab,
    )


@partial(jax.jit, static_argnames="problem")
def measure_all(weights: Weights, yardstick: Yardstick, problem: Problem) -> Observables | ContentObservables | HeadObservables:
    """Observables of many networks (leading axis of the weights), one after the other."""
    return jax.lax.map(lambda one: measure(one, yardstick, problem), weights)
