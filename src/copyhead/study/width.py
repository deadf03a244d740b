"""How far a network of finite d_model is from the kernel limit: trained, and predicted from embeddings that adapt."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from copyhead.experiment.diagnostics import over_seeds
from copyhead.study.branch import branch_state, signed
from copyhead.study.curves import kept
from copyhead.study.exact import exact_minima
from copyhead.study.results import Results
from copyhead.study.spec import Reproduction
from copyhead.theory.content import ContentOrderParameters
from copyhead.theory.finite_width import finite_width
from copyhead.theory.transition import phases

QUANTITIES = ContentOrderParameters._fields


class Departure(NamedTuple):
    """Order parameters minus those of the kernel limit, by d_model, P and quantity (axes of all arrays).

    measured, error: by g_E; mean over data sets of the difference to the exact minimum of the kernel limit on the same data
    set, and its standard error. theory: by g_E; the same difference for population moments. limit: population, by P, quantity.
    """

    widths: list[int]
    sequences: list[int]
    measured: dict[float, Float[np.ndarray, "width P q"]]
    error: dict[float, Float[np.ndarray, "width P q"]]
    theory: dict[float, Float[np.ndarray, "width P q"]]
    limit: Float[np.ndarray, "P q"]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each P, quantity, g_E and d_model."""
        return [
            {
                "P": place,
                "quantity": quantity,
                "limit": float(self.limit[column, index]),
                "embedding_variance": variance,
                "width": width,
                "measured": float(self.measured[variance][row, column, index]),
                "error": float(self.error[variance][row, column, index]),
                "theory": float(self.theory[variance][row, column, index]),
                "measured_times_width": float(self.measured[variance][row, column, index] * width),
            }
            for column, place in enumerate(self.sequences)
            for index, quantity in enumerate(QUANTITIES)
            for variance in self.measured
            for row, width in enumerate(self.widths)
        ]


def departures(spec: Reproduction, found: Results) -> dict[str, Departure]:
    """The departure of each attention from the kernel limit; empty if widths were not part of the run."""
    return {
        attention: _departure(spec, attention, found)
        for attention in spec.attentions
        if any(name.startswith(f"width-{attention}-") for name in found.blocks)
    }


def _departure(spec: Reproduction, attention: str, results: Results) -> Departure:
    own = {
        (width, variance): f"width-{attention}-{width}-{variance:g}"
        for width in spec.widths
        for variance in spec.width_variances
    }
    block = results.blocks[next(iter(own.values()))]
    problem, places, seeds = block.problem, [round(place or 0) for place in block.sequences], list(block.seeds)
    found = phases(problem, reach=places)
    exact = exact_minima(problem, places, seeds, ("copy",)).isel(start=0)
    states = [branch_state(found, place, "copy").order_parameters for place in places]
    limit = np.array([[float(value) for value in state] for state in states])
    shape = len(spec.widths), len(places), len(QUANTITIES)
    measured, error, theory = ({variance: np.full(shape, np.nan) for variance in spec.width_variances} for _ in range(3))
    for row, width in enumerate(spec.widths):
        for variance in spec.width_variances:
            trained = signed(kept(results[own[width, variance]][[*QUANTITIES, "overlap", "diverged"]]), attention).isel(start=0)
            for index, quantity in enumerate(QUANTITIES):
                difference = (trained[quantity] - exact[quantity]).transpose("P", "seed").values
                estimates = [over_seeds(values[np.isfinite(values)]) for values in difference]
                measured[variance][row, :, index] = [estimate.mean for estimate in estimates]
                error[variance][row, :, index] = [estimate.error for estimate in estimates]
            for column, (place, state) in enumerate(zip(places, states, strict=True)):
                assert isinstance(state, ContentOrderParameters)
                moved = finite_width(problem.replace(sequences=place), width, variance, state)
                if moved.converged:
                    theory[variance][row, column] = np.array(moved.order_parameters) - limit[column]
    return Departure(list(spec.widths), places, measured, error, theory, limit)
