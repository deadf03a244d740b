"""The reproduction as data: its settings, and the study that they make with grids of P around the transitions of the theory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator

from copyhead.model.network import Network
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.record import Record
from copyhead.study.memory import refuse_too_large
from copyhead.study.study_file import EXPECTED, Adam, Block, Exact, Jump, Ladder, Langevin, Study
from copyhead.theory.solution import Solution, solve
from copyhead.theory.transition import phases
from copyhead.theory.unreduced import MOST_LOGITS


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


# Name of a block, by which its results are found again.
Blocks = dict[str, Block]


def study(spec: Reproduction) -> tuple[Study, Blocks]:
    """The study that a reproduction is: one block for each method, kind of attention, network and size, the longest first.

    Raises:
        ProblemError: if the sizes need too much memory, or the theory gives no grid of P.
    """
    refuse_too_large(spec.problem, spec.network, max(spec.grid or (0,)))
    found = _beyond(spec) if spec.problem.beyond else _paper(spec)
    beside = f" beyond the paper: {', '.join(spec.problem.beyond)}" if spec.problem.beyond else ""
    return Study(title=f"Phase transitions of a copy head{beside}", blocks=tuple(found.values())), found


def _adam(spec: Reproduction, **changed: Any) -> Adam:
    return Adam(**{"steps": spec.adam_steps, "rate": spec.adam_rate, "network": spec.network, "batch": spec.batch, **changed})


def _beyond(spec: Reproduction) -> Blocks:
    """Beyond the paper's task: Adam and the theory of the same data sets, both starts."""
    found: Blocks = {}
    for attention in spec.attentions:
        problem = spec.problem.replace(attention=attention)
        grid = list(spec.grid) if spec.grid else p_grid(solve(problem), spec.points)
        refuse_too_large(problem, spec.network, grid[-1])
        shared = {"problem": problem, "grid": {"sequences": tuple(grid)}, "seeds": tuple(range(spec.seeds))}
        found[f"adam-{attention}"] = Block(method=_adam(spec), **shared)
        if problem.length * problem.vocab <= LARGEST_OWN and problem.heads * problem.length**2 <= MOST_LOGITS:
            found[f"exact-{attention}"] = Block(method=Exact(), **shared)
    return found


def _paper(spec: Reproduction) -> Blocks:
    for axis in ("vocab", "length"):
        largest = spec.problem.replace(**{axis: plane_axes(spec, axis)[-1]})
        refuse_too_large(largest, spec.network, max(spec.grid or (0,)), " (the largest of the loss maps)")
    theory = {attention: phases(spec.problem.replace(attention=attention)) for attention in spec.attentions}
    found: Blocks = {}
    for attention in spec.attentions:
        problem, seeds = spec.problem.replace(attention=attention), tuple(range(spec.seeds))
        grid = tuple(spec.grid or p_grid(theory[attention], spec.points))
        langevin = Langevin(
            warmup=spec.warmup, draws=spec.draws, thin=spec.thin, network=spec.network, batch=spec.batch, trace=True
        )
        for factor in spec.chi_factors:
            chi, heads = spec.problem.chi * factor, problem.head_dimension
            # the ratio of d_h to chi is what the theory depends on
            scaled = problem.replace(chi=chi, head_dimension=None if heads is None else max(1, round(heads * factor)))
            points = {"sequences": grid[:: spec.sampled]}
            found[f"sgld-{attention}-x{factor:g}"] = Block(method=langevin, problem=scaled, grid=points, seeds=seeds)
        for name, method in (("adam", _adam(spec)), ("exact", Exact())):
            found[f"{name}-{attention}"] = Block(method=method, problem=problem, grid={"sequences": grid}, seeds=seeds)
        window = next((t.window for t in theory[attention].transitions if t.window), None)
        if window is not None:
            method = Jump(**_adam(spec).model_dump(exclude={"kind"}), sections=spec.sections, bracket=None)
            found[f"jump-{attention}"] = Block(method=method, problem=problem, seeds=seeds)
        if window is not None and problem.positional:
            place = next(t.P for t in theory[attention].transitions if t.window)
            method = Ladder(draws=spec.ladder_draws, repeats=spec.repeats)
            sampled = tuple(range(EXPECTED, min(spec.ladders, spec.seeds)))
            points = {"sequences": (round(place),)}
            found[f"ladder-{attention}"] = Block(method=method, problem=problem, grid=points, seeds=sampled)
        if theory[attention].transitions and adapts(spec.network.replace(width=spec.widths[0]), problem):
            points = {"sequences": tuple(departure_places(theory[attention]))}
            for width in spec.widths:
                for variance in spec.width_variances:
                    # from the small start linear attention may end in its metastable branch of negative c1
                    method = _adam(spec, network=spec.network.replace(width=width, embedding_variance=variance))
                    name = f"width-{attention}-{width}-{variance:g}"
                    found[name] = Block(method=method, problem=problem, grid=points, starts=("copy",), seeds=seeds)
        for axis in ("length", "vocab"):
            points = {"sequences": tuple(plane_grid(spec, axis, attention))}
            for size in plane_axes(spec, axis):
                found[f"plane-{attention}-{axis}-{size}"] = Block(
                    method=_adam(spec, steps=spec.plane_steps),
                    problem=problem.replace(**{axis: size}),
                    grid=points,
                    starts=("small",),
                    seeds=tuple(range(spec.plane_seeds)),
                )
    order = ("sgld", "ladder", "adam", "jump", "width", "exact", "plane")
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].partition("-")[0])))
