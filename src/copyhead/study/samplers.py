"""Each sampler on one problem, from both starts: observables and statistics of the draws by name, as (chain, draw)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from copyhead.experiment import langevin, mala, reference, umbrella
from copyhead.experiment.adam import NEVER
from copyhead.experiment.cells import repeated
from copyhead.experiment.hamiltonian import HamiltonianSettings
from copyhead.experiment.observables import Observables, measure_all, order_parameters, yardstick
from copyhead.experiment.packed import PackedPath
from copyhead.experiment.target import TARGETS, posed
from copyhead.model.attention import attention
from copyhead.model.moments import Empirical
from copyhead.model.network import Network
from copyhead.problem import Problem
from copyhead.study.exact import FRESH_SEQUENCES

if TYPE_CHECKING:
    from copyhead.study.sampling import SamplingSettings

Draws = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def _named(observed: Any, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Observables by name, without those that were not measured."""
    found = {name: np.asarray(values, float).reshape(shape) for name, values in observed._asdict().items()}
    return {name: values for name, values in found.items() if np.isfinite(values).any()}


def collapsed(problem: Problem, data: Empirical, settings: SamplingSettings) -> Draws:
    """Own HMC on G, with W drawn given it."""
    chosen = HamiltonianSettings(warmup=settings.warmup, draws=settings.draws, thin=settings.spacing)
    count = 2 * settings.chains
    found = umbrella.unbiased(problem, data, count, chosen, settings.seed, FRESH_SEQUENCES)
    shape = (count, settings.draws)
    stats = {"lp": -found.energy.reshape(shape), "acceptance_rate": found.acceptance.reshape(shape)}
    return _named(found.observables, shape), stats


def joint(problem: Problem, data: Empirical, settings: SamplingSettings) -> Draws:
    """SGLD or MALA on (G, W)."""
    cells, path = repeated(problem, data, 2 * settings.chains, settings.seed, 3), PackedPath(problem)
    chosen = langevin.LangevinSettings(
        langevin.LOGIT_STEPS[problem.attention],
        warmup=settings.warmup * settings.spacing,
        draws=settings.draws,
        thin=settings.spacing,
    )
    against, shape = yardstick(problem, Network(), FRESH_SEQUENCES), (2 * settings.chains, settings.draws)
    if settings.sampler == "mala":
        adjusted = mala.sample(cells, path, against, chosen)
        return _named(adjusted.observables, shape), {"acceptance_rate": adjusted.acceptance}
    found = langevin.sample(cells, path, against, chosen)
    lost = (np.asarray(found.diverged) != NEVER)[:, None]
    return _named(found.observables, shape), {"diverging": np.broadcast_to(lost, shape).copy()}


def library(problem: Problem, data: Empirical, settings: SamplingSettings) -> Draws:
    """HMC or NUTS of blackjax; on the collapsed target no loss is measured, W not being drawn."""
    every, shape = settings.spacing, (2 * settings.chains, settings.draws)
    name = settings.target or "collapsed"
    target = TARGETS[name](posed(problem, jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), data)))
    begin = jax.vmap(target.initial)(repeated(problem, data, shape[0], settings.seed, 3).start)
    how = reference.ReferenceSettings(settings.warmup, settings.draws * every)
    algorithm: reference.Algorithm = "nuts" if settings.sampler == "nuts" else "hmc"
    found = reference.sample(target, begin, problem.chi, settings.seed, algorithm, how)
    against = yardstick(problem, Network(), FRESH_SEQUENCES)
    flat = jax.tree.map(lambda leaf: jnp.asarray(leaf[:, ::every].reshape(-1, *leaf.shape[2:])), found.positions)
    if name == "joint":
        observed = measure_all(flat, against, problem)
    else:
        matrix = attention(flat, problem.attention, problem.length)
        seen = jax.lax.map(lambda pair: order_parameters(pair[0], pair[1], against), (flat, matrix))
        observed = Observables(*seen, *[jnp.full(len(flat), jnp.nan)] * 3)
    stats = {"lp": found.log_density, "acceptance_rate": found.acceptance, "diverging": found.divergent}
    return _named(observed, shape), {key: np.asarray(value)[:, ::every] for key, value in stats.items()}


RUN: dict[str, Callable[[Problem, Empirical, SamplingSettings], Draws]] = {
    "hmc": collapsed,
    "mala": joint,
    "sgld": joint,
    "nuts": library,
    "blackjax-hmc": library,
}
