"""A ladder of biased chains along aG, and the free energy that they give: barrier, branch weights, P* at finite chi.

Windows with harmonic biases on the place u (`collapsed`) cover the way from one branch to the other. Each is sampled by
`hamiltonian.run`, neighbours exchange states, and `free_energy.log_weights` joins all draws to one weighted sample of the
unbiased posterior. A draw keeps what its density depends on, so the same sample is reweighted to other P: where both branches
have equal weight is P*, from sampling alone.

Repeats are independent. Half of them begin in the uniform phase in every window, half as a copy head: an estimate that
depends on the start has not converged, and says so.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import brentq

from copyhead.experiment import hamiltonian
from copyhead.experiment.cells import STARTS
from copyhead.experiment.collapsed import Marks, Rung, Sizes, density_of_marks, order_parameter, sizes
from copyhead.experiment.free_energy import log_weights
from copyhead.experiment.hamiltonian import HamiltonianSettings, Trace
from copyhead.experiment.observables import yardstick
from copyhead.experiment.packed import Packed, PackedPath
from copyhead.model import network, targets, tokens
from copyhead.model.moments import Empirical
from copyhead.model.network import Network
from copyhead.problem import Problem, ProblemError

# Of a window, in units where the action, which is chi L times something, has curvatures of order one: the distance to the next,
# and the curvature of its bias. That must exceed the negative one of a barrier (0.33 at the preset, 0.63 at L = 48), or a
# window would have two maxima.
SPACING, STIFFNESS = 1.4, 1.25
# The ladder goes on beyond the places seen in the two phases by this many windows.
BEYOND = 2
# Trajectories from either start that find the two phases.
SCOUT = HamiltonianSettings(warmup=200, draws=100, losses=False)
# Standard errors by which estimates from the two starts may differ, and the least acceptance of an exchange.
AGREEMENT, EXCHANGE_GATE = 4.0, 0.05
# A barrier counts where it is this many nats above both wells: below, the posterior has one phase with a shoulder.
LEAST_BARRIER = 1.0

Status = Literal["good", "one phase", "depends on the start", "exchange too rare"]


class Measurement(NamedTuple):
    """A mean over repeats with its standard error."""

    mean: float
    error: float


class FreeEnergy(NamedTuple):
    """The free energy F(aG) = -log p(aG) of one data set, in nats, from R repeats. Errors: standard errors over repeats.

    status: "one phase" where there is no barrier; then wells and what follows from them is nan.
    place, aG: bin centers, along u and as aG. profile, error: F(aG), least value zero.
    cG, cG_profile, cG_error: likewise of the logit order parameter.
    wells, top: aG of the two minima and of the maximum between them. heights: of the top above the wells.
    log_ratio: log of the weight of the copying phase over that of the uniform one, at P. by_start: its mean by start.
    P_star: where it is zero, by reweighting to other P. slope: d log_ratio / d ln P at P.
    exchange: the least mean acceptance of an exchange. round_trips: of states between the ends of the ladder, all repeats.
    """

    status: Status
    sequences: float
    chi: float
    place: Float[np.ndarray, "b"]
    aG: Float[np.ndarray, "b"]
    profile: Float[np.ndarray, "b"]
    error: Float[np.ndarray, "b"]
    cG: Float[np.ndarray, "b"]
    cG_profile: Float[np.ndarray, "b"]
    cG_error: Float[np.ndarray, "b"]
    wells: tuple[float, float]
    top: float
    heights: tuple[Measurement, Measurement]
    log_ratio: Measurement
    by_start: tuple[float, float]
    P_star: Measurement
    slope: float
    exchange: float
    round_trips: int


NOT_MEASURED = Measurement(math.nan, math.nan)


def measurement(values: Float[np.ndarray, "repeat"]) -> Measurement:
    """nan if any repeat has none."""
    return Measurement(float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values))))


def starts(problem: Problem, shape: tuple[int, int, int], seed: int) -> Float[np.ndarray, "rung repeat data L L"]:
    """Transposed logits: even repeats from small weights, odd ones from a copying network, with the scatter of the prior."""
    rungs, repeats, data = shape
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    logits = np.stack([network.start(Network(), problem, target, start, seed).logits for start in STARTS])
    chosen = logits[np.arange(repeats) % 2].swapaxes(-1, -2)[None, :, None]
    random = np.random.default_rng(tokens.stream(seed, "init", 1))
    noise = random.normal(size=(rungs, repeats, data, problem.length, problem.length))
    spread = math.sqrt(problem.logit_variance / problem.chi) * problem.position_scale
    return (chosen + spread * noise).astype(np.float32)


def _keys(shape: tuple[int, int, int], seed: int, use: int) -> Float[np.ndarray, "rung repeat data 2"]:
    random = np.random.default_rng(tokens.stream(seed, "langevin", use))
    return random.integers(0, 2**32, size=(*shape, 2), dtype=np.uint32)


def ladder(low: float, high: float, problem: Problem) -> Rung:
    """Windows from one place to the other and a little beyond, with a leading axis of rungs."""
    spacing = SPACING / math.sqrt(problem.chi * problem.length)
    count = max(2, math.ceil((high - low) / spacing) + 1 + 2 * BEYOND)
    middle = (low + high) / 2
    centers = middle + spacing * (np.arange(count) - (count - 1) / 2)
    ones = np.ones_like(centers)
    return Rung(problem.chi * ones, ones, centers, ones * STIFFNESS * problem.chi * problem.length)


def climb(problem: Problem, data: Empirical, repeats: int, settings: HamiltonianSettings, seed: int) -> tuple[Trace, Rung]:
    """Scouts both phases of each data set (leading axis), lays the ladder, and samples it.

    Returns:
        The trace, and the rungs with axes (rung, repeat, data).
    """
    numbers, path = sizes(problem), PackedPath(problem)
    packed = path.pack(data)
    against = yardstick(problem, Network(), 1)
    count = len(np.asarray(data.sequences))

    def sampled(rung: Rung, shape: tuple[int, int, int], use: int, settings: HamiltonianSettings) -> tuple[Trace, Rung]:
        whole = Rung(*(np.broadcast_to(part[:, None, None], shape).astype(np.float32) for part in rung))
        begin, keys = starts(problem, shape, seed), _keys(shape, seed, use)
        found = hamiltonian.run(begin, packed, whole, keys, against, numbers, settings, problem)
        return jax.tree.map(np.asarray, found), whole

    zero = np.zeros(1)
    scout, _ = sampled(Rung(zero + problem.chi, zero + 1, zero, zero), (1, 4, count), 1, SCOUT)
    seen = scout.marks.place
    rung = ladder(float(np.quantile(seen, 0.001)), float(np.quantile(seen, 0.999)), problem)
    return sampled(rung, (len(rung.chi), repeats, count), 2, settings)


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


def reweighted(joined: Joined, factor: float, chi: float, numbers: Sizes) -> Float[np.ndarray, "draw"]:
    """Log weights at `factor` times P, not normalised."""

    def energy(weight: float) -> np.ndarray:
        return np.asarray(density_of_marks(joined.marks, Rung(chi, weight, 0.0, 0.0), numbers))

    with jax.enable_x64(True):
        return joined.log_weight - energy(factor) + energy(1.0)


def _profile(value: np.ndarray, log_weight: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """-log of the density in each bin, infinite where there is no draw. By bin, because sums over bins lose those on a barrier."""
    bins, inside = np.searchsorted(edges, value) - 1, (value > edges[0]) & (value < edges[-1])
    mass = np.bincount(bins[inside], np.exp(log_weight[inside] - log_weight.max()), len(edges) - 1)
    with np.errstate(divide="ignore"):
        return -np.log(mass / np.diff(edges))


def _log_ratio(joined: Joined, log_weight: np.ndarray, cut: float) -> float:
    above = joined.marks.place > cut
    if not above.any() or above.all():
        return math.nan
    return float(np.logaddexp.reduce(log_weight[above]) - np.logaddexp.reduce(log_weight[~above]))


def _barrier(place: np.ndarray, profile: np.ndarray) -> tuple[int, int, int] | None:
    """Indices of the lower well, the top and the upper well; None where F has no barrier of LEAST_BARRIER."""
    best, found = LEAST_BARRIER, None
    for top in range(1, len(place) - 1):
        below, above = int(np.argmin(profile[:top])), top + 1 + int(np.argmin(profile[top + 1 :]))
        height = profile[top] - max(profile[below], profile[above])
        if height > best:
            best, found = height, (below, top, above)
    return found


def _spread(profiles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over repeats of profiles that are shifted against each other by a constant.

    Each is aligned by its mean over the bins that all repeats have visited.
    """
    seen = np.isfinite(profiles).all(axis=0)
    aligned = np.where(seen, profiles, np.nan) - profiles[:, seen].mean(axis=1, keepdims=True)
    mean = aligned.mean(axis=0)
    return mean - np.nanmin(mean), aligned.std(axis=0, ddof=1) / math.sqrt(len(profiles))


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


def free_energy(trace: Trace, rung: Rung, problem: Problem, sequences: float, data: int = 0) -> FreeEnergy:
    """The free energy of one data set of a ladder."""
    numbers, repeats = sizes(problem), trace.energy.shape[1]
    parts = [join(trace, rung, repeat, data) for repeat in range(repeats)]
    place = np.concatenate([part.marks.place for part in parts])
    spacing = SPACING / math.sqrt(problem.chi * problem.length)
    centers = rung.center[:, 0, 0]
    edges = np.arange(centers[0] - spacing, centers[-1] + 1.5 * spacing, spacing / 2)
    middle = (edges[1:] + edges[:-1]) / 2
    along = order_parameter(edges, problem)
    by_place, place_error = _spread(np.array([_profile(p.marks.place, p.log_weight, edges) for p in parts]))
    by_aG, aG_error = _spread(np.array([_profile(order_parameter(p.marks.place, problem), p.log_weight, along) for p in parts]))
    cG_edges = np.linspace(*np.quantile(np.concatenate([p.cG for p in parts]), [0.001, 0.999]), len(edges))
    by_cG, cG_error = _spread(np.array([_profile(p.cG, p.log_weight, cG_edges) for p in parts]))
    seen = np.isfinite(by_place)
    exchange = np.nanmean(trace.exchanged[:-1, :, data], axis=(1, 2))
    trips = sum(round_trips(trace.walker[:, repeat, data]) for repeat in range(repeats))
    found = _barrier(middle[seen], by_place[seen])
    common = (
        sequences,
        problem.chi,
        middle,
        order_parameter(middle, problem),
        by_aG,
        aG_error,
        (cG_edges[1:] + cG_edges[:-1]) / 2,
        by_cG,
        cG_error,
    )
    mixing = float(np.nanmin(exchange)), trips
    if found is None:
        nan = math.nan
        absent = (nan, nan), nan, (NOT_MEASURED, NOT_MEASURED), NOT_MEASURED, (nan, nan), NOT_MEASURED, nan
        return FreeEnergy("one phase", *common, *absent, *mixing)
    below, top, above = (float(middle[seen][index]) for index in found)
    profiles = np.array([_profile(p.marks.place, p.log_weight, edges)[seen] for p in parts])
    heights = tuple(measurement(profiles[:, found[1]] - profiles[:, well]) for well in (found[0], found[2]))
    ratios = np.array([_log_ratio(part, part.log_weight, top) for part in parts])

    def ratio(log_factor: float, part: Joined) -> float:
        return _log_ratio(part, reweighted(part, math.exp(log_factor), problem.chi, numbers), top)

    places = np.array([_root(lambda x, part=part: ratio(x, part)) for part in parts])
    slope = float(np.mean([(ratio(0.01, part) - ratio(-0.01, part)) / 0.02 for part in parts]))
    log_ratio, by_start = measurement(ratios), (float(ratios[::2].mean()), float(ratios[1::2].mean()))
    apart = abs(by_start[0] - by_start[1]) / math.hypot(
        *(np.std(ratios[start::2], ddof=1) / math.sqrt(len(ratios[start::2])) for start in (0, 1))
    )
    status: Status = "good"
    if mixing[0] < EXCHANGE_GATE:
        status = "exchange too rare"
    elif apart > AGREEMENT:
        status = "depends on the start"
    wells = float(order_parameter(np.array(below), problem)), float(order_parameter(np.array(above), problem))
    star = measurement(sequences * np.exp(places))
    top_aG = float(order_parameter(np.array(top), problem))
    return FreeEnergy(status, *common, wells, top_aG, heights, log_ratio, by_start, star, slope, *mixing)


# P* is sought by reweighting up to this factor from the P that was sampled, either way.
REACH = math.log(1.1)


def _root(function) -> float:
    ends = function(-REACH), function(REACH)
    if not np.isfinite(ends).all() or ends[0] * ends[1] > 0:
        return math.nan
    return float(brentq(function, -REACH, REACH, xtol=1e-7))
