"""Order parameters at finite d_model: embeddings that adapt to the data, on the symmetric subspace.

The weights are Z = (p; W_emb) with rows z, W_QK, W_V and W_O; U = (D Z) W_QK (D Z)^T with D^2 = (tau_p, tau_x), and
W = W_emb W_V W_O. With orthonormal rows Z_0 at the start and a prior of variance g_E / (chi d_model) around them,

    E = ... + |W_QK|^2 / (2 g_W) + |W_O|^2 / (2 g_O) + d_model / (2 g_E) (|Z - Z_0|^2 + |W_V - W_V0|^2).

For a given U and W the best change of the rows is Z = s Z_0 with s that commutes with the symmetries: a number for each Fourier
mode of the positions (U is circulant there) and for the zero-sum tokens, and a symmetric 2 x 2 matrix in the two uniform
directions. Each divides the cost of what is built on it; d_model -> infinity fixes s = 1, which is the kernel limit.

The modes s_k differ, so that lags other than 0 and 1, equal in the kernel limit, are not quite so at finite width. They are
taken as equal: by symmetry that changes the order parameters at second order in 1 / d_model only (a test holds it).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from copyhead.problem import Attention, Problem
from copyhead.theory.content import ContentOrderParameters, ContentTask, content_blocks, content_order_parameters, content_task
from copyhead.theory.descent import descend
from copyhead.theory.posterior import best_output
from copyhead.theory.saddle_point import QUICK_COMPILATION

# Newton steps that follow the descent, which ends short of the minimum where that is far from the start and soft.
NEWTON_STEPS = 10
# What a gradient must be below, in units in which the priors have curvature one: order parameters are right to five digits.
ACCEPTED = 1e-6


class FiniteWidth(NamedTuple):
    """order_parameters: as of the kernel limit. stretch: largest change of s, by how much the embeddings adapt.

    converged: whether the gradient vanishes, and the Hessian is positive: it is a minimum.
    """

    order_parameters: ContentOrderParameters
    stretch: float
    converged: bool


def _squared_error(coordinates: Float[Array, "4"], output: Float[Array, "2"], task: ContentTask, kind: Attention) -> Array:
    """Of W with the amplitudes `output` on zero-sum token vectors and on the uniform one, in the population times P."""
    blocks, w = content_blocks(coordinates, task, kind), output[:, None, None]
    return blocks.target_square + blocks.inner(w, blocks.attention_square * w - 2 * blocks.overlap)


def _energy(x: Float[Array, "n"], task: ContentTask, stiffness: Float[Array, ""], kind: Attention) -> Float[Array, ""]:
    """E of the symmetric weights; x = (c1, cG, cI, cS, w_o, w_u, y) with s = s_0 + y / sqrt(stiffness), so that the prior of
    each y is y^2 / 2: of the zero-sum tokens, of W_V on them and on their mean, of s_11, s_12, s_22, and of every mode s_k."""
    coordinates, (zero_sum, uniform) = x[:4], x[4:6]
    moved = x[6:] / jnp.sqrt(stiffness)
    (tokens, value, mean_value), (a, b, c), modes = 1 + moved[:3], moved[3:6] + jnp.array([1.0, 0.0, 1.0]), 1 + moved[6:]
    c1, cG, cI, cS = coordinates
    prior, vocab, length = task.prior, task.vocab, task.prior.length
    position, token = prior.position_scale, prior.token_coupling * vocab
    angles = 2 * jnp.pi * jnp.arange(1, modes.shape[0] + 1) / length
    circulant = cG**2 + cS**2 + 2 * cG * cS * jnp.cos(angles)
    weights = jnp.stack([position**0.5 / length**0.5, token**0.5 / vocab**0.5])
    square = (a * weights[0] + b * weights[1]) ** 2 + (b * weights[0] + c * weights[1]) ** 2
    mean = c1 + (cG + cS) / length + cI / vocab
    logits = (mean / square) ** 2 + jnp.sum(circulant / modes**4) / position**2 + (vocab - 1) * (cI / token) ** 2 / tokens**4
    outputs = (vocab - 1) * (zero_sum / (tokens * value)) ** 2 + uniform**2 / ((b**2 + c**2) * mean_value**2)
    times = jnp.concatenate([jnp.stack([vocab - 1, vocab - 1, 1.0, 1.0, 2.0, 1.0]), jnp.ones_like(modes)])
    cost = logits / prior.logit_variance + outputs / prior.output_variance + jnp.sum(times * x[6:] ** 2)
    return (cost + _squared_error(coordinates, x[4:6], task, kind) / prior.kappa) / 2


@partial(jax.jit, static_argnames="kind")
def _value_and_gradient(x: Array, task: ContentTask, stiffness: Array, kind: Attention) -> tuple[Array, Array]:
    return jax.value_and_grad(_energy)(x, task, stiffness, kind)


@partial(jax.jit, static_argnames="kind", compiler_options=QUICK_COMPILATION)
def _newton(x: Array, task: ContentTask, stiffness: Array, kind: Attention) -> tuple[Array, Array, Array]:
    """The place, the gradient and the Hessian after NEWTON_STEPS."""

    def at(y: Array) -> tuple[Array, Array]:
        gradient = jax.grad(_energy)(y, task, stiffness, kind)
        return gradient, gradient

    def step(_: int, y: Array) -> Array:
        hessian, gradient = jax.jacfwd(at, has_aux=True)(y)
        return y - jnp.linalg.solve(hessian, gradient)

    place = jax.lax.fori_loop(0, NEWTON_STEPS, step, x)
    hessian, gradient = jax.jacfwd(at, has_aux=True)(place)
    return place, gradient, hessian


def finite_width(problem: Problem, width: float, embedding_variance: float, start: ContentOrderParameters) -> FiniteWidth:
    """The minimum at d_model = width next to a minimum of the kernel limit, at problem.sequences.

    Args:
        embedding_variance: g_E.
        start: order parameters of the branch to follow, from the kernel limit.
    """
    assert problem.sequences is not None
    kind, stiffness = problem.attention, np.float64(width / embedding_variance)
    with jax.enable_x64(True):
        task = jax.tree.map(jnp.asarray, content_task(problem)._replace(sequences=np.float64(problem.sequences)))
        coordinates = jnp.array([start.c1, start.cG, start.cI, start.cS], jnp.float64)
        output = best_output(content_blocks(coordinates, task, kind), task.prior).ravel()
        first = np.concatenate([coordinates, output, np.zeros(6 + problem.length - 1)])
        near = descend(lambda x: _value_and_gradient(x, task, stiffness, kind), first, ACCEPTED)
        place, gradient, hessian = _newton(near.place, task, stiffness, kind)
        loss = _squared_error(place[:4], place[4:6], task, kind) / (problem.sequences * problem.scored)
        state = content_order_parameters(place[:4], task, kind)._replace(loss=loss)
    converged = np.max(np.abs(gradient)) < ACCEPTED and np.linalg.eigvalsh(hessian)[0] > 0
    stretch = float(np.max(np.abs(place[6:])) / stiffness**0.5)
    return FiniteWidth(ContentOrderParameters(*(float(value) for value in state)), stretch, bool(converged))
