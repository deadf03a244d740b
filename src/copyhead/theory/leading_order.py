"""Leading-order places of the transitions: the paper's Eqs. 16, 17 and 21, and the upper fold. Scaling laws, not minima."""

from __future__ import annotations

import math
from typing import NamedTuple

from copyhead.problem import Problem


class LeadingOrder(NamedTuple):
    """P at which each transition is expected for large L, from the leading terms of the action."""

    pooling: float
    copying_linear: float
    copying_softmax: float
    upper_fold: float


def leading_order(problem: Problem) -> LeadingOrder:
    """The scales in P, whatever the attention, for a fused query-key matrix; separate ones (head_dimension) move them down.

    pooling (Eq. 16), linear attention, L^2 >> V: sigma^2 L V / ((tau_p + tau_x L / V) sqrt(g_O g_W)).
    copying_linear (Eq. 17), a crossover, so a scale only: sigma^2 L^(3/2) V^(1/2) / (tau_p sqrt(g_O g_W)).
    copying_softmax (Eq. 21): (L / (4 g_W tau_p^2)) (V / (V - 1)) sigma^2 ln^2 L; well below the exact place:
    2.6 times at L = 32, V = 4, and 1.9 times at L = 1024.
    upper_fold, softmax, ours (docs/theory.md): where training from small weights leaves the uniform state for L >> V,
    (L^2 / (2 e g_W tau_p^2)) (V / (V - 1)) sigma^2, from e^cG << L and P t >> kappa V / g_O.
    """
    length, vocab, noise = problem.length, problem.vocab, problem.noise
    deviation = math.sqrt(problem.output_variance * problem.logit_variance)
    kernel = problem.position_scale + problem.token_scale * length / vocab
    softmax = length * noise * vocab / (vocab - 1) / (problem.logit_variance * problem.position_scale**2)
    return LeadingOrder(
        noise * length * vocab / (kernel * deviation),
        noise * length**1.5 * vocab**0.5 / (problem.position_scale * deviation),
        softmax * math.log(length) ** 2 / 4,
        softmax * length / (2 * math.e),
    )


def cost_ratio(problem: Problem) -> float:
    """A lower bound on the price of copying logits with separate query and key matrices, against a fused one (then 1).

    A singular value s costs nu I(m) instead of s^2/(2 g_W), with m^2 = s^2/(g_W nu tau_p^2). I is concave in m^2, so the ratio
    is above 2 dI/d(m^2) = 2/(1 + sqrt(1 + 4 m^2)). Copying has s = ln L in softmax, (L V tau_p^2 g_W/g_O)^(1/4) in linear
    attention, to leading order.
    """
    if problem.head_dimension is None:
        return 1.0
    widths = problem.position_scale**2 * problem.logit_variance
    linear = math.sqrt(problem.length * problem.vocab * widths / problem.output_variance)
    squared = max(math.log(problem.length) ** 2, linear) * problem.chi / (widths * problem.head_dimension)
    return 2 / (1 + math.sqrt(1 + 4 * squared))
