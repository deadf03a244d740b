"""Figures: lines are theory, dots with error bars are experiment. Drawn without a display; the caller saves them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from copyhead.problem import Problem, ProblemError
from copyhead.study.compare import Curves, Measured
from copyhead.study.diagram import Diagram
from copyhead.study.scaling import Scaling
from copyhead.study.spec import Reproduction
from copyhead.study.width import QUANTITIES, Departure
from copyhead.theory.action import at, reduced_action, row_entries
from copyhead.theory.transition import Phases

FIGURE_SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, distinct for colour-blind readers
BLACK, BLUE, ORANGE, GREEN, RED, GREY = "#000000", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
START_COLOURS = {"small": BLUE, "copy": ORANGE}
SIZES = {"small": 8.0, "copy": 5.5}  # both stay visible where they agree
NAMES = {
    "c1": r"$c_1$, mean logit",
    "cG": r"$c_G$, copy logit",
    "cI": r"$c_I$, logit of equal tokens",
    "cS": r"$c_S$, logit of the own position",
    "a1": r"$a_1$, uniform attention",
    "aG": r"$a_G$, copy attention",
    "loss": "loss per token",
}
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "copyhead",
    "legend.frameon": False,
}


def _figure(rows: int, columns: int, width: float, height: float, **settings: Any) -> tuple[Figure, np.ndarray]:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, squeeze=False, **settings)
    return figure, axes


def save(figure: Figure, *paths: Path) -> None:
    """Writes a figure; SVG without a date, so that equal figures are equal files.

    Raises:
        ProblemError: if a file cannot be written.
    """
    with matplotlib.rc_context(STYLE):
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # keeps the layout just found, once for all formats
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            try:
                figure.savefig(path, dpi=150, metadata=metadata)
            except OSError as error:
                raise ProblemError(f"out = {str(path)!r}: cannot be written ({error.strerror})") from None


def _draw_minima(axes: Axes, found: Phases, quantity: str, low: float, high: float) -> None:
    """All minima against P: the global one solid, metastable ones dashed; window shaded, transitions dotted."""
    grid = np.linspace(math.log(low), math.log(high), 160)
    ends = [piece.points[i].log_p for piece in found.segments for i in (0, -1)]
    grid = np.unique(np.clip([*grid, *ends, *(math.log(t.P) for t in found.transitions)], grid[0], grid[-1]))
    values = np.full((2, len(found.segments), len(grid)), np.nan)
    for column, log_p in enumerate(grid):
        for rank, (piece, point) in enumerate(found.points(float(log_p))):
            row = next(i for i, other in enumerate(found.segments) if other is piece)
            values[min(rank, 1), row, column] = getattr(found.observe(point), quantity)
    sequences = np.exp(grid)
    for row in range(len(found.segments)):
        axes.plot(sequences, values[0, row], color=BLACK, lw=1.3)
        axes.plot(sequences, values[1, row], color=BLACK, lw=1.0, ls=(0, (4, 2)))
    for t in found.transitions:
        if low <= t.P <= high:
            axes.axvline(t.P, color=GREY, lw=0.7, ls=":")
        if t.window:
            axes.axvspan(max(t.window[0], low), min(t.window[1], high), color=GREY, alpha=0.18, lw=0)
    axes.set(xlabel="training sequences $P$", ylabel=NAMES[quantity], xlim=(low, high))


def theory_curves(found: Phases, problem: Problem) -> Figure:
    """All order parameters and the loss against P."""
    shown = _quantities(found)
    figure, axes = _figure(1, len(shown), 2.8 * len(shown), 2.8)
    low, high = _range(found)
    for panel, quantity in zip(axes.flat, shown, strict=True):
        _draw_minima(panel, found, quantity, low, high)
    figure.suptitle(
        f"{problem.attention} attention, L = {problem.length}, V = {problem.vocab}, $\\sigma^2$ = {problem.noise:g}"
    )
    return figure


def _quantities(found: Phases) -> list[str]:
    """The order parameters that the theory has, in the order of NAMES."""
    fields = found.observe(found.segments[0].points[0])._fields
    return [name for name in NAMES if name in fields]


def _range(found: Phases) -> tuple[float, float]:
    marks = [place for t in found.transitions for place in (t.window or (t.P,))]
    if not marks:
        return math.exp(found.lower), math.exp(found.upper)
    return 0.4 * min(marks), 2.2 * max(marks)


def order_parameters(results: Measured, spec: Reproduction) -> Figure:
    """Order parameters and loss: theory as lines, Adam (both starts) and SGLD (two chi) as dots with errors."""
    shown = _quantities(results.theory)
    columns = -(-(len(shown) + 1) // 2)
    figure, axes = _figure(2, columns, 4 * columns, 6.6)
    low, high = results.adam.sequences[0] * 0.95, results.adam.sequences[-1] * 1.05
    for panel, quantity in zip(axes.flat, shown, strict=False):
        _draw_minima(panel, results.theory, quantity, low, high)
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


def landscapes(softmax: Phases, linear: Phases) -> Figure:
    """The action below, at and above the transition: in cG for softmax, in (c1, cG) for linear attention.

    If attention reads tokens, cI and cS are those of the global minimum.
    """
    figure, axes = _figure(1, 4, 14, 3.4)
    first = next((t for t in softmax.transitions), None)
    center = first.P if first else math.exp((softmax.lower + softmax.upper) / 2)
    line = np.linspace(-0.3, 3.0, 300)
    for ratio, colour in ((0.9, BLUE), (1.0, BLACK), (1.15, RED)):
        rest = _others(softmax, ratio * center)
        entries = row_entries(softmax.system.task)
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
        rest, length = np.array(_others(linear, sequences)), float(linear.system.task.prior.length)
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


def departures(found: dict[str, Departure]) -> Figure:
    """Distance of Adam from the kernel limit against 1 / d_model: order parameters of the same data sets, and the theory."""
    figure, axes = _figure(1, 2 * len(found), 5 * 2 * len(found), 3.8)
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
    figure, axes = _figure(1, 1, 6, 4)
    panel = axes[0, 0]
    first = next(t for t in results.theory.transitions if t.window)
    assert first.window is not None
    low, high = 0.85 * first.window[0], 1.2 * first.window[1]
    _draw_minima(panel, results.theory, "aG", low, high)
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
    figure, axes = _figure(len(attentions), 2, 11, 3.9 * len(attentions))
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
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_locator(NullLocator())
        panel.set(xlim=(data.P.values[0] * 0.95, data.P.values[-1] * 1.05), title=f"{attention}: Adam from the small start")
        figure.colorbar(mesh, ax=panel, label="loss per token")
    shown = {}
    for panel in axes.flat:
        handles, labels = panel.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), fontsize=8)
    return figure


def scaling_curves(found: Scaling) -> Figure:
    """Places of the transitions against L, and their local exponents."""
    figure, axes = _figure(1, 3, 14, 4)
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


def chi_shift(measured: dict[str, Measured], spec: Reproduction) -> Figure:
    """SGLD minus the exact theory of the same data sets, at each chi, outside the coexistence window.

    Multiplied by chi the two agree: a shift of order 1/chi, not an error. Inside the window chains also change branch.
    """
    figure, axes = _figure(len(measured), 2, 10, 3 * len(measured))
    for row, (attention, results) in enumerate(measured.items()):
        windows = [t.window for t in results.theory.transitions if t.window]
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


def phase_diagram(found: Diagram) -> Figure:
    """Loss of the global minimum with boundaries if P is on an axis; otherwise place of the transition and verdicts."""
    figure, axes = _figure(1, 1, 7, 5)
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
        panel.plot(*pair, color=colour, label=name, lw=1.5)
    if not with_p:
        first = (found.verdicts == "first-order").astype(float)
        if 0 < first.mean() < 1:
            panel.contour(found.x.values, found.y.values, first, levels=[0.5], colors="white")
            panel.plot([], [], color="white", label="first-order | crossover")
    scales = ["log" if axis.values[0] > 0 else "linear" for axis in (found.x, found.y)]
    panel.set(xscale=scales[0], yscale=scales[1], xlabel=_label(found.x.name), ylabel=_label(found.y.name))
    panel.set(xlim=(found.x.values[0], found.x.values[-1]), ylim=(found.y.values[0], found.y.values[-1]))
    panel.set_title(f"{found.problem.attention} attention")
    if panel.get_legend_handles_labels()[0]:
        panel.legend(fontsize=8, frameon=True, facecolor="#dddddd")
    return figure


def _label(name: str) -> str:
    description = Problem.model_fields[name].description or name
    return description.split(" (")[0]
