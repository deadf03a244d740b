"""Cells: independent runs, each with its own start, data set and prior, that are executed together in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int, UInt32

from copyhead.experiment.path import Path
from copyhead.model import network, targets, tokens
from copyhead.model.network import Network, Positional, Start, Weights
from copyhead.problem import Problem

STARTS: tuple[Start, ...] = ("small", "copy")

# (P, data seed, start, chi)
Run = tuple[int, int, Start, float]


class Cells(NamedTuple):
    """n runs (leading axis n). start: initial weights. data: as the path collects it. chi: of each run.

    key, batch_key: words of the random streams of its noise and of its mini-batches.
    """

    start: Weights
    data: Any
    chi: Float[np.ndarray, "n"]
    key: UInt32[np.ndarray, "n 2"]
    batch_key: UInt32[np.ndarray, "n 2"]


def data_sets(problem: Problem, sequences: list[int], seed: int) -> list[Int[np.ndarray, "P L"]]:
    """Nested data sets: that of P = 300 is the prefix of that of P = 400 at the same seed."""
    whole = drawn(problem, tokens.stream(seed, "train"), max(sequences))
    return [whole[:count] for count in sequences]


def drawn(problem: Problem, source: np.random.SeedSequence, sequences: int) -> Int[np.ndarray, "P L"]:
    """Sequences of the token law of a problem, one after the other.

    Raises:
        ProblemError: for a law that the file does not give.
    """
    return tokens.law(problem).draw(source, sequences, problem.length, problem.cyclic)


def assemble(path: Path, runs: list[Run]) -> Cells:
    """Cells for runs given as (P, seed, start, chi), in that order.

    Every random draw comes from the seed: the data, the small start, and the keys of noise and mini-batches, which also depend
    on P, start and chi.
    """
    problem = path.problem
    target = targets.operator(problem)
    wanted: dict[int, list[int]] = {}
    for count, seed, _, _ in runs:
        wanted.setdefault(seed, []).append(count)
    data = {
        (count, seed): found
        for seed, counts in wanted.items()
        for count, found in zip(sorted(set(counts)), data_sets(problem, sorted(set(counts)), seed), strict=True)
    }
    starts = [network.start(path.network, problem, target, start, seed) for _, seed, start, _ in runs]
    sources = [(seed, (count, STARTS.index(start), round(1000 * chi))) for count, seed, start, chi in runs]
    keys, batch_keys = (
        np.stack([tokens.stream(seed, name, *parts).generate_state(2) for seed, parts in sources])
        for name in ("langevin", "batch")
    )
    return Cells(
        network.stacked(starts),
        path.collect([data[count, seed] for count, seed, _, _ in runs]),
        np.array([chi for *_, chi in runs], np.float32),
        keys,
        batch_keys,
    )


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


def scattered(problem: Problem, shape: tuple[int, int, int], seed: int, kinds: tuple[Start, ...] = STARTS) -> Positional:
    """Positional networks (rung, repeat, data, ...): repeats from each kind of start in turn, with the scatter of the prior."""
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    chosen = network.stacked([network.start(Network(), problem, target, kind, seed) for kind in kinds])
    turn = np.broadcast_to(np.arange(shape[1])[:, None] % len(kinds), shape)
    begin = jax.tree.map(lambda leaf: np.asarray(leaf)[turn], chosen)
    random = np.random.default_rng(tokens.stream(seed, "init", 1))
    spread = (problem.logit_variance / problem.chi) ** 0.5 * problem.position_scale
    logits = begin.logits + spread * random.normal(size=begin.logits.shape)
    return Positional(logits.astype(np.float32), begin.output)


def repeated(problem: Problem, data: Any, chains: int, seed: int, use: int, kinds: tuple[Start, ...] = STARTS) -> Cells:
    """Cells (chain, data), flattened in that order: `chains` on each of the data sets (leading axis), see `scattered`.

    Args:
        use: tells random streams of one seed apart.
    """
    count = len(data.sequences)
    begin = scattered(problem, (1, chains, count), seed, kinds)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), begin)
    keys = tokens.stream(seed, "langevin", use).generate_state(2 * chains * count).reshape(-1, 2)
    tiled = jax.tree.map(lambda leaf: np.concatenate([np.asarray(leaf)] * chains), data)
    return Cells(flat, tiled, np.full(chains * count, problem.chi, np.float32), keys, keys)
