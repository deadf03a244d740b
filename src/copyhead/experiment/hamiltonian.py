"""Hamiltonian Monte Carlo on the collapsed posterior, with the flow of the Gaussian prior solved exactly (split HMC).

The mass matrix is the inverse prior covariance, so that the prior alone turns (G, v) by an angle: any number of steps of any
length, without error. Only the kicks by the data term discretise, which is why steps of half a radian are accepted in L^2
dimensions (Shahbaba, Lan, Johnson and Neal 2014). Every step is corrected by Metropolis: there is no bias of the step size.

Many chains run at once, (rung, repeat) for every data set. With more than one rung neighbours exchange their states after each
trajectory, which leaves the product of their densities as it is (replica exchange): rungs may differ in chi, in P, or in the
bias along aG (`collapsed.Rung`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.optimizers.dual_averaging import dual_averaging
from jax.scipy.special import ndtr
from jaxtyping import Array, Bool, Float, Int, UInt32

from copyhead.experiment.collapsed import Marks, Rung, Seen, Sizes, draw_output, look_and_force, marks, negative_log_density
from copyhead.experiment.noise import normals
from copyhead.experiment.observables import Observables, Yardstick, measure, order_parameters
from copyhead.experiment.packed import Packed, prior_energy, sandwich
from copyhead.experiment.path import COMPILATION
from copyhead.model.attention import attention
from copyhead.model.network import Positional
from copyhead.model.prior import Prior
from copyhead.problem import Problem

# Acceptance that the step size is adapted to. Lower ones are cheaper in theory, but trajectories near a barrier vary.
ACCEPTANCE = 0.85
# Trajectories without velocity before the warm-up, and the angle of their steps: small, to descend into the nearest branch. A
# start far above it would otherwise turn its energy into heat, and cross a barrier of many nats before it has cooled.
QUENCH, QUENCH_ANGLE = 60, 0.1
# The angle of one step starts at the first, and that of a trajectory stays below the second: after half a turn a mode comes
# back with the same amplitude, and its variance would not mix although its mean does. For the same reason each trajectory
# varies its angle by a factor 1 +- JITTER.
FIRST_ANGLE, LARGEST_TURN, JITTER = 0.3, 2.0, 0.4


class HamiltonianSettings(NamedTuple):
    """leapfrogs: kicks in one trajectory. warmup: trajectories in which the angle adapts. draws: recorded trajectories.

    thin: trajectories from one draw to the next. losses: draw W and measure losses; a draw costs more than a trajectory then.
    """

    leapfrogs: int = 5
    warmup: int = 300
    draws: int = 500
    thin: int = 1
    losses: bool = True


class Trace(NamedTuple):
    """Draws of all chains, (rung, repeat, data, draw) unless said.

    observables: of G and a W drawn given it. energy: -log p at the chain's own rung, up to a constant. marks: what the density
    of a draw at any other rung needs. acceptance: probability of accepting the trajectory. walker: the rung at which the
    state of a chain began. exchanged: acceptance probability of the exchange with the next rung, nan if there was none.
    angle: of one step, (rung, repeat, data).
    """

    observables: Any
    energy: Float[np.ndarray, "rung repeat data draw"]
    marks: Marks
    acceptance: Float[np.ndarray, "rung repeat data draw"]
    walker: Int[np.ndarray, "rung repeat data draw"]
    exchanged: Float[np.ndarray, "rung repeat data draw"]
    angle: Float[np.ndarray, "rung repeat data"]


class State(NamedTuple):
    """Of one chain. data_energy: `collapsed.data_term`. force: its gradient. seen, walker: see `Trace`."""

    logits: Float[Array, "... L L"]
    seen: Seen
    data_energy: Float[Array, "..."]
    force: Float[Array, "... L L"]
    walker: Int[Array, "..."]


def prior_draw(noise: Float[Array, "... L L"], chi: Float[Array, "..."], prior: Prior) -> Float[Array, "... L L"]:
    """K^(1/2) xi K^(1/2) sqrt(g_W / chi)."""
    return sandwich(noise, prior, 0.5) * jnp.sqrt(prior.logit_variance / chi)[..., None, None]


def _kick(force: Array, chi: Array, prior: Prior) -> Array:
    """The prior covariance times the force."""
    return sandwich(force, prior, 1.0) * (prior.logit_variance / chi)[..., None, None]


def trajectory(
    state: State,
    data: Packed,
    rung: Rung,
    angle: Float[Array, "chain"],
    noise: Float[Array, "chain n"],
    leapfrogs: int,
    sizes: Sizes,
) -> tuple[State, Float[Array, "chain"]]:
    """One trajectory and its Metropolis test; also the probability of acceptance.

    noise: L^2 + 2 standard normals by chain: velocity, jitter, and the test.
    """
    length, prior = sizes.length, sizes.prior
    velocity = prior_draw(noise[:, : length**2].reshape(-1, length, length), rung.chi, prior)
    angle = angle * (1 + JITTER * (2 * ndtr(noise[:, -2]) - 1))
    cosine, sine = jnp.cos(angle)[:, None, None], jnp.sin(angle)[:, None, None]
    half = angle[:, None, None] / 2
    before = state.data_energy + rung.chi * state.seen.prior + rung.chi * prior_energy(velocity, prior)

    def step(_: int, carried: tuple[Array, Array, Array, Seen, Array]) -> tuple[Array, Array, Array, Seen, Array]:
        logits, velocity, force, *_rest = carried
        velocity = velocity - half * _kick(force, rung.chi, prior)
        logits, velocity = cosine * logits + sine * velocity, cosine * velocity - sine * logits
        seen, energy, force = look_and_force(logits, data, rung, sizes)
        return logits, velocity - half * _kick(force, rung.chi, prior), force, seen, energy

    begin = (state.logits, velocity, state.force, state.seen, state.data_energy)
    logits, velocity, force, seen, energy = jax.lax.fori_loop(0, leapfrogs, step, begin)
    change = energy + rung.chi * seen.prior + rung.chi * prior_energy(velocity, prior) - before
    # a trajectory that has left the numbers is refused, and counts as such
    probability = jnp.where(jnp.isfinite(change), jnp.exp(jnp.minimum(-change, 0)), 0.0)
    moved = State(logits, seen, energy, force, state.walker)
    return _choose(ndtr(noise[:, -1]) < probability, moved, state), probability


def _choose(condition: Bool[Array, "..."], first: Any, second: Any) -> Any:
    def one(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(condition.shape + (1,) * (a.ndim - condition.ndim)), a, b)

    return jax.tree.map(one, first, second)


def exchange(
    state: State, rung: Rung, uniform: Float[Array, "rung repeat data"], number: UInt32[Array, ""], sizes: Sizes
) -> tuple[State, Float[Array, "rung repeat data"]]:
    """Neighbouring rungs exchange states; even and odd pairs in turn. Also the probability, by the lower rung of a pair.

    The force of a state is of its old rung afterwards.
    """
    rungs = uniform.shape[0]
    index = jnp.arange(rungs)
    parity = (number % 2).astype(index.dtype)
    partner = jnp.clip(jnp.where(index % 2 == parity, index + 1, index - 1), 0, rungs - 1)
    own = state.data_energy + rung.chi * state.seen.prior
    crossed = negative_log_density(jax.tree.map(lambda leaf: leaf[partner], state.seen), rung, sizes)
    gain = own + own[partner] - crossed - crossed[partner]
    probability = jnp.where((partner == index)[:, None, None], 0.0, jnp.exp(jnp.minimum(gain, 0)))
    accepted = uniform[jnp.minimum(index, partner)] < probability
    lower = jnp.where((partner > index)[:, None, None], probability, jnp.nan)
    return _choose(accepted, jax.tree.map(lambda leaf: leaf[partner], state), state), lower


@partial(jax.jit, static_argnames=("sizes", "settings", "problem"), compiler_options=COMPILATION)
def run(
    start: Float[Array, "rung repeat data L L"],
    data: Packed,
    rung: Rung,
    keys: UInt32[Array, "rung repeat data 2"],
    yardstick: Yardstick,
    sizes: Sizes,
    settings: HamiltonianSettings,
    problem: Problem,
) -> Trace:
    """Warm-up and draws of all chains. start: transposed logits. data: (data, ...). rung: scalars by chain."""
    shape, length = start.shape[:3], sizes.length
    ladder, largest = shape[0] > 1, LARGEST_TURN / settings.leapfrogs
    count = length**2 + 3
    flat_keys = keys.reshape(-1, 2)
    begin, update, _ = dual_averaging()
    chain: Any = jax.vmap(
        jax.vmap(partial(trajectory, leapfrogs=settings.leapfrogs, sizes=sizes), in_axes=(0, None, 0, 0, 0)),
        in_axes=(0, None, 0, 0, 0),
    )
    fresh: Any = jax.vmap(jax.vmap(partial(look_and_force, sizes=sizes), in_axes=(0, None, 0)), in_axes=(0, None, 0))

    def advance(state: State, angle: Array, number: Any, heat: Any = 1.0) -> tuple[State, Array, Array]:
        noise = normals(flat_keys, number, count).reshape(*shape, count)
        noise = jnp.concatenate([noise[..., :1], heat * noise[..., 1:-2], noise[..., -2:]], axis=-1)
        state, probability = chain(state, data, rung, angle, noise[..., 1:])
        exchanged: Any = jnp.full(shape, jnp.nan)
        if ladder:
            state, exchanged = exchange(state, rung, ndtr(noise[..., 0]), number, sizes)
            seen, energy, force = fresh(state.logits, data, rung)
            state = state._replace(seen=seen, data_energy=energy, force=force)
        return state, probability, exchanged

    def prepare(carried: tuple, hot: Bool[Array, ""]) -> tuple[tuple, None]:
        """One trajectory before the draws: cold, to descend, or hot, to adapt; one loop, or it would be compiled twice."""
        state, adaptation, number = carried
        angle = jnp.where(hot, jnp.minimum(jnp.exp(adaptation[0]), largest), QUENCH_ANGLE)
        state, probability = advance(state, angle, number, hot.astype(angle.dtype))[:2]
        # repeats of a rung adapt together
        shortfall = jnp.broadcast_to(ACCEPTANCE - probability.mean(axis=1, keepdims=True), shape)
        adapted = jax.tree.map(lambda new, old: jnp.where(hot, new, old), update(adaptation, shortfall), adaptation)
        return (state, adapted, number + 1), None

    def once(carried: tuple, _: None) -> tuple[tuple, tuple]:
        state, angle, number = carried
        state, probability, exchanged = advance(state, angle, number)
        return (state, angle, number + 1), (probability, exchanged)

    def observe(state: State, number: Any) -> Any:
        logits = state.logits.mT.reshape(-1, length, length)
        if not settings.losses:
            matrix = attention(logits, sizes.kind, length)
            nothing = jnp.full(len(logits), jnp.nan)
            found = jax.vmap(lambda one, row: order_parameters(one, row, yardstick))(logits, matrix)
            return Observables(*found, *[nothing] * 3)
        noise = normals(flat_keys ^ jnp.uint32(1), number, sizes.vocab**2).reshape(*shape, sizes.vocab, sizes.vocab)
        output = draw_output(state.seen, rung, noise, sizes).reshape(-1, sizes.vocab, sizes.vocab)
        return jax.vmap(lambda one: measure(one, yardstick, problem))(Positional(logits, output))

    def draw(carried: Any, _: None) -> tuple[tuple, tuple]:
        carried, (probability, exchanged) = jax.lax.scan(once, carried, length=settings.thin)
        state, _, number = carried
        observed = observe(state, number)
        energy = state.data_energy + rung.chi * state.seen.prior
        seen = jax.tree.map(lambda leaf: leaf.reshape(*shape), observed), energy, marks(state.seen)
        return carried, (*seen, probability.mean(axis=0), state.walker, jnp.nanmean(exchanged, axis=0))

    seen, energy, force = fresh(start, data, rung)
    walker = jnp.broadcast_to(jnp.arange(shape[0])[:, None, None], shape)
    state = State(start, seen, energy, force, walker)
    adaptation: Any = begin(jnp.full(shape, FIRST_ANGLE))
    adaptation = adaptation._replace(log_x_avg=jnp.zeros(shape), avg_error=jnp.zeros(shape), step=jnp.array(1))
    begun: Any = (state, adaptation, jnp.uint32(0))
    hot = jnp.arange(QUENCH + settings.warmup) >= QUENCH
    (state, adaptation, number), _ = jax.lax.scan(prepare, begun, hot)
    angle = jnp.minimum(jnp.exp(adaptation[1]), largest) if settings.warmup else jnp.full(shape, FIRST_ANGLE)
    _, traces = jax.lax.scan(draw, (state, angle, number), length=settings.draws)
    traces = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 3), traces)
    return Trace(*traces, angle=angle)
