"""Theory at finite chi against sampling, on expected moments: means and variances of each branch, and precursors.

On expected moments theory and sampling have the same posterior, so that what is left is the expansion in 1/chi. Chains are HMC
on the collapsed posterior (means, variances: exact) and SGLD on (G, W) (relaxation, a property of that dynamics).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from copyhead.experiment import langevin, umbrella
from copyhead.experiment.cells import STARTS, repeated
from copyhead.experiment.convergence import Verdict, judge, summary
from copyhead.experiment.hamiltonian import HamiltonianSettings
from copyhead.experiment.langevin import LangevinSettings
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.model import moments, tokens
from copyhead.model.moments import Empirical
from copyhead.model.network import Network
from copyhead.problem import Attention, Problem
from copyhead.record import plain
from copyhead.study.branch import sector
from copyhead.theory.fluctuations import Fluctuations, fluctuations
from copyhead.theory.precursors import Approach, precursors
from copyhead.theory.transition import phases

CHIS = (5.0, 15.0, 50.0, 150.0)
QUANTITIES = ("c1", "cG", "aG")
# chi of the approach to a fold: the rounding by fluctuations begins at a distance that falls as chi^(-2/3).
APPROACH_CHIS = (50.0, 200.0, 1000.0)


class Settings(NamedTuple):
    """chains: from each start. steps: of SGLD for relaxation, by chain, half of them warm-up."""

    chains: int = 4
    warmup: int = 300
    draws: int = 1000
    steps: int = 60_000


class Compared(NamedTuple):
    """One quantity of one branch: sampled mean and standard deviation with errors beside the theory, differences in errors.

    verdict: of the chains of both starts at this P. status: of the theory, see `Fluctuations`; "absent" if it has no such
    branch, and then its numbers are nan.
    """

    attention: Attention
    chi: float
    P: float
    branch: str
    verdict: Verdict
    quantity: str
    mean: float
    error: float
    theory: float
    z: float
    deviation: float
    deviation_error: float
    theory_deviation: float
    z_deviation: float
    status: str


def expected(problem: Problem, places: list[float]) -> Empirical:
    """Expected moments at each P."""
    found = [moments.expected(tokens.uniform(problem.vocab), place, problem.length) for place in places]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


def places(problem: Problem) -> list[float]:
    """P to compare at: well below and above each transition, and at P* itself, by the theory for chi -> infinity."""
    found = []
    for transition in phases(problem).transitions:
        low, high = transition.window or (transition.P, transition.P)
        found += [0.8 * low, *([transition.P] if transition.window else []), 1.3 * high]
    return sorted(found)


def compare(
    problem: Problem,
    chis: tuple[float, ...] = CHIS,
    settings: Settings | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> list[Compared]:
    """Means and standard deviations at every chi and at the `places` of a problem."""
    settings = settings or Settings()
    rows: list[Compared] = []
    where = places(problem)
    data = expected(problem, where)
    how = HamiltonianSettings(warmup=settings.warmup, draws=settings.draws, losses=False)
    found = phases(problem, reach=where)
    for chi in chis:
        report(f"{problem.attention}, chi = {chi:g}")
        here = problem.replace(chi=chi)
        trace = umbrella.unbiased(here, data, 2 * settings.chains, how, 0).observables
        for index, place in enumerate(where):
            drawn = {name: np.asarray(getattr(trace, name)[0, :, index], float) for name in QUANTITIES}
            if problem.attention == "linear":
                sign = sector(drawn["c1"])[:, None]
                drawn = {name: values * sign for name, values in drawn.items()}
            judged = judge({start: {k: v[number::2] for k, v in drawn.items()} for number, start in enumerate(STARTS)})
            branches = list(fluctuations(here, place, found))
            for name, quantities in judged.branches.items():
                chains = {key: values if name == "all" else values[STARTS.index(name) :: 2] for key, values in drawn.items()}
                theory = _nearest(branches, quantities["cG"].mean)
                rows += [_row(problem, chi, place, name, judged.verdict, key, chains[key], theory) for key in QUANTITIES]
    return rows


def _nearest(branches: list[Fluctuations], cG: float) -> Fluctuations | None:
    """The branch whose mean cG is nearest to a sampled one, if there is a branch with a minimum."""
    known = [one for one in branches if one.status != "no minimum"]
    return min(known, key=lambda one: abs(one.cG - cG)) if known else None


def _row(
    problem: Problem,
    chi: float,
    place: float,
    branch: str,
    verdict: Verdict,
    quantity: str,
    chains: Float[np.ndarray, "chain draw"],
    theory: Fluctuations | None,
) -> Compared:
    from arviz_stats.base.array import array_stats

    seen = summary(chains)
    deviation_error = float(array_stats.mcse(chains, chain_axis=0, draw_axis=1, method="sd"))
    mean = deviation = math.nan
    if theory is not None:
        mean, deviation = float(getattr(theory, quantity)), theory.deviations[quantity]
    return Compared(
        problem.attention,
        chi,
        place,
        branch,
        verdict,
        quantity,
        seen.mean,
        seen.error,
        mean,
        (seen.mean - mean) / seen.error,
        seen.deviation,
        deviation_error,
        deviation,
        (seen.deviation - deviation) / deviation_error,
        "absent" if theory is None else theory.status,
    )


Reached = Literal["mixed", "not converged", "left the branch"]


class Approached(NamedTuple):
    """Sampled precursors along an approach of the theory, at one chi. Arrays by place, towards the transition.

    susceptibility: chi Var of the order parameter, with error. rate: of relaxation per step of SGLD, from the integrated
    autocorrelation time (2 / rate for one exponential), with error, nan from chains that are too short; theory_rate: by the
    theory at the same step sizes. status: of the chains of the susceptibility; without "mixed" its values are not to be used.
    """

    approach: Approach
    chi: float
    sequences: Float[np.ndarray, "n"]
    distance: Float[np.ndarray, "n"]
    susceptibility: Float[np.ndarray, "n"]
    susceptibility_error: Float[np.ndarray, "n"]
    rate: Float[np.ndarray, "n"]
    rate_error: Float[np.ndarray, "n"]
    theory_rate: Float[np.ndarray, "n"]
    status: tuple[Reached, ...]


def approach(
    problem: Problem, chi: float, found: tuple[Approach, ...], settings: Settings | None = None, points: int = 8
) -> list[Approached]:
    """Sampled precursors on the way to the upper fold (softmax) or to P_c from below (linear), at one chi."""
    settings = settings or Settings()
    rows = []
    for way in found:
        if not way.before or way.place not in ("upper fold", "P_c"):
            continue
        chosen = np.unique(np.round(np.linspace(0, len(way.sequences) - 1, points)).astype(int))
        rows.append(_approached(problem.replace(chi=chi), way, chosen, settings))
    return rows


def _approached(problem: Problem, way: Approach, chosen: np.ndarray, settings: Settings) -> Approached:
    where = [float(place) for place in way.sequences[chosen]]
    data = expected(problem, where)
    how = HamiltonianSettings(leapfrogs=10, warmup=settings.warmup, draws=settings.draws, losses=False)
    count = 2 * settings.chains
    trace = umbrella.unbiased(problem, data, count, how, 0, kinds=("small",))
    values = np.asarray(getattr(trace.observables, way.order_parameter)[0], float)
    variance = problem.chi * np.array([values[:, index].var(axis=1, ddof=1) for index in range(len(where))])
    rate, rate_error, slow = _rates(problem, data, way.order_parameter, settings)
    # a run that has gone over to copying has left the branch for good
    left = np.asarray(trace.marks.place[0]).max(axis=(0, 2)) > _between(problem)
    passed = [summary(values[:, index]).passed for index in range(len(where))]
    status: list[Reached] = [
        "left the branch" if gone else "mixed" if good else "not converged" for gone, good in zip(left, passed, strict=True)
    ]
    steps = _steps(problem, data)
    theory = [_theory_rate(problem, place, step) for place, step in zip(where, steps, strict=True)]
    return Approached(
        way,
        problem.chi,
        np.array(where),
        way.distance[chosen],
        variance.mean(axis=1),
        variance.std(axis=1, ddof=1) / math.sqrt(count),
        np.where(slow, np.nan, rate),
        np.where(slow, np.nan, rate_error),
        np.array(theory),
        tuple(status),
    )


def _between(problem: Problem) -> float:
    """Halfway between the cG of the two branches at P*, above which a chain has left the first; infinite without two."""
    found = phases(problem)
    jump = next((t for t in found.transitions if t.window), None)
    if jump is None:
        return math.inf
    return float(np.mean([float(minimum.order_parameters.cG) for minimum in found.minima(jump.P)[:2]]))


def _steps(problem: Problem, data: Empirical) -> list[tuple[float, float]]:
    """Steps of G and W that `langevin` takes on each data set."""
    found = langevin.step_sizes(PackedPath(problem), None, np.asarray(data.sequences), _langevin(problem))
    return [(float(found.logits.bulk), float(bulk)) for bulk in np.asarray(found.output.bulk).ravel()]


def _langevin(problem: Problem) -> LangevinSettings:
    return LangevinSettings(langevin.LOGIT_STEPS[problem.attention])


def _theory_rate(problem: Problem, place: float, steps: tuple[float, float]) -> float:
    """Rate per step of SGLD on the branch of least cG, at the chi of the problem."""
    branches = [one for one in fluctuations(problem, place, mobility=steps) if one.status != "no minimum"]
    return min(branches, key=lambda one: one.cG).relaxation if branches else math.nan


def _rates(problem: Problem, data: Empirical, quantity: str, settings: Settings) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rates per step with errors from SGLD; whether chains were too short: below some 40 effective draws they look faster."""
    from arviz_stats.base.array import array_stats

    count, thin, path = settings.chains, 20, PackedPath(problem)
    places, draws = len(np.asarray(data.sequences)), settings.steps // (2 * thin)
    cells = repeated(problem, data, count, 0, 4, ("small",))
    how = _langevin(problem)._replace(warmup=settings.steps // 2, draws=draws, thin=thin)
    found = langevin.sample(cells, path, yardstick(problem, Network(), 1), how)
    chains = np.asarray(getattr(found.observables, quantity), float).reshape(count, places, draws)
    ess = np.array([
        [float(array_stats.ess(chains[row, column][None], chain_axis=0, draw_axis=1, method="mean")) for row in range(count)]
        for column in range(places)
    ])  # fmt: skip
    rate = 2 * ess / (draws * thin)
    return rate.mean(axis=1), rate.std(axis=1, ddof=1) / math.sqrt(count), ess.mean(axis=1) < 40


class FiniteChiStudy(NamedTuple):
    """compared: means and standard deviations of both attentions. approached: precursors, by place and chi."""

    compared: list[Compared]
    approached: list[Approached]


def study(
    problem: Problem,
    chis: tuple[float, ...] = CHIS,
    approach_chis: tuple[float, ...] = APPROACH_CHIS,
    settings: Settings | None = None,
    report: Callable[[str], None] = lambda stage: None,
) -> FiniteChiStudy:
    """Both attentions of a problem."""
    compared: list[Compared] = []
    approached: list[Approached] = []
    for attention in ("softmax", "linear"):
        here = problem.replace(attention=attention, sequences=None)
        compared += compare(here, chis, settings, report)
        ways = precursors(here, nearest=0.003, points=15)
        for chi in approach_chis:
            report(f"{attention}, precursors at chi = {chi:g}")
            approached += approach(here, chi, ways, settings)
    return FiniteChiStudy(compared, approached)


def stages(chis: tuple[float, ...], approach_chis: tuple[float, ...]) -> int:
    """How often `study` reports."""
    return 2 * (len(chis) + len(approach_chis))


def text(found: FiniteChiStudy) -> str:
    """Tables in words and numbers."""
    lines = [
        "attention      chi        P  branch  verdict        quantity   sampled +- error    theory      z   sd / theory  theory"
    ]
    for one in found.compared:
        ratio = one.deviation / one.theory_deviation if one.theory_deviation else math.nan
        lines.append(
            f"{one.attention:9s} {one.chi:8g} {one.P:8.1f}  {one.branch:6s}  {one.verdict:13s}  {one.quantity:8s} "
            f"{one.mean:9.5f} +- {one.error:.5f} {one.theory:9.5f} {one.z:6.1f}  {ratio:10.3f}   {one.status}"
        )
    for one in found.approached:
        way = one.approach
        lines.append(
            f"{way.order_parameter} to the {way.place} at P = {way.P:.2f}, chi = {one.chi:g}: distance, chi Var (theory at "
            "infinite chi), status of its chains, rate per SGLD step (theory at this chi)"
        )
        limit = way.susceptibility[np.isin(way.sequences, one.sequences)]
        seen = one.distance, one.susceptibility, one.susceptibility_error, limit, one.status
        for row in zip(*seen, one.rate, one.rate_error, one.theory_rate, strict=True):
            lines.append("  {:.4f}  {:.4f} +- {:.4f} ({:.4f})  {:15s}  {:.5f} +- {:.5f} ({:.5f})".format(*row))
    return "\n".join(lines)


def records(found: FiniteChiStudy) -> dict[str, list[dict[str, object]]]:
    """For JSON: nan as None, arrays as lists."""

    def row(one: Compared | Approached) -> dict[str, object]:
        return plain({name: value for name, value in one._asdict().items() if name != "approach"})

    ways = [
        {"place": one.approach.place, "P_of_place": one.approach.P, "order_parameter": one.approach.order_parameter, **row(one)}
        for one in found.approached
    ]
    return {"compared": [row(one) for one in found.compared], "precursors": ways}
