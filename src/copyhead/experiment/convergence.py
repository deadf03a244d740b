"""Whether chains from two starts sampled one distribution, two branches, or neither: a verdict with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np
from arviz_stats.base.array import array_stats
from jaxtyping import Float

Verdict = Literal["mixed", "metastable", "not converged"]

# Gates of Vehtari, Gelman, Simpson, Carpenter and Buerkner (2021): rank-normalised split R-hat, bulk and tail ESS of all
# chains.
RHAT_GATE, ESS_GATE = 1.01, 400.0
# R-hat below which a chain is taken to have joined the other start's; one of few draws is not expected to pass RHAT_GATE.
JOINED = 1.1
# The smaller ESS of these two quantiles is that of the tails.
TAIL = (0.05, 0.95)


class Sampled(NamedTuple):
    """One quantity over the chains of one branch. error: Monte Carlo standard error of the mean. deviation: standard deviation.

    rhat: rank-normalised split R-hat of all chains. bulk, tail: effective sample sizes.
    """

    mean: float
    error: float
    deviation: float
    bulk: float
    tail: float
    rhat: float

    @property
    def passed(self) -> bool:
        """Whether the gates are passed."""
        return bool(self.rhat <= RHAT_GATE and min(self.bulk, self.tail) >= ESS_GATE)


class Convergence(NamedTuple):
    """The verdict on one point, and what it rests on.

    mixed: both starts sample one distribution; `branches` has one entry, "all". metastable: each start has its own, in which it
    mixed; one entry for each start, never averaged. not converged: neither; entries by start are shown and not to be used.

    reason: one sentence. between: R-hat of all chains of both starts, by quantity. branches: by branch and quantity.
    """

    verdict: Verdict
    reason: str
    between: dict[str, float]
    branches: dict[str, dict[str, Sampled]]


def summary(draws: Float[np.ndarray, "chain draw"]) -> Sampled:
    """Mean, spread and diagnostics of chains that are meant to sample one distribution."""
    draws = np.asarray(draws, float)
    if not np.isfinite(draws).all():
        return Sampled(float("nan"), float("nan"), float("nan"), 0.0, 0.0, float("inf"))
    mean, deviation = float(draws.mean()), float(draws.std(ddof=1))
    if np.min(np.ptp(draws, axis=1)) == 0:  # a chain that never moved
        return Sampled(mean, float("nan"), deviation, 0.0, 0.0, float("inf"))
    axes = {"chain_axis": 0, "draw_axis": 1}
    bulk = float(array_stats.ess(draws, method="bulk", **axes))
    tail = float(array_stats.ess(draws, method="tail", prob=TAIL, **axes))
    return Sampled(
        mean,
        float(array_stats.mcse(draws, method="mean", **axes)),
        deviation,
        bulk,
        tail,
        float(array_stats.rhat(draws, **axes)),
    )


def judge(draws: Mapping[str, Mapping[str, Float[np.ndarray, "chain draw"]]]) -> Convergence:
    """The verdict on chains from different starts, given as draws[start][quantity].

    A single R-hat would call a chain that never left the wrong phase converged: chains of one start agree with each other. What
    counts is R-hat between the starts.
    """
    starts = list(draws)
    quantities = list(draws[starts[0]])
    whole = {name: summary(np.concatenate([draws[start][name] for start in starts])) for name in quantities}
    between = {name: found.rhat for name, found in whole.items()}
    if all(found.passed for found in whole.values()):
        reason = f"all chains of both starts agree: R-hat <= {max(between.values()):.3f}, ESS >= {_least(whole):.0f}"
        return Convergence("mixed", reason, between, {"all": whole})
    own = {start: {name: summary(draws[start][name]) for name in quantities} for start in starts}
    failed = [(start, name) for start in starts for name, found in own[start].items() if not found.passed]
    if not failed and len(starts) > 1:
        apart = max(between, key=lambda name: between[name])
        gap = " and ".join(f"{own[start][apart].mean:.4g} ({start})" for start in starts)
        reason = f"each start mixed in a branch of its own: {apart} = {gap}, R-hat between starts {between[apart]:.2f}"
        return Convergence("metastable", reason, between, own)
    start, name = failed[0] if failed else (starts[0], quantities[0])
    worst = own[start][name]
    for here, there in zip(starts, reversed(starts), strict=True):
        left = sum(_joined(chain, draws[there][name]) for chain in draws[here][name]) if not own[here][name].passed else 0
        if own[there][name].passed and 0 < left < len(draws[here][name]):
            reason = (
                f"{left} of {len(draws[here][name])} chains from the {here} start have left its branch for that of the other"
            )
            return Convergence("not converged", f"{reason}: {name} has R-hat {own[here][name].rhat:.2f}", between, own)
    reason = (
        f"chains from the {start} start disagree or are too short: {name} has R-hat {worst.rhat:.3f} (at most {RHAT_GATE:g}), "
        f"ESS {min(worst.bulk, worst.tail):.0f} (at least {ESS_GATE:g})"
    )
    return Convergence("not converged", reason, between, own)


def _joined(chain: Float[np.ndarray, "draw"], others: Float[np.ndarray, "chain draw"]) -> bool:
    """Whether a chain samples, in the later half of its draws, what others do."""
    late = chain[len(chain) // 2 :]
    together = np.stack([late, *others[:, len(chain) - len(late) :]])
    return float(array_stats.rhat(together, chain_axis=0, draw_axis=1)) < JOINED


def _least(found: Mapping[str, Sampled]) -> float:
    return min(min(one.bulk, one.tail) for one in found.values())
