"""How the places of the transitions grow with L, in theory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.problem import Problem
from copyhead.theory.leading_order import leading_order
from copyhead.theory.transition import phases

LENGTHS = (18, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PLACES = ("P*", "lower fold", "upper fold", "Eq. 21", "P_c", "Eq. 16", "crossover", "Eq. 17", "fold scale")


class Scaling(NamedTuple):
    """places: P by name (see PLACES), nan where there is none at that L.

    Softmax: P*, the folds, the scale of the upper one, Eq. 21. Linear: the rest.
    """

    lengths: Float[np.ndarray, "n"]
    places: dict[str, Float[np.ndarray, "n"]]

    def exponent(self, name: str) -> tuple[Float[np.ndarray, "n-1"], Float[np.ndarray, "n-1"]]:
        """Geometric means of neighbouring L, and d ln P / d ln L between them."""
        middle = np.sqrt(self.lengths[1:] * self.lengths[:-1])
        return middle, np.diff(np.log(self.places[name])) / np.diff(np.log(self.lengths))


def scaling(problem: Problem, lengths: Sequence[int] = LENGTHS) -> Scaling:
    """Places of all transitions over L, at the other parameters of `problem`."""
    places = {name: np.full(len(lengths), np.nan) for name in PLACES}
    for index, length in enumerate(lengths):
        varied = problem.replace(length=length, sequences=None)
        scales = leading_order(varied)
        for name, value in zip(("Eq. 16", "Eq. 17", "Eq. 21", "fold scale"), scales, strict=True):
            places[name][index] = value
        for t in phases(varied.replace(attention="softmax")).transitions:
            if t.window:
                places["P*"][index] = t.P
                places["lower fold"][index], places["upper fold"][index] = t.window
        for t in phases(varied.replace(attention="linear")).transitions:
            if t.kind != "first-order":  # linear attention jumps only for token_scale > 0 and large L / V
                places["P_c" if t.kind == "second-order" else "crossover"][index] = t.P
    return Scaling(np.array(lengths, float), places)
