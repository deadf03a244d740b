"""Symmetric subspaces beyond the paper's task: masks, heads, other targets and token laws (docs/theory.md, section 14).

Independent tokens leave one number for each class of entries of `layout.compressed`; correlated tokens on a ring, with a target
of lags, leave one for each lag. Every head has its own. In softmax attention the mean logit of a row is a gauge whose best
value is zero, so that a class less is free.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from copyhead.model import layout, targets, tokens
from copyhead.model.attention import attention
from copyhead.model.heads import coefficient, principal
from copyhead.model.layout import Layout
from copyhead.model.moments import Correlated, Empirical, Independent, independent
from copyhead.model.prior import Prior, logit_energy, prior
from copyhead.problem import Attention, Problem, ProblemError

# Largest V of correlated tokens: an evaluation of S takes a V x V system, and the Hessian one for each lag. At V = 300,
# L = 32 the branches were not there after ten minutes.
MOST_CORRELATED = 128


class NoSubspace(ProblemError):
    """No symmetric subspace is known; the minima over all logits may be (`all_logits`)."""


class SymmetricTask(NamedTuple):
    """A task and the subspace in which its stationary points are sought. Coordinates: head, row class, entry class.

    heads: (H,) ones. classes: multiplicities of the classes. class_of: class of each of the L x L entries where the data need
    the full matrix, else None. row: class of each position, -1 where it is not scored. target, layout: of the classes, or with
    `class_of` of the full matrix.
    """

    heads: Float[Array, "H"]
    classes: Layout
    class_of: Int[Array, "L L"] | None
    row: Int[Array, "L"]
    target: Float[Array, "R K"]
    layout: Layout
    moments: Independent | Correlated | Empirical
    prior: Prior

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, row classes, entry classes."""
        rows, entries = self.classes.columns.shape
        return len(self.heads), rows, entries


def symmetric_task(problem: Problem) -> SymmetricTask:
    """The task at P = 1.

    Raises:
        NoSubspace: where no symmetric subspace is known.
        ProblemError: for attention that reads tokens, separate query and key matrices, and too many correlated tokens.
    """
    problem.require_fused_positional("masks, heads, other targets and token laws are known")
    law, target, mask = tokens.law(problem), targets.operator(problem), targets.allowed(problem)
    probability = law.marginal(problem.length, problem.cyclic)
    numbers = prior(problem, float(np.sum(probability**2)))
    if not law.independent:
        return _lag_task(problem, law, target, numbers)
    classes = layout.compressed(target, mask)
    if problem.token_scale > 0 and (len(classes.layout.rows) > 1 or not _columns_alike(target)):
        # under a mask the prior of all logits is not known either
        refusal = ProblemError if problem.causal else NoSubspace
        raise refusal(f"token_scale = {problem.token_scale:g}: must be 0 where rows or columns of the target differ")
    heads, moments = np.ones(problem.heads), independent(probability)
    return SymmetricTask(heads, classes.layout, None, classes.row, classes.target, classes.layout, moments, numbers)


def _columns_alike(target: Float[np.ndarray, "L L"]) -> bool:
    """Whether all columns of T hold the same values, so that column sums of symmetric logits are equal."""
    ordered = np.sort(target, axis=0)
    return bool(np.all(ordered == ordered[:, :1]))


def _lag_task(problem: Problem, law: tokens.Law, target: Float[np.ndarray, "L L"], numbers: Prior) -> SymmetricTask:
    """Correlated tokens in the cyclic model: A and G are circulant, one class for each lag; those of the target first."""
    if problem.lags is None or not problem.cyclic:
        raise NoSubspace(
            f"tokens = {problem.tokens!r}: correlated tokens need cyclic = True and a target of lags (else no symmetry)"
        )
    if problem.vocab > MOST_CORRELATED:
        raise ProblemError(
            f"vocab = {problem.vocab}: must be <= {MOST_CORRELATED} for correlated tokens; laws of independent tokens take any"
        )
    length, first = problem.length, [lag for some in lags_by_class(problem) for lag in some]
    order = [*first, *(lag for lag in range(length) if lag not in first)]
    place = np.empty(length, int)
    place[order] = np.arange(length)
    a, b = np.indices((length, length))
    whole = layout.masked(target, np.ones((length, length), bool))
    classes = Layout(np.full(1, float(length)), np.full(1, float(length)), np.ones((1, length)))
    moments = Correlated(np.float64(1), law.pairs(length, True))
    heads, row = np.ones(problem.heads), np.zeros(length, int)
    return SymmetricTask(heads, classes, place[(a - b) % length], row, target, whole, moments, numbers)


def lags_by_class(problem: Problem) -> list[list[int]]:
    """Lags of the target by class of entries, in the order of the classes: those of equal weight for independent tokens."""
    lags = problem.lags or {}
    if not tokens.law(problem).independent:
        return [[lag] for lag in sorted(lags, key=lambda lag: -abs(lags[lag]))]
    values = sorted(set(lags.values()), key=lambda weight: (-abs(weight), -weight))
    return [[lag for lag in lags if lags[lag] == weight] for weight in values]


def at_sequences(task: SymmetricTask, sequences: float | Float[Array, ""]) -> SymmetricTask:
    """The same task with P sequences."""
    return task._replace(moments=task.moments.scaled(sequences))


def _free(task: SymmetricTask) -> Int[np.ndarray, "d"]:
    """Places of the coordinates of linear attention among all entries by class.

    G_h (x) W_h, summed over heads, and both priors do not change if the heads are rotated into one another: in head h the first
    h entries are rotated to zero, or every minimum would have flat directions.
    """
    heads, rows, entries = task.shape
    inside = np.arange(rows * entries) >= np.arange(heads)[:, None]
    return np.flatnonzero(inside)


def dimension(task: SymmetricTask, kind: Attention) -> int:
    """Number of coordinates."""
    heads, rows, entries = task.shape
    return len(_free(task)) if kind == "linear" else heads * rows * (entries - 1)


def class_logits(coordinates: Float[Array, "d"], task: SymmetricTask, kind: Attention) -> Float[Array, "H R K"]:
    """Logits by class. Those of softmax are given over the last class of a row, and the mean of the row is zero."""
    heads, rows, entries = task.shape
    if kind == "linear":
        return jnp.zeros(heads * rows * entries).at[_free(task)].set(coordinates).reshape(task.shape)
    over = coordinates.reshape(heads, rows, entries - 1)
    excess = jnp.concatenate([over, jnp.zeros((heads, rows, 1))], axis=-1)
    return excess - (task.classes.row_sums(excess) / jnp.sum(task.classes.columns, axis=-1))[..., None]


def lift(coordinates: Float[Array, "d"], task: SymmetricTask, kind: Attention) -> Float[Array, "H R K"]:
    """Logits in the layout of the task."""
    found = class_logits(coordinates, task, kind)
    return found if task.class_of is None else found[:, 0, task.class_of]


def coordinates_of(logits: Float[np.ndarray, "H R K"], task: SymmetricTask, kind: Attention) -> Float[np.ndarray, "d"]:
    """Inverse of `class_logits`, up to the mean of a row of softmax, and a rotation of the heads of linear attention."""
    if kind == "softmax":
        return np.ravel(logits[..., :-1] - logits[..., -1:])
    upper = np.linalg.qr(logits.reshape(len(logits), -1), mode="complete")[1]
    return np.ravel(upper)[_free(task)]


def starts(task: SymmetricTask, kind: Attention) -> Float[np.ndarray, "n d"]:
    """Coordinates from which a search for minima starts.

    Some heads copy and the others do nothing; they copy in all rows or in short ones only, all classes of the target or one.
    Linear attention also pools, with either sign.
    """
    heads, rows, entries = task.shape
    columns = np.asarray(task.classes.columns)
    length = columns.sum(axis=-1)
    shape = class_target(task)
    shape = shape / np.abs(shape).max()
    wanted = [shape] + [shape * (np.arange(entries) == k) for k in range(entries) if np.any(shape[:, k]) and entries > 2]
    if rows > 1:
        wanted += [shape * (length <= np.quantile(length, part))[:, None] for part in (0.25, 0.5, 0.75)]
    nothing = [np.zeros((rows, entries))]
    if kind == "softmax":
        patterns = [size * np.log(length)[:, None] * one for one in wanted for size in (0.7, 1.2, -0.5)]
        of_heads = [[pattern] * k + nothing * (heads - k) for pattern in patterns for k in range(1, heads + 1)]
    else:  # heads that do the same can be rotated into one
        widths = task.prior.position_scale**2 * task.prior.logit_variance / task.prior.output_variance
        # G and W share the product L that copying asks for so that their costs are equal: L cG^2 / g_W = V (L / cG)^2 / g_O
        size = (float(task.prior.length) * _vocab(task) * float(widths)) ** 0.25
        level = np.ones((rows, entries)) / np.sqrt(length)[:, None]
        patterns = [size * (copying * one + pooling * level) for one in wanted for copying, pooling in _LINEAR]
        of_heads = [[pattern, *nothing * (heads - 1)] for pattern in [*patterns, 0.3 * size * level]]
        if heads > 1:
            of_heads += [[size * one, sign * size * level, *nothing * (heads - 2)] for one in wanted for sign in (1, -1)]
    return np.array([coordinates_of(np.stack(one), task, kind) for one in [nothing * heads, *of_heads]])


def _vocab(task: SymmetricTask) -> float:
    if isinstance(task.moments, Independent):
        return float(np.sum(np.asarray(task.moments.multiplicity)))
    pairs = task.moments.pairs if isinstance(task.moments, Correlated) else task.moments.tensor
    return float(pairs.shape[-1])


def class_target(task: SymmetricTask) -> Float[np.ndarray, "R K"]:
    """T by class."""
    target = np.asarray(task.target)
    if task.class_of is None:
        return target
    found = np.zeros(task.classes.columns.shape)
    found[0, np.asarray(task.class_of)] = target
    return found


# Copying and pooling parts of the starts for linear attention, whose rows may also have the other sign than the copy entries.
_LINEAR = ((1.0, 0.0), (1.0, 0.3), (0.5, -1.0), (1.0, -0.5))


def canonical(
    coordinates: Float[np.ndarray, "d"], order: Float[np.ndarray, "d"], task: SymmetricTask, kind: Attention
) -> Float[np.ndarray, "d"]:
    """One of the equivalent points: heads of softmax in falling order of cG; each head of linear attention with the sign in
    which its first entry is positive.

    Args:
        order: see `excess_weights`.
    """
    if kind == "softmax":
        blocks = np.asarray(coordinates).reshape(len(task.heads), -1)
        return np.concatenate(blocks[np.argsort(-(blocks @ order[: blocks.shape[1]]), kind="stable")])
    free = _free(task)
    head = free // (task.shape[1] * task.shape[2])
    first = np.array([coordinates[np.flatnonzero(head == h)[0]] if np.any(head == h) else 1.0 for h in range(len(task.heads))])
    return coordinates * np.where(first < 0, -1.0, 1.0)[head]


def excess_weights(task: SymmetricTask, kind: Attention) -> Float[np.ndarray, "d"]:
    """The cG of the first head, for softmax the mean over heads, as a linear function of the coordinates."""
    with jax.enable_x64(True):
        return np.asarray(jax.grad(_excess)(np.zeros(dimension(task, kind)), task, kind))


def _attended(logits: Float[Array, "H R K"], task: SymmetricTask, kind: Attention) -> Float[Array, "H R K"]:
    return attention(logits, kind, task.prior.length, task.layout.columns) * (task.layout.scored > 0)[:, None]


def _target_square(task: SymmetricTask) -> Float[Array, ""]:
    if isinstance(task.moments, Independent):
        return task.moments.target_square(task.target, task.layout)
    if isinstance(task.moments, Empirical):
        return jnp.einsum("ai,aj,ijuu->", task.target, task.target, task.moments.tensor)
    return jnp.trace(task.moments.contract(task.target, task.target))


def _explained(matrices: Float[Array, "H R K"], task: SymmetricTask, ridge: Float[Array, ""]) -> Float[Array, ""]:
    if isinstance(task.moments, Independent):
        return task.moments.explained(matrices, task.target, task.layout, ridge)
    return task.moments.explained(matrices, task.target, ridge)


def symmetric_action(coordinates: Float[Array, "d"], task: SymmetricTask, kind: Attention) -> Float[Array, ""]:
    """S = prior + [Y2 - tr N^T (F + kappa / g_O)^-1 N] / (2 kappa); prior of every head.

    Entries that a row class does not have get the prior of one entry, so that they stay at zero.
    """
    found = class_logits(coordinates, task, kind)
    missing = jnp.sum(jnp.where(task.classes.columns > 0, 0.0, found) ** 2) / (2 * task.prior.logit_variance)
    logits = found if task.class_of is None else found[:, 0, task.class_of]
    return action_of(logits, task, kind) + missing


def action_of(logits: Float[Array, "H R K"], task: SymmetricTask, kind: Attention) -> Float[Array, ""]:
    """S of logits in the layout of the task."""
    explained = _explained(_attended(logits, task, kind), task, task.prior.ridge)
    return _cost(logits, task) + (_target_square(task) - explained) / (2 * task.prior.kappa)


def _cost(logits: Float[Array, "H R K"], task: SymmetricTask) -> Float[Array, ""]:
    """Logit energy of all heads; classes of rows that differ are admitted only where the prior does not join them."""
    if len(task.layout.rows) > 1 and task.class_of is None:
        norm = jnp.sum(task.layout.rows * task.layout.row_sums(logits**2))
        return norm / (2 * task.prior.position_scale**2 * task.prior.logit_variance)
    return jnp.sum(jax.vmap(lambda one: logit_energy(one, task.layout, task.prior))(logits))


class Parts(NamedTuple):
    """What is read off logits. Each by head. c1, cG: mean off the target, and coefficient of T above it; a1, aG likewise.

    rows: cG by row class. classes: mean attention of each entry class, over the scored rows that have it. loss: per token.
    """

    c1: Float[Array, "H"]
    cG: Float[Array, "H"]
    a1: Float[Array, "H"]
    aG: Float[Array, "H"]
    rows: Float[Array, "H R"]
    classes: Float[Array, "H K"]
    loss: Float[Array, ""]


def _excess(coordinates: Float[Array, "d"], task: SymmetricTask, kind: Attention) -> Float[Array, ""]:
    weight = task.layout.scored[:, None] * task.layout.columns
    by_head = jax.vmap(lambda one: coefficient(one, weight, task.target)[1])(lift(coordinates, task, kind))
    return by_head[0] if kind == "linear" else jnp.mean(by_head)


def turned(
    logits: Float[Array, "H R K"], task: SymmetricTask, kind: Attention
) -> tuple[Float[Array, "H R K"], Float[Array, "H R K"]]:
    """Logits and attention of the heads; those of linear attention are rotated to their principal ones."""
    matrices = _attended(logits, task, kind)
    if kind == "softmax":
        return logits, matrices
    turn = principal(logits, task.layout.scored[:, None] * task.layout.columns)
    return jnp.einsum("hg,hrk->grk", turn, logits), jnp.einsum("hg,hrk->grk", turn, matrices)


@partial(jax.jit, static_argnames="kind")
def parts(logits: Float[Array, "H R K"], task: SymmetricTask, kind: Attention) -> Parts:
    """Order parameters by head, row and class of logits in the layout of the task."""
    logits, matrices = turned(logits, task, kind)
    weight = task.layout.scored[:, None] * task.layout.columns
    c1, cG = jax.vmap(lambda one: coefficient(one, weight, task.target))(logits)
    off, aG = jax.vmap(lambda one: coefficient(one, weight, task.target))(matrices)
    eye = jnp.eye(len(weight))
    rows = jax.vmap(lambda one: jax.vmap(lambda row: coefficient(one, weight * row[:, None], task.target)[1])(eye))(logits)
    entries = jnp.sum(weight, axis=0)
    classes = jnp.sum(weight * matrices, axis=1) / jnp.where(entries > 0, entries, 1.0)
    number = task.moments.sequences * jnp.sum(task.layout.scored)
    ridge = jnp.asarray(task.prior.ridge)
    explained, slope = jax.value_and_grad(lambda r: _explained(matrices, task, r))(ridge)
    # the derivative by the ridge is -|W|^2
    loss = (_target_square(task) - explained + ridge * slope) / number
    return Parts(c1, cG, task.prior.length * off, aG, rows, classes, loss)


def attention_on(
    logits: Float[Array, "H L L"], task: SymmetricTask, kind: Attention, shifts: Float[Array, "K L L"]
) -> Float[Array, "H K"]:
    """Mean attention of each head, in the order of `parts`, on the entries of each of K matrices of zeros and ones."""
    _, matrices = turned(logits, task, kind)
    return jnp.einsum("hab,kab->hk", matrices, shifts) / jnp.sum(shifts, axis=(-2, -1))
