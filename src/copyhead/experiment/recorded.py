"""Training recorded on the way: gradient descent with a constant learning rate, or Adam, full batch, for many cells at once.

Gradient descent is theta' = theta - eta grad E by the gradient that Adam has too, L2 terms included; tau = eta * step is the
time of the gradient flow that it follows for small eta.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from copyhead.experiment.adam import AdamSettings, bounded, updating
from copyhead.experiment.cells import Cells, in_chunks
from copyhead.experiment.observables import Observables, Yardstick, measure, yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.path import COMPILATION
from copyhead.model import tokens
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Positional, stacked
from copyhead.problem import Problem


class DescentSettings(NamedTuple):
    """Gradient descent. learning_rate: eta, stable below 2 / (largest curvature of E)."""

    learning_rate: float


class Recorded(NamedTuple):
    """step: number of updates at each record. observables: (cell, record). finite: whether the weights stayed bounded."""

    step: Int[np.ndarray, "r"]
    observables: Observables
    finite: Bool[np.ndarray, "cell"]


def small_starts(problem: Problem, scale: float, seeds: list[int]) -> Positional:
    """G and W with i.i.d. normal entries of standard deviation `scale`, from the stream of `network.start`."""
    drawn = []
    for seed in seeds:
        draw = np.random.default_rng(tokens.stream(seed, "init")).standard_normal
        shapes = (problem.length, problem.length), (problem.vocab, problem.vocab)
        drawn.append(Positional(*(scale * draw(shape, np.float32) for shape in shapes)))
    return stacked(drawn)  # type: ignore[return-value]


def train(
    problem: Problem, start: Positional, data: Empirical, settings: DescentSettings | AdamSettings, steps: Int[np.ndarray, "r"]
) -> Recorded:
    """Trains every cell (leading axis of `start` and `data`) and records its order parameters.

    Args:
        steps: numbers of updates at which to record, increasing, from zero.

    Raises:
        ValueError: unless the steps begin with zero and increase.
        ProblemError: for separate query and key matrices.
    """
    steps = np.asarray(steps, int)
    if len(steps) < 2 or steps[0] != 0 or not np.all(np.diff(steps) > 0):
        raise ValueError("steps: must increase from zero")
    # P is in the data: the loop is compiled once for all P
    path, count = PackedPath(problem.replace(sequences=None)), len(start.logits)
    # the loss on fresh sequences is not looked at: one sequence will do
    yard = yardstick(problem, Network(), 1)
    words = np.zeros((count, 2), np.uint32)  # neither noise nor mini-batches are drawn
    cells = Cells(start, data, np.full(count, problem.chi, np.float32), words, words)
    adam = settings if isinstance(settings, AdamSettings) else None
    rate, strides = np.float32(settings.learning_rate), np.diff(steps).astype(np.int32)

    def run(part: Cells) -> tuple[Observables, Array]:
        return _run(*path.prepare(part.start, part.data, part.batch_key), yard, strides, rate, path, adam)

    return Recorded(steps, *in_chunks(run, cells, min(path.cells, count)))


@partial(jax.jit, static_argnames=("path", "adam"), compiler_options=COMPILATION)
def _run(
    start: Any,
    data: Any,
    yard: Yardstick,
    strides: Int[Array, "r-1"],
    rate: Float[Array, ""],
    path: PackedPath,
    adam: AdamSettings | None,
) -> tuple[Observables, Array]:
    """Observables (cell, record) and whether weights stayed bounded; `strides` are updates from one record to the next."""

    def seen(weights: Any) -> Observables:
        return jax.vmap(lambda one: measure(one, yard, path.problem))(path.restore(weights))  # type: ignore[return-value]

    def descend(state: tuple) -> tuple:
        (weights,) = state
        return (jax.tree.map(lambda part, slope: part - rate * slope, weights, path.slope(weights, data, None)),)

    begin, update = ((start,), descend) if adam is None else updating(start, data, path, adam)

    def stretch(state: tuple, stride: Array) -> tuple[tuple, Observables]:
        state = jax.lax.fori_loop(0, stride, lambda _, inner: update(inner), state)
        return state, seen(state[0])

    end, records = jax.lax.scan(stretch, begin, strides)
    whole = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]).T, seen(start), records)
    return whole, bounded(end[0])
