"""Cells: independent runs, each with its own start, data set and prior, that are executed together in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, UInt32

from copyhead.model import layout, moments, network, targets, tokens
from copyhead.model.layout import Layout
from copyhead.model.moments import Empirical
from copyhead.model.network import Positional
from copyhead.model.prior import Prior, prior
from copyhead.problem import Attention, Problem

STARTS = ("small", "copy")


class Cells(NamedTuple):
    """n runs (leading axis n). start: initial weights. data: moments. chi: of each run. key: words of its random stream."""

    start: Positional
    data: Empirical
    chi: Float[np.ndarray, "n"]
    key: UInt32[np.ndarray, "n 2"]


class Objective(NamedTuple):
    """What all cells share of the energy. target: T (L x L)."""

    target: Float[np.ndarray, "L L"]
    layout: Layout
    prior: Prior
    kind: Attention


def objective(problem: Problem) -> Objective:
    """The part of a problem's energy that is the same for all of its cells."""
    target = targets.shift(problem.length, cyclic=problem.cyclic).astype(np.float32)
    return Objective(target, layout.full(problem.length, problem.cyclic, jnp.float32), prior(problem), problem.attention)


def data_sets(problem: Problem, sequences: list[int], seed: int) -> list[Empirical]:
    """Moments of nested data sets: that of P = 300 is the prefix of that of P = 400 at the same seed."""
    drawn = tokens.sample(tokens.stream(seed, "train"), max(sequences), problem.length, tokens.uniform(problem.vocab))
    return [moments.empirical(drawn[:count], problem.vocab) for count in sequences]


def assemble(problem: Problem, runs: list[tuple[int, int, str, float]]) -> Cells:
    """Cells for runs given as (P, seed, start, chi), in that order.

    Every random draw comes from the seed: the data, the small start, and the key of a chain, which also depends on P,
    start and chi.
    """
    target = objective(problem).target
    wanted: dict[int, list[int]] = {}
    for count, seed, _, _ in runs:
        wanted.setdefault(seed, []).append(count)
    data = {
        (count, seed): found
        for seed, counts in wanted.items()
        for count, found in zip(sorted(set(counts)), data_sets(problem, sorted(set(counts)), seed), strict=True)
    }
    starts, keys = [], []
    for count, seed, start, chi in runs:
        if start == "small":
            starts.append(network.small_start(tokens.stream(seed, "init"), problem.length, problem.vocab))
        else:
            starts.append(network.copy_start(target, problem.vocab, problem.attention))
        source = tokens.stream(seed, "langevin", count, STARTS.index(start), round(1000 * chi))
        keys.append(source.generate_state(2))
    return Cells(
        _stack(starts),
        _stack([data[count, seed] for count, seed, _, _ in runs]),
        np.array([chi for *_, chi in runs], np.float32),
        np.stack(keys),
    )


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf, np.float32) for leaf in leaves]), *trees)


def in_chunks(run: Callable[[Cells], Any], cells: Cells, chunk: int) -> Any:
    """Applies a compiled function to `chunk` cells at a time; the last chunk is filled up with copies.

    All calls have one shape, so one compilation serves any number of cells, and small chunks stay in the CPU's cache.
    """
    n = len(cells.chi)
    parts = []
    for first in range(0, n, chunk):
        index = np.minimum(np.arange(first, first + chunk), n - 1)
        part = run(jax.tree.map(lambda leaf, index=index: leaf[index], cells))
        parts.append(jax.tree.map(np.asarray, part))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *parts)
