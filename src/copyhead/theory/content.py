"""Attention that reads the tokens: the action on the symmetric logits of content-dependent attention, exact for uniform tokens.

The logits of a sequence x come from four blocks of weights, G_ab = pp[a,b] + pt[a,x_b] + tp[x_a,b] + tt[x_a,x_b]. Cyclic
shifts of the positions and permutations of the tokens leave S invariant, and on what they leave free, so do permutations of
the L - 2 positions that are neither a nor a - 1. Hence S has stationary points with

    G_ab = c1 + cG delta(b, a-1) + cI delta(x_a, x_b) + cS delta(a, b).

cS cannot be left out: a position always agrees with itself, so that cI singles it out, and cS partly takes that back.

Given the own token u of a row and whether its target token y equals u, the row depends on n, the number of the L - 2 other
positions that hold u: binomial, while the rest hold one of the other V - 1 tokens each. So expectations are sums over n.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.linalg import eigh_tridiagonal

from copyhead.model.prior import Prior, Scalar, prior, spectral_energy
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.posterior import TokenBlocks, data_energy, mean_loss

# Nodes of the quadrature over n: exact for L <= NODES + 1, and else for polynomials of degree below 2 NODES. Softmax rows are
# rational in n; tests/test_theory_content.py compares them with the full sums.
NODES = 16
# Angles that stand for the Fourier modes of the positions: exact for L <= MODES; for one fused matrix at any L.
MODES = 32


class ContentTask(NamedTuple):
    """The copy task for attention that reads the tokens; L, V and P are numbers, so that one compilation serves every size.

    deviation: values of n - (L - 2) / V, for n positions beside a row's own and its target that hold the row's own token.
    weight: their probability, zero for unused nodes. cosine: of the angles of the Fourier modes of positions but the uniform
    one; number: of modes at each.
    """

    vocab: Scalar
    sequences: Scalar
    deviation: Float[Array, "n"]
    weight: Float[Array, "n"]
    cosine: Float[Array, "k"]
    number: Float[Array, "k"]
    prior: Prior


class ContentOrderParameters(NamedTuple):
    """c1, cG, cI, cS of the logits, the attention averaged over sequences as a1, aG, and the population loss per token."""

    c1: Scalar
    cG: Scalar
    cI: Scalar
    cS: Scalar
    a1: Scalar
    aG: Scalar
    loss: Scalar


def content_task(problem: Problem) -> ContentTask:
    """The task at P = 1.

    Raises:
        ProblemError: where attention has no access to the tokens, or positions are not equivalent.
    """
    if problem.token_scale <= 0:
        raise ProblemError("content = True: needs token_scale > 0, the weight of tokens in the logits")
    if not problem.cyclic:
        raise ProblemError("content = True: the order-parameter theory needs cyclic = True")
    if problem.length < 3:
        raise ProblemError(f"length = {problem.length}: must be >= 3 with content = True, or cG and cS are one parameter")
    quadrature = binomial_quadrature(problem.length - 2, 1 / problem.vocab)
    modes = fourier_modes(problem.length)
    return ContentTask(np.float64(problem.vocab), np.float64(1), *quadrature, *modes, prior(problem))


def fourier_modes(length: float) -> tuple[Float[np.ndarray, "k"], Float[np.ndarray, "k"]]:
    """Cosines of the angles 2 pi k / L, k = 1 .. L - 1, and how many modes each stands for.

    Beyond MODES positions the sum over all angles is a mean over MODES of them, which converges geometrically for a periodic
    function, less the uniform mode at angle zero.
    """
    used = min(MODES, int(length))
    number = np.append(np.full(used, length / used), np.zeros(MODES - used))
    number[0] -= 1
    return np.cos(2 * np.pi * np.arange(MODES) / used), number


def binomial_quadrature(count: float, probability: float) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Gauss quadrature of the binomial law around its mean: NODES nodes and weights, the last unused for count < NODES - 1.

    The nodes are the eigenvalues of the Jacobi matrix of the Krawtchouk polynomials (Golub and Welsch 1969). With count + 1
    nodes they are 0 .. count, less the mean, and the weights the law itself. A real `count` is admitted for `end_point`.
    """
    used = min(NODES, int(count) + 1)
    degree = np.arange(used)
    diagonal = (1 - 2 * probability) * degree  # plus the mean, count * probability
    squares = degree * (count - degree + 1) * probability * (1 - probability)
    nodes, vectors = eigh_tridiagonal(diagonal, np.sqrt(squares[1:]))
    empty = np.zeros(NODES - used)
    return np.append(nodes, empty), np.append(vectors[0] ** 2, empty)


class RowMeans(NamedTuple):
    """Expectations over sequences of one row of A and of its output h = (A x)_a, a vector over tokens.

    target: attention on the target position. total, total_square: the sum of the row, and its square.
    square, overlap: |h|^2 and h . y, both without their uniform direction.
    """

    target: Float[Array, ""]
    total: Float[Array, ""]
    total_square: Float[Array, ""]
    square: Float[Array, ""]
    overlap: Float[Array, ""]


# y = u or not, in the order of the first axis of what `_row_means` computes
_AGREE = np.array([[0.0], [1.0]])


def _row_means(coordinates: Float[Array, "4"], task: ContentTask, kind: Attention) -> RowMeans:
    c1, cG, cI, cS = coordinates
    vocab, length, deviation = task.vocab, task.prior.length, task.deviation
    mean_equal = (length - 2) / vocab
    equal = mean_equal + deviation
    differing = length - 2 - equal
    # positions that hold another token than u, that hold u, the own one, the target if y != u, and if y = u
    logits = jnp.stack([jnp.zeros_like(c1), cI, cI + cS, cG, cG + cI])
    largest = jax.lax.stop_gradient(jnp.max(logits))  # a constant that softmax does not depend on
    weights = c1 + logits if kind == "linear" else jnp.exp(logits - largest)
    other, same, own = weights[:3]
    excess = cI if kind == "linear" else other * jnp.expm1(cI)
    target = weights[3:, None]
    on_token, off_token = own + equal * same, differing * other  # without the target
    total = on_token + off_token + target
    scale = (1 / length if kind == "linear" else 1 / total) * jnp.ones_like(total)
    # attention on u minus the mean of the other tokens, on_token - off_token / (V - 1), without a difference of sums over L
    gap = own + mean_equal * excess + deviation * (same + other / (vocab - 1))

    def mean(values: Float[Array, "2 n"]) -> Float[Array, ""]:
        return jnp.sum(jnp.array([[1 - 1 / vocab], [1 / vocab]]) * task.weight * values)

    # |h|^2 splits into u against the others, and the others: independent uniform draws of V - 1 tokens
    apart = gap + jnp.where(_AGREE == 1, target, -target / (vocab - 1))
    spread = differing * other**2 + (1 - _AGREE) * target**2
    square = mean(((1 - 1 / vocab) * apart**2 + (1 - 1 / (vocab - 1)) * spread) * scale**2)
    # The rest of a row has to do with y only through the partition sum; its change with y = u, without a difference of sums.
    change = 0.0 if kind == "linear" else (target[0] - target[1]) * scale[0] * scale[1]
    on_target = mean(target * scale)
    overlap = (1 - 1 / vocab) * (on_target + jnp.sum(task.weight * gap * change) / vocab)
    if kind == "softmax":
        return RowMeans(on_target, jnp.ones_like(square), jnp.ones_like(square), square, overlap)
    return RowMeans(on_target, mean(total / length), mean((total / length) ** 2), square, overlap)


def content_blocks(coordinates: Float[Array, "4"], task: ContentTask, kind: Attention) -> TokenBlocks:
    """F and N of the posterior in the two modes of the token symmetry: V - 1 zero-sum directions and the uniform one."""
    row, zero_sum = _row_means(coordinates, task, kind), task.vocab - 1
    number = task.sequences * task.prior.length
    return TokenBlocks(
        jnp.asarray(number),
        number * jnp.stack([row.square / zero_sum, row.total_square / task.vocab])[:, None, None],
        number * jnp.stack([row.overlap / zero_sum, row.total / task.vocab])[:, None, None],
        jnp.stack([zero_sum, jnp.ones_like(zero_sum)]),
    )


def content_logit_energy(coordinates: Float[Array, "4"], task: ContentTask) -> Float[Array, ""]:
    """The least cost of the four blocks of weights, entries of variance g_W times tau_p^2, tau_p tau_x (twice) and tau_x^2.

    It is that of the singular values: of the circulant matrix cG G* + cS 1 in pp, one for each Fourier mode; of cI in tt, for
    zero-sum token vectors; and of the mean logit, for the uniform direction of positions and tokens together.
    The mean logit can be shared out among all four, by least squares; what is left of cG and cS is in pp, that of cI in tt.
    """
    c1, cG, cI, cS = coordinates
    vocab, length, position = task.vocab, task.prior.length, task.prior.position_scale
    token = task.prior.token_coupling * vocab
    mean = (c1 + (cG + cS) / length + cI / vocab) / (position / length + token / vocab)
    positions = (cG**2 + cS**2 + 2 * cG * cS * task.cosine) / position**2
    squared = jnp.concatenate([positions, jnp.stack([mean**2, (cI / token) ** 2])])
    return spectral_energy(squared, jnp.concatenate([task.number, jnp.stack([jnp.ones_like(vocab), vocab - 1])]), task.prior)


def content_action(coordinates: Float[Array, "4"], task: ContentTask, kind: Attention) -> Float[Array, ""]:
    """S: the minimum over W of E at the logits of (c1, cG, cI, cS)."""
    return content_logit_energy(coordinates, task) + data_energy(content_blocks(coordinates, task, kind), task.prior)


def content_order_parameters(coordinates: Float[Array, "4"], task: ContentTask, kind: Attention) -> ContentOrderParameters:
    """a1: L times the mean attention off the target. aG: the mean on the target minus that off it."""
    c1, cG, cI, cS = coordinates
    row, length = _row_means(coordinates, task, kind), task.prior.length
    off = (row.total - row.target) / (length - 1)
    loss = mean_loss(content_blocks(coordinates, task, kind), task.prior, task.sequences * length)
    return ContentOrderParameters(c1, cG, cI, cS, length * off, row.target - off, loss)
