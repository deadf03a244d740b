"""Figure of training time: curves at one P, the jump against P, slowing down at the folds, initial scale, learning rate."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from copyhead.report.style import BLACK, BLUE, GREEN, GREY, NAMES, ORANGE, RED, START_COLOURS, panels
from copyhead.study.training_record import Curves, Times, Training
from copyhead.theory.flow import Slowing

TIME = r"$\tau = \eta\,\times$ step"
JUMP = r"$\tau$ of the jump"


def training_times(found: Training) -> Figure:
    """Six panels: aG and loss against tau at one P, tau of the jump against P, slowing down, initial scale, learning rate."""
    figure, axes = panels(2, 3, 12.5, 7.2)
    for panel, quantity in zip(axes[0, :2], ("aG", "loss"), strict=True):
        _curves(panel, found, quantity)
    _against_sequences(axes[0, 2], found)
    _slowing(axes[1, 0], found.slowing)
    _scales(axes[1, 1], found)
    _rates(axes[1, 2], found)
    return figure


def _curves(axes: Axes, found: Training, quantity: str) -> None:
    place, curves = found.main, found.curves
    sign = np.sign(curves.data.observables.overlap[:, -1:]) if quantity == "aG" and found.problem.attention == "linear" else 1.0
    bundle = sign * getattr(curves.data.observables, quantity)
    time = place.rate * curves.data.step
    axes.plot(time, bundle.T, color=BLUE, lw=0.5, alpha=0.55)
    axes.plot([], [], color=BLUE, lw=0.7, alpha=0.7, label=f"gradient descent, {len(bundle)} data sets")
    axes.plot(time, bundle.mean(axis=0), color=BLUE, lw=2, label="their mean")
    axes.plot(curves.theory.time, getattr(curves.theory, quantity), color=BLACK, lw=1.8, label="gradient flow (theory)")
    seen = getattr(curves.population.observables, quantity)[0]
    axes.plot(time, seen, color=ORANGE, lw=1.6, ls=(0, (3, 3)), label="gradient descent, population moments")
    axes.set(xlabel=f"{TIME}, η = {place.rate:.2g}", ylabel=NAMES[quantity], xlim=(0, time[-1]))
    if quantity == "aG":
        if np.isfinite(place.levels.middle):
            axes.axhline(place.levels.middle, color=GREY, lw=0.7, ls=":")
    else:
        axes.legend(fontsize=7, loc="upper right")
    _adam(axes, curves, quantity, sign)
    axes.set_title(f"{found.problem.attention}, P = {place.P}, {place.start} start", fontsize=9)


def _adam(axes: Axes, curves: Curves, quantity: str, sign: np.ndarray | float) -> None:
    """Mean of Adam on its own steps, along the upper edge, up to well after its jump."""
    seen = sign * getattr(curves.adam.observables, quantity)
    mean = seen.mean(axis=0)
    late = np.flatnonzero(np.abs(mean - mean[-1]) > 0.02 * np.ptp(mean))
    last = min(len(mean) - 1, 2 * int(late[-1]) + 5 if late.size else 10)
    above = axes.twiny()
    above.plot(curves.adam.step[: last + 1], mean[: last + 1], color=GREEN, lw=1.1, ls="-.", label="Adam")
    above.set(xlim=(0, curves.adam.step[last]))
    above.set_xlabel("step of Adam (green)", color=GREEN, fontsize=8)
    above.tick_params(axis="x", colors=GREEN, labelsize=7)
    above.spines["top"].set_visible(True)
    above.spines["top"].set_color(GREEN)


def _against_sequences(axes: Axes, found: Training) -> None:
    for index, line in enumerate(found.lines):
        labels = ("gradient flow", "length of its plateau") if index == len(found.lines) - 1 else (None, None)
        axes.plot(line.sequences, line.time, color=BLACK, lw=1.3, label=labels[0])
        if np.isfinite(line.length).any():
            axes.plot(line.sequences, line.length, color=GREY, lw=1, ls="-.", label=labels[1])
    jumped = [place for place in found.places if place.theory.status == "jumped"]
    axes.plot([p.P for p in jumped], [p.population for p in jumped], "x", color=ORANGE, ms=6, label="population moments")
    if found.problem.attention == "linear":  # where the start matters
        means = [place.paired.mean for place in jumped]
        axes.plot([p.P for p in jumped], means, "D", ms=6, mfc="none", color=BLACK, label="flow from the random starts, mean")
    shown = [place for place in found.places if place.data.jumped]
    if shown:
        sequences = np.array([place.P for place in shown])
        means, errors, scatters = (np.array([getattr(p.data, key) for p in shown]) for key in ("mean", "error", "scatter"))
        axes.errorbar(sequences, means, scatters, fmt="none", ecolor=BLUE, lw=0.8, capsize=3)
        axes.errorbar(sequences, means, errors, fmt="o", ms=3.5, color=BLUE, lw=2.2, label="data sets: mean, error, scatter")
    for one in found.slowing:
        name = "upper" if one.start == "small" else "lower"
        axes.axvline(one.fold, color=START_COLOURS[one.start], lw=1, ls="--", label=f"{name} fold, {one.fold:.1f}")
    axes.set(xlabel="training sequences $P$", ylabel=JUMP, yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("time of the jump", fontsize=9)
    axes.legend(fontsize=7)


def _slowing(axes: Axes, found: tuple[Slowing, ...]) -> None:
    if not found:
        axes.text(
            0.5, 0.5, "no first-order transition:\nno fold to slow down at", ha="center", va="center", fontsize=9, color=GREY
        )
        axes.set_axis_off()
        return
    for one in found:
        name, colour = ("upper", BLUE) if one.start == "small" else ("lower", ORANGE)
        exponent = one.time_exponent[-1]
        axes.loglog(
            one.distance, one.time, "o-", ms=3, lw=1, color=colour, label=f"beyond {name} fold: τ, exponent {exponent:.3f}"
        )
        label = rf"inside: $2\pi$ / rate, exponent {-one.rate_exponent[-1]:.3f}"
        axes.loglog(one.distance, 2 * np.pi / one.rate, "s", ms=3, mfc="none", color=colour, label=label)
    first = found[0]
    guide = 1.6 * first.time[-1] * (first.distance / first.distance[-1]) ** -0.5
    axes.loglog(first.distance, guide, color=GREY, lw=1, ls="--", label="slope -1/2")
    axes.set(xlabel=r"distance $|P - P_\mathrm{fold}| / P_\mathrm{fold}$", ylabel=JUMP)
    axes.set_title("slowing down at the folds", fontsize=9)
    axes.legend(fontsize=7)


def _scales(axes: Axes, found: Training) -> None:
    sweep = found.scales
    axes.semilogx(sweep.value, sweep.theory, color=BLACK, lw=1.3, label="gradient flow")
    axes.semilogx(sweep.value, sweep.population, "x", color=ORANGE, ms=6, label="population moments")
    own: Times = found.main.data
    if found.main.start == "small" and own.jumped:
        axes.errorbar(
            [found.settings.scale], [own.mean], [own.scatter], fmt="o", ms=3.5, color=BLUE, capsize=3, label="data sets"
        )
    axes.set(xlabel="initial scale (standard deviation of an entry)", ylabel=JUMP)
    axes.set_title(f"initial scale, P = {found.main.P}", fontsize=9)
    axes.set_ylim(0, None)
    axes.legend(fontsize=7)


def _rates(axes: Axes, found: Training) -> None:
    sweep = found.rates
    axes.loglog(sweep.value, sweep.deviation, "o-", ms=3.5, lw=1, color=ORANGE, label="largest deviation of a curve")
    shift = np.abs(sweep.population / sweep.theory - 1)
    axes.loglog(sweep.value, shift, "^-", ms=3.5, lw=1, color=RED, label="shift of the jump, relative")
    middle = len(sweep.value) // 2
    guide = sweep.deviation[middle] * sweep.value / sweep.value[middle]
    axes.loglog(sweep.value, 1.5 * guide, color=GREY, lw=1, ls="--", label=r"slope 1 in $\eta$")
    axes.axhline(0.02, color=GREY, lw=0.7, ls=":")
    axes.axvline(found.main.limit, color=BLACK, lw=1, ls="--", label=f"stability limit, {found.main.limit:.3g}")
    axes.axvline(found.main.rate, color=BLUE, lw=1, ls=":", label=f"η of the other panels, {found.main.rate:.2g}")
    axes.set(xlabel="learning rate η", ylabel="relative to the flow")
    axes.set_title(f"gradient descent on population moments, P = {found.main.P}", fontsize=9)
    axes.legend(fontsize=7)
