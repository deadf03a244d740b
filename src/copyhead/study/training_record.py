"""Training times as records: settings, one P, sweeps, and the whole study with its table and its JSON form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field

from copyhead.experiment.diagnostics import NOTHING, over_seeds
from copyhead.experiment.recorded import Recorded
from copyhead.model.network import Start
from copyhead.problem import Problem
from copyhead.record import Record, plain
from copyhead.theory.flow import Levels, Passage, Slowing, Trajectory

RECORDS = 401
MOST_STEPS = 3_000_000
# What is compared with the flow, curve by curve.
COMPARED = ("aG", "cG", "loss")


class TrainingSettings(Record):
    """How training time is measured."""

    rate: float | None = Field(default=None, gt=0, description="eta, learning rate of gradient descent")
    scale: float = Field(
        default=0.01, gt=0, le=1, description="standard deviation of the entries of G and W at the small start"
    )
    seeds: int = Field(default=8, ge=2, le=1000, description="number of data sets and starts at each P")
    steps: int | None = Field(default=None, ge=RECORDS - 1, le=MOST_STEPS, description="steps of gradient descent")
    grid: tuple[float, ...] | None = Field(default=None, description="P of the jump times: numbers > 0")


class Times(NamedTuple):
    """Times of the jump over data sets. values: one for each, nan if it did not jump within the run.

    mean, error, scatter: of those that jumped, see `diagnostics.over_seeds`.
    """

    values: Float[np.ndarray, "seed"]
    mean: float
    error: float
    scatter: float

    @property
    def jumped(self) -> int:
        return int(np.isfinite(self.values).sum())


def of_jumps(values: Float[np.ndarray, "seed"]) -> Times:
    """What the values that are there say together."""
    kept = values[np.isfinite(values)]
    found = over_seeds(kept) if len(kept) else NOTHING
    return Times(values, found.mean, found.error, found.scatter)


class Place(NamedTuple):
    """One P. levels, theory: of the flow from the start of typical size. rate, limit: learning rate and its stability limit.

    steps: of gradient descent. population: tau of the jump on population moments. deviation: largest distance of its curves
    from those of the flow, over the range of the flow. data: tau over data sets. paired: tau of the flow, each from the
    projection of the start that was trained. z: mean of data - paired in its standard errors, nan unless all jumped.
    adam: steps of Adam over data sets.
    """

    P: int
    start: Start
    levels: Levels
    theory: Passage
    rate: float
    limit: float
    steps: int
    population: float
    deviation: dict[str, float]
    data: Times
    paired: Times
    z: float
    adam: Times


class Curves(NamedTuple):
    """Everything against time at one P. theory: the flow at the times of the records. loss is per token on the population."""

    theory: Trajectory
    population: Recorded
    data: Recorded
    adam: Recorded


class Sweep(NamedTuple):
    """tau of the jump against the initial scale or the learning rate: theory and gradient descent on population moments."""

    value: Float[np.ndarray, "n"]
    theory: Float[np.ndarray, "n"]
    population: Float[np.ndarray, "n"]
    deviation: Float[np.ndarray, "n"]


class Line(NamedTuple):
    """The theory against P from one start of typical size, see `Passage`; from the fold to the last P of the grid."""

    start: Start
    sequences: Float[np.ndarray, "n"]
    time: Float[np.ndarray, "n"]
    plateau: Float[np.ndarray, "n"]
    length: Float[np.ndarray, "n"]


@dataclass(frozen=True)
class Training:
    """Training times of one problem. main: the place whose curves are kept. slowing: by start, empty without folds."""

    problem: Problem
    settings: TrainingSettings
    lines: tuple[Line, ...]
    places: tuple[Place, ...]
    main: Place
    curves: Curves
    scales: Sweep
    rates: Sweep
    slowing: tuple[Slowing, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON: nan as None, arrays as lists."""
        curves = {
            name: {"step": one.step, **{key: getattr(one.observables, key) for key in COMPARED}}
            for name, one in self.curves._asdict().items()
            if isinstance(one, Recorded)
        }
        return plain({
            "problem": self.problem.model_dump(),
            "settings": self.settings.model_dump(),
            "lines": [one._asdict() for one in self.lines],
            "places": [_nested(place) for place in self.places],
            "main": self.main.P,
            "curves": {"theory": self.curves.theory._asdict(), **curves},
            "scales": self.scales._asdict(),
            "rates": self.rates._asdict(),
            "slowing": [one._asdict() for one in self.slowing],
            "seconds": self.seconds,
        })  # fmt: skip

    def __str__(self) -> str:
        lines = [
            f"{self.problem.attention} attention, initial scale {self.settings.scale:g}, tau = eta * step",
            "     P  start  theory           tau  plateau aG (length)      eta  population  largest deviation  "
            "data sets +- error (scatter)  jumped  flow from their starts      z  Adam steps",
        ]
        lines += [_row(one) for one in self.places]
        for one in self.slowing:
            lines.append(
                f"slowing down beyond P = {one.fold:.3f} ({one.start} start): exponent {one.time_exponent[0]:.3f} at distance "
                f"{one.distance[0]:.0e} .. {one.time_exponent[-1]:.4f} at {one.distance[-1]:.0e}; time * rate / 2 pi "
                f"{one.product[0]:.3f} .. {one.product[-1]:.4f}"
            )
        for name, sweep in (("initial scale", self.scales), ("eta", self.rates)):
            pairs = zip(sweep.value, sweep.theory, sweep.population, strict=True)
            values = ", ".join(f"{value:.3g}: {expected:.3f} ({seen:.3f})" for value, expected, seen in pairs)
            lines.append(f"tau at P = {self.main.P} by theory (population) against {name}: {values}")
        return "\n".join(lines)


def _row(one: Place) -> str:
    """One line of the table."""
    passed, data = one.theory, one.data
    plateau = "-" if math.isnan(passed.plateau) else f"{passed.plateau:.5f} ({passed.length:.2f})"
    return (
        f"{one.P:6d}  {one.start:5s}  {passed.status:13s}  {passed.time:7.3f}  {plateau:>19s}  {one.rate:.5f}  "
        f"{one.population:10.3f}  {max(one.deviation.values()):16.2%}   {data.mean:9.3f} +- {data.error:.3f} "
        f"({data.scatter:.3f})  {data.jumped:3d}/{len(data.values)}  {one.paired.mean:22.3f}  {one.z:5.1f}  "
        f"{one.adam.mean:10.0f}"
    )


def _nested(value: Any) -> Any:
    """Named tuples as dictionaries."""
    return {key: _nested(part) for key, part in value._asdict().items()} if hasattr(value, "_asdict") else value
