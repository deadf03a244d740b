"""Prediction: the record that `copyhead.predict` returns: verdict, transitions, leading order, states; repr, JSON and plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from copyhead.problem import Problem
from copyhead.theory.leading_order import LeadingOrder, leading_order
from copyhead.theory.transition import Minimum, Phases, Transition, Verdict, phases

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from copyhead.finite_chi import AtFiniteChi


@dataclass(frozen=True)
class Prediction:
    """What the theory says of one problem with population moments, at chi -> infinity but for `finite_chi`.

    state: every minimum at problem.sequences, the global one first; None if the problem has no P. Linear attention has
    with each minimum also its mirror image (G, W) -> (-G, -W), which is not listed.
    status: "ok", or why the verdict is not to be trusted.
    finite_chi: the same at problem.chi, to one loop; None unless asked for.
    """

    problem: Problem
    verdict: Verdict
    transitions: tuple[Transition, ...]
    leading_order: LeadingOrder
    state: tuple[Minimum, ...] | None
    status: str
    phases: Phases
    finite_chi: AtFiniteChi | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, as `copyhead predict --json` prints them."""
        record: dict[str, Any] = {
            "problem": self.problem.model_dump(),
            "verdict": self.verdict,
            "transitions": [
                {
                    "kind": transition.kind,
                    "P": transition.P,
                    "window": None if transition.window is None else list(transition.window),
                    "before": transition.before._asdict(),
                    "after": transition.after._asdict(),
                }
                for transition in self.transitions
            ],
            "leading_order": self.leading_order._asdict(),
            "status": self.status,
        }
        if self.state is not None:
            record["state"] = [
                {
                    **minimum.order_parameters._asdict(),
                    "action": minimum.action,
                    "metastable": minimum.metastable,
                    "lowest_eigenvalue": minimum.lowest,
                }
                for minimum in self.state
            ]
        if self.finite_chi is not None:
            record["finite_chi"] = self.finite_chi.to_dict()
        return record

    def plot(self) -> Figure:
        """Order parameters and loss against P: minima as lines, metastable ones dashed, the window shaded."""
        from copyhead.report.theory_figures import theory_curves

        return theory_curves(self.phases, self.problem)

    def __repr__(self) -> str:
        p = self.problem
        lines = [
            f"{self.verdict} ({p.attention} attention, L = {p.length}, V = {p.vocab}, sigma^2 = {p.noise:g}, "
            f"g_W = {p.logit_variance:g}, g_O = {p.output_variance:g}, tau_x = {p.token_scale:g}"
            f"{', attention reads the tokens' if p.content else ''}; chi -> infinity)"
        ]
        leading = self.leading_order
        copying = ("Eq. 21", leading.copying_softmax) if p.attention == "softmax" else ("Eq. 17", leading.copying_linear)
        pooling = ("Eq. 16", leading.pooling)
        for t in self.transitions:
            equation, scale = pooling if t.pools else copying
            window = f", coexistence {t.window[0]:.6g} .. {t.window[1]:.6g}" if t.window else ""
            lines.append(
                f"  {t.kind} at P = {t.P:.6g}{window}; leading order ({equation}) {scale:.4g}, ratio {t.P / scale:.3f}"
            )
            for name, state in (("before", t.before), ("after ", t.after)) if t.window else (("there ", t.before),):
                lines.append("    " + name + "  " + "  ".join(f"{k} {v:.5g}" for k, v in state._asdict().items()))
        for minimum in self.state or ():
            kind = "metastable" if minimum.metastable else "global"
            values = "  ".join(f"{k} {v:.5g}" for k, v in minimum.order_parameters._asdict().items())
            lines.append(f"  minimum at P = {p.sequences:g} ({kind}): {values}  S {minimum.action:.6g}")
        if self.finite_chi is not None:
            lines += self.finite_chi.lines()
        if self.status != "ok":
            lines.append(f"  status: {self.status}")
        return "\n".join(lines)


def predict(problem: Problem, finite_chi: bool = False) -> Prediction:
    """Order and place of every transition of the copy task, and the minima at problem.sequences if that is given.

    Exact minima of the action with population moments, chi -> infinity (theory.md sections 3 to 5).

    Args:
        finite_chi: also P*(chi), fluctuations and barriers at problem.chi (section 11), which takes seconds to compile.

    Raises:
        ProblemError: where the order-parameter theory does not apply (token_scale > 0 without cyclic symmetry, or content
            without token_scale); with finite_chi also for content = True or separate query and key matrices.
    """
    if finite_chi:
        from copyhead.theory.effective_action import gaussian_task

        gaussian_task(problem)  # refuses what the expansion does not cover before a search that may take long
    found = phases(problem.replace(sequences=None))
    here, state, expanded = found, None, None
    if problem.sequences is not None:
        # outside the range of the transitions the branches are followed that far
        here = found if found.lower <= math.log(problem.sequences) <= found.upper else phases(problem)
        state = tuple(here.minima(problem.sequences))
    if finite_chi:
        from copyhead.finite_chi import at_finite_chi

        expanded = at_finite_chi(problem, here)
    status = "ok" if found.complete else "incomplete: a branch of minima could not be followed to the end of the range of P"
    if state == ():
        status = f"incomplete: no minimum was found at P = {problem.sequences:g}"
    return Prediction(problem, found.verdict, found.transitions, leading_order(problem), state, status, found, expanded)
