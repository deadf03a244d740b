"""HMC and NUTS of blackjax on any `Target`, with its window adaptation of step size and diagonal mass matrix."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

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


def sample(
    target: Target, starts: Any, chi: float, seed: int, algorithm: Algorithm, settings: ReferenceSettings
) -> ReferenceTrace:
    """One chain from each start (leading axis of `starts`), run side by side."""
    density = partial(target.log_density, chi=chi)
    kernel: Any = blackjax.hmc if algorithm == "hmc" else blackjax.nuts
    fixed = {"num_integration_steps": settings.leapfrogs} if algorithm == "hmc" else {"max_num_doublings": settings.doublings}

    def one(start: Any, key: Array) -> tuple:
        adapt_key, draw_key = jax.random.split(key)
        warmup: Any = blackjax.window_adaptation(kernel, density, **fixed)
        (state, tuned), _ = warmup.run(adapt_key, start, num_steps=settings.warmup)
        step = kernel(density, **{**tuned, **fixed}).step

        def draw(state: Any, key: Array) -> tuple[Any, tuple]:
            state, info = step(key, state)
            seen = state.position, state.logdensity, info.acceptance_rate, info.num_integration_steps, info.is_divergent
            return state, seen

        _, seen = jax.lax.scan(draw, state, jax.random.split(draw_key, settings.draws))
        return (*seen, tuned["step_size"])

    count = len(jax.tree.leaves(starts)[0])
    found = jax.jit(jax.vmap(one))(starts, jax.random.split(jax.random.key(seed), count))
    positions, *rest = jax.tree.map(np.asarray, found)
    return ReferenceTrace(positions, *rest)


def copies(position: Any, chains: int, spread: float, seed: int) -> Any:
    """`chains` starts around a position, with normal scatter."""
    random = np.random.default_rng(seed)

    def around(leaf: Array) -> Array:
        return jnp.asarray(leaf + spread * random.normal(size=(chains, *np.shape(leaf))), leaf.dtype)

    return jax.tree.map(around, position)
