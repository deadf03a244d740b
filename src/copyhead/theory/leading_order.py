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
    """The scales in P, whatever the attention.

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
