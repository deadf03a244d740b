"""The reproduction as data: which problems, grids, seeds, starts and settings, and the parts that it is executed in."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, field_validator

from copyhead.model.network import Network
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.record import Record
from copyhead.study.memory import refuse_too_large
from copyhead.theory.solution import Solution, solve
from copyhead.theory.transition import phases
from copyhead.theory.unreduced import MOST_LOGITS

Method = Literal["adam", "langevin", "exact", "jump", "ladder", "plane", "width"]


class Reproduction(Record):
    """Everything that determines the results of `copyhead reproduce`."""

    problem: Problem = Field(default_factory=lambda: Problem.preset("paper"), description="sizes and prior of the network")
    network: Network = Field(default_factory=Network, description="the network that is trained and sampled")
    batch: int | None = Field(default=None, ge=1, description="sequences in one step's gradient; None: all of them")
    attentions: tuple[Attention, ...] = Field(default=("softmax", "linear"), min_length=1, description="kinds of attention")
    grid: tuple[int, ...] | None = Field(
        default=None,
        description="P of every training run, ascending integers >= 1 (at least 4); default: from the theory",
    )
    seeds: int = Field(default=8, ge=2, le=1000, description="number of data sets")
    chi_factors: tuple[float, float] = Field(default=(1.0, 3.0), description="chi of the two SGLD runs, in units of chi")
    adam_steps: int = Field(default=4000, ge=100, description="updates of one training run")
    adam_rate: float = Field(default=0.03, gt=0, lt=1, description="learning rate of Adam at the start")
    warmup: int = Field(default=3000, ge=0, description="SGLD steps before the first draw")
    draws: int = Field(default=160, ge=20, description="recorded states of a chain")
    thin: int = Field(default=50, ge=1, description="SGLD steps from one draw to the next")
    points: int = Field(default=18, ge=4, le=200, description="number of P on each grid")
    sampled: int = Field(default=2, ge=1, description="every how many-th P is sampled by SGLD")
    sections: int = Field(default=12, ge=1, le=100, description="values of P tried at a time in the search for a jump")
    ladders: int = Field(
        default=2, ge=0, le=100, description="data sets, beside expected moments, with F(aG) and P* by sampling"
    )
    repeats: int = Field(
        default=4, ge=4, le=100, multiple_of=2, description="independent ladders of one F(aG), from both starts"
    )
    ladder_draws: int = Field(default=120, ge=50, description="draws of each window of a ladder")
    widths: tuple[int, ...] = Field(default=(64, 128, 256, 512), description="d_model of the departure from theory")
    width_variances: tuple[float, ...] = Field(default=(1.0, 0.01), description="g_E of the departure from theory")
    plane_sizes: int = Field(default=6, ge=2, le=50, description="number of L, and of V, in the loss maps")
    plane_points: int = Field(default=12, ge=3, le=200, description="number of P in the loss maps")
    plane_steps: int = Field(default=2500, ge=100, description="updates of one training run in the loss maps")
    plane_seeds: int = Field(default=2, ge=1, description="data sets for each point of the loss maps")

    @field_validator("grid")
    @classmethod
    def _ascending(cls, grid: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if grid is not None and (len(grid) < SHORTEST_GRID or grid[0] < 1 or any(a >= b for a, b in pairwise(grid))):
            raise ValueError("must be at least 4 ascending integers >= 1")
        return grid

    @field_validator("widths", "width_variances")
    @classmethod
    def _distinct_sizes(cls, sizes: tuple[float, ...]) -> tuple[float, ...]:
        if not sizes or len(set(sizes)) < len(sizes) or (list(sizes) != sorted(sizes) and isinstance(sizes[0], int)):
            raise ValueError("must be one or more different values, d_model in ascending order")
        if min(sizes) <= 0 or (isinstance(sizes[0], int) and not 2 <= min(sizes) <= max(sizes) <= 16384):
            raise ValueError("must be > 0, and d_model from 2 to 16384")
        return sizes

    @field_validator("chi_factors")
    @classmethod
    def _two_scales(cls, factors: tuple[float, float]) -> tuple[float, float]:
        if not 0 < factors[0] < factors[1]:
            raise ValueError("must be two ascending numbers > 0")
        return factors

    @field_validator("attentions")
    @classmethod
    def _distinct(cls, attentions: tuple[Attention, ...]) -> tuple[Attention, ...]:
        if len(set(attentions)) < len(attentions):
            raise ValueError("must not repeat")
        return attentions

    @property
    def identity(self) -> str:
        """A hash of all fields, files that they name, the package's own sources and the numerical libraries' versions.

        Two runs with the same one give the same numbers; a changed kernel never meets the parts of an older one.
        """
        digest = hashlib.sha256(self.model_dump_json().encode() + json.dumps(self.problem.digests).encode())
        for path in sorted(Path(__file__).parents[1].rglob("*.py")):
            digest.update(path.read_bytes())
        for package in ("jax", "numpy", "scipy", "optax"):
            digest.update(version(package).encode())
        return digest.hexdigest()[:16]


# Largest L V at which S is minimised on each data set: an evaluation takes (L V)^2 operations, a minimum some hundred of them.
LARGEST_OWN = 1500
# Transitions that have a part of the grid each.
MOST_SPANS = 3
# Fewest P that a transition can be read off.
SHORTEST_GRID = 4


def adapts(network: Network, problem: Problem) -> bool:
    """Whether the theory of finite width applies: orthonormal embeddings, all trained, and a fused query-key matrix."""
    return (
        network.kind == "embedded"
        and network.embedding == "orthogonal"
        and network.positions == "learned"
        and network.width >= problem.length + problem.vocab
        and problem.head_dimension is None
    )


QUICK: dict[str, Any] = {
    "seeds": 3,
    "adam_steps": 2500,
    "warmup": 1500,
    "draws": 100,
    "thin": 30,
    "points": 10,
    "ladders": 0,
    "ladder_draws": 80,
    "plane_sizes": 3,
    "plane_points": 7,
    "plane_steps": 1500,
    "plane_seeds": 1,
}


# Attention that reads tokens has no moment form: a step costs a hundred times as much, so there is less of everything.
CONTENT: dict[str, Any] = {
    "seeds": 4,
    "adam_steps": 2500,
    "warmup": 2000,
    "draws": 100,
    "thin": 60,
    "points": 14,
    "sampled": 3,
    "sections": 4,
    "plane_sizes": 4,
    "plane_points": 8,
    "plane_steps": 1200,
    "plane_seeds": 1,
}


def settings_for(network: Network, quick: bool) -> dict[str, Any]:
    """Defaults that depend on the network and on whether a check or a result is wanted."""
    content = network.kind != "positional"
    chosen = {**(CONTENT if content else {}), **(QUICK if quick else {})}
    if content and quick:
        chosen |= {"seeds": 2, "points": 6, "widths": (64, 256), "plane_sizes": 2, "plane_points": 4, "draws": 40}
    return chosen


class Part(NamedTuple):
    """One piece of work, run by one worker and stored as one file. weight: expected cost, for the progress bar only."""

    name: str
    method: Method
    problem: Problem
    arguments: dict[str, Any]
    weight: float


def p_grid(found: Solution, points: int) -> list[int]:
    """Integers from well below the first transition to well above the last, two thirds of them close to the transitions.

    Close: across a coexistence window and a tenth beyond it; from a tenth below to a third above any other place.
    """
    spans = _merged(
        [(0.9 * t.window[0], 1.1 * t.window[1]) if t.window else (0.9 * t.P, 1.33 * t.P) for t in found.transitions]
    )
    if not spans:
        raise ProblemError("grid = None: the theory finds no transition to put the grid around; give one")
    outer = np.geomspace(0.45 * spans[0][0], 2.2 * spans[-1][1], points - points * 2 // 3)
    inner = [np.geomspace(*span, points * 2 // 3 // len(spans)) for span in spans]
    grid = sorted({round(float(place)) for place in (*outer, *np.concatenate(inner))} - {0})
    if len(grid) < SHORTEST_GRID:
        raise ProblemError(
            f"noise: must be larger; the transitions lie at P < {spans[-1][1]:.3g}, where there are too few integers"
        )
    return grid


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order; where more than MOST_SPANS overlap, as the jumps of many rows do, those that overlap are one."""
    if len(spans) <= MOST_SPANS:
        return spans
    found = [spans[0]]
    for low, high in spans[1:]:
        if low <= found[-1][1]:
            found[-1] = found[-1][0], max(high, found[-1][1])
        else:
            found.append((low, high))
    return found


def departure_places(found: Solution) -> list[int]:
    """The P of the departure from theory against width: before the last transition, and as a copy head."""
    last = found.transitions[-1]
    below, above = last.window or (last.P, last.P)
    return [max(1, round(0.8 * below)), max(2, round(1.2 * above))]


def plane_axes(spec: Reproduction, axis: Literal["length", "vocab"]) -> list[int]:
    """Sizes, evenly spaced in the logarithm, from half the problem's own to twice (L) or three times (V)."""
    # attention that reads tokens has no theory at L = 2, where the own position is the target of the target
    center, least = getattr(spec.problem, axis), 3 if axis == "length" and spec.problem.content else 2
    sizes = np.geomspace(max(center / 2, least), center * (2 if axis == "length" else 3), spec.plane_sizes)
    return sorted({round(float(size)) for size in sizes})


def plane_grid(spec: Reproduction, axis: Literal["length", "vocab"], attention: Attention) -> list[int]:
    """Common P axis of a loss map: from below the first transition at its ends and its center to above the last."""
    places = []
    sizes = plane_axes(spec, axis)
    for size in {sizes[0], getattr(spec.problem, axis), sizes[-1]}:
        found = phases(spec.problem.replace(**{axis: size}, attention=attention))
        places += [place for t in found.transitions for place in ([*t.window] if t.window else [t.P])]
    if not places:
        raise ProblemError(f"{axis}: the theory finds no transition to put a loss map around")
    grid = np.geomspace(0.5 * min(places), 1.6 * max(places), spec.plane_points)
    return sorted({round(float(place)) for place in grid} - {0})


def beyond_parts(spec: Reproduction) -> list[Part]:
    """The work beyond the paper's task: Adam and the theory of the same data sets, both starts."""
    found = []
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        grid = list(spec.grid) if spec.grid else p_grid(solve(problem), spec.points)
        refuse_too_large(problem, spec.network, grid[-1])
        for number, seeds in enumerate(list(map(int, half)) for half in np.array_split(np.arange(spec.seeds), 2)):
            if seeds:
                arguments, cost = {"sequences": grid, "seeds": seeds}, len(grid) * len(seeds) * problem.heads**2
                found.append(Part(f"adam-{attention}-{number}", "adam", problem, arguments, cost * spec.adam_steps * 4))
                if problem.length * problem.vocab <= LARGEST_OWN and problem.heads * problem.length**2 <= MOST_LOGITS:
                    found.append(Part(f"exact-{attention}-{number}", "exact", problem, arguments, cost * 4e4))
    return sorted(found, key=lambda part: (0 not in part.arguments["seeds"], -part.weight))


def parts(spec: Reproduction) -> list[Part]:
    """All the work of a reproduction: of each half of the seeds the longest pieces first.

    Pieces that differ in the seeds only share their kernels: one after the other they compile them once, side by side twice.

    Raises:
        ProblemError: if the sizes need too much memory, or the theory gives no grid of P.
    """
    if spec.problem.beyond:
        refuse_too_large(spec.problem, spec.network, max(spec.grid or (0,)))
        return beyond_parts(spec)
    for axis in ("vocab", "length"):
        largest = spec.problem.replace(**{axis: plane_axes(spec, axis)[-1]})
        refuse_too_large(largest, spec.network, max(spec.grid or (0,)), " (the largest of the loss maps)")
    found: list[Part] = []
    halves = [list(map(int, half)) for half in np.array_split(np.arange(spec.seeds), 2) if len(half)]
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        theory = phases(problem)
        grid = list(spec.grid) if spec.grid else p_grid(theory, spec.points)
        sampled = grid[:: spec.sampled]
        for number, seeds in enumerate(halves):
            for factor in spec.chi_factors:
                arguments = {"sequences": sampled, "seeds": seeds, "chi": spec.problem.chi * factor}
                cost = len(sampled) * len(seeds) * (spec.warmup + spec.draws * spec.thin)
                found.append(Part(f"langevin-{attention}-x{factor:g}-{number}", "langevin", problem, arguments, cost * 2.5))
            arguments = {"sequences": grid, "seeds": seeds}
            found.append(
                Part(
                    f"adam-{attention}-{number}",
                    "adam",
                    problem,
                    arguments,
                    len(grid) * len(seeds) * spec.adam_steps * 2,
                )
            )
            found.append(Part(f"exact-{attention}-{number}", "exact", problem, arguments, len(grid) * len(seeds) * 2e4))
        window = next((t.window for t in theory.transitions if t.window), None)
        if window is not None:
            for start in ("small", "copy"):
                bracket = (round(0.6 * window[0]), round(1.5 * window[1]))
                arguments = {"seeds": list(range(spec.seeds)), "start": start, "bracket": bracket}
                found.append(Part(f"jump-{attention}-{start}", "jump", problem, arguments, spec.seeds * 30 * spec.adam_steps))
        if window is not None and problem.positional:
            place = next(t.P for t in theory.transitions if t.window)
            arguments = {"sequences": round(place), "seeds": list(range(min(spec.ladders, spec.seeds)))}
            cost = (1 + len(arguments["seeds"])) * spec.repeats * (spec.ladder_draws + 300)
            found.append(Part(f"ladder-{attention}", "ladder", problem, arguments, 500 * cost))
        if theory.transitions and adapts(spec.network.replace(width=spec.widths[0]), problem):
            for number, width in enumerate(spec.widths):
                arguments = {"sequences": departure_places(theory), "seeds": list(range(spec.seeds)), "width": width}
                found.append(Part(f"width-{attention}-{number}", "width", problem, arguments, 4e4 * width))
        for axis in ("length", "vocab"):
            arguments = {"sequences": plane_grid(spec, axis, attention), "seeds": list(range(spec.plane_seeds))}
            for size in plane_axes(spec, axis):
                varied = problem.replace(**{axis: size})
                scale = (size / getattr(spec.problem, axis)) ** 2
                cost = spec.plane_points * spec.plane_seeds * spec.plane_steps * scale
                found.append(Part(f"plane-{attention}-{axis}-{size}", "plane", varied, arguments, cost + 2e5))
    return sorted(found, key=lambda part: (0 not in part.arguments["seeds"], -part.weight))
