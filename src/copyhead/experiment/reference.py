"""HMC and NUTS of blackjax on any `Target`, with its window adaptation of step size and diagonal mass matrix."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import blackjax
import jax
import numpy as np
from jaxtyping import Array, Float

from copyhead.experiment.path import COMPILATION
from copyhead.experiment.target import Target

Algorithm = Literal["hmc", "nuts"]


class ReferenceSettings(NamedTuple):
    """warmup: adaptation. draws: recorded. leapfrogs: of HMC; NUTS chooses its own, at most 2^doublings."""

    warmup: int = 500
    draws: int = 500
    leapfrogs: int = 16
    doublings: int = 8


class ReferenceTrace(NamedTuple):
    """positions: leading axes (chain, draw). log_density. acceptance: mean probability of a trajectory. gradients: evaluated.

    divergent: whether the energy ran away. step: that was adapted to.
    """

    positions: Any
    log_density: Float[np.ndarray, "chain draw"]
    acceptance: Float[np.ndarray, "chain draw"]
    gradients: Float[np.ndarray, "chain draw"]
    divergent: Float[np.ndarray, "chain draw"]
    step: Float[np.ndarray, "chain"]


class Library:
    """Chains of one target at one chi, compiled once: `adapt` from starts, then `draw` as often as wanted."""

    def __init__(self, target: Target, chi: float, algorithm: Algorithm, settings: ReferenceSettings) -> None:
        density = partial(target.log_density, chi=chi)
        kernel: Any = blackjax.hmc if algorithm == "hmc" else blackjax.nuts
        hmc = algorithm == "hmc"
        fixed = {"num_integration_steps": settings.leapfrogs} if hmc else {"max_num_doublings": settings.doublings}
        warmup: Any = blackjax.window_adaptation(kernel, density, **fixed)

        def adapt(start: Any, key: Array) -> Any:
            return warmup.run(key, start, num_steps=settings.warmup)[0]

        def draws(tuned: Any, key: Array) -> tuple[Any, tuple]:
            step = kernel(density, **{**tuned[1], **fixed}).step

            def draw(state: Any, key: Array) -> tuple[Any, tuple]:
                state, info = step(key, state)
                seen = state.position, state.logdensity, info.acceptance_rate, info.num_integration_steps, info.is_divergent
                return state, seen

            state, seen = jax.lax.scan(draw, tuned[0], jax.random.split(key, settings.draws))
            return (state, tuned[1]), (*seen, tuned[1]["step_size"])

        self._adapt, self._draws = (jax.jit(jax.vmap(one), compiler_options=COMPILATION) for one in (adapt, draws))

    def adapt(self, starts: Any, seed: int) -> Any:
        """States with their step sizes and mass matrices, one for each start (leading axis)."""
        return self._adapt(starts, jax.random.split(jax.random.key(seed), len(jax.tree.leaves(starts)[0])))

    def draw(self, tuned: Any, seed: int) -> tuple[Any, ReferenceTrace]:
        """The states after `settings.draws` draws, and these."""
        tuned, found = self._draws(tuned, jax.random.split(jax.random.key(seed), len(jax.tree.leaves(tuned)[0])))
        positions, *rest = jax.tree.map(np.asarray, found)
        return tuned, ReferenceTrace(positions, *rest)


def sample(
    target: Target, starts: Any, chi: float, seed: int, algorithm: Algorithm, settings: ReferenceSettings
) -> ReferenceTrace:
    """One chain from each start (leading axis of `starts`), run side by side."""
    library = Library(target, chi, algorithm, settings)
    # seeds of keys are even for adaptation and odd for draws
    return library.draw(library.adapt(starts, 2 * seed), 2 * seed + 1)[1]
