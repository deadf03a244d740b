"""Order parameters and loss per token, measured on weights."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.energy import loss_per_token
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.network import Positional
from copyhead.problem import Attention


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


class Yardstick(NamedTuple):
    """What weights are measured against. target: T. population, fresh: moments for the two losses."""

    target: Float[Array, "L L"]
    layout: Layout
    population: Moments
    fresh: Moments


def measure(weights: Positional, yardstick: Yardstick, kind: Attention) -> Observables:
    """Observables of one network."""
    target, layout, length = yardstick.target, yardstick.layout, yardstick.target.shape[0]
    scored = jnp.broadcast_to(layout.scored[:, None], target.shape)
    on, off = scored * target, scored * (1 - target)

    def means(matrix: Float[Array, "L L"]) -> tuple[Array, Array]:
        mean_off = jnp.sum(off * matrix) / jnp.sum(off)
        return mean_off, jnp.sum(on * matrix) / jnp.sum(on) - mean_off

    matrix = attention(weights.logits, kind, length)
    c1, cG = means(weights.logits)
    off_attention, aG = means(matrix)
    loss, fresh = (
        loss_per_token(matrix, weights.output, target, moments, layout) for moments in (yardstick.population, yardstick.fresh)
    )
    return Observables(c1, cG, length * off_attention, aG, loss, fresh, jnp.trace(weights.output) / weights.output.shape[-1])


@partial(jax.jit, static_argnames="kind")
def measure_all(weights: Positional, yardstick: Yardstick, kind: Attention) -> Observables:
    """Observables of many networks (leading axis of the weights)."""
    return jax.vmap(lambda one: measure(one, yardstick, kind))(weights)
