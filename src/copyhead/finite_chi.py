"""What `copyhead.predict(problem, finite_chi=True)` adds: P*(chi), the barrier there, the branches at one P; lines and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from copyhead.problem import Problem
from copyhead.record import plain
from copyhead.theory.coexistence import FiniteChi, maxwell
from copyhead.theory.fluctuations import Fluctuations, fluctuations
from copyhead.theory.precursors import Approach, precursors
from copyhead.theory.transition import Phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AtFiniteChi:
    """The expansion around the symmetric saddle points at problem.chi, to one loop (theory.md section 11).

    coexistence: P*(chi) of the first first-order transition; None if the problem has none for chi -> infinity.
    state: every branch at problem.sequences, the one of largest weight first; None if the problem has no P.
    """

    problem: Problem
    phases: Phases
    coexistence: FiniteChi | None
    state: tuple[Fluctuations, ...] | None

    def precursors(self) -> tuple[Approach, ...]:
        """Susceptibility and relaxation on the way to every transition."""
        return precursors(self.problem, found=self.phases)

    def plot(self) -> Figure:
        """The precursors against the distance to each transition."""
        from copyhead.report.theory_figures import precursors as draw

        return draw(self.precursors())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; None for a number that does not exist or is beyond float64."""
        record: dict[str, Any] = {"chi": self.problem.chi, "coexistence": None}
        if (found := self.coexistence) is not None:
            record["coexistence"] = {
                "P": found.P,
                "limit": found.limit,
                "shift": found.P - found.limit,
                "slope": found.slope,
                "before": found.before.to_dict(self.problem.chi),
                "after": found.after.to_dict(self.problem.chi),
                "barrier": None if found.barrier is None else found.barrier._asdict(),
            }
        if self.state is not None:
            record["state"] = [one.to_dict(self.problem.chi) for one in self.state]
        return plain(record)

    def lines(self) -> list[str]:
        """As the repr of a prediction shows it: means +- standard deviations."""
        chi = self.problem.chi
        lines = [f"  at chi = {chi:g}, to one loop:"]
        if (found := self.coexistence) is None:
            lines.append("    no first-order transition for chi -> infinity")
        else:
            leading = f"leading order {found.slope:.4g} / chi = {found.slope / chi:.4g}"
            if math.isfinite(found.P):
                lines.append(
                    f"    P*(chi) = {found.P:.6g}, {found.P - found.limit:+.4g} from P* = {found.limit:.6g}; {leading}"
                )
            else:
                lines.append(
                    f"    P*(chi): none, the branches do not coexist with equal weight near P* = {found.limit:.6g}; {leading}"
                )
            for name, one in (("before", found.before), ("after ", found.after)):
                lines.append(f"      {name}  {_saddle(one) if one.status == 'no minimum' else _means(one)}; {one.status}")
            lines += self._barrier(found)
        if self.state is not None:
            lines.append(f"    branches at P = {self.problem.sequences:g}:")
            lines += [line for one in self.state for line in self._branch(one)]
        return lines

    def _branch(self, one: Fluctuations) -> list[str]:
        lines = [f"      {_saddle(one)}; {one.status}"]
        rows = [("chi -> infinity", np.diag(one.susceptibility), one.saddle_relaxation)]
        if one.status != "no minimum":
            lines.append(f"        mean {_means(one)}; weight {one.weight:.4g}")
            rows.insert(0, (f"chi = {self.problem.chi:g}", self.problem.chi * np.diag(one.covariance), one.relaxation))
        for name, (first, second), rate in rows:
            lines.append(f"        {name}: chi Var cG {second:.4g}, chi Var c1 {first:.4g}, relaxation rate {rate:.4g}")
        return lines

    def _barrier(self, found: FiniteChi) -> list[str]:
        over = found.barrier
        if over is None:
            return []
        if not over.symmetric:
            return ["      barrier: not known, single rows can cross one by one"]
        return [
            f"      barrier chi dF {over.heights[0]:.4g} and {over.heights[1]:.4g} at cG = {over.top:.4g}; "
            f"lifetimes {over.lifetimes[0]:.3g} and {over.lifetimes[1]:.3g} (eps times Langevin steps)"
        ]


def at_finite_chi(problem: Problem, found: Phases) -> AtFiniteChi:
    """Both parts; `found` holds problem.sequences, if that is given.

    Raises:
        ProblemError: for content = True or separate query and key matrices.
    """
    state = None if problem.sequences is None else fluctuations(problem, found=found)
    return AtFiniteChi(problem, found, maxwell(problem, found), state)


def _saddle(one: Fluctuations) -> str:
    return "saddle c1 {:.5g}  cG {:.5g}".format(*one.saddle)


def _means(one: Fluctuations) -> str:
    return "  ".join(f"{name} {getattr(one, name):.5g} +- {error:.2g}" for name, error in one.deviations.items())
