"""Sampling one problem: both starts, diagnostics and verdict, theory at finite chi beside it, F(aG) on request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from copyhead.experiment.convergence import summary
from copyhead.problem import Problem, ProblemError
from copyhead.record import Record
from copyhead.theory.fluctuations import Fluctuations, fluctuations

if TYPE_CHECKING:
    from jaxtyping import Float
    from xarray import DataTree

    from copyhead.experiment.convergence import Convergence
    from copyhead.experiment.umbrella import FreeEnergy
    from copyhead.model.moments import Empirical

Sampler = Literal["hmc", "mala", "sgld", "nuts", "blackjax-hmc"]
TargetName = Literal["joint", "collapsed"]

# Quantities that a verdict is about. Observables that are not drawn are left out.
JUDGED = ("c1", "cG", "aG", "loss")
# What changes sign with (G, W) -> (-G, -W) in linear attention.
ODD = ("c1", "cG", "a1", "aG")
FRESH_SEQUENCES = 4096
# Steps of the logits of SGLD and MALA, see study.run.
LOGIT_STEPS = {"softmax": 0.03, "linear": 0.1}


class SamplingSettings(Record):
    """How to sample one problem."""

    sampler: Sampler = Field(default="hmc", description="hmc (own, W integrated out), mala, sgld, nuts or blackjax-hmc")
    target: TargetName | None = Field(default=None, description="joint or collapsed, for nuts and blackjax-hmc")
    chains: int = Field(default=4, ge=2, le=1000, description="chains from each of the two starts")
    warmup: int = Field(default=500, ge=0, description="trajectories or steps before the first draw")
    draws: int = Field(default=1000, ge=50, description="draws of a chain")
    thin: int | None = Field(default=None, ge=1, description="steps from one draw to the next; default 1, for sgld and mala 50")
    seed: int = Field(default=0, ge=0, lt=2**31, description="of the data set and of all other random draws")
    population: bool = Field(default=False, description="expected moments in place of a data set")
    free_energy: bool = Field(
        default=False, description="also F(aG) between the branches and P*, from a ladder of biased chains"
    )
    repeats: int = Field(default=4, ge=4, le=100, multiple_of=2, description="independent ladders, half from either start")

    @property
    def spacing(self) -> int:
        """Steps from one draw to the next."""
        return self.thin or (50 if self.sampler in ("sgld", "mala") else 1)


@dataclass(frozen=True)
class Sampling:
    """Draws of one problem and what they say.

    draws: ArviZ data, groups posterior and sample_stats with dimensions chain and draw; the coordinate `start` of a chain is
    small or copy. convergence: the verdict. theory: branches at finite chi on population moments, empty where the theory does
    not apply. free_energy: None unless asked for.
    """

    problem: Problem
    settings: SamplingSettings
    draws: DataTree
    convergence: Convergence
    theory: tuple[Fluctuations, ...]
    free_energy: FreeEnergy | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """All but the draws; nan becomes None."""
        found = self.convergence
        branches = {name: {key: one._asdict() for key, one in branch.items()} for name, branch in found.branches.items()}
        ladder = self.free_energy
        return _plain({
            "problem": self.problem.model_dump(),
            "settings": self.settings.model_dump(),
            "verdict": found.verdict,
            "reason": found.reason,
            "rhat_between_starts": found.between,
            "branches": branches,
            "acceptance": {start: float(value) for start, value in self._acceptance().items()},
            "theory": [_branch(one) for one in self.theory],
            "free_energy": None if ladder is None else ladder_dict(ladder),
            "seconds": self.seconds,
        })  # fmt: skip

    def _acceptance(self) -> dict[str, float]:
        stats = self.draws["sample_stats"].dataset
        if "acceptance_rate" not in stats:
            return {}
        return {start: float(stats.acceptance_rate.where(stats.start == start).mean()) for start in ("small", "copy")}

    def __str__(self) -> str:
        found, problem = self.convergence, self.problem
        data = "expected moments" if self.settings.population else f"data set {self.settings.seed}"
        lines = [
            f"{problem.attention} attention, P = {problem.sequences:g}, chi = {problem.chi:g}, {data}, "
            f"{self.settings.sampler}: {found.verdict}",
            f"  {found.reason}",
        ]
        for name, branch in found.branches.items():
            lines.append(f"  {'all chains' if name == 'all' else f'chains from the {name} start'}")
            lines += [
                f"    {quantity:5s} {one.mean:10.5f} +- {one.error:.5f}   sd {one.deviation:.5f}   ESS {one.bulk:6.0f} bulk "
                f"{one.tail:6.0f} tail   R-hat {one.rhat:.3f}"
                for quantity, one in branch.items()
            ]
        if self.theory:
            lines.append("  theory at finite chi, population moments (mean, standard deviation)")
        for one in self.theory:
            if one.status == "no minimum":
                lines.append(f"    a branch without a minimum at this chi (saddle cG {one.saddle[1]:.4f})")
                continue
            spread = [math.sqrt(value) for value in (*np.diag(one.covariance), one.attention_covariance[1, 1])]
            lines.append(
                f"    weight {one.weight:.3g}: c1 {one.c1:.4f}, {spread[0]:.4f}; cG {one.cG:.4f}, {spread[1]:.4f}; "
                f"aG {one.aG:.5f}, {spread[2]:.5f} ({one.status})"
            )
        return "\n".join([*lines, *([] if self.free_energy is None else _ladder_lines(self.free_energy))])


def _branch(one: Fluctuations) -> dict[str, Any]:
    return {
        "status": one.status,
        "c1": one.c1,
        "cG": one.cG,
        "a1": one.a1,
        "aG": one.aG,
        "sd_c1": math.sqrt(one.covariance[0, 0]),
        "sd_cG": math.sqrt(one.covariance[1, 1]),
        "sd_aG": math.sqrt(one.attention_covariance[1, 1]),
        "weight": one.weight,
    }


def ladder_dict(found: FreeEnergy) -> dict[str, Any]:
    """The free energy as plain numbers."""
    profiles = {
        name: {key: values.tolist() for key, values in getattr(found, name)._asdict().items()}
        for name in ("by_aG", "by_cG")
    }  # fmt: skip
    measured = {
        name: getattr(found, name)._asdict() for name in ("log_ratio", "P_star")
    }  # fmt: skip
    return {
        "status": found.status,
        "wells": found.wells,
        "top": found.top,
        "heights": [one._asdict() for one in found.heights],
        **measured,
        "log_ratio_by_start": found.by_start,
        "slope": found.slope,
        "least_exchange": found.exchange,
        "round_trips": found.round_trips,
        **profiles,
    }


def _ladder_lines(found: FreeEnergy) -> list[str]:
    lines = [f"  F(aG) from a ladder of biased chains: {found.status}"]
    if found.status != "one phase":
        low, high = found.heights
        lines += [
            f"    wells at aG = {found.wells[0]:.4f} and {found.wells[1]:.4f}, top at {found.top:.4f}",
            f"    barrier {low.mean:.1f} +- {low.error:.1f} from below, {high.mean:.1f} +- {high.error:.1f} from above",
            f"    log weight of copying over uniform {found.log_ratio.mean:.2f} +- {found.log_ratio.error:.2f} (from the small "
            f"start {found.by_start[0]:.2f}, from the copy start {found.by_start[1]:.2f})",
            f"    P* = {found.P_star.mean:.3f} +- {found.P_star.error:.3f}",
        ]
    return [*lines, f"    least exchange acceptance {found.exchange:.2f}, {found.round_trips} round trips"]


def _plain(value: Any) -> Any:
    """nan and infinities as None, arrays as lists."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(one) for one in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def check(problem: Problem, settings: SamplingSettings) -> None:
    """Refuses what cannot be sampled, before anything is computed.

    Raises:
        ProblemError: for attention that reads tokens, separate query and key matrices, a P that is no number of sequences,
            energies beyond float32, or settings that do not go together.
    """
    from copyhead.experiment.collapsed import sizes
    from copyhead.experiment.umbrella import refuse_beyond_float32

    sizes(problem)
    refuse_beyond_float32(problem, _sequences(problem, settings.population))
    if settings.target is not None and settings.sampler not in ("nuts", "blackjax-hmc"):
        own = "collapsed" if settings.sampler == "hmc" else "joint"
        raise ProblemError(
            f"target = {settings.target!r}: {settings.sampler} has the {own} posterior for its target; leave it out"
        )


def _sequences(problem: Problem, population: bool) -> float:
    count = problem.sequences
    if count is None:
        raise ProblemError("sequences = None: must be given, sampling is at one number of sequences (--at)")
    if not population and (count != round(count) or count < 1):
        raise ProblemError(
            f"sequences = {count:g}: must be an integer >= 1 for a data set; expected moments take any number > 0"
        )
    return count


def data_for(problem: Problem, seed: int, population: bool) -> Empirical:
    """The moments of one data set, or the expected ones, with a leading axis of length one.

    Raises:
        ProblemError: without a number of sequences, or with a fraction of one where data are drawn.
    """
    from copyhead.experiment.cells import data_sets
    from copyhead.model import moments, tokens

    count = _sequences(problem, population)
    if population:
        found = moments.expected(tokens.uniform(problem.vocab), count, problem.length)
    else:
        found = moments.empirical(data_sets(problem, [round(count)], seed)[0], problem.vocab)
    return type(found)(np.asarray(found.sequences)[None], np.asarray(found.tensor)[None])


def sample(
    problem: Problem, settings: SamplingSettings | None = None, report: Callable[[str], None] = lambda stage: None
) -> Sampling:
    """Samples the posterior of one problem from both starts and judges the chains.

    Args:
        report: is told each stage as it begins.

    Raises:
        ProblemError: see `check`.
    """
    settings = settings or SamplingSettings()
    began = time.perf_counter()
    check(problem, settings)
    data = data_for(problem, settings.seed, settings.population)
    report("sampling")
    observed, stats = RUN[settings.sampler](problem, data, settings)
    tree = _tree(problem, settings, observed, stats)
    report("diagnostics")
    convergence = _judged(tree)
    theory = ()
    if problem.token_scale == 0 or problem.cyclic:
        theory = fluctuations(problem)
    found = None
    if settings.free_energy:
        report("ladder of biased chains")
        found = ladder(problem, data, settings)
    return Sampling(problem, settings, tree, convergence, theory, found, time.perf_counter() - began)


def ladder(problem: Problem, data: Empirical, settings: SamplingSettings) -> FreeEnergy:
    """F(aG) and P* of one data set from a ladder at the P of the problem."""
    from copyhead.experiment import umbrella
    from copyhead.experiment.hamiltonian import HamiltonianSettings

    assert problem.sequences is not None
    chosen = HamiltonianSettings(warmup=max(100, settings.warmup // 3), draws=max(100, settings.draws // 3), losses=False)
    trace, rung = umbrella.climb(problem, data, settings.repeats, chosen, settings.seed)
    return umbrella.free_energy(trace, rung, problem, problem.sequences)


def _judged(tree: DataTree) -> Convergence:
    from copyhead.experiment.convergence import judge

    posterior = tree["posterior"].dataset
    names = [name for name in JUDGED if name in posterior and bool(np.isfinite(posterior[name]).any())]
    starts = list(dict.fromkeys(posterior.start.values.tolist()))
    return judge({
        start: {name: posterior[name].values[posterior.start.values == start] for name in names} for start in starts
    })  # fmt: skip


def _tree(
    problem: Problem, settings: SamplingSettings, observed: dict[str, np.ndarray], stats: dict[str, np.ndarray]
) -> DataTree:
    """ArviZ data; chains of even number are from the small start, the others from the copying one."""
    import arviz_base

    count = len(observed["cG"])
    posterior = observed
    if problem.attention == "linear":
        sign = sector(observed["c1"])[:, None]
        posterior = {name: values * sign if name in ODD else values for name, values in observed.items()}
    tree = arviz_base.from_dict({"posterior": posterior, "sample_stats": stats})
    attributes = {
        "problem": problem.to_json(),
        "settings": settings.model_dump_json(),
        "inference_library": "blackjax" if settings.sampler in ("nuts", "blackjax-hmc") else "copyhead",
    }
    starts = np.where(np.arange(count) % 2 == 0, "small", "copy")
    for name in ("posterior", "sample_stats"):
        group = tree[name].dataset.assign_coords(start=("chain", starts))
        for variable, words in MEANINGS.items():
            if variable in group:
                group[variable].attrs["long_name"] = words
        tree[name] = type(tree)(group.assign_attrs(attributes))
    return tree


# A chain of linear attention has chosen a sector if its mean c1 is this many of its own errors from zero.
CHOSEN = 5.0


def sector(c1: Float[np.ndarray, "chain draw"]) -> Float[np.ndarray, "chain"]:
    """The sign of each chain of linear attention; (G, W) and its mirror image (-G, -W) are equally good.

    One for a chain that has not chosen: turning such a chain by the sign of its mean would give the mean a bias.
    """
    found = [summary(chain[None]) for chain in c1]
    return np.array([-1.0 if one.mean < -CHOSEN * one.error else 1.0 for one in found])


MEANINGS = {
    "c1": "mean logit off the target",
    "cG": "mean logit on the target minus c1",
    "a1": "L times the mean attention off the target",
    "aG": "mean attention on the target minus that off it",
    "loss": "loss per token on the population",
    "fresh": "loss per token on fresh sequences",
    "overlap": "tr W / V",
    "lp": "log density of the target, up to a constant",
    "acceptance_rate": "mean probability of accepting a proposal since the draw before",
    "diverging": "whether the energy of a trajectory ran away",
}


def _named(observed: Any, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Observables by name as (chain, draw), without those that were not measured."""
    found = {name: np.asarray(values, float).reshape(shape) for name, values in observed._asdict().items()}
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def _hmc(problem: Problem, data: Empirical, settings: SamplingSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    from copyhead.experiment import umbrella
    from copyhead.experiment.hamiltonian import HamiltonianSettings

    chosen = HamiltonianSettings(warmup=settings.warmup, draws=settings.draws, thin=settings.spacing)
    count, fresh = 2 * settings.chains, FRESH_SEQUENCES
    found = umbrella.unbiased(problem, data, count, chosen, settings.seed, fresh)
    shape = (count, settings.draws)
    stats = {"lp": -found.energy.reshape(shape), "acceptance_rate": found.acceptance.reshape(shape)}
    return _named(found.observables, shape), stats


def _langevin(problem: Problem, data: Empirical, settings: SamplingSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    from copyhead.experiment import langevin, mala, umbrella
    from copyhead.experiment.adam import NEVER
    from copyhead.experiment.cells import STARTS, Cells
    from copyhead.experiment.observables import yardstick
    from copyhead.experiment.packed import PackedPath
    from copyhead.model import network, targets, tokens
    from copyhead.model.network import Network, Positional

    count, path = 2 * settings.chains, PackedPath(problem)
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    outputs = [np.asarray(network.start(Network(), problem, target, start, settings.seed).output) for start in STARTS]
    logits = umbrella.starts(problem, (1, count, 1), settings.seed)[0, :, 0].swapaxes(-1, -2)
    begin = Positional(logits, np.stack([outputs[chain % 2] for chain in range(count)]))
    keys = tokens.stream(settings.seed, "langevin", 3).generate_state(2 * count).reshape(count, 2)
    repeated = type(data)(np.repeat(data.sequences, count, axis=0), np.repeat(data.tensor, count, axis=0))
    cells = Cells(begin, repeated, np.full(count, problem.chi, np.float32), keys, keys)
    chosen = langevin.LangevinSettings(
        LOGIT_STEPS[problem.attention], warmup=settings.warmup * settings.spacing, draws=settings.draws, thin=settings.spacing
    )
    against, shape = yardstick(problem, Network(), FRESH_SEQUENCES), (count, settings.draws)
    if settings.sampler == "mala":
        adjusted = mala.sample(cells, path, against, chosen)
        return _named(adjusted.observables, shape), {"acceptance_rate": adjusted.acceptance}
    found = langevin.sample(cells, path, against, chosen)
    lost = (np.asarray(found.diverged) != NEVER)[:, None]
    return _named(found.observables, shape), {"diverging": np.broadcast_to(lost, shape).copy()}


def _blackjax(problem: Problem, data: Empirical, settings: SamplingSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from copyhead.experiment import reference, umbrella
    from copyhead.experiment.cells import STARTS
    from copyhead.experiment.observables import Observables, measure_all, order_parameters, yardstick
    from copyhead.experiment.target import TARGETS, posed
    from copyhead.model import network, targets
    from copyhead.model.attention import attention
    from copyhead.model.network import Network, Positional

    one = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data)
    name = settings.target or "collapsed"
    chosen = TARGETS[name](posed(problem, one))
    count = 2 * settings.chains
    logits = jnp.asarray(umbrella.starts(problem, (1, count, 1), settings.seed)[0, :, 0].swapaxes(-1, -2))
    target = targets.shift(problem.length, cyclic=problem.cyclic)
    outputs = [np.asarray(network.start(Network(), problem, target, start, settings.seed).output) for start in STARTS]
    begin = Positional(logits, jnp.stack([outputs[chain % 2] for chain in range(count)])) if name == "joint" else logits
    how = reference.ReferenceSettings(settings.warmup, settings.draws * settings.spacing)
    found = reference.sample(chosen, begin, problem.chi, settings.seed, "nuts" if settings.sampler == "nuts" else "hmc", how)
    shape = (count, settings.draws)
    against = yardstick(problem, Network(), FRESH_SEQUENCES)
    every = settings.spacing
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf[:, ::every].reshape(-1, *leaf.shape[2:])), found.positions)
    if name == "joint":
        observed = measure_all(flat, against, problem)
    else:
        matrix = attention(flat, problem.attention, problem.length)
        nothing = jnp.full(len(flat), jnp.nan)
        seen = jax.lax.map(lambda pair: order_parameters(pair[0], pair[1], against), (flat, matrix))
        observed = Observables(*seen, *[nothing] * 3)
    stats = {"lp": found.log_density, "acceptance_rate": found.acceptance, "diverging": found.divergent}
    return _named(observed, shape), {key: np.asarray(value)[:, ::every] for key, value in stats.items()}


RUN: dict[str, Callable[..., tuple[dict[str, Any], dict[str, Any]]]] = {
    "hmc": _hmc,
    "mala": _langevin,
    "sgld": _langevin,
    "nuts": _blackjax,
    "blackjax-hmc": _blackjax,
}


def save(found: Sampling, path: Path) -> None:
    """Writes the draws as netCDF, whole or not at all.

    Raises:
        ProblemError: if the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        found.draws.to_netcdf(part, engine="h5netcdf")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise ProblemError(f"out = {str(path)!r}: cannot be written ({error.strerror or error})") from None
