"""Sampling one problem: both starts, diagnostics and verdict, theory at finite chi beside it, F(aG) on request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from copyhead.model.network import Network
from copyhead.problem import Problem, ProblemError
from copyhead.record import Record, plain
from copyhead.study.branch import ODD, sector
from copyhead.study.memory import refuse_too_large
from copyhead.theory.fluctuations import Fluctuations, fluctuations

if TYPE_CHECKING:
    from xarray import DataTree

    from copyhead.experiment.convergence import Convergence
    from copyhead.experiment.umbrella import FreeEnergy
    from copyhead.model.moments import Empirical

Sampler = Literal["hmc", "mala", "sgld", "nuts", "blackjax-hmc"]
TargetName = Literal["joint", "collapsed"]

# Quantities that a verdict is about. Observables that are not drawn are left out.
JUDGED = ("c1", "cG", "aG", "loss")


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
        return plain({
            "problem": self.problem.model_dump(),
            "settings": self.settings.model_dump(),
            "verdict": found.verdict,
            "reason": found.reason,
            "rhat_between_starts": found.between,
            "branches": branches,
            "acceptance": {start: float(value) for start, value in self._acceptance().items()},
            "theory": [one.to_dict(self.problem.chi) for one in self.theory],
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
            means = "; ".join(f"{name} {getattr(one, name):.5f}, {deviation:.5f}" for name, deviation in one.deviations.items())
            lines.append(f"    weight {one.weight:.3g}: {means} ({one.status})")
        return "\n".join([*lines, *([] if self.free_energy is None else _ladder_lines(self.free_energy))])


def ladder_dict(found: FreeEnergy) -> dict[str, Any]:
    """The free energy by name."""
    measured = {name: getattr(found, name)._asdict() for name in ("log_ratio", "P_star", "by_aG", "by_cG")}
    return {
        "status": found.status,
        "wells": found.wells,
        "top": found.top,
        "heights": [one._asdict() for one in found.heights],
        "log_ratio_by_start": found.by_start,
        "slope": found.slope,
        "least_exchange": found.exchange,
        "round_trips": found.round_trips,
        **measured,
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


def check(problem: Problem, settings: SamplingSettings) -> None:
    """Refuses what cannot be sampled, before anything is computed.

    Raises:
        ProblemError: for attention that reads tokens, separate query and key matrices, a P that is no number of sequences,
            energies beyond float32, more memory than there may be, or settings that do not go together.
    """
    from copyhead.experiment.collapsed import sizes
    from copyhead.experiment.umbrella import refuse_beyond_float32

    sizes(problem)
    count = _sequences(problem, settings.population)
    refuse_beyond_float32(problem, count)
    refuse_too_large(problem, Network(), 0 if settings.population else count)
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
    from copyhead.study import samplers

    report("sampling")
    observed, stats = samplers.RUN[settings.sampler](problem, data, settings)
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
    """ArviZ data; chains are from each start in turn."""
    import arviz_base

    from copyhead.experiment.cells import STARTS

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
    starts = np.array(STARTS)[np.arange(count) % len(STARTS)]
    for name in ("posterior", "sample_stats"):
        group = tree[name].dataset.assign_coords(start=("chain", starts))
        for variable, words in MEANINGS.items():
            if variable in group:
                group[variable].attrs["long_name"] = words
        tree[name] = type(tree)(group.assign_attrs(attributes))
    return tree


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
