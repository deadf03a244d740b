"""Prediction: the record that `copyhead.predict` returns: verdict, transitions, leading order, states; repr, JSON and plot."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from copyhead.problem import Problem, ProblemError
from copyhead.record import plain
from copyhead.theory.front import Front, Passing
from copyhead.theory.leading_order import LeadingOrder, leading_order
from copyhead.theory.solution import Solution, solve
from copyhead.theory.symmetric import NoSubspace
from copyhead.theory.transition import Minimum, Phases, Transition, Verdict, attention_by_lag, shown_length

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from copyhead.finite_chi import AtFiniteChi
    from copyhead.theory.all_logits import Check


@dataclass(frozen=True)
class Prediction:
    """What the theory says of one problem with population moments, at chi -> infinity but for `finite_chi`.

    state: every minimum at problem.sequences, the global one first; None if the problem has no P. Linear attention has
    with each minimum also its mirror image (G, W) -> (-G, -W), which is not listed.
    status: "ok", or why the verdict is not to be trusted.
    leading_order: None where the problem has none, beyond the paper's task.
    front: where each row passes cG = 1, and where it jumps, under a causal mask; else None.
    phases: None where no symmetric subspace is known; state then holds the minima over all logits.
    finite_chi: the same at problem.chi, to one loop; None unless asked for.
    all_logits: the minima over all H L^2 logits at problem.sequences; None unless asked for.
    """

    problem: Problem
    verdict: Verdict
    transitions: tuple[Transition, ...]
    leading_order: LeadingOrder | None
    state: tuple[Minimum, ...] | None
    status: str
    phases: Solution | None
    finite_chi: AtFiniteChi | None = None
    front: tuple[Passing, ...] | None = None
    all_logits: Check | None = None

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
            "leading_order": None if self.leading_order is None else self.leading_order._asdict(),
            "status": self.status,
        }
        if self.state is not None:
            record["state"] = [
                {
                    **minimum.order_parameters._asdict(),
                    "action": minimum.action,
                    "metastable": minimum.metastable,
                    "lowest_eigenvalue": minimum.lowest,
                    **self._details(minimum),
                }
                for minimum in self.state
            ]
        if self.front is not None:
            record["front"] = plain([one._asdict() for one in self.front])
        if self.finite_chi is not None:
            record["finite_chi"] = self.finite_chi.to_dict()
        if self.all_logits is not None:
            record["all_logits"] = self.all_logits.to_dict()
        return record

    def _details(self, minimum: Minimum) -> dict[str, Any]:
        """What a minimum has beyond the paper's order parameters, where it says something."""
        problem, found = self.problem, {}
        if problem.causal:
            found["rows"] = list(minimum.rows)
        if problem.heads > 1:
            found["heads"] = list(minimum.heads)
        if problem.lags is not None and (len(problem.lags) > 1 or problem.target != "lag:1"):
            found["lags"] = attention_by_lag(problem, minimum)
        return found

    def plot(self) -> Figure:
        """Order parameters and loss against P: minima as lines, metastable ones dashed, the window shaded.

        Raises:
            ProblemError: where no symmetric subspace is known.
        """
        from copyhead.report.theory_figures import theory_curves

        if self.phases is None:
            raise ProblemError(f"{self.status}: nothing to plot against P")
        return theory_curves(self.phases, self.problem)

    def __repr__(self) -> str:
        p = self.problem
        lines = [
            f"{self.verdict} ({p.attention} attention, L = {p.length}, V = {p.vocab}, sigma^2 = {p.noise:g}, "
            f"g_W = {p.logit_variance:g}, g_O = {p.output_variance:g}, tau_x = {p.token_scale:g}"
            f"{', attention reads the tokens' if p.content else ''}"
            f"{''.join(f', {part}' for part in p.beyond)}; chi -> infinity)"
        ]
        leading = self.leading_order
        scales = (None, None, None) if leading is None else (leading.copying_softmax, leading.copying_linear, leading.pooling)
        copying = ("Eq. 21", scales[0]) if p.attention == "softmax" else ("Eq. 17", scales[1])
        pooling = "Eq. 16", scales[2]
        shown = self.transitions if len(self.transitions) <= MOST_SHOWN else self.transitions[-MOST_SHOWN:]
        if len(shown) < len(self.transitions):
            lines.append(f"  {len(self.transitions)} transitions from P = {self.transitions[0].P:.6g} on, the last ones are")
        for t in shown:
            window = f", coexistence {t.window[0]:.6g} .. {t.window[1]:.6g}" if t.window else ""
            equation, scale = pooling if t.pools else copying
            ratio = f"; leading order ({equation}) {scale:.4g}, ratio {t.P / scale:.3f}" if scale else ""
            lines.append(f"  {t.kind} at P = {t.P:.6g}{window}{ratio}")
            for name, state in (("before", t.before), ("after ", t.after)) if t.window else (("there ", t.before),):
                lines.append("    " + name + "  " + "  ".join(f"{k} {v:.5g}" for k, v in state._asdict().items()))
        for minimum in self.state or ():
            kind = "metastable" if minimum.metastable else "global"
            values = "  ".join(f"{k} {v:.5g}" for k, v in minimum.order_parameters._asdict().items())
            lines.append(f"  minimum at P = {p.sequences:g} ({kind}): {values}  S {minimum.action:.6g}")
            for name, detail in self._details(minimum).items():
                lines.append(f"    {name}: {_listed(detail)}")
        if self.front is not None:
            lines.append("  front: P where the row with n allowed positions passes cG = 1")
            lines += [f"    n = {one.n}: {_passing(one)}" for one in self.front if shown_length(one.n, self.front[-1].n)]
        if self.finite_chi is not None:
            lines += self.finite_chi.lines()
        if self.all_logits is not None:
            lines += self.all_logits.lines()
        if self.status != "ok":
            lines.append(f"  status: {self.status}")
        return "\n".join(lines)


# Transitions that are printed; with --json all are.
MOST_SHOWN = 4


def _listed(detail: Any) -> str:
    if isinstance(detail, dict):
        return "  ".join(f"lag {lag} {value:.5g}" for lag, value in detail.items())
    return "  ".join("-" if value is None else f"{value:.4g}" for value in detail)


def _passing(one: Passing) -> str:
    if one.sides is None or one.window is None or one.jump is None:
        return f"{one.P:.6g}"
    return (
        f"{one.P:.6g}; jumps at {one.jump:.6g} from cG {one.sides[0]:.4g} to {one.sides[1]:.4g}, two minima from "
        f"{one.window[0]:.6g} to {one.window[1]:.6g}"
    )


def predict(problem: Problem, finite_chi: bool = False, all_logits: bool = False) -> Prediction:
    """Order and place of every transition of the copy task, and the minima at problem.sequences if that is given.

    Exact minima of the action with population moments, chi -> infinity (theory.md sections 3 to 5).

    Args:
        finite_chi: also P*(chi), fluctuations and barriers at problem.chi (section 11), which takes seconds to compile.
        all_logits: also the minima over all H L^2 logits at problem.sequences, from many starts. Where no symmetric subspace is
            known they are the only answer: without transitions, the verdict undetermined.

    Raises:
        ProblemError: where the order-parameter theory does not apply (no symmetric subspace is known, and all_logits is not
            asked for; content without token_scale); with finite_chi also for content = True or separate query and key
            matrices, and with all_logits for these, without problem.sequences, and for more logits than are feasible.
    """
    if finite_chi:
        from copyhead.theory.effective_action import gaussian_task

        gaussian_task(problem)  # refuses what the expansion does not cover before a search that may take long
    if all_logits:
        from copyhead.theory.unreduced import unreduced_task

        if problem.sequences is None:
            raise ProblemError("sequences = None: must be given (--at P) for the minima over all logits")
        unreduced_task(problem)  # likewise
    try:
        found = solve(problem.replace(sequences=None))
    except NoSubspace as error:
        if not all_logits:
            raise ProblemError(f"{error}; minima over all logits at one P: --at P --all-logits") from None
        return _without_subspace(problem, str(error))
    here, state, expanded, checked = found, None, None, None
    if problem.sequences is not None:
        # outside the range of the transitions the branches are followed that far
        here = found if found.lower <= math.log(problem.sequences) <= found.upper else solve(problem)
        state = tuple(here.minima(problem.sequences))
        if all_logits:
            from copyhead.theory.all_logits import check

            checked = check(problem, problem.sequences, solution=here)
    if finite_chi and isinstance(here, Phases):
        from copyhead.finite_chi import at_finite_chi

        expanded = at_finite_chi(problem, here)
    status = "ok" if found.complete else "incomplete: a branch of minima could not be followed to the end of the range of P"
    if state == ():
        status = f"incomplete: no minimum was found at P = {problem.sequences:g}"
    if checked is not None and checked.verdict == "asymmetric":
        status = f"asymmetric: at P = {checked.sequences:g} a minimum without the symmetry is lower by {checked.difference:.3g}"
    scales = None if problem.beyond else leading_order(problem)
    front = found.passing if isinstance(found, Front) else None
    return Prediction(problem, found.verdict, found.transitions, scales, state, status, found, expanded, front, checked)


def _without_subspace(problem: Problem, reason: str) -> Prediction:
    """What the full matrix says at one P."""
    from copyhead.theory.all_logits import check

    assert problem.sequences is not None
    checked = check(problem, problem.sequences)
    state = tuple(one.minimum for one in checked.states)
    status = f"no transitions: {reason}"
    return Prediction(problem, "undetermined", (), None, state, status, None, all_logits=checked)
