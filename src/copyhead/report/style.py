"""What all figures share: colours, names of quantities, panels, the minima of the theory against P; drawn without a display."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from copyhead.problem import ProblemError
from copyhead.theory.front import Front
from copyhead.theory.order_parameters import OrderParameters, order_of
from copyhead.theory.solution import Solution
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
# Transitions beyond this number, those of many rows, are marked thinner and without their windows.
MOST_MARKED = 4
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "copyhead",
    "legend.frameon": False,
}


def panels(rows: int, columns: int, width: float, height: float, **settings: Any) -> tuple[Figure, np.ndarray]:
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


def log_ticks(axis: Axis) -> None:
    """Plain numbers at 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())


def draw_minima(axes: Axes, found: Solution, quantity: str, low: float, high: float) -> None:
    """All minima against P: the global one solid, metastable ones dashed; window shaded, transitions dotted."""
    grid = np.linspace(math.log(low), math.log(high), 160)
    if isinstance(found, Front):
        _draw_states(axes, found, quantity, grid)
    else:
        _draw_branches(axes, found, quantity, grid)
    many = len(found.transitions) > MOST_MARKED
    for t in found.transitions:
        if low <= t.P <= high:
            axes.axvline(t.P, color=GREY, lw=0.3 if many else 0.7, ls=":")
        if t.window and not many:
            axes.axvspan(max(t.window[0], low), min(t.window[1], high), color=GREY, alpha=0.18, lw=0)
    axes.set(xlabel="training sequences $P$", ylabel=NAMES[quantity], xlim=(low, high))


def _draw_branches(axes: Axes, found: Phases, quantity: str, grid: np.ndarray) -> None:
    ends = [piece.points[i].log_p for piece in found.segments for i in (0, -1)]
    grid = np.unique(np.clip([*grid, *ends, *(math.log(t.P) for t in found.transitions)], grid[0], grid[-1]))
    values = np.full((2, len(found.segments), len(grid)), np.nan)
    for column, log_p in enumerate(grid):
        for rank, (piece, point) in enumerate(found.points(float(log_p))):
            row = next(i for i, other in enumerate(found.segments) if other is piece)
            values[min(rank, 1), row, column] = getattr(found.observe(point), quantity)
    for row in range(len(found.segments)):
        axes.plot(np.exp(grid), values[0, row], color=BLACK, lw=1.3)
        axes.plot(np.exp(grid), values[1, row], color=BLACK, lw=1.0, ls=(0, (4, 2)))


def _draw_states(axes: Axes, found: Front, quantity: str, grid: np.ndarray) -> None:
    """The states of a scan; those of all rows in their lowest or highest minima dashed where they are not the best."""
    for states, style in ((found.best, "-"), (found.up, (0, (4, 2))), (found.down, (0, (4, 2)))):
        inside = [one for one in states if math.exp(grid[0]) <= one.P <= math.exp(grid[-1])]
        values = [getattr(order_of(found.observe(one.excess, one.P)), quantity) for one in inside]
        axes.plot([one.P for one in inside], values, color=BLACK, lw=1.3 if style == "-" else 0.8, ls=style)


def quantities(found: Solution) -> list[str]:
    """The order parameters that the theory has, in the order of NAMES."""
    if isinstance(found, Front):
        return [name for name in NAMES if name in OrderParameters._fields]
    fields = found.observe(found.segments[0].points[0])._fields
    return [name for name in NAMES if name in fields]
