"""The reproduction as data: which problems, grids, seeds, starts and settings, and the parts that it is executed in."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from copyhead.problem import Attention, Problem
from copyhead.theory.transition import Phases, phases

Method = Literal["adam", "langevin", "exact", "jump", "plane"]


@dataclass(frozen=True)
class Reproduction:
    """Everything that determines the results of `copyhead reproduce`.

    problem: sizes and prior; its attention is replaced by each of the two. seeds: data sets. chis: of the two SGLD runs.
    adam_steps, adam_rate: see AdamSettings. warmup, draws, thin: see LangevinSettings. points: number of P on each grid.
    sampled: every how many-th of them is sampled by SGLD too. plane_sizes: number of L and of V in the loss maps.
    """

    problem: Problem = field(default_factory=lambda: Problem.preset("paper"))
    attentions: tuple[Attention, ...] = ("softmax", "linear")
    seeds: int = 8
    chi_factors: tuple[float, ...] = (1.0, 3.0)
    adam_steps: int = 4000
    adam_rate: float = 0.03
    warmup: int = 3000
    draws: int = 160
    thin: int = 50
    points: int = 18
    sampled: int = 2
    plane_sizes: int = 6
    plane_points: int = 12
    plane_seeds: int = 2

    @property
    def identity(self) -> str:
        """A hash of all fields: two runs with the same one give the same numbers."""
        record = {**asdict(self), "problem": self.problem.model_dump()}
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


QUICK: dict[str, Any] = {
    "seeds": 3,
    "adam_steps": 2500,
    "warmup": 1500,
    "draws": 100,
    "thin": 30,
    "points": 10,
    "plane_sizes": 3,
    "plane_points": 7,
    "plane_seeds": 1,
}


class Part(NamedTuple):
    """One piece of work, run by one worker and stored as one file. weight: expected cost, for the progress bar only."""

    name: str
    method: Method
    problem: Problem
    arguments: dict[str, Any]
    weight: float


def p_grid(found: Phases, points: int) -> list[int]:
    """Integers from well below the first transition to well above the last, half of them near the transitions."""
    marks = [place for t in found.transitions for place in ([*t.window] if t.window else [t.P])]
    low, high = min(marks), max(marks)
    outer = np.geomspace(0.4 * low, 2.5 * high, points - points // 2)
    inner = np.linspace(0.9 * low, 1.1 * high, points // 2)
    return sorted({round(float(place)) for place in (*outer, *inner)})


def plane_axes(spec: Reproduction, axis: Literal["length", "vocab"]) -> list[int]:
    """Sizes from half to twice the problem's own, doubling evenly."""
    center, least = getattr(spec.problem, axis), 2
    sizes = np.geomspace(max(center / 2, least), center * (2 if axis == "length" else 3), spec.plane_sizes)
    return sorted({round(float(size)) for size in sizes})


def plane_grid(spec: Reproduction, axis: Literal["length", "vocab"], attention: Attention) -> list[int]:
    """Common P axis of a loss map: from below the first transition of any size to above the last."""
    places = []
    for size in plane_axes(spec, axis):
        found = phases(spec.problem.replace(**{axis: size}, attention=attention))
        places += [place for t in found.transitions for place in ([*t.window] if t.window else [t.P])]
    grid = np.geomspace(0.5 * min(places), 1.6 * max(places), spec.plane_points)
    return sorted({round(float(place)) for place in grid})


def parts(spec: Reproduction) -> list[Part]:
    """All the work of a reproduction, the longest pieces first."""
    found: list[Part] = []
    halves = [list(map(int, half)) for half in np.array_split(np.arange(spec.seeds), 2) if len(half)]
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        theory = phases(problem)
        grid = p_grid(theory, spec.points)
        sampled = grid[:: spec.sampled]
        for number, seeds in enumerate(halves):
            for factor in spec.chi_factors:
                arguments = {"sequences": sampled, "seeds": seeds, "chi": spec.problem.chi * factor}
                cost = len(sampled) * len(seeds) * (spec.warmup + spec.draws * spec.thin)
                found.append(Part(f"langevin-{attention}-x{factor:g}-{number}", "langevin", problem, arguments, cost * 2.5))
            arguments = {"sequences": grid, "seeds": seeds}
            found.append(Part(f"adam-{attention}-{number}", "adam", problem, arguments, len(grid) * len(seeds) * spec.adam_steps * 2))
            found.append(Part(f"exact-{attention}-{number}", "exact", problem, arguments, len(grid) * len(seeds) * 2e4))
        if theory.verdict == "first-order":
            window = next(t.window for t in theory.transitions if t.window)
            for start in ("small", "copy"):
                bracket = (round(0.6 * window[0]), round(1.5 * window[1]))
                arguments = {"seeds": list(range(spec.seeds)), "start": start, "bracket": bracket}
                found.append(Part(f"jump-{start}", "jump", problem, arguments, spec.seeds * 30 * spec.adam_steps))
        for axis in ("length", "vocab"):
            arguments = {"sequences": plane_grid(spec, axis, attention), "seeds": list(range(spec.plane_seeds))}
            for size in plane_axes(spec, axis):
                varied = problem.replace(**{axis: size})
                scale = (size / getattr(spec.problem, axis)) ** 2
                cost = spec.plane_points * spec.plane_seeds * spec.adam_steps * scale
                found.append(Part(f"plane-{attention}-{axis}-{size}", "plane", varied, arguments, cost + 2e5))
    return sorted(found, key=lambda part: -part.weight)
