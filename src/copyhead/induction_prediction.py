"""InductionPrediction: what `copyhead.predict_induction` returns: branches, P*, where training leaves; repr, JSON and plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from copyhead.induction import Induction
from copyhead.theory.recall_phases import Escape, RecallPhases, branch_name, onset, recall_phases
from copyhead.theory.transition import Minimum, Transition, Verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class InductionPrediction:
    """What the theory says of one recall task, at chi -> infinity with the population loss (docs/induction.md).

    transitions: jumps of the global minimum, with P* and the folds around it. escapes: upper folds of the branches without a
    copy head, where training from small weights leaves them. onset: P_c, where the empty state of L = V loses stability.
    state: every minimum at problem.sequences, the global one first; None without P. status: "ok", or what was not found.
    """

    problem: Induction
    verdict: Verdict
    transitions: tuple[Transition, ...]
    escapes: tuple[Escape, ...]
    onset: float
    state: tuple[Minimum, ...] | None
    status: str
    phases: RecallPhases

    def name(self, state: Any) -> str:
        """The branch of a state: empty, pooling, anti-pooling, induction or anti-induction."""
        return branch_name(state, self.problem.length)

    @property
    def branches(self) -> list[dict[str, Any]]:
        """Each branch with its range of P; start, end: what it begins and ends with, none at the edge of the range."""
        found = [
            {
                "branch": self.phases.name(piece.points[len(piece.points) // 2]),
                "low": math.exp(piece.lower),
                "start": None if piece.start is None else piece.start.kind,
                "high": math.exp(piece.upper),
                "end": None if piece.end is None else piece.end.kind,
            }
            for piece in self.phases.segments
        ]
        return sorted(found, key=lambda one: one["low"])

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as `copyhead predict --task recall --json` prints them."""
        record: dict[str, Any] = {
            "problem": self.problem.model_dump(),
            "verdict": self.verdict,
            "transitions": [
                {
                    "kind": t.kind,
                    "P": t.P,
                    "window": None if t.window is None else list(t.window),
                    "before": {"branch": self.name(t.before), **t.before._asdict()},
                    "after": {"branch": self.name(t.after), **t.after._asdict()},
                }
                for t in self.transitions
            ],
            "branches": self.branches,
            "escapes": [escape._asdict() for escape in self.escapes],
            "onset": self.onset,
            "status": self.status,
        }
        if self.state is not None:
            record["state"] = [
                {
                    "branch": self.name(one.order_parameters),
                    **one.order_parameters._asdict(),
                    "action": one.action,
                    "metastable": one.metastable,
                    "lowest_eigenvalue": one.lowest,
                }
                for one in self.state
            ]
        return record

    def plot(self) -> Figure:
        """Action, match, output, previous-token score and loss of every branch against P."""
        from copyhead.report.induction_figures import branches

        return branches(self.phases)

    def __repr__(self) -> str:
        p = self.problem
        lines = [
            f"{self.verdict} (recall, minimal two-layer network, L = {p.length}, V = {p.vocab}, sigma^2 = {p.noise:g}, "
            f"g_W1 = {p.position_variance:g}, g_W2 = {p.match_variance:g}, g_O = {p.output_variance:g}; chi -> infinity)"
        ]
        for t in self.transitions:
            assert t.window is not None
            lines.append(f"  {t.kind} at P* = {t.P:.6g}, coexistence {t.window[0]:.6g} .. {t.window[1]:.6g}")
            for side, state in (("before", t.before), ("after ", t.after)):
                lines.append(f"    {side}  {self.name(state)}: {_listed(state)}")
        if p.length == p.vocab:
            lines.append(f"  the empty state is a minimum up to P_c = {self.onset:.6g}")
        for escape in self.escapes:
            lines.append(f"  a run on the {escape.branch} branch leaves it at P = {escape.P:.6g}, to: {escape.leads}")
        for one in self.branches:
            ends = f"{one['low']:.6g} ({one['start'] or 'edge'}) .. {one['high']:.6g} ({one['end'] or 'edge'})"
            lines.append(f"  branch {one['branch']}: P = {ends}")
        for one in self.state or ():
            kind = "metastable" if one.metastable else "global"
            state = one.order_parameters
            lines.append(f"  minimum at P = {p.sequences:g} ({kind}) {self.name(state)}: {_listed(state)}  S {one.action:.6g}")
        if self.status != "ok":
            lines.append(f"  status: {self.status}")
        return "\n".join(lines)


def _listed(state: Any) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in state._asdict().items())


def predict_induction(problem: Induction) -> InductionPrediction:
    """Branches of the recall task, equal action, folds, and the minima at problem.sequences if that is given.

    Exact minima of the action with the population loss, chi -> infinity (docs/induction.md).

    Raises:
        ProblemError: for next-token, whose population loss is no finite sum, and for length above `recall_phases.LONGEST`.
    """
    found = recall_phases(problem, () if problem.sequences is None else (problem.sequences,))
    state = None if problem.sequences is None else tuple(found.minima(problem.sequences))
    status = "ok" if found.complete else "incomplete: a branch of minima could not be followed to its end"
    if state == ():
        status = f"incomplete: no minimum was found at P = {problem.sequences:g}"
    return InductionPrediction(problem, found.verdict, found.transitions, found.escapes, onset(problem), state, status, found)
