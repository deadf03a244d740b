"""Two attention layers: networks, the one forward pass of all of them, their losses and priors.

Scored queries a are the last position (recall) or 0 .. L-2 (next-token). Both layers are causal: b <= a.

minimal:      A1 = softmax(C1), logits_2[a, k] = sum_b A1[k, b] M[x_a, x_b] + C2[a, k], f_a = sum_k A2[a, k] W[x_k]
content:      the same with A1 = softmax(C1[a, b] + M1[x_a, x_b])
transformer:  r_0 = E[x] + p,  r_l = r_(l-1) + A_l r_(l-1) V_l O_l,  f = r_2 U,
              logits_l = r_(l-1) Q_l (r_(l-1) K_l)^T / sqrt(d_h)

E = sum over sequences and scored positions of l(f, y) / kappa + sum over weights of |weight|^2 / (2 g), where l is
|f - y|^2 / 2 or the cross-entropy -ln softmax(f)[y], for which kappa is a temperature. Entries of C1 and C2 with b > a are
in neither.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field

from copyhead.induction import Induction
from copyhead.model.tokens import stream
from copyhead.record import ProblemError, Record

Loss = Literal["squared", "cross-entropy"]
Start = Literal["small", "induction", "anti"]
# An aligned start: logit of the target above the others after ln n (as a copying network has it), and |beta|.
LOGIT, MATCH = 2.0, 4.0


class TwoLayer(Record):
    """Which two-layer network is trained, and on which loss."""

    kind: Literal["minimal", "content", "transformer"] = Field(default="minimal", description="parametrisation")
    loss: Loss = Field(default="squared", description="squared error or cross-entropy")
    width: int = Field(default=64, ge=2, le=4096, description="d_model of the transformer")
    head_dimension: int = Field(default=64, ge=1, le=4096, description="d_h, columns of query, key and value matrices")
    weight_variance: float = Field(
        default=1.0, gt=0, description="prior variance of every weight of the transformer, times 1/chi"
    )


class Minimal(NamedTuple):
    """first: C1. second: C2, of the last position (recall) or all. match: M. output: W."""

    first: Float[Array, "... L L"]
    second: Float[Array, "... *L L"]
    match: Float[Array, "... V V"]
    output: Float[Array, "... V V"]


class Content(NamedTuple):
    """As Minimal; content: M1, tokens in the logits of layer 1."""

    first: Float[Array, "... L L"]
    content: Float[Array, "... V V"]
    second: Float[Array, "... *L L"]
    match: Float[Array, "... V V"]
    output: Float[Array, "... V V"]


class Transformer(NamedTuple):
    """Embeddings E, p; query, key, value and output matrices of both layers; unembedding U."""

    tokens: Float[Array, "... V d"]
    positions: Float[Array, "... L d"]
    query1: Float[Array, "... d h"]
    key1: Float[Array, "... d h"]
    value1: Float[Array, "... d h"]
    output1: Float[Array, "... h d"]
    query2: Float[Array, "... d h"]
    key2: Float[Array, "... d h"]
    value2: Float[Array, "... d h"]
    output2: Float[Array, "... h d"]
    unembedding: Float[Array, "... d V"]


Weights = Minimal | Content | Transformer


class Pass(NamedTuple):
    """output: f at the scored positions. first, second: attention of both layers, of all positions and of the scored ones."""

    output: Float[Array, "P q V"]
    first: Float[Array, "P L L"]
    second: Float[Array, "P q L"]


def scored(problem: Induction) -> Int[np.ndarray, "q"]:
    """Positions with a target."""
    last = problem.length - 1
    return np.array([last]) if problem.task == "recall" else np.arange(last)


def causal(logits: Float[Array, "... q L"], queries: Int[np.ndarray, "q"]) -> Float[Array, "... q L"]:
    """Softmax over the positions up to the query."""
    seen = np.arange(logits.shape[-1]) <= queries[:, None]
    return jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)


def forward(weights: Weights, tokens: Int[Array, "P L"], problem: Induction) -> Pass:
    """Outputs and attention of one network on sequences."""
    everywhere, queries = np.arange(problem.length), scored(problem)
    if isinstance(weights, Transformer):
        return _transformer(weights, tokens, everywhere, queries)
    logits = weights.first
    if isinstance(weights, Content):
        logits = logits + weights.content[tokens[:, :, None], tokens[:, None, :]]
    first = jnp.broadcast_to(causal(logits, everywhere), (len(tokens), problem.length, problem.length))
    pairs = weights.match[tokens[:, queries, None], tokens[:, None, :]]
    own = weights.second if weights.second.ndim == 1 else weights.second[queries]
    second = causal(jnp.einsum("pab,pkb->pak", pairs, first) + own, queries)
    return Pass(jnp.einsum("pak,pkv->pav", second, weights.output[tokens]), first, second)


def _transformer(
    weights: Transformer, tokens: Int[Array, "P L"], everywhere: Int[np.ndarray, "L"], queries: Int[np.ndarray, "q"]
) -> Pass:
    scale = weights.query1.shape[-1] ** -0.5

    def layer(stream: Any, rows: Any, query: Any, key: Any, value: Any, output: Any) -> tuple[Any, Any]:
        logits = jnp.einsum("pah,pbh->pab", stream[:, rows] @ query, stream @ key) * scale
        attention = causal(logits, rows)
        return stream[:, rows] + (attention @ (stream @ value)) @ output, attention

    begin = weights.tokens[tokens] + weights.positions
    middle, first = layer(begin, everywhere, weights.query1, weights.key1, weights.value1, weights.output1)
    end, second = layer(middle, queries, weights.query2, weights.key2, weights.value2, weights.output2)
    return Pass(end @ weights.unembedding, first, second)


class Circuits(NamedTuple):
    """Token parts of layer 2. match: query-key, between a token and one that layer 1 has moved. output: value-output."""

    match: Float[Array, "... V V"]
    output: Float[Array, "... V V"]


def circuits(weights: Weights) -> Circuits:
    """M and W; of the transformer E Q_2 (E V_1 O_1 K_2)^T / sqrt(d_h) and E V_2 O_2 U (K-composition, Elhage et al. 2021)."""
    if not isinstance(weights, Transformer):
        return Circuits(weights.match, weights.output)
    moved = weights.tokens @ weights.value1 @ weights.output1 @ weights.key2
    match = (weights.tokens @ weights.query2) @ jnp.swapaxes(moved, -1, -2) * weights.query2.shape[-1] ** -0.5
    return Circuits(match, weights.tokens @ weights.value2 @ weights.output2 @ weights.unembedding)


def losses(output: Float[Array, "*n V"], target: Int[Array, "*n"], kind: Loss) -> Float[Array, "*n"]:
    """|f - y|^2, a sum over the V outputs, or the cross-entropy in nats."""
    if kind == "squared":
        return jnp.sum((output - jax.nn.one_hot(target, output.shape[-1])) ** 2, axis=-1)
    return -jnp.take_along_axis(jax.nn.log_softmax(output), target[..., None], axis=-1)[..., 0]


def weight_of_loss(problem: Induction, network: TwoLayer) -> float:
    """Factor of the summed losses in E: 1 / (2 kappa), or 1 / kappa for cross-entropy."""
    return 1 / ((2 if network.loss == "squared" else 1) * problem.kappa)


def variances(network: TwoLayer, problem: Induction) -> Any:
    """g of every weight, in the structure of the weights."""
    position, match, output = problem.position_variance, problem.match_variance, problem.output_variance
    if network.kind == "minimal":
        return Minimal(position, position, match, output)
    if network.kind == "content":
        return Content(position, match, position, match, output)
    return Transformer(*[network.weight_variance] * len(Transformer._fields))


def allowed(network: TwoLayer, problem: Induction) -> Any:
    """Which entries of each weight exist, as arrays of zero and one that broadcast to it."""
    below = np.tril(np.ones((problem.length, problem.length), np.float32))
    second = np.float32(1) if problem.task == "recall" else below
    one = np.float32(1)
    if network.kind == "minimal":
        return Minimal(below, second, one, one)
    if network.kind == "content":
        return Content(below, one, second, one, one)
    return Transformer(*[one] * len(Transformer._fields))


def prior_energy(weights: Weights, network: TwoLayer, problem: Induction) -> Float[Array, ""]:
    """sum over the entries that exist of weight^2 / (2 g)."""
    terms = [
        jnp.sum((part * there) ** 2) / (2 * g)
        for part, there, g in zip(weights, allowed(network, problem), variances(network, problem), strict=True)
    ]
    return jnp.asarray(sum(terms))


def shapes(network: TwoLayer, problem: Induction) -> Any:
    """Shape of every weight."""
    length, vocab, width, heads = problem.length, problem.vocab, network.width, network.head_dimension
    square, second = (vocab, vocab), (length,) if problem.task == "recall" else (length, length)
    if network.kind == "minimal":
        return Minimal((length, length), second, square, square)  # type: ignore[arg-type]
    if network.kind == "content":
        return Content((length, length), square, second, square, square)  # type: ignore[arg-type]
    layer = [(width, heads)] * 3 + [(heads, width)]
    return Transformer((vocab, width), (length, width), *layer, *layer, (width, vocab))  # type: ignore[arg-type]


def start(network: TwoLayer, problem: Induction, kind: Start, scale: float, seed: int) -> Weights:
    """Initial weights, float32: random ones, and for an aligned start those of `aligned` in addition.

    Random entries have standard deviation `scale`; of the transformer `scale` times one over the root of the rows of a matrix,
    or of d_model for embeddings, so that scale = 1 is a customary start.

    Raises:
        ProblemError: for an aligned start in a transformer that is too narrow.
    """
    draw = np.random.default_rng(stream(seed, "init")).standard_normal
    parts = [
        scale * draw(shape) * there for shape, there in zip(shapes(network, problem), allowed(network, problem), strict=True)
    ]
    if network.kind == "transformer":
        narrow = Transformer(*[network.width**-0.5] * 2, *[part.shape[0] ** -0.5 for part in parts[2:]])
        parts = [factor * part for factor, part in zip(narrow, parts, strict=True)]
    if kind != "small":
        parts = [part + more for part, more in zip(parts, aligned(network, problem, kind), strict=True)]
    return type(allowed(network, problem))(*(np.asarray(part, np.float32) for part in parts))


def aligned(network: TwoLayer, problem: Induction, kind: Start) -> Weights:
    """An induction head, or its opposite, which attends to all but the successor of the match and subtracts what it finds.

    Layer 1: the previous position has a logit ln n + 2 above the n - 1 others. M = beta (I - 11^T/V), beta = 4, and
    W = I - 11^T/V; anti: beta = -4, W = -(L/3) (I - 11^T/V), since attention to all else tells tokens apart by 1/L only.
    """
    length, vocab = problem.length, problem.vocab
    if network.kind == "transformer":
        return _aligned_transformer(network, problem, kind)
    centred = np.eye(vocab) - 1 / vocab
    strength, gain = (MATCH, 1.0) if kind == "induction" else (-MATCH, -length / 3)
    first = np.diag(np.log(np.arange(2, length + 1)) + LOGIT, -1)
    second = np.zeros(shapes(network, problem).second)
    if network.kind == "minimal":
        return Minimal(first, second, strength * centred, gain * centred)
    return Content(first, np.zeros((vocab, vocab)), second, strength * centred, gain * centred)


def _aligned_transformer(network: TwoLayer, problem: Induction, kind: Start) -> Transformer:
    """Orthogonal parts of the stream: position, token, token moved by layer 1, output."""
    length, vocab, width, heads = problem.length, problem.vocab, network.width, network.head_dimension
    if width < length + 3 * vocab or heads < max(length, vocab):
        raise ProblemError(
            f"width = {width}, head_dimension = {heads}: must be >= length + 3 vocab = {length + 3 * vocab} and "
            f">= {max(length, vocab)} for a start as an induction head"
        )
    basis = np.eye(width)
    place, token, moved, out = np.split(basis[:, : length + 3 * vocab], length + vocab * np.arange(3), axis=1)

    def into(part: np.ndarray) -> np.ndarray:
        return np.pad(part, ((0, 0), (0, heads - part.shape[1])))

    strength, gain = (MATCH, 1.0) if kind == "induction" else (-MATCH, -length / 3)
    root = heads**0.25
    logit = (np.log(length) + LOGIT) ** 0.5 * root
    before = np.concatenate([np.zeros((width, 1)), place[:, :-1]], axis=1)
    size, sign = abs(strength) ** 0.5 * root, np.sign(strength)
    amount = abs(gain) ** 0.5
    return Transformer(
        token.T, place.T,
        logit * into(place), logit * into(before), into(token), into(moved).T,
        size * into(token), sign * size * into(moved), np.sign(gain) * amount * into(token), amount * into(out).T,
        out,
    )  # fmt: skip
