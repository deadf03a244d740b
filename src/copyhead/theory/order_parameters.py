"""Order parameters of the copy task, and the maps between them and the logits (theory.md section 4).

    G = c1 1 1^T + cG G*        A = a1 1 1^T / L + aG G*

so c1 is an entry off the copy diagonal, cG the excess of a copy entry, and likewise a1 / L and aG. Attention that reads the
tokens has two more, see `content`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from copyhead.model.attention import attention
from copyhead.model.layout import Layout
from copyhead.problem import Attention
from copyhead.theory.content import ContentOrderParameters, ContentTask, content_order_parameters
from copyhead.theory.posterior import Task, loss_per_token
from copyhead.theory.symmetric import Parts, SymmetricTask, parts
from copyhead.theory.symmetric import lift as lift_classes

Number = Float[Array, "..."] | float


class OrderParameters(NamedTuple):
    """c1, cG of the logits, a1, aG of the attention, and the population loss per token (W at its optimum)."""

    c1: Number
    cG: Number
    a1: Number
    aG: Number
    loss: Number


AnyOrderParameters = OrderParameters | ContentOrderParameters


def lift(coordinates: Float[Array, "2"], target: Float[Array, "R K"]) -> Float[Array, "R K"]:
    """(c1, cG) -> G = c1 1 1^T + cG T."""
    return coordinates[0] + coordinates[1] * target


def project(
    matrix: Float[Array, "R K"], target: Float[Array, "R K"], layout: Layout
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Mean of the entries off the target, and mean on it minus mean off it, over the scored rows; inverts `lift`."""

    def mean(weight: Float[Array, "R K"]) -> Float[Array, ""]:
        count = jnp.sum(layout.scored * layout.row_sums(weight))
        return jnp.sum(layout.scored * layout.row_sums(weight * matrix)) / count

    off = mean(1 - target)
    return off, mean(target) - off


def order_parameters(
    coordinates: Float[Array, "d"], task: Task | ContentTask | SymmetricTask, kind: Attention
) -> AnyOrderParameters:
    """All order parameters at a point of the symmetric subspace."""
    if isinstance(task, ContentTask):
        return content_order_parameters(coordinates, task, kind)
    if isinstance(task, SymmetricTask):
        return order_of(parts(lift_classes(coordinates, task, kind), task, kind))
    logits = lift(coordinates, task.target)
    matrix = attention(logits, kind, task.prior.length, task.layout.columns)
    off, excess = project(matrix, task.target, task.layout)
    loss = loss_per_token(logits, task, kind)
    return OrderParameters(coordinates[0], coordinates[1], task.prior.length * off, excess, jnp.asarray(loss))


def order_of(found: Parts) -> OrderParameters:
    """Those of the leading head, the one with the largest aG."""
    leading = found.aG.argmax()
    c1, cG, a1, aG = (values[leading] for values in (found.c1, found.cG, found.a1, found.aG))
    return OrderParameters(c1, cG, a1, aG, found.loss)
