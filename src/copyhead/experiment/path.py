"""Path: how the gradient of E is computed in a step loop; moments where they suffice, else through the sequences."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from copyhead.model.network import Network, Weights
from copyhead.problem import Problem

# XLA's own thread pool costs more than it gives on products of this size, even with one thread.
COMPILATION = {"xla_cpu_multi_thread_eigen": False}


class Shared(NamedTuple):
    """What many positions share of a weight: logits of a token as key or query, and of the mean key.

    frame: orthonormal columns for the last axis of the weight, the keys that are shared. leverage: the largest curvature of E
    within the frame, by its part in that of a common shift of all logits; elsewhere: outside of it.
    """

    frame: Float[Array, "cell n k"] | None
    leverage: float
    elsewhere: float = 0.0


class Path(Protocol):
    """A gradient of E for many cells at once; hashable, because a step loop is compiled for it.

    cells: how many to run at a time. unroll: steps in one turn of the loop.
    variances: g of each weight, None if it is not trained. rates: factors on Adam's rate.
    """

    @property
    def problem(self) -> Problem: ...
    @property
    def network(self) -> Network: ...
    @property
    def cells(self) -> int: ...
    @property
    def unroll(self) -> int: ...
    @property
    def variances(self) -> Any: ...
    @property
    def rates(self) -> Any: ...
    def collect(self, data: list[Int[np.ndarray, "P L"]]) -> Any:
        """Data sets along a leading axis."""
        ...

    def prepare(self, start: Any, data: Any, key: UInt32[np.ndarray, "cell 2"]) -> tuple[Any, Any]:
        """Weights and data as the loop holds them."""
        ...

    def restore(self, weights: Any) -> Weights:
        """Weights of the network."""
        ...

    def slope(self, weights: Any, data: Any, number: UInt32[Array, ""] | None) -> Any:
        """grad E of step `number`; None: of the full batch."""
        ...

    def sequences(self, data: Any) -> Array:
        """P of each cell."""
        ...

    def shared(self, start: Any) -> list[Shared | None]:
        """For each weight what many positions share of it; None: nothing."""
        ...


def path(problem: Problem, network: Network | None = None, batch: int | None = None) -> Path:
    """The fastest path for a network.

    Raises:
        ProblemError: if problem, network and batch do not go together.
    """
    # they are built on what this module defines
    from copyhead.experiment.direct import DirectPath
    from copyhead.experiment.moment_path import MomentPath
    from copyhead.experiment.packed import PackedPath

    network = network or Network()
    if network.kind == "positional" and batch is None:
        return MomentPath(problem) if problem.beyond else PackedPath(problem)
    return DirectPath(problem, network, batch)
