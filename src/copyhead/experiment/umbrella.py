"""A ladder of biased chains along aG, and the free energy that they give: barrier, branch weights, P* at finite chi.

Windows with harmonic biases on the place s (`collapsed`) cover the way from one branch to the other. Each is sampled by
`hamiltonian.run`, neighbours exchange states, and `free_energy.log_weights` joins all draws to one weighted sample of the
unbiased posterior. A draw keeps what its density depends on, so the same sample is reweighted to other P: where both branches
have equal weight is P*, from sampling alone.

Repeats are independent. Half of them begin in the uniform phase in every window, half as a copy head: an estimate that
depends on the start has not converged, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq
from scipy.stats import ttest_ind

from copyhead.experiment import hamiltonian
from copyhead.experiment.cells import STARTS, scattered
from copyhead.experiment.collapsed import Marks, Rung, Sizes, density_of_marks, order_parameter, sizes
from copyhead.experiment.diagnostics import NOTHING, Estimate, over_seeds
from copyhead.experiment.free_energy import Profile, averaged, barrier, log_weights, profile
from copyhead.experiment.hamiltonian import HamiltonianSettings, Trace
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.model import tokens
from copyhead.model.moments import Empirical
from copyhead.model.network import Network, Start
from copyhead.problem import Problem, ProblemError

# Of a window, in units where the action, which is chi L times something, has curvatures of order one: the distance to the next,
# and the curvature of its bias. That must exceed the negative one of a barrier (0.33 at the preset, 0.63 at L = 48), or a
# window would have two maxima.
SPACING, STIFFNESS = 1.4, 1.25
# The ladder goes on beyond the places seen in the two phases by this many windows.
BEYOND = 2
# Chains from both starts that find the two phases.
SCOUTS, SCOUT = 4, HamiltonianSettings(warmup=200, draws=100, losses=False)
# Estimates from the two starts are called different at this rate of false alarms; the least acceptance of an exchange.
FALSE_ALARM, EXCHANGE_GATE = 1e-3, 0.05
# P* is sought by reweighting up to this factor from the P that was sampled, either way.
REACH = math.log(1.1)
# -log p of this size is still known to some tenths in float32; with more noise the Metropolis test would refuse at random.
LARGEST_ENERGY = 2e5
# Bins of F for each window.
BINS = 2
# A barrier counts where it is this many nats above both wells: below, the posterior has one phase with a shoulder.
LEAST_BARRIER = 1.0

GOOD: Final = "good"
Status = Literal["good", "one phase", "depends on the start", "exchange too rare"]


class FreeEnergy(NamedTuple):
    """The free energy F = -log p of one data set, in nats, from R repeats. Estimates: over repeats.

    status: "one phase" where there is no barrier; then all below that needs one is nan.
    along: F of the place s. by_aG, by_cG: F of aG and of cG.
    wells, top: aG of the two minima and of the maximum between them. heights: of the top above the wells, in F of s.
    log_ratio: log of the weight of the copying phase over that of the uniform one, at P. by_start: its mean by start.
    P_star: where it is zero, by reweighting to other P. slope: d log_ratio / d ln P at P.
    exchange: the least mean acceptance of an exchange. round_trips: of states between the ends of the ladder, all repeats.
    """

    status: Status
    sequences: float
    chi: float
    along: Profile
    by_aG: Profile
    by_cG: Profile
    wells: tuple[float, float]
    top: float
    heights: tuple[Estimate, Estimate]
    log_ratio: Estimate
    by_start: tuple[float, float]
    P_star: Estimate
    slope: float
    exchange: float
    round_trips: int


def _keys(shape: tuple[int, int, int], seed: int, use: int) -> Float[np.ndarray, "rung repeat data 2"]:
    random = np.random.default_rng(tokens.stream(seed, "langevin", use))
    return random.integers(0, 2**32, size=(*shape, 2), dtype=np.uint32)


def _spacing(problem: Problem) -> float:
    return SPACING / math.sqrt(problem.chi * problem.length)


def ladder(low: float, high: float, problem: Problem) -> Rung:
    """Windows from one place to the other and a little beyond, with a leading axis of rungs."""
    spacing = _spacing(problem)
    count = max(2, math.ceil((high - low) / spacing) + 1 + 2 * BEYOND)
    middle = (low + high) / 2
    centers = middle + spacing * (np.arange(count) - (count - 1) / 2)
    ones = np.ones_like(centers)
    return Rung(problem.chi * ones, ones, centers, ones * STIFFNESS * problem.chi * problem.length)


def unbiased(
    problem: Problem,
    data: Empirical,
    chains: int,
    settings: HamiltonianSettings,
    seed: int,
    fresh: int = 1,
    kinds: tuple[Start, ...] = STARTS,
) -> Trace:
    """Chains without ladder or bias, (1, chain, data), from each kind of start in turn.

    Args:
        fresh: sequences on which the loss is measured beside the population.
    """
    zero = np.zeros(1)
    rung = Rung(zero + problem.chi, zero + 1, zero, zero)
    return _sampled(problem, data, rung, chains, settings, seed, 1, fresh, kinds)[0]


def climb(problem: Problem, data: Empirical, repeats: int, settings: HamiltonianSettings, seed: int) -> tuple[Trace, Rung]:
    """Scouts both phases of each data set (leading axis), lays the ladder, and samples it.

    Returns:
        The trace, and the rungs with axes (rung, repeat, data).
    """
    seen = unbiased(problem, data, SCOUTS, SCOUT, seed).marks.place
    rung = ladder(float(np.quantile(seen, 0.001)), float(np.quantile(seen, 0.999)), problem)
    return _sampled(problem, data, rung, repeats, settings, seed, 2)


def refuse_beyond_float32(problem: Problem, sequences: float) -> None:
    """Raises:
    ProblemError: if energies, which go up to chi P / (2 sigma^2), are too large to be told apart in float32.
    """
    size = problem.chi * sequences / (2 * problem.noise)
    if size > LARGEST_ENERGY:
        largest = LARGEST_ENERGY * problem.chi / size
        raise ProblemError(f"chi = {problem.chi:g}: must be <= {largest:.4g} here, or float32 would not tell energies apart")


def _sampled(
    problem: Problem,
    data: Empirical,
    rung: Rung,
    repeats: int,
    settings: HamiltonianSettings,
    seed: int,
    use: int,
    fresh: int = 1,
    kinds: tuple[Start, ...] = STARTS,
) -> tuple[Trace, Rung]:
    shape = (len(rung.chi), repeats, len(np.asarray(data.sequences)))
    refuse_beyond_float32(problem, float(np.max(data.sequences)))
    whole = Rung(*(np.broadcast_to(part[:, None, None], shape).astype(np.float32) for part in rung))
    packed, against = PackedPath(problem).pack(data), yardstick(problem, Network(), fresh)
    begin, keys = scattered(problem, shape, seed, kinds).logits.swapaxes(-1, -2), _keys(shape, seed, use)
    # chi and P are in the rungs and the data: without them in the static arguments one compilation serves all
    neutral = problem.replace(chi=1.0, sequences=None)
    found = hamiltonian.run(begin, packed, whole, keys, against, sizes(neutral), settings, neutral)
    return jax.tree.map(np.asarray, found), whole


class Joined(NamedTuple):
    """Draws of one repeat and data set with their log weights in the unbiased posterior at P."""

    marks: Marks
    cG: Float[np.ndarray, "draw"]
    log_weight: Float[np.ndarray, "draw"]


def join(trace: Trace, rung: Rung, repeat: int, data: int) -> Joined:
    """All windows of one repeat."""
    one = jax.tree.map(lambda leaf: np.asarray(leaf[:, repeat, data], float), trace.marks)
    center, stiffness = (np.asarray(part[:, repeat, data], float)[:, None, None] for part in (rung.center, rung.stiffness))
    weights = log_weights(stiffness * (one.place[None] - center) ** 2 / 2)
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), one)
    return Joined(flat, np.asarray(trace.observables.cG[:, repeat, data], float).ravel(), weights.ravel())


def repeats(trace: Trace, rung: Rung, data: int = 0) -> list[Joined]:
    """Every repeat of one data set, joined."""
    return [join(trace, rung, repeat, data) for repeat in range(trace.energy.shape[1])]


def reweighted(joined: Joined, factor: float, chi: float, numbers: Sizes) -> Float[np.ndarray, "draw"]:
    """Log weights at `factor` times P, not normalised."""

    def energy(weight: float) -> np.ndarray:
        return np.asarray(density_of_marks(joined.marks, Rung(chi, weight, 0.0, 0.0), numbers))

    with jax.enable_x64(True):
        return joined.log_weight - energy(factor) + energy(1.0)


def _log_ratio(joined: Joined, log_weight: np.ndarray, cut: float) -> float:
    above = joined.marks.place > cut
    if not above.any() or above.all():
        return math.nan
    return float(np.logaddexp.reduce(log_weight[above]) - np.logaddexp.reduce(log_weight[~above]))


def round_trips(walker: Int[np.ndarray, "rung draw"]) -> int:
    """How often a state has gone from the first rung to the last and back, over all states of one ladder."""
    rungs = len(walker)
    trips = 0
    ends = {0: 0, rungs - 1: 1}
    visits: dict[int, list[int]] = {}
    for draw in range(walker.shape[1]):
        for rung, end in ends.items():
            path = visits.setdefault(int(walker[rung, draw]), [])
            if not path or path[-1] != end:
                path.append(end)
    for path in visits.values():
        trips += max(0, (len(path) - 1) // 2)
    return trips


def free_energy(
    trace: Trace, rung: Rung, problem: Problem, sequences: float, data: int = 0, parts: list[Joined] | None = None
) -> FreeEnergy:
    """The free energy of one data set of a ladder that was sampled at P sequences.

    Args:
        parts: what `repeats` found for it, if that is known already.
    """
    numbers = sizes(problem)
    parts = repeats(trace, rung, data) if parts is None else parts
    edges = _edges(rung, problem)
    ends = [float(end) for end in np.quantile(np.concatenate([part.cG for part in parts]), [0.001, 0.999])]
    by_repeat = np.array([profile(part.marks.place, part.log_weight, edges) for part in parts])
    along = averaged(edges, by_repeat)
    by_cG = np.linspace(*ends, num=len(edges))
    profiles = (
        along,
        _by_aG(parts, edges, problem, [part.log_weight for part in parts]),
        averaged(by_cG, np.array([profile(part.cG, part.log_weight, by_cG) for part in parts])),
    )
    exchange = float(np.nanmin(np.nanmean(trace.exchanged[:-1, :, data], axis=(1, 2))))
    trips = sum(round_trips(trace.walker[:, repeat, data]) for repeat in range(len(parts)))
    found = barrier(along, LEAST_BARRIER)
    if found is None:
        absent = (math.nan, math.nan), math.nan, (NOTHING, NOTHING), NOTHING, (math.nan, math.nan), NOTHING
        return FreeEnergy("one phase", sequences, problem.chi, *profiles, *absent, math.nan, exchange, trips)
    top = along.center[found[1]]
    below, above = (over_seeds(by_repeat[:, found[1]] - by_repeat[:, well]) for well in (found[0], found[2]))

    def ratio(log_factor: float, part: Joined) -> float:
        return _log_ratio(part, reweighted(part, math.exp(log_factor), problem.chi, numbers), top)

    ratios = np.array([ratio(0.0, part) for part in parts])
    stars = [sequences * math.exp(_root(partial(ratio, part=part))) for part in parts]
    by_start = [over_seeds(ratios[start::2]) for start in (0, 1)]
    status: Status = GOOD
    if exchange < EXCHANGE_GATE:
        status = "exchange too rare"
    elif float(ttest_ind(ratios[::2], ratios[1::2])[1]) < FALSE_ALARM:
        status = "depends on the start"
    aG = profiles[1].center
    return FreeEnergy(
        status,
        sequences,
        problem.chi,
        *profiles,
        (float(aG[found[0]]), float(aG[found[2]])),
        float(aG[found[1]]),
        (below, above),
        over_seeds(ratios),
        (by_start[0].mean, by_start[1].mean),
        over_seeds(np.array(stars)),
        float(np.mean([(ratio(0.01, part) - ratio(-0.01, part)) / 0.02 for part in parts])),
        exchange,
        trips,
    )


def _root(function: Callable[[float], float]) -> float:
    """Where a function of ln P / P_sampled changes sign within REACH; nan if it does not."""
    ends = function(-REACH), function(REACH)
    if not np.isfinite(ends).all() or ends[0] * ends[1] > 0:
        return math.nan
    return float(brentq(function, -REACH, REACH, xtol=1e-7))


def around(parts: list[Joined], rung: Rung, problem: Problem, factors: tuple[float, ...]) -> list[Profile]:
    """F(aG) at other P, by factors on the P that was sampled."""
    numbers, edges = sizes(problem), _edges(rung, problem)
    return [
        _by_aG(parts, edges, problem, [reweighted(part, factor, problem.chi, numbers) for part in parts]) for factor in factors
    ]


def _by_aG(
    parts: list[Joined], edges: Float[np.ndarray, "b+1"], problem: Problem, log_weights: list[Float[np.ndarray, "draw"]]
) -> Profile:
    """F(aG) over bins that are given along s."""
    along = order_parameter(edges, problem)
    values = [order_parameter(part.marks.place, problem) for part in parts]
    return averaged(along, np.array([profile(*pair, along) for pair in zip(values, log_weights, strict=True)]))


def _edges(rung: Rung, problem: Problem) -> Float[np.ndarray, "b+1"]:
    """Bins along s from the first window to the last."""
    center, width = np.asarray(rung.center[:, 0, 0], float), _spacing(problem) / BINS
    return np.linspace(center[0], center[-1], 1 + math.ceil((center[-1] - center[0]) / width))
