"""Networks: parametrisations (weights -> circuits) and the one forward pass that follows them all.

With one-hot tokens the logits of a sequence x depend on the weights only through the query-key circuit U, a matrix between
L + V rows z (L positions, V tokens) in four blocks, and the output only through the value-output circuit W (V x V):

    logits[a, b] = pp[a, b] + pt[a, x_b] + tp[x_a, b] + tt[x_a, x_b]        f = A x W

positional: pp and W are the weights, no other block: the d_model -> infinity limit at tau_x = 0.
kernel:     all four blocks and W are the weights: the d_model -> infinity limit at any tau_x.
embedded:   z = (sqrt(tau_p) p; sqrt(tau_x) W_emb), U = z W_QK z^T and W = W_emb W_V W_O; with separate query and key
            matrices W_QK = W_Q W_K^T. Every weight is trained. Values read the token part of the embedding only.

Prior of a weight: normal around `centre` with variance g / chi (class Scale). The theory marginalises the last layers, W_QK and
W_O, which start at zero; embeddings and W_V are features: they start at order one (rows of unit norm), their prior is
centred there, and its variance falls like 1 / d_model, so that their kernel is fixed for d_model -> infinity.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from copyhead.model import targets
from copyhead.model.attention import attention
from copyhead.model.tokens import stream
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.record import Record

Start = Literal["small", "copy"]
# Standard deviation of the weights of a small start.
SMALL = 0.01


class Network(Record):
    """Which network is trained, and what the limit d_model -> infinity hides of it."""

    kind: Literal["positional", "kernel", "embedded"] = Field(default="positional", description="parametrisation")
    width: int = Field(default=128, ge=2, le=16384, description="d_model of the embedded network")
    embedding: Literal["orthogonal", "gaussian"] = Field(default="orthogonal", description="law of the embeddings at the start")
    positions: Literal["learned", "fixed"] = Field(default="learned", description="whether the positional encoding is trained")
    embedding_variance: float = Field(
        default=0.01, gt=0, description="g_E, prior variance of the length of an embedding row around its start, times 1/chi"
    )


class Positional(NamedTuple):
    """logits: G = pp. output: W. With an axis of heads, (H, L, L) and (H, V, V), for a problem beyond the paper's."""

    logits: Float[Array, "... L L"]
    output: Float[Array, "... V V"]


class Circuits(NamedTuple):
    """Blocks of U (p: position, t: token; queries first) and W; they are also the weights of the kernel network."""

    pp: Float[Array, "... L L"]
    pt: Float[Array, "... L V"]
    tp: Float[Array, "... V L"]
    tt: Float[Array, "... V V"]
    output: Float[Array, "... V V"]


class Fused(NamedTuple):
    """Weights of the embedded network with one query-key matrix."""

    positions: Float[Array, "... L d"]
    tokens: Float[Array, "... V d"]
    query_key: Float[Array, "... d d"]
    value: Float[Array, "... d d"]
    output: Float[Array, "... d V"]


class Split(NamedTuple):
    """Weights of the embedded network with separate query and key matrices, d_h columns each."""

    positions: Float[Array, "... L d"]
    tokens: Float[Array, "... V d"]
    query: Float[Array, "... d h"]
    key: Float[Array, "... d h"]
    value: Float[Array, "... d d"]
    output: Float[Array, "... d V"]


Weights = Positional | Circuits | Fused | Split


class Scale(NamedTuple):
    """How one weight is treated. variance: g, its energy being |weight - centre|^2 / (2 g); None if it is not trained.

    anchored: whether the centre is the start (else zero). rate: factor on Adam's learning rate; with it an update moves U and
    W by as much at every width.
    """

    variance: float | None
    anchored: bool
    rate: float


def circuits(weights: Weights, problem: Problem) -> Circuits:
    """The blocks of U and W of one network (leading axes by vmap)."""
    if isinstance(weights, Circuits):
        return weights
    if isinstance(weights, Positional):
        length, vocab = weights.logits.shape[-1], weights.output.shape[-1]
        blank = jnp.zeros((length, vocab), weights.logits.dtype)
        return Circuits(weights.logits, blank, blank.T, jnp.zeros((vocab, vocab), blank.dtype), weights.output)
    rows = jnp.concatenate([problem.position_scale**0.5 * weights.positions, problem.token_scale**0.5 * weights.tokens])
    split = isinstance(weights, Split)
    both = (rows @ weights.query) @ (rows @ weights.key).T if split else (rows @ weights.query_key) @ rows.T
    length = weights.positions.shape[-2]
    blocks = both[:length, :length], both[:length, length:], both[length:, :length], both[length:, length:]
    return Circuits(*blocks, (weights.tokens @ weights.value) @ weights.output)


def scales(network: Network, problem: Problem) -> Any:
    """The Scale of every weight, in the structure of the weights.

    Raises:
        ProblemError: if the kind of network does not go with the problem.
    """
    position, token, heads = problem.position_scale, problem.token_scale, problem.head_dimension
    logit, output = problem.logit_variance, problem.output_variance
    if network.kind != "positional":
        problem.require_paper(f"network = {network.kind} is")
    if network.kind != "embedded" and heads is not None:
        raise ProblemError(
            f"head_dimension = {heads}: needs network = embedded; the {network.kind} network has no query and key"
        )
    if network.kind == "positional":
        if token > 0:
            raise ProblemError(
                f"token_scale = {token:g}: attention of the positional network reads no tokens; use network = kernel"
            )
        return Positional(Scale(position**2 * logit, False, 1.0), Scale(output, False, 1.0))
    if token == 0:
        raise ProblemError(f"token_scale = 0: must be > 0 with network = {network.kind}, or tokens would have no logits")
    if network.kind == "kernel":
        pp, mixed, tt = (Scale(logit * block, False, 1.0) for block in (position**2, position * token, token**2))
        return Circuits(pp, mixed, mixed, tt, Scale(output, False, 1.0))
    width = network.width
    feature = Scale(network.embedding_variance / width, True, width**-0.5)
    positions = feature if network.positions == "learned" else feature._replace(variance=None)
    # In the rotated basis of W_O Adam has one step size for stiff and soft directions of W; ten times the step makes up for it.
    value, last = feature._replace(rate=1 / width), Scale(output, False, 10 * width**-0.5)
    if heads is None:
        return Fused(positions, feature, Scale(logit, False, (problem.length + problem.vocab) / width), value, last)
    factor = Scale((logit * problem.chi / heads) ** 0.5, False, (width * heads) ** -0.5)
    return Split(positions, feature, factor, factor, value, last)


def start(network: Network, problem: Problem, target: Float[np.ndarray, "L L"], kind: Start, seed: int) -> Weights:
    """Initial weights, float32. small: U and W of standard deviation 0.01. copy: a network that copies, see `copying`.

    Of several heads the first one copies and the others are small. Logits that the mask hides are zero.
    """
    if problem.beyond and network.kind == "positional":
        return _heads(problem, target, kind, seed)
    source, length, vocab = stream(seed, "init"), problem.length, problem.vocab
    draw = np.random.default_rng(source).standard_normal
    scale = SMALL if kind == "small" else 0.0
    logits, output = scale * draw((length, length), np.float32), scale * draw((vocab, vocab), np.float32)
    if kind == "copy":
        logits, output = copying(target, vocab, problem.attention)
    if network.kind == "positional":
        return Positional(logits, output)
    if network.kind == "kernel":
        pt, tp, tt = (scale * draw(shape, np.float32) for shape in ((length, vocab), (vocab, length), (vocab, vocab)))
        return Circuits(logits, pt, tp, tt, output)
    return _embedded(network, problem, logits, output, kind, seed)


def _heads(problem: Problem, target: Float[np.ndarray, "L L"], kind: Start, seed: int) -> Positional:
    """Weights with an axis of heads; each head has its own draws, after those of the heads before it."""
    length, vocab, inside = problem.length, problem.vocab, targets.allowed(problem)
    draw = np.random.default_rng(stream(seed, "init")).standard_normal
    shapes = (length, length), (vocab, vocab)
    heads = [Positional(*(SMALL * draw(shape, np.float32) for shape in shapes)) for _ in range(problem.heads)]
    if kind == "copy":
        heads[0] = copying(target, vocab, problem.attention, inside)
    logits, output = (np.stack(parts).astype(np.float32) for parts in zip(*heads, strict=True))
    return Positional(np.where(inside, logits, 0), output)


def copying(
    target: Float[np.ndarray, "L L"], vocab: int, kind: Attention, allowed: Bool[np.ndarray, "L L"] | None = None
) -> Positional:
    """G and W that copy, A x W close to T x, whatever the data.

    Softmax: in a row of n allowed positions the logits of target entries are ln n + 2 + ln q above the rest, where q is the
    part of an entry in sum_b |T_ab|, one for a single entry. So the target takes 88% of the attention (n large), in the ratio
    of |T|.
    Attention has no negative entries: signs, and row sums other than one, are left to W = w I with w the least squares fit of
    T by w q. It is 1 for the copy task, and small for weights of both signs, which one head of softmax cannot follow.
    Linear: G = g T with W = (L / g) I, so that A x W = T x, and g = (V L)^(1/4), where |G|^2 = |W|^2 if |T|^2 = L.

    Args:
        allowed: which positions a row may attend to; None means all.
    """
    length = target.shape[0]
    if kind == "linear":
        gain = (length * vocab) ** 0.25
        return Positional(gain * target, (length / gain) * np.eye(vocab))
    size = np.full(length, length) if allowed is None else allowed.sum(axis=1)
    on = target != 0
    part = np.abs(target) / np.maximum(np.abs(target).sum(axis=1, keepdims=True), np.finfo(float).tiny)
    logits = np.where(on, np.log(size)[:, None] + 2.0 + np.log(np.where(on, part, 1.0)), 0.0)
    return Positional(logits, np.sum(part * target) / np.sum(part**2) * np.eye(vocab))


def _embedded(network: Network, problem: Problem, logits: Any, output: Any, kind: Start, seed: int) -> Fused | Split:
    """Random embeddings, and last layers that are small, or that give the logits and output map of a copying network."""
    length, vocab, width, heads = problem.length, problem.vocab, network.width, problem.head_dimension
    draw = np.random.default_rng(stream(seed, "embedding")).standard_normal
    rows = draw((length + vocab, width))
    value = draw((width, width))
    if network.embedding == "orthogonal":
        rows, value = orthogonal(rows), orthogonal(value)
    else:
        rows, value = rows / width**0.5, value / width**0.5
    positions, embedding = rows[:length], rows[length:]
    if kind == "small":
        query_key, last = SMALL * draw((width, width)), SMALL * draw((width, vocab))
        queries = [0.1 * heads**-0.25 * draw((width, heads)) for _ in range(2)] if heads else []
    else:
        inverse = np.linalg.pinv(positions) / problem.position_scale**0.5
        query_key, last = inverse @ logits @ inverse.T, np.linalg.pinv(embedding @ value) @ output
        if heads:  # the best approximation of rank d_h, in equal parts
            left, sizes, right = np.linalg.svd(query_key)
            queries = [np.zeros((width, heads)) for _ in range(2)]
            rank = min(heads, width)
            for part, factor in zip(queries, (left, right.T), strict=True):
                part[:, :rank] = factor[:, :rank] * sizes[:rank] ** 0.5
        else:
            queries = []
    middle = queries or [query_key]
    arrays = (np.asarray(part, np.float32) for part in (positions, embedding, *middle, value, last))
    return Split(*arrays) if heads else Fused(*arrays)


def orthogonal(normal: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Orthonormal rows, uniformly distributed; if n > d a tight frame, whose rows have mean square norm one."""
    rows, columns = normal.shape
    factor, triangle = np.linalg.qr(normal.T if rows < columns else normal)
    factor = factor * np.sign(np.diag(triangle))  # or its law would depend on the algorithm
    return factor.T if rows < columns else factor * (rows / columns) ** 0.5


def logits(weights: Circuits, tokens: Int[Array, "P L"]) -> Float[Array, "P L L"]:
    """pp[a, b] + pt[a, x_b] + tp[x_a, b] + tt[x_a, x_b] of every sequence."""
    by_key = jnp.moveaxis(weights.pt[:, tokens], 0, 1)
    return weights.pp + by_key + weights.tp[tokens] + weights.tt[tokens[:, :, None], tokens[:, None, :]]


def forward(weights: Circuits, tokens: Int[Array, "P L"], kind: Attention) -> Float[Array, "P L V"]:
    """f = A x W on sequences of tokens; the direct path, with a cost that grows with P."""
    return attention(logits(weights, tokens), kind, tokens.shape[-1]) @ weights.output[tokens]


def prior_energy(weights: Weights, start: Weights, scale: Any) -> Float[Array, ""]:
    """sum over weights of |weight - centre|^2 / (2 g); `scale` as returned by `scales`."""
    terms = [
        jnp.sum((part - (begin if how.anchored else 0.0)) ** 2) / (2 * how.variance)
        for part, begin, how in zip(weights, start, scale, strict=True)
        if how.variance is not None
    ]
    return jnp.asarray(sum(terms))


def stacked(networks: list[Weights]) -> Weights:
    """Networks of one kind along a new leading axis, float32."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf, np.float32) for leaf in leaves]), *networks)
