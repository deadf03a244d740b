"""Figures of experiments: lines are theory, dots with error bars are training and sampling; the caller saves them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from copyhead.report.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NAMES,
    ORANGE,
    RED,
    SIZES,
    START_COLOURS,
    draw_minima,
    log_ticks,
    panels,
    quantities,
)
from copyhead.study.curves import Curves, Measured
from copyhead.study.diagram import Diagram
from copyhead.study.spec import Reproduction
from copyhead.study.width import QUANTITIES, Departure


def order_parameters(results: Measured, spec: Reproduction) -> Figure:
    """Order parameters and loss: theory as lines, Adam (both starts) and SGLD (two chi) as dots with errors."""
    shown = quantities(results.theory)
    columns = -(-(len(shown) + 1) // 2)
    figure, axes = panels(2, columns, 4 * columns, 6.6)
    low, high = results.adam.sequences[0] * 0.95, results.adam.sequences[-1] * 1.05
    for panel, quantity in zip(axes.flat, shown, strict=False):
        draw_minima(panel, results.theory, quantity, low, high)
        for start, colour in START_COLOURS.items():
            _dots(
                panel,
                results.adam,
                quantity,
                start,
                "o",
                colour,
                f"Adam, {start} start",
                filled=False,
                size=SIZES[start],
            )
            for (factor, data), marker in zip(results.sgld.items(), ("v", "^"), strict=False):
                label = rf"SGLD $\chi$ = {spec.problem.chi * factor:g}, {start} start"
                _dots(panel, data, quantity, start, marker, colour, label, filled=True, size=SIZES[start] - 2)
        if high > 50 * low:  # pooling of linear attention that reads tokens is far below copying
            panel.set_xscale("log")
            log_ticks(panel.xaxis)
    legend = axes.flat[-1]
    legend.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    handles += [Line2D([], [], color=BLACK, ls=style) for style in ("-", (0, (4, 2)))]
    labels += ["theory, global minimum", "theory, metastable minimum"]
    legend.legend(handles, labels, loc="center")
    seeds = results.adam.data.sizes["seed"]
    legend.set_title(f"mean over {seeds} data sets; error bars: standard error", fontsize=8)
    return figure


def _dots(
    axes: Axes,
    curves: Curves,
    quantity: str,
    start: str,
    marker: str,
    colour: str,
    label: str,
    *,
    filled: bool,
    size: float = 6,
) -> None:
    found = [curves.estimate(quantity, place, start) for place in curves.sequences]
    axes.errorbar(
        curves.sequences,
        [estimate.mean for estimate in found],
        [estimate.error for estimate in found],
        fmt=marker,
        ms=size,
        mfc=colour if filled else "none",
        mec=colour,
        ecolor=colour,
        elinewidth=1,
        alpha=0.8,
        label=label,
    )


def departures(found: dict[str, Departure]) -> Figure:
    """Distance of Adam from the kernel limit against 1 / d_model: order parameters of the same data sets, and the theory."""
    figure, axes = panels(1, 2 * len(found), 5 * 2 * len(found), 3.8)
    for index, (attention, rows) in enumerate(found.items()):
        for side, panel in enumerate(axes[0, 2 * index : 2 * index + 2]):
            place = rows.sequences[side]
            copying = QUANTITIES.index("cG")
            for (variance, values), colour in zip(rows.measured.items(), (RED, BLUE, GREEN, ORANGE), strict=False):
                inverse = 1 / np.array(rows.widths, float)
                mean, error = values[:, side, copying], rows.error[variance][:, side, copying]
                label = f"Adam, $g_E$ = {variance:g}"
                panel.errorbar(inverse, mean, error, fmt="o", color=colour, mfc="none", label=label)
                order = np.argsort(inverse)
                panel.plot(inverse[order], rows.theory[variance][order, side, copying], color=colour, lw=1.2)
            panel.axhline(0, color=GREY, lw=0.7, ls=":")
            panel.set(
                xscale="log", xlabel=r"$1/d_\mathrm{model}$", title=f"{attention}, P = {place}",
                ylabel=r"$c_G$ minus that of $d_\mathrm{model} \to \infty$",
            )  # fmt: skip
            panel.legend(fontsize=8)
    return figure


def hysteresis(results: Measured) -> Figure:
    """Copy attention from the two starts, with the folds and the Maxwell point of the theory."""
    figure, axes = panels(1, 1, 6, 4)
    panel = axes[0, 0]
    first = next(t for t in results.theory.transitions if t.window)
    assert first.window is not None
    low, high = 0.85 * first.window[0], 1.2 * first.window[1]
    draw_minima(panel, results.theory, "aG", low, high)
    for start, label in (("small", "Adam up from the small start"), ("copy", "Adam down from the copy start")):
        _dots(
            panel,
            results.adam,
            "aG",
            start,
            "o" if start == "small" else "s",
            START_COLOURS[start],
            label,
            filled=False,
        )
        jump = results.jump[start]
        places = ((jump.low + jump.high) / 2).values
        height = 0.5 * (float(first.before.aG) + float(first.after.aG))
        error = float(np.std(places, ddof=1)) if len(places) > 1 else 0.0
        panel.errorbar(
            [places.mean()],
            [height],
            xerr=[error],
            fmt=">" if start == "small" else "<",
            color=START_COLOURS[start],
            ms=8,
            capsize=3,
            label=f"its jump: {places.mean():.0f} (scatter {error:.0f})",
        )
    panel.annotate(f"$P^*$ = {first.P:.1f}", (first.P, 0.02), fontsize=8, rotation=90, va="bottom", ha="right", color=GREY)
    panel.legend(fontsize=8)
    return figure


def loss_maps(maps: dict[tuple[str, str], Any], lines: dict[tuple[str, str], Diagram]) -> Figure:
    """Adam's loss over (P, L) and (P, V), one row for each attention, with the boundaries of the theory."""
    attentions = list(dict.fromkeys(attention for attention, _ in maps))
    figure, axes = panels(len(attentions), 2, 11, 3.9 * len(attentions))
    styles = {
        "first-order": (BLACK, "-", "equal action $P^*$"),
        "lower fold": (BLACK, ":", "folds"),
        "upper fold": (BLACK, ":", None),
        "second-order": (BLACK, "-.", "$P_c$, second-order"),
        "crossover": (BLACK, "--", "crossover"),
        "leading order": (RED, "-", "leading order"),
        "leading order (pooling)": (RED, "-.", "leading order, pooling"),
    }
    for (attention, axis), data in maps.items():
        panel = axes[attentions.index(attention), ("length", "vocab").index(axis)]
        loss = data.loss.mean("seed").transpose(axis, "P").values
        mesh = panel.pcolormesh(
            data.P.values,
            data[axis].values,
            np.clip(loss, 1e-2, 1),
            norm=LogNorm(0.05, 1),
            cmap="viridis",
            shading="nearest",
        )
        drawn = lines[attention, axis]
        for name, values in drawn.lines.items():
            colour, style, label = styles[name]
            panel.plot(values, drawn.y.values, color=colour, ls=style, lw=1.5, label=label)
        panel.set(xscale="log", yscale="log", xlabel="training sequences $P$", ylabel="$L$" if axis == "length" else "$V$")
        ticks = data[axis].values
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        log_ticks(panel.xaxis)
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set(xlim=(data.P.values[0] * 0.95, data.P.values[-1] * 1.05), title=f"{attention}: Adam from the small start")
        figure.colorbar(mesh, ax=panel, label="loss per token")
    shown = {}
    for panel in axes.flat:
        handles, labels = panel.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), fontsize=8)
    return figure


def chi_shift(measured: dict[str, Measured], spec: Reproduction) -> Figure:
    """SGLD minus the exact theory of the same data sets, at each chi, outside the coexistence window.

    Multiplied by chi the two agree: a shift of order 1/chi, not an error. Inside the window chains also change branch.
    """
    figure, axes = panels(len(measured), 2, 10, 3 * len(measured))
    for row, (attention, results) in enumerate(measured.items()):
        windows = [t.window for t in results.theory.transitions if t.window]
        assert results.exact is not None  # the paper's task is always compared with the theory of the same data
        places = [p for p in results.exact.sequences if not any(0.97 * w[0] <= p <= 1.03 * w[1] for w in windows)]
        for column, quantity in enumerate(("cG", "loss")):
            panel = axes[row, column]
            for (factor, data), marker in zip(results.sgld.items(), ("v", "^"), strict=False):
                sampled = [p for p in places if p in data.sequences]
                for start, colour in START_COLOURS.items():
                    pairs = [(data.estimate(quantity, p, start), results.exact.estimate(quantity, p, start)) for p in sampled]
                    panel.errorbar(
                        sampled,
                        [factor * (found.mean - exact.mean) for found, exact in pairs],
                        [factor * found.error for found, _ in pairs],
                        fmt=marker, ms=4, color=colour, label=rf"$\chi$ = {spec.problem.chi * factor:g}, {start} start",
                    )  # fmt: skip
            panel.axhline(0, color=BLACK, lw=0.8)
            name = NAMES[quantity].split(",")[0]
            panel.set(
                xlabel="training sequences $P$",
                ylabel=rf"$(\chi/{spec.problem.chi:g})\,\times$ shift of {name}",
                title=attention,
            )
        axes[row, 0].legend(fontsize=7)
    return figure
