"""Training of two-layer networks: Adam, gradient descent and SGLD, full batch or mini-batch, many cells at once.

A cell is (P, seed, start, scale). Cells of similar P run together under one vmap, filled up to one P; steps between two
records of the scores are one compiled loop. Gradient descent is theta' = theta - eps grad E; SGLD adds sqrt(2 eps / chi) xi.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from copyhead.experiment.induction_scores import Scores, measure
from copyhead.experiment.noise import normals
from copyhead.experiment.path import COMPILATION
from copyhead.experiment.two_layer_paths import Sequences, TwoLayerPath, training_set
from copyhead.model import two_layer
from copyhead.model.tokens import stream
from copyhead.model.two_layer import Start, Weights
from copyhead.record import ProblemError

Method = Literal["adam", "descent", "langevin"]
STARTS: tuple[Start, ...] = ("small", "induction", "anti")
# Runs at a time: what the caches hold of data sets of some thousand sequences.
CELLS = 8
# Distance to a stationary point, see `Trained.residual`.
TOLERANCE = 1e-3


class Run(NamedTuple):
    """One cell. scale: standard deviation of random initial weights, see two_layer.start."""

    sequences: int
    seed: int
    start: Start = "small"
    scale: float = 0.01


class Settings(NamedTuple):
    """learning_rate: of Adam, decaying to zero along a cosine; else eps times `TwoLayerPath.curvature`, stable below about one.

    steps: updates, a multiple of records. records: places at which scores are measured, the last one at the end.
    """

    method: Method = "adam"
    steps: int = 2500
    learning_rate: float = 0.03
    records: int = 5


class Trained(NamedTuple):
    """weights: after the last step. step, scores: of each record, the start first; scores are (cell, record).

    residual: largest entry of |grad E| of the full batch at the end, over the order of its curvature: how far a step of
    gradient descent would still go. change: of any of previous, induction, loss from the record before the last.
    finite: whether weights are finite.
    """

    weights: Weights
    step: Int[np.ndarray, "r"]
    scores: Scores
    residual: Float[np.ndarray, "cell"]
    change: Float[np.ndarray, "cell"]
    finite: Bool[np.ndarray, "cell"]

    @property
    def last(self) -> Scores:
        """Scores at the end."""
        return Scores(*(part[:, -1] for part in self.scores))

    @property
    def converged(self) -> Bool[np.ndarray, "cell"]:
        """Whether a run ended at a stationary point; SGLD never does, mini-batches hardly."""
        return self.finite & (self.residual < TOLERANCE)


def adam(settings: Settings) -> optax.GradientTransformation:
    """Adam with a learning rate that decays to zero along a cosine."""
    return optax.adam(optax.cosine_decay_schedule(settings.learning_rate, settings.steps))


def starts(runs: list[Run], path: TwoLayerPath) -> Weights:
    """Weights of every run before the first step, along a leading axis."""
    chosen = [two_layer.start(path.network, path.problem, run.start, run.scale, run.seed) for run in runs]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *chosen)


def train(
    runs: list[Run],
    path: TwoLayerPath,
    settings: Settings,
    test: Sequences,
    progress: Callable[[int, int], None] = lambda done, of: None,
    chunk: int = CELLS,
) -> Trained:
    """Trains every run; results are in the order given and do not depend on the chunk beyond rounding.

    Args:
        test: fresh sequences on which scores are measured.
        progress: called with the number of finished stretches (records of a chunk) and of all.

    Raises:
        ProblemError: for settings or starts that do not go with the network.
    """
    if settings.records < 1 or settings.steps % settings.records:
        raise ProblemError(f"steps = {settings.steps}: must be a multiple of records = {settings.records}")
    order = sorted(range(len(runs)), key=lambda index: runs[index].sequences)
    size = min(chunk, len(runs))
    first = range(0, len(runs), size)
    parts = []
    for number, begin in enumerate(first):
        some = [runs[order[min(index, len(runs) - 1)]] for index in range(begin, begin + size)]

        def told(done: int, number: int = number) -> None:
            progress(number * settings.records + done, len(first) * settings.records)

        parts.append(_chunk(some, path, settings, test, told))
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves)[: len(runs)][np.argsort(order)], *parts)
    weights, scores, residual, finite = whole
    end = [getattr(scores, name) for name in ("previous", "induction", "loss")]
    change = np.max([np.abs(part[:, -1] - part[:, -2]) for part in end], axis=0)
    step = np.arange(settings.records + 1) * (settings.steps // settings.records)
    return Trained(weights, step, scores, residual, change, finite)


def _chunk(runs: list[Run], path: TwoLayerPath, settings: Settings, test: Sequences, told: Callable[[int], None]) -> Any:
    problem, network = path.problem, path.network
    weights = starts(runs, path)
    data = jax.tree.map(jnp.asarray, path.collect([training_set(problem, run.sequences, run.seed) for run in runs]))
    parts = [(run.sequences, STARTS.index(run.start)) for run in runs]
    keys = [
        jnp.asarray(
            np.stack([stream(run.seed, name, *part).generate_state(2) for run, part in zip(runs, parts, strict=True)]),
            jnp.uint32,
        )
        for name in ("langevin", "batch")
    ]
    state = (weights, adam(settings).init(weights), jnp.uint32(0))
    seen = [measure(weights, test, problem, network)]
    for done in range(settings.records):
        state = stretch(state, data, *keys, path, settings)
        seen.append(measure(state[0], test, problem, network))
        told(done + 1)
    residual, finite = ending(state[0], data, path)
    scores = Scores(*(np.stack(part, axis=1) for part in zip(*seen, strict=True)))
    return jax.tree.map(np.asarray, (state[0], scores, residual, finite))


@partial(jax.jit, static_argnames=("path", "settings"), compiler_options=COMPILATION)
def stretch(state: tuple, data: Any, noise: Array, batch: Array, path: TwoLayerPath, settings: Settings) -> tuple:
    """The steps from one record to the next; the state is (weights, memory of Adam, number of the step)."""
    eps = settings.learning_rate / path.curvature(jnp.sum(data.share, axis=1))
    rule = adam(settings)
    there = two_layer.allowed(path.network, path.problem)
    slope = jax.vmap(jax.grad(path.energy))

    def gradient(weights: Any, number: Array) -> Any:
        if path.batch is None:
            return slope(weights, data)
        keys = jax.vmap(lambda key: jax.random.fold_in(jax.random.wrap_key_data(key), number))(batch)
        return slope(weights, jax.vmap(path.chosen)(data, keys))

    def along(part: Array) -> Array:
        return eps.reshape(-1, *[1] * (part.ndim - 1))

    def step(state: tuple, _: None) -> tuple[tuple, None]:
        weights, memory, number = state
        down = gradient(weights, number)
        if settings.method == "adam":
            updates, memory = rule.update(down, memory)
            return (optax.apply_updates(weights, updates), memory, number + 1), None
        moved = jax.tree.map(lambda part, by: part - along(part) * by, weights, down)
        if settings.method == "langevin":
            ends = np.cumsum([int(np.prod(part.shape[1:])) for part in weights])
            xi = jnp.split(normals(noise, number, int(ends[-1])), ends[:-1], axis=1)
            moved = type(weights)(
                *(
                    part + jnp.sqrt(2 * along(part) / path.problem.chi) * some.reshape(part.shape) * here
                    for part, some, here in zip(moved, xi, there, strict=True)
                )
            )
        return (moved, memory, number + 1), None

    return jax.lax.scan(step, state, length=settings.steps // settings.records)[0]


@partial(jax.jit, static_argnames=("path",), compiler_options=COMPILATION)
def ending(weights: Any, data: Any, path: TwoLayerPath) -> tuple[Float[Array, "cell"], Bool[Array, "cell"]]:
    """Largest entry of |grad E| of the full batch over the order of its curvature, and whether all weights are finite."""

    def one(weights: Any, data: Any) -> tuple[Array, Array]:
        slope = jax.grad(path.energy)(weights, data)
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(part)) for part in slope]))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(part)) for part in weights]))
        return largest / path.curvature(jnp.sum(data.share)), finite

    return jax.lax.map(lambda both: one(*both), (weights, data))
