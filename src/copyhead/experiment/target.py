"""The posterior of one data set as log densities that any sampler can take: joint, collapsed, reduced.

Plain JAX for one position at a time, through `model.energy` alone; `jax.vmap`, `jax.grad` and libraries of samplers apply. The
step loops of this package (`langevin`, `mala`, `hamiltonian`) have faster forms of these densities; tests hold them together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.model import layout, targets
from copyhead.model.attention import attention
from copyhead.model.energy import energy
from copyhead.model.layout import Layout
from copyhead.model.moments import Moments
from copyhead.model.network import Positional
from copyhead.model.prior import Prior, prior
from copyhead.problem import Attention, Problem


class Posed(NamedTuple):
    """A positional network and its data. target: T. moments: of one data set, or expected ones in one block."""

    target: Float[np.ndarray, "L L"]
    moments: Moments
    layout: Layout
    prior: Prior
    kind: Attention


def posed(problem: Problem, moments: Moments) -> Posed:
    """Raises:
    ProblemError: for attention that reads tokens and for separate query and key matrices.
    """
    problem.require_positional("targets are known")
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    return Posed(target, moments, layout.full(problem.length, problem.cyclic), prior(problem), problem.attention)


class Target(ABC):
    """A density of one data set; up to a constant that does not depend on the position, at a mean-field scale chi."""

    def __init__(self, posed: Posed) -> None:
        self.posed = posed

    @abstractmethod
    def log_density(self, position: Any, chi: Float[Array, ""] | float) -> Float[Array, ""]: ...

    @abstractmethod
    def initial(self, weights: Positional) -> Any:
        """The position of a network."""

    def value_and_gradient(self, position: Any, chi: Float[Array, ""] | float) -> tuple[Float[Array, ""], Any]:
        """log density and its gradient by the position."""
        return jax.value_and_grad(self.log_density)(position, chi)

    def energy(self, logits: Float[Array, "L L"], output: Float[Array, "V V"]) -> Float[Array, ""]:
        """E(G, W)."""
        found = self.posed
        return energy(logits, output, found.target, found.moments, found.layout, found.prior, found.kind)


class Joint(Target):
    """(G, W), a Positional: log p = -chi E(G, W)."""

    def log_density(self, position: Positional, chi: Float[Array, ""] | float) -> Float[Array, ""]:
        return -chi * self.energy(*position)

    def initial(self, weights: Positional) -> Positional:
        return Positional(jnp.asarray(weights.logits), jnp.asarray(weights.output))


class Collapsed(Target):
    """G alone, L x L: W integrated out, log p = -chi min_W E(G, W) - (V/2) log det(F/kappa + 1/g_O).

    E is quadratic in W, so the integral is Gaussian: its maximum and its width.
    """

    def log_density(self, position: Float[Array, "L L"], chi: Float[Array, ""] | float) -> Float[Array, ""]:
        found, numbers = self.posed, self.posed.prior
        matrix = attention(position, found.kind, numbers.length)
        square = found.moments.contract(matrix, matrix, found.layout)[0] / numbers.kappa
        overlap = found.moments.contract(matrix, found.target, found.layout)[0] / numbers.kappa
        precision = square + jnp.eye(len(square)) / numbers.output_variance
        # E is stationary in the best W, so its dependence on G through W does not count
        best = jax.lax.stop_gradient(jnp.linalg.solve(precision, overlap))
        return -chi * self.energy(position, best) - len(square) / 2 * jnp.linalg.slogdet(precision)[1]

    def initial(self, weights: Positional) -> Float[Array, "L L"]:
        return jnp.asarray(weights.logits)


class Reduced(Collapsed):
    """(c1, cG) of a network whose logits are tied to c1 1 1^T + cG T: the collapsed density there, with a flat measure."""

    def log_density(self, position: Float[Array, "2"], chi: Float[Array, ""] | float) -> Float[Array, ""]:
        return super().log_density(position[0] + position[1] * self.posed.target, chi)

    def initial(self, weights: Positional) -> Float[Array, "2"]:
        on = jnp.sum(self.posed.target * weights.logits) / jnp.sum(self.posed.target)
        off = jnp.sum((1 - self.posed.target) * weights.logits) / jnp.sum(1 - self.posed.target)
        return jnp.stack([off, on - off])


TARGETS: dict[str, type[Target]] = {"joint": Joint, "collapsed": Collapsed, "reduced": Reduced}
