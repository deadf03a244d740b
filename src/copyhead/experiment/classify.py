"""Order of a transition from data alone: first-order, second-order, crossover or undetermined, with the evidence.

First-order needs both phases seen at the same P, at two grid points at least: by two starts (hysteresis) or by repeats
(bimodality). A jump between two neighbouring points is none: a continuous change may be as steep. A curve without coexistence is
compared with shapes (`shapes`): a power law that starts at P_c, a smooth step, a jump, and no feature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from copyhead.experiment import shapes
from copyhead.experiment.shapes import Curve, Fit
from copyhead.experiment.table import Table

Order = Literal["first-order", "second-order", "crossover", "undetermined"]

# First-order: two branches this far apart, in units of the scatter around them ...
SEPARATION = 5.0
# ... that are both seen at this many grid points, with at most this share of the runs there between them ...
COEXISTING, BETWEEN = 2, 0.15
# ... where "between" is this part of the gap, and better than any one curve by this difference in ln likelihood.
MIDDLE, TWO_BRANCHES = (0.25, 0.75), 8.0
# Starts disagree at one P if their means do by this many standard errors and by this part of the height.
DISAGREE, PART = 5.0, 0.2
# Continuous: one shape is better than another by this difference in AICc (a ratio of e^2 in weight for 4).
BETTER = 4.0
# A change is resolved by the grid if this many points lie on it, between these parts of its height.
RESOLVED, RISE = 2, (0.15, 0.85)
# An exponent that is below one by this many errors is a kink.
KINK = 2.0
# The first and last point see at most this part of a step still to come, or already gone.
SHOULDER = 0.25
# Height over scatter of a mean below which there is nothing to classify.
VISIBLE = 5.0
# Latent heat below this part of the range of the loss contradicts coexistence.
NO_HEAT = 0.05
# Trend: a power of chi or size is different from zero by this many errors.
TREND = 3.0


class Quantity(NamedTuple):
    """One piece of evidence. error: standard error, None if there is none. needed: such as '>= 5', '' if none is asked for."""

    name: str
    value: float
    error: float | None = None
    needed: str = ""


@dataclass(frozen=True)
class Classification:
    """The order of a transition, its place and why.

    P: its place, None if there is none; interval: of P (the window between the folds if first-order, else one standard error).
    reason: one sentence. notes: what was done to the data.
    """

    verdict: Order
    reason: str
    P: float | None = None
    interval: tuple[float, float] | None = None
    evidence: tuple[Quantity, ...] = ()
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON takes it; a number that is not finite is None."""
        return {
            "verdict": self.verdict,
            "P": self.P,
            "interval": None if self.interval is None else list(self.interval),
            "reason": self.reason,
            "evidence": [
                {**one._asdict(), "value": _known(one.value), "error": _known(one.error)} for one in self.evidence
            ],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        place = "" if self.P is None else f" at P = {self.P:.5g}"
        between = "" if self.interval is None else f" ({self.interval[0]:.5g} .. {self.interval[1]:.5g})"
        lines = [f"{self.verdict}{place}{between}", f"  {self.reason}"]
        width = max((len(one.name) for one in self.evidence), default=0)
        for one in self.evidence:
            error = "" if _known(one.error) is None else f" +- {one.error:.2g}"
            needed = f"   ({one.needed})" if one.needed else ""
            lines.append(f"    {one.name:<{width}}  {one.value:.4g}{error}{needed}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _known(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
