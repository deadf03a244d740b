"""The recall task of the minimal two-layer network on its symmetric subspace (docs/induction.md).

Tokens of the context are distinct and exchangeable, so M = beta (I - 11^T/V) and W = w (I - 11^T/V) + u 11^T/V at stationary
points, while the positional logits C1, C2 stay free. The logits of the last position then depend on j alone, and the population
loss is a finite sum over the L - 2 values of j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.induction import Induction
from copyhead.theory.recipe import RecipeTask


class RecallData(NamedTuple):
    """V and the prior variances, as numbers."""

    vocab: float | Float[Array, ""]
    position_variance: float | Float[Array, ""]
    match_variance: float | Float[Array, ""]
    output_variance: float | Float[Array, ""]


class Weights(NamedTuple):
    """Weights on the symmetric subspace. C1: first-layer logits, zero above the diagonal. C2: of the last position."""

    C1: Float[Array, "L L"]
    C2: Float[Array, "L"]
    beta: Float[Array, ""]
    w: Float[Array, ""]
    u: Float[Array, ""]


class Attended(NamedTuple):
    """Attention of both layers. first: (L, L); second: of the last position, one row for each j = 0 .. L - 3."""

    first: Float[Array, "L L"]
    second: Float[Array, "J L"]


@dataclass(frozen=True)
class Recall:
    """Recipe of the recall task. Coordinates: C1 (lower triangle by rows), C2, beta, w, u; L (L + 1) / 2 + L + 3 of them."""

    length: int

    @property
    def dimension(self) -> int:
        return self.length * (self.length + 1) // 2 + self.length + 3

    def weights(self, coordinates: Float[Array, "d"]) -> Weights:
        """Coordinates to weights."""
        length, first = self.length, self.length * (self.length + 1) // 2
        C1 = jnp.zeros((length, length)).at[np.tril_indices(length)].set(coordinates[:first])
        return Weights(C1, coordinates[first : first + length], *coordinates[first + length :])

    def coordinates(self, weights: Weights) -> Float[np.ndarray, "d"]:
        """Inverse of `weights`."""
        lower = np.asarray(weights.C1)[np.tril_indices(self.length)]
        return np.concatenate([lower, weights.C2, np.array([weights.beta, weights.w, weights.u])])

    def attention(self, weights: Weights) -> Attended:
        """Attention of both layers. The logit of position k is beta (A1_kj + [k = L - 1] A1_kk) + C2_k, up to a constant."""
        last = self.length - 1
        causal = np.tril(np.ones((self.length, self.length), bool))
        first = jax.nn.softmax(jnp.where(causal, weights.C1, -jnp.inf), axis=-1)
        matched = first[:, : last - 1].T.at[:, last].add(first[last, last])
        return Attended(first, jax.nn.softmax(weights.beta * matched + weights.C2, axis=-1))

    def loss(self, coordinates: Float[Array, "d"], data: RecallData) -> Float[Array, ""]:
        """E |o W - y|^2 = mean_j [w^2 (|o|^2 - 1/V) - 2 w (o_(j+1) - 1/V)] + 1 - 1/V + (u - 1)^2 / V.

        o: attention by token of the context; the last position holds token j.
        """
        weights, last = self.weights(coordinates), self.length - 1
        second = self.attention(weights).second
        places = np.arange(last - 1)
        attended = second[:, :last].at[places, places].add(second[:, last])
        square = jnp.mean(jnp.sum(attended**2, axis=-1)) - 1 / data.vocab
        hit = jnp.mean(attended[places, places + 1]) - 1 / data.vocab
        return weights.w**2 * square - 2 * weights.w * hit + 1 - 1 / data.vocab + (weights.u - 1) ** 2 / data.vocab

    def cost(self, coordinates: Float[Array, "d"], data: RecallData) -> Float[Array, ""]:
        """|C1|^2 / (2 g_W1) + |C2|^2 / (2 g_W1) + (V - 1) beta^2 / (2 g_W2) + ((V - 1) w^2 + u^2) / (2 g_O)."""
        *positions, beta, w, u = coordinates[:-3], *coordinates[-3:]
        output = (data.vocab - 1) * w**2 + u**2
        return (
            jnp.sum(positions[0] ** 2) / data.position_variance
            + (data.vocab - 1) * beta**2 / data.match_variance
            + output / data.output_variance
        ) / 2

    def order(self, data: RecallData) -> Float[np.ndarray, "d"]:
        """beta."""
        return np.eye(self.dimension)[-3]


def recall_task(problem: Induction) -> RecipeTask:
    """The numbers of the task, at P = 1."""
    data = RecallData(float(problem.vocab), problem.position_variance, problem.match_variance, problem.output_variance)
    return RecipeTask(data, problem.kappa, 1.0)
