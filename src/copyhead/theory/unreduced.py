"""The action on all H L^2 logits, beyond the paper's task: no symmetry, with expected moments or those of one data set."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float

from copyhead.model import layout, targets, tokens
from copyhead.model.moments import Correlated, Empirical, independent
from copyhead.model.prior import prior
from copyhead.problem import Attention, Problem, ProblemError
from copyhead.theory.symmetric import MOST_CORRELATED, SymmetricTask, action_of

# Largest H L^2: beyond, one descent takes minutes.
MOST_LOGITS = 2**16


def unreduced_task(problem: Problem, data: Empirical | None = None) -> SymmetricTask:
    """The task on all H L^2 logits: every entry that the mask leaves is a class of its own.

    Args:
        data: moments of a data set; default: expected ones at P = 1. On a ring correlated tokens have the ring's pairs, else
            those of open sequences.

    Raises:
        ProblemError: for attention that reads tokens, separate query and key matrices, token_scale > 0 under a mask, and more
            logits or correlated tokens than are feasible.
    """
    problem.require_fused_positional("the minima over all logits are known")
    length = problem.length
    if problem.heads * length**2 > MOST_LOGITS:
        raise ProblemError(f"length = {length}: heads * length^2 must be <= {MOST_LOGITS} to minimise over all logits")
    if problem.causal and problem.token_scale > 0:
        raise ProblemError(f"token_scale = {problem.token_scale:g}: must be 0 with causal = True")
    law, target = tokens.law(problem), targets.operator(problem)
    probability = law.marginal(length, problem.cyclic)
    if data is not None:
        moments = data
    elif law.independent:
        moments = independent(probability)
    elif problem.vocab > MOST_CORRELATED:
        raise ProblemError(f"vocab = {problem.vocab}: must be <= {MOST_CORRELATED} for correlated tokens")
    else:
        pairs = law.pairs(length, problem.cyclic)
        moments = Correlated(np.float64(1), pairs if problem.cyclic else both_ways(pairs))
    whole = layout.masked(target, targets.allowed(problem))
    row = np.where(np.asarray(whole.scored) > 0, np.arange(length), -1)
    entries = np.arange(length**2).reshape(length, length)
    numbers = prior(problem, float(np.sum(probability**2)))
    return SymmetricTask(np.ones(problem.heads), whole, entries, row, target, whole, moments, numbers)


def both_ways(pairs: Float[np.ndarray, "L V V"]) -> Float[np.ndarray, "D V V"]:
    """Pairs of open sequences at the lags 1 - L .. L - 1, from those at 0 .. L - 1: C_-d = C_d^T."""
    return np.concatenate([pairs[:0:-1].transpose(0, 2, 1), pairs])


def expanded(logits: Float[np.ndarray, "H R K"], problem: Problem) -> Float[np.ndarray, "H L L"]:
    """All logits of a symmetric point, from those in the layout of its task; zero where there is no class."""
    if not tokens.law(problem).independent:
        return logits  # that layout is the full matrix
    return layout.compressed(targets.operator(problem), targets.allowed(problem)).expand(logits)


@partial(jax.jit, static_argnames="kind")
def value_and_gradient(
    logits: Float[Array, "H L L"], task: SymmetricTask, kind: Attention
) -> tuple[Float[Array, ""], Float[Array, "H L L"]]:
    """S of all logits, and its gradient."""
    return jax.value_and_grad(action_of)(logits, task, kind)
