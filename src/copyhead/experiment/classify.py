"""Order of a transition from data alone: first-order, second-order, crossover or undetermined, with the evidence.

First-order needs both phases at the same P, at two grid points at least: by two starts (hysteresis) or by repeats
(bimodality). A jump between two neighbouring points is none, as a continuous change may be as steep. A curve without
coexistence is compared with shapes (`shapes`): a power law that starts at P_c, a smooth step, a jump, and no feature.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from copyhead.experiment import shapes
from copyhead.experiment.branches import Branches, branches, hysteresis, latent_heat, two_branches
from copyhead.experiment.classification import Classification, Quantity
from copyhead.experiment.shapes import Curve, Fit
from copyhead.experiment.table import FEWEST, Runs, Table, runs_of

# First-order: two branches this far apart, in units of the scatter around them ...
SEPARATION = 5.0
# ... that are both seen at this many grid points, with at most this share of the runs there between them ...
COEXISTING, BETWEEN = 2, 0.15
# ... and which describe the runs better than a smooth curve by this difference in ln likelihood.
TWO_BRANCHES = 8.0
# Second-order: the kink is better in AICc than a smooth step or a cubic, than a jump and than a kink of exponent one by these
# differences (4 is a ratio of e^2 in weight), and has this many grid points on its rise, between these parts of its height.
KINK_OVER_STEP, KINK_OVER_JUMP, KINK_OVER_BEND, KINK_POINTS = 4.0, 2.0, -1.0, 3
RISE = 0.15, 0.85
# Crossover: likewise for the smooth step against a kink, a jump and a kink of exponent one.
STEP_OVER_KINK, STEP_OVER_JUMP, STEP_OVER_BEND, STEP_OVER_DRIFTING, STEP_POINTS = 6.0, 3.0, 1.0, 2.0, 2
# Shapes are compared from this many values of P on.
COMPARABLE = 10
# Any transition: the best shape is better than a parabola by this difference.
OVER_PARABOLA = 3.0
# The first and last point see at most this part of a step still to come, or already gone.
SHOULDER = 0.25
# A curve that falls back behind an extremum by this part of its height is classified on the steeper side of that only.
FALLS_BACK = 0.3
# Height over scatter of a mean below which there is nothing to classify.
VISIBLE = 5.0
# Evidence that is followed from one chi or size to the next.
WIDTH, GAP = "width of the step in ln P", "gap between the branches"
STAYS = {GAP: "first-order", WIDTH: "crossover"}
# Trend: a power of chi or size that is different from zero by this many errors and by this much contradicts a verdict.
TREND, POWER = 3.0, 0.1


def classify(table: Table, signed: bool = False) -> Classification:
    """The order of the transition of the order parameter against P.

    With several chi or sizes the largest decides, and the trend may contradict it.

    Args:
        signed: take the order parameter as it comes; else its size is taken where it grows from zero with either sign.
    """
    notes = (f"columns not used: {', '.join(table.unused)}",) if table.unused else ()
    if not signed and _mirrored(table):
        table = replace(table, order=np.abs(table.order))
        notes += ("values of both signs grow from zero: |order parameter| is taken",)
    several = (name for name in ("chi", "size") if (v := getattr(table, name)) is not None and len(np.unique(v)) > 1)
    scale = next(several, None)
    found = _one(table) if scale is None else _by_scale(table, scale)
    return replace(found, notes=notes + found.notes)


def _mirrored(table: Table) -> bool:
    """Whether large values of both signs occur while values are small at one end of P: not a change from -1 to 1."""
    size = np.abs(table.order)
    large = table.order[size > 0.5 * size.max()]
    ranks = np.argsort(np.argsort(table.control)) / len(size)
    ends = min(size[ranks < 0.2].mean(), size[ranks >= 0.8].mean())
    return bool(large.min() < 0 < large.max() and ends < 0.3 * size.max())


def _one(table: Table) -> Classification:
    """The order from the runs of one chi and size."""
    runs = runs_of(table)
    no_feature, step = shapes.smooth(runs.curve), shapes.step(runs.curve)
    starts, disagreeing = hysteresis(runs)
    found = branches(runs.x, runs.y, runs.point)
    two: tuple[Quantity, ...] = ()
    if found is not None:
        separation, both, between, likelihood, gap = two_branches(runs, found, (no_feature, step))
        two = (
            separation._replace(needed=f"first-order: > {SEPARATION:g}"),
            both._replace(needed=f"first-order: >= {COEXISTING}"),
            between._replace(needed=f"first-order: <= {BETWEEN:g}"),
            likelihood._replace(needed=f"first-order: > {TWO_BRANCHES:g}"),
            gap,
        )
        apart = separation.value > SEPARATION and between.value <= BETWEEN and likelihood.value > TWO_BRANCHES
        if apart and found.coexisting:
            return _coexistence(runs, found, (*two, *starts))
    if disagreeing:
        reason = f"the starts disagree at {disagreeing} values of P, but not as two branches with nothing between"
        return Classification("undetermined", reason, evidence=(*two, *starts))
    return _continuous(runs, no_feature, step, (*two[:4], *starts))


def _coexistence(runs: Runs, found: Branches, evidence: tuple[Quantity, ...]) -> Classification:
    """First-order, unless the window is not seen whole or by too few points, or the loss contradicts it."""
    grid, (first, last) = runs.grid, found.window
    heat, contradicts = latent_heat(runs, found)
    evidence += heat
    if first == 0 or last == len(grid) - 1:
        reason = f"two branches coexist up to the edge of the grid, {grid[first]:.4g} .. {grid[last]:.4g}"
        return Classification("undetermined", reason, evidence=evidence)
    # each fold lies between the last point that has only one branch and the next
    window = float(np.sqrt(grid[first - 1] * grid[first])), float(np.sqrt(grid[last] * grid[last + 1]))
    place = float(np.sqrt(window[0] * window[1]))
    if found.coexisting < COEXISTING:
        reason = f"both branches are seen at P = {grid[first]:.4g} only: the grid is coarser than the window"
        return Classification("undetermined", reason, place, window, evidence)
    if contradicts:
        reason = "two branches coexist, but with the same loss: no latent heat"
        return Classification("undetermined", reason, place, window, evidence)
    reason = (
        f"two branches with nothing between coexist at {found.coexisting} grid points, {grid[first]:.4g} .. {grid[last]:.4g}"
    )
    return Classification("first-order", reason, place, window, evidence)


def _continuous(runs: Runs, no_feature: Fit, step: Fit, evidence: tuple[Quantity, ...]) -> Classification:
    """Second-order, crossover or undetermined, for runs without coexistence."""
    curve, grid = runs.curve, runs.grid
    part = _monotone(curve)
    notes: tuple[str, ...] = ()
    if len(part.x) < len(grid):
        curve, grid = part, np.exp(part.x)
        notes = (f"not monotone: only P = {grid[0]:.4g} .. {grid[-1]:.4g} is classified",)
    if len(grid) < COMPARABLE:
        reason = f"{len(grid)} values of P are too few to compare shapes"
        return Classification("undetermined", reason, evidence=evidence, notes=notes)
    if notes:
        no_feature, step = shapes.smooth(curve), shapes.step(curve)
    jump, cubic = shapes.jump(curve), shapes.smooth(curve, degree=3)
    side, kink = min(((side, shapes.kink(curve, side)) for side in (1, -1)), key=lambda pair: pair[1].aicc)
    bend = shapes.kink(curve, side, exponent=1.0)
    drifting = min((shapes.kink(curve, side, flat=shapes.DRIFT) for side in (1, -1)), key=lambda fit: fit.aicc)
    compared = {
        "a parabola": no_feature,
        "a cubic": cubic,
        "a jump": jump,
        "a smooth step": step,
        "a kink": kink,
        "a kink of exponent 1": bend,
        "a kink on a drifting line": drifting,
    }
    best = min(fit.aicc for fit in compared.values())
    height = float(np.ptp(curve.y))
    fitted = min(compared.values(), key=lambda fit: fit.aicc)
    noise = max(float(np.sqrt(np.mean((curve.y - fitted.values) ** 2))), 1e-9 * height)
    beta, beta_error = float(kink.parameters[1]), float(kink.errors[1])
    risen = shapes.step_function(curve.x, step.parameters)
    grown = _grown(curve, kink)
    resolved = int(np.sum((risen > RISE[0]) & (risen < RISE[1])))
    evidence = (
        Quantity("height over scatter of the means", height / noise, needed=f"> {VISIBLE:g}"),
        *(Quantity(f"AICc of {name}, less that of the best", fit.aicc - best) for name, fit in compared.items()),
        Quantity("exponent beta of the kink", beta, beta_error),
        Quantity("grid points on the rise, kink", float(grown), needed=f"second-order: >= {KINK_POINTS}"),
        Quantity(WIDTH, shapes.step_width(step.parameters), shapes.step_width(step.parameters) * float(step.errors[1])),
        Quantity("grid points on the rise, step", float(resolved), needed=f"crossover: >= {STEP_POINTS}"),
        *evidence,
    )

    def undetermined(reason: str) -> Classification:
        return Classification("undetermined", reason, evidence=evidence, notes=notes)

    if height < VISIBLE * noise:
        return undetermined("the scatter is too large: the order parameter changes by little more than it")
    if no_feature.aicc < best + OVER_PARABOLA:
        return undetermined("no transition in the range: a parabola describes the order parameter as well")
    if kink.aicc < min(
        step.aicc - KINK_OVER_STEP, cubic.aicc - KINK_OVER_STEP, jump.aicc - KINK_OVER_JUMP, bend.aicc - KINK_OVER_BEND
    ):
        if grown < KINK_POINTS:
            return undetermined("the rise of the kink is narrower than the grid")
        reason = (
            f"continuous, with a kink of exponent {beta:.2f} +- {beta_error:.2f} that no smooth step or jump describes as well"
        )
        return Classification("second-order", reason, *_place(kink), evidence, notes)
    if jump.aicc < min(step.aicc + STEP_OVER_JUMP, kink.aicc + KINK_OVER_JUMP):
        where = int(np.searchsorted(curve.x, jump.parameters[0]))
        return undetermined(
            f"it changes between {grid[where - 1]:.4g} and {grid[where]:.4g}, two neighbouring points: a jump, or a continuous "
            "change narrower than the grid; a second start, or repeats on a finer grid there, would tell"
        )
    if not step.aicc < min(kink.aicc - STEP_OVER_KINK, bend.aicc - STEP_OVER_BEND, drifting.aicc - STEP_OVER_DRIFTING):
        return undetermined("the scatter is too large to tell a kink from a smooth step")
    if resolved < STEP_POINTS:
        return undetermined("it changes as a smooth step that is narrower than the grid")
    if not (risen[0] < SHOULDER and risen[-1] > 1 - SHOULDER):
        return undetermined("the step reaches the edge of the grid")
    return Classification(
        "crossover", "a smooth step without kink or jump, resolved by the grid", *_place(step), evidence, notes
    )


def _monotone(curve: Curve) -> Curve:
    """The curve up to an extremum or from it on, whichever side changes more, where both sides change much; else all of it."""
    ends = curve.y[:2].mean(), curve.y[-2:].mean()
    for extreme in (int(np.argmax(curve.y)), int(np.argmin(curve.y))):
        left, right = (abs(curve.y[extreme] - end) for end in ends)
        if min(left, right) > FALLS_BACK * np.ptp(curve.y):
            kept = slice(0, extreme + 1) if left >= right else slice(extreme, None)
            return Curve(*(column[kept] for column in curve))
    return curve


def _grown(curve: Curve, kink: Fit) -> int:
    """Number of grid points on the rise of a kink, between two parts of its height."""
    line = kink.coefficients[0] + kink.coefficients[1] * (curve.x - curve.x.mean())
    part = np.abs(kink.values - line)
    part = part / max(part.max(), 1e-300)
    return int(np.sum((part > RISE[0]) & (part < RISE[1])))


def _place(fit: Fit) -> tuple[float, tuple[float, float]]:
    """P of a fit and the interval of one standard error."""
    x, error = float(fit.parameters[0]), float(fit.errors[0])
    return float(np.exp(x)), (float(np.exp(x - error)), float(np.exp(x + error)))


class Trend(NamedTuple):
    """A power law of a quantity in chi or size: its exponent with error, from at least three values."""

    exponent: float
    error: float

    @property
    def falls(self) -> bool:
        return self.exponent < -max(TREND * self.error, POWER)


def _by_scale(table: Table, name: str) -> Classification:
    """The order at the largest chi or size, unless the trend contradicts it."""
    values = getattr(table, name)
    enough = [value for value in np.unique(values) if len(np.unique(table.control[values == value])) >= FEWEST]
    if not enough:
        return Classification("undetermined", f"no {name} has {FEWEST} values of P")
    found = {float(value): classify(table.rows(values == value), signed=True) for value in enough}
    largest = max(found)
    verdict = replace(found[largest], notes=(f"the verdict is that of {name} = {largest:g}, the largest",))
    trends = {quantity: trend for quantity in (GAP, WIDTH) if (trend := _trend(found, quantity)) is not None}
    verdict = replace(
        verdict,
        evidence=(
            *verdict.evidence,
            *(
                Quantity(f"power of {name} in the {quantity}", trend.exponent, trend.error, f"{STAYS[quantity]}: not below 0")
                for quantity, trend in trends.items()
            ),
        ),
        notes=(*verdict.notes, *(f"{name} = {value:g}: {one.verdict}" for value, one in found.items())),
    )
    if verdict.verdict == "first-order" and GAP in trends and trends[GAP].falls:
        return replace(verdict, verdict="undetermined", reason=f"two branches coexist, but their gap closes as {name} grows")
    if verdict.verdict == "crossover" and WIDTH in trends and trends[WIDTH].falls:
        reason = f"a smooth step at every {name}, but it narrows as {name} grows: it may be a transition in the limit"
        return replace(verdict, verdict="undetermined", reason=reason)
    return verdict


def _trend(found: dict[float, Classification], quantity: str) -> Trend | None:
    """The power law of one piece of evidence, None with fewer than three values of it."""
    known = {value: one for value, c in found.items() for one in c.evidence if one.name == quantity and one.value > 0}
    if len(known) < 3:
        return None
    x, y = np.log(list(known)), np.log([one.value for one in known.values()])
    # the error of each value, or what the values scatter about the line, whichever is larger
    given = np.array([(one.error or 0.0) / one.value for one in known.values()])
    slope, offset = np.polyfit(x, y, 1)
    scatter = np.sqrt(np.sum((y - slope * x - offset) ** 2) / (len(x) - 2))
    error = np.hypot(scatter, np.sqrt(np.mean(given**2))) / np.sqrt(np.sum((x - x.mean()) ** 2))
    return Trend(float(slope), float(error))
