"""How far a network of finite d_model is from the kernel limit: trained, and predicted from embeddings that adapt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.study.compare import branch_state
from copyhead.study.run import exact_minima
from copyhead.study.spec import Part, Reproduction
from copyhead.study.store import Store
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.finite_width import finite_width
from copyhead.theory.transition import phases


class Departure(NamedTuple):
    """cG minus that of the kernel limit, by d_model (rows of all arrays) and P.

    measured: by g_E; mean over data sets of the difference to the exact minimum of the kernel limit on the same data set, and
    its standard error. theory: by g_E; the same difference for population moments. cG: of the kernel limit, by P.
    """

    widths: list[int]
    sequences: list[int]
    measured: dict[float, Float[np.ndarray, "width P 2"]]
    theory: dict[float, Float[np.ndarray, "width P"]]
    cG: list[float]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each P, g_E and d_model."""
        return [
            {
                "P": place,
                "cG_limit": self.cG[column],
                "embedding_variance": variance,
                "width": width,
                "measured": float(values[index, column, 0]),
                "error": float(values[index, column, 1]),
                "theory": float(self.theory[variance][index, column]),
                "measured_times_width": float(values[index, column, 0] * width),
            }
            for column, place in enumerate(self.sequences)
            for variance, values in self.measured.items()
            for index, width in enumerate(self.widths)
        ]


def departures(spec: Reproduction, work: list[Part], store: Store) -> dict[str, Departure]:
    """The departure of each attention from the kernel limit; empty if widths were not part of the run."""
    return {
        attention: _departure(spec, own, store)
        for attention in spec.attentions
        if (own := [part for part in work if part.method == "width" and part.problem.attention == attention])
    }


def _departure(spec: Reproduction, own: list[Part], store: Store) -> Departure:
    own = sorted(own, key=lambda part: part.arguments["width"])
    problem, places, seeds = own[0].problem, own[0].arguments["sequences"], own[0].arguments["seeds"]
    found = phases(problem, reach=places)
    exact = exact_minima(problem, places, seeds, ("copy",)).cG.isel(start=0)
    states = [branch_state(found, place, "copy").order_parameters for place in places]
    measured = {variance: np.empty((len(own), len(places), 2)) for variance in spec.width_variances}
    theory = {variance: np.empty((len(own), len(places))) for variance in spec.width_variances}
    for row, part in enumerate(own):
        trained = store.read(part.name).cG
        sign = np.where(store.read(part.name).overlap < 0, -1.0, 1.0) if problem.attention == "linear" else 1.0
        for variance in spec.width_variances:
            difference = ((trained * sign).sel(embedding_variance=variance) - exact).transpose("P", "seed").values
            measured[variance][row, :, 0] = difference.mean(axis=1)
            measured[variance][row, :, 1] = difference.std(axis=1, ddof=1) / len(seeds) ** 0.5
            for column, (place, state) in enumerate(zip(places, states, strict=True)):
                assert isinstance(state, ContentOrderParameters)
                limit = finite_width(problem.replace(sequences=place), part.arguments["width"], variance, state)
                moved = float(limit.order_parameters.cG) - float(state.cG)
                theory[variance][row, column] = moved if limit.converged else np.nan
    widths = [part.arguments["width"] for part in own]
    return Departure(widths, places, measured, theory, [float(state.cG) for state in states])
