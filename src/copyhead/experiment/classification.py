"""What `classify` answers: an order, a place, and the evidence for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from copyhead.record import plain

Order = Literal["first-order", "second-order", "crossover", "undetermined"]


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
            "evidence": [{**one._asdict(), "value": plain(one.value), "error": plain(one.error)} for one in self.evidence],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        place = "" if self.P is None else f" at P = {self.P:.5g}"
        between = "" if self.interval is None else f" ({self.interval[0]:.5g} .. {self.interval[1]:.5g})"
        lines = [f"{self.verdict}{place}{between}", f"  {self.reason}"]
        width = max((len(one.name) for one in self.evidence), default=0)
        for one in self.evidence:
            error = "" if plain(one.error) is None else f" +- {one.error:.2g}"
            needed = f"   ({one.needed})" if one.needed else ""
            lines.append(f"    {one.name:<{width}}  {one.value:.4g}{error}{needed}")
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
