"""Figures of the theory alone: curves, landscapes of the action, scaling with L, phase diagrams."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

from copyhead.problem import Problem
from copyhead.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, draw_minima, log_ticks, panels, quantities
from copyhead.study.diagram import Diagram
from copyhead.study.scaling import Scaling
from copyhead.theory.action import at, reduced_action, row_entries
from copyhead.theory.precursors import Approach
from copyhead.theory.recipe import RecipeTask
from copyhead.theory.solution import Solution
from copyhead.theory.transition import Phases

# Most values of an axis that each get a tick.
MOST_TICKS = 8


def theory_curves(found: Solution, problem: Problem) -> Figure:
    """All order parameters and the loss against P."""
    shown = quantities(found)
    figure, axes = panels(1, len(shown), 2.8 * len(shown), 2.8)
    low, high = _range(found)
    for panel, quantity in zip(axes.flat, shown, strict=True):
        draw_minima(panel, found, quantity, low, high)
    figure.suptitle(
        f"{problem.attention} attention, L = {problem.length}, V = {problem.vocab}, $\\sigma^2$ = {problem.noise:g}"
    )
    return figure


def _range(found: Solution) -> tuple[float, float]:
    marks = [place for t in found.transitions for place in (t.window or (t.P,))]
    if not marks:
        return math.exp(found.lower), math.exp(found.upper)
    return 0.4 * min(marks), 2.2 * max(marks)


def _length(found: Phases) -> float:
    task = found.system.task
    if isinstance(task, RecipeTask):
        raise TypeError("landscapes are drawn for the copy task")
    return float(task.prior.length)


def landscapes(softmax: Phases, linear: Phases) -> Figure:
    """The action below, at and above the transition: in cG for softmax, in (c1, cG) for linear attention.

    If attention reads tokens, cI and cS are those of the global minimum.
    """
    figure, axes = panels(1, 4, 14, 3.4)
    first = next((t for t in softmax.transitions), None)
    center = first.P if first else math.exp((softmax.lower + softmax.upper) / 2)
    line = np.linspace(-0.3, 3.0, 300)
    for ratio, colour in ((0.9, BLUE), (1.0, BLACK), (1.15, RED)):
        rest = _others(softmax, ratio * center)
        entries = row_entries(softmax.system.task, "softmax")
        mean = [-(entries[1:] @ np.array([c, *rest])) / entries[0] for c in line]  # c1, of which only the prior depends
        values = np.array([_action(softmax, (a, c, *rest), ratio * center) for a, c in zip(mean, line, strict=True)])
        axes[0, 0].plot(line, values - values.min(), color=colour, label=f"P = {ratio * center:.0f}")
    axes[0, 0].set(xlabel=r"$c_G$", ylabel="action $S$ above its minimum", title="softmax", ylim=(-0.3, 8))
    axes[0, 0].legend()
    places = [t.P for t in linear.transitions] or [math.exp((linear.lower + linear.upper) / 2)]
    for panel, sequences in zip(axes[0, 1:], (0.85 * places[0], 1.25 * places[0], 1.3 * places[-1]), strict=True):
        minima = [m.order_parameters for m in linear.minima(sequences)]
        reach = [max(1.8 * max(abs(float(getattr(m, n))) for m in minima), least) for n, least in (("c1", 0.1), ("cG", 0.5))]
        x, y = np.linspace(-reach[0], reach[0], 61), np.linspace(-reach[1], reach[1], 61)
        rest, length = np.array(_others(linear, sequences)), _length(linear)
        # the other order parameters change sign, too, in the mirror image
        values = np.array([[_action(linear, (a, b, *(rest * np.sign(length * a + b))), sequences) for a in x] for b in y])
        levels = np.linspace(0, np.quantile(values - values.min(), 0.6), 16)
        panel.contourf(x, y, values - values.min(), levels=levels, cmap="viridis", extend="max")
        for m in minima:
            panel.plot([m.c1, -float(m.c1)], [m.cG, -float(m.cG)], "o", color=ORANGE, mec="white", ms=6)
        panel.set(xlabel=r"$c_1$", ylabel=r"$c_G$", title=f"linear, P = {sequences:.0f}")
    return figure


def _action(found: Phases, coordinates: tuple[float, ...], sequences: float) -> float:
    import jax

    with jax.enable_x64(True):
        return float(_jitted_action()(np.array(coordinates), found.system.task, sequences, found.system.kind))


def _others(found: Phases, sequences: float) -> tuple[float, ...]:
    """The order parameters beside c1 and cG, in the global minimum."""
    return tuple(found.system.coordinates(found.points(math.log(sequences))[0][1].z)[2:])


@functools.cache
def _jitted_action() -> Callable[..., Any]:
    import jax

    return jax.jit(lambda c, task, sequences, kind: reduced_action(c, at(task, sequences), kind), static_argnums=3)


def scaling_curves(found: Scaling) -> Figure:
    """Places of the transitions against L, and their local exponents."""
    figure, axes = panels(1, 3, 14, 4)
    styles = {
        "P*": (BLACK, "-", 0), "lower fold": (BLUE, ":", 0), "upper fold": (BLUE, "--", 0), "Eq. 21": (RED, "-", 0),
        "fold scale": (BLUE, "-.", 0),
        "crossover": (BLACK, "-", 1), "Eq. 17": (RED, "-", 1), "P_c": (BLACK, "--", 1), "Eq. 16": (RED, "--", 1),
    }  # fmt: skip
    for name, (colour, style, column) in styles.items():
        axes[0, column].loglog(found.lengths, found.places[name], color=colour, ls=style, label=name)
        if name in ("P*", "upper fold", "Eq. 21", "crossover", "P_c"):
            marker = "o" if column == 0 else "s"
            axes[0, 2].semilogx(*found.exponent(name), color=colour, ls=style, marker=marker, ms=3, label=name)
    for panel, title in zip(axes[0], ("softmax", "linear", "local exponent $d \\ln P / d \\ln L$"), strict=True):
        panel.set(xlabel="$L$", title=title)
        panel.legend(fontsize=8)
    axes[0, 0].set_ylabel("$P$")
    return figure


# Colour and label of each place that a branch may come to.
APPROACHES = {
    "P*": (BLACK, "$P^*$"),
    "upper fold": (RED, "upper fold"),
    "lower fold": (ORANGE, "lower fold, from above"),
    "P_c": (BLUE, "$P_c$"),
}


def precursors(found: Sequence[Approach]) -> Figure:
    """Susceptibility and relaxation rate against the distance to each transition, with the exponents of the last decade.

    Lines: chi -> infinity. Dots: at finite chi, open where the correction is not small; none where there is no minimum.
    """
    figure, axes = panels(1, 2, 9.5, 4.4)
    for one in found:
        colour, name = APPROACHES[one.place]
        style, name = ("--", f"{name}, from above") if one.place == "P_c" and not one.before else ("-", name)
        label = f"${one.order_parameter[0]}_{one.order_parameter[1]}$ to {name}"
        good = np.array([status == "good" for status in one.status])
        curves = (
            (one.susceptibility, one.finite_susceptibility, one.susceptibility_exponent),
            (one.relaxation, one.finite_relaxation, one.relaxation_exponent),
        )
        for panel, (limit, finite, exponent) in zip(axes[0], curves, strict=True):
            panel.loglog(one.distance, limit, color=colour, ls=style, label=f"{label}: {exponent.value:.3f}")
            for chosen, fill in ((good, colour), (~good, "none")):
                panel.loglog(one.distance[chosen], finite[chosen], "o", ms=3, color=colour, mfc=fill)
    for panel, name in zip(axes[0], (r"$\chi$ Var", r"relaxation rate per $\epsilon$ times steps"), strict=True):
        panel.set(xlabel="distance $|P - P_0| / P_0$", ylabel=name)
        panel.invert_xaxis()
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": 2}
        panel.legend(fontsize=7, title="exponent of the last decade", title_fontsize=7, **below)
    chis = ", ".join(f"{chi:g}" for chi in sorted({one.chi for one in found}))
    figure.suptitle(rf"lines: $\chi \to \infty$; dots: $\chi$ = {chis}")
    return figure


def phase_diagram(found: Diagram) -> Figure:
    """Loss of the global minimum with boundaries if P is on an axis; otherwise place of the transition and verdicts."""
    figure, axes = panels(1, 1, 7, 5)
    panel = axes[0, 0]
    with_p = "sequences" in (found.x.name, found.y.name)
    values = found.loss if with_p else found.places
    finite = values[np.isfinite(values) & (values > 0)]
    mesh = panel.pcolormesh(
        found.x.values,
        found.y.values,
        values,
        norm=LogNorm(finite.min(), finite.max()),
        cmap="viridis",
        shading="nearest",
    )
    figure.colorbar(mesh, ax=panel, label="loss per token of the global minimum" if with_p else "$P$ of the transition")
    for (name, line), colour in zip(found.lines.items(), (RED, ORANGE, BLACK, BLUE, GREY, GREEN, BLACK), strict=False):
        pair = (line, found.y.values) if found.x.name == "sequences" else (found.x.values, line)
        if np.isfinite(line).sum() > 1:
            panel.plot(*pair, color=colour, label=name, lw=1.5)
    if not with_p:
        first = (found.verdicts == "first-order").astype(float)
        if 0 < first.mean() < 1:
            panel.contour(found.x.values, found.y.values, first, levels=[0.5], colors="white")
            panel.plot([], [], color="white", label="first-order | crossover")
    scales = ["log" if axis.values[0] > 0 else "linear" for axis in (found.x, found.y)]
    panel.set(xscale=scales[0], yscale=scales[1], xlabel=_label(found.x.name), ylabel=_label(found.y.name))
    panel.set(xlim=(found.x.values[0], found.x.values[-1]), ylim=(found.y.values[0], found.y.values[-1]))
    for axis, drawn, scale in zip((found.x, found.y), (panel.xaxis, panel.yaxis), scales, strict=True):
        if scale == "log" and len(axis.values) <= MOST_TICKS:
            drawn.set_major_locator(FixedLocator(axis.values))
            drawn.set_major_formatter(ScalarFormatter())
            drawn.set_minor_locator(NullLocator())
        elif scale == "log":
            log_ticks(drawn)
    panel.set_title(f"{found.problem.attention} attention")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=True, facecolor="#dddddd")
    return figure


def _label(name: str) -> str:
    description = Problem.model_fields[name].description or name
    return description.split(" (")[0]
