"""Figures of a study: curves against P for every problem, and places of the transitions over an axis of the grid."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from copyhead.report.style import BLACK, BLUE, GREEN, GREY, NAMES, ORANGE, RED, SIZES, START_COLOURS, log_ticks, panels

SHOWN = ("cG", "loss")
MARKS = {"adam": ("o", "Adam"), "sgld": ("^", "SGLD"), "exact": ("x", "exact, same data")}
# Places on the axis of P that a method gives by itself.
PLACES = {"jump": "jump", "ladder": "P_star"}
# Most problems that get a figure; the table has all of them.
MOST_FIGURES = 24


def curves(rows: list[dict[str, Any]], places: dict[str, Any] | None) -> Figure | None:
    """cG and loss of one problem against P: theory as lines, means over data sets with standard errors as dots.

    Jumps of training and P* of sampling are dotted verticals with their standard errors as bands.

    None where there are fewer than two P.
    """
    if len({row["P"] for row in rows if np.isfinite(row["P"])}) < 2:
        return None
    figure, axes = panels(1, len(SHOWN), 4.6 * len(SHOWN), 3.6)
    for panel, quantity in zip(axes.flat, SHOWN, strict=True):
        if places and np.isfinite(places["window_low"]):
            panel.axvspan(places["window_low"], places["window_high"], color=GREY, alpha=0.18, lw=0)
        for start, colour in {**START_COLOURS, "both": BLACK}.items():
            for settings in dict.fromkeys(row["settings"] for row in rows):
                own = [r for r in rows if r["start"] == start and r["settings"] == settings]
                own = [r for r in own if quantity in r or r["method"] in PLACES]
                if not own:
                    continue
                method = own[0]["method"]
                if method in PLACES:
                    _place(panel, own[0], PLACES[method], colour)
                    continue
                place, mean = (np.array([row[name] for row in own], float) for name in ("P", quantity))
                if method == "theory":
                    panel.plot(place, mean, color=colour, lw=1.2, label=f"theory, {start} branch")
                    continue
                mark, name = MARKS[method]
                panel.errorbar(
                    place,
                    mean,
                    [row[f"{quantity}_error"] for row in own],
                    fmt=mark,
                    color=colour,
                    ms=SIZES[start],
                    mfc="none",
                    lw=0.8,
                    label=f"{name}, {start} start",
                )
        spans = [row["P"] for row in rows if np.isfinite(row["P"])]
        if max(spans) > 8 * min(spans):
            panel.set_xscale("log")
            log_ticks(panel.xaxis)
        panel.set(xlabel="training sequences $P$", ylabel=NAMES[quantity])
    shown = dict(zip(*reversed(axes.flat[0].get_legend_handles_labels()), strict=True))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize=7)
    return figure


def _place(panel: Any, row: dict[str, Any], name: str, colour: str) -> None:
    """One place on the axis of P with its error, if it was found."""
    if name not in row:
        return
    told = "P* by sampling" if name == "P_star" else f"jump, {row['start']} start"
    panel.axvline(row[name], color=colour, ls=":", lw=1, label=told)
    if np.isfinite(row[f"{name}_error"]):
        panel.axvspan(row[name] - row[f"{name}_error"], row[name] + row[f"{name}_error"], color=colour, alpha=0.12, lw=0)


def places_over(found: list[dict[str, Any]], axis: str, others: list[str]) -> Figure:
    """Places of the transitions against one axis of the grid, a line for each combination of the others."""
    figure, axes = panels(1, 1, 6.0, 4.2)
    panel = axes[0, 0]
    lines = list(dict.fromkeys(tuple(row[name] for name in others) for row in found))
    colours = [BLUE, ORANGE, GREEN, RED, BLACK]
    for index, key in enumerate(lines):
        own = [row for row in found if tuple(row[name] for name in others) == key]
        x = np.array([row[axis] for row in own], float)
        colour = colours[index % len(colours)]
        told = ", ".join(f"{name} = {value}" for name, value in zip(others, key, strict=True))
        panel.plot(x, [row["last_place"] for row in own], "o-", color=colour, ms=4, lw=1, label=told or "last transition")
        low, high = (np.array([row[name] for row in own], float) for name in ("window_low", "window_high"))
        if np.isfinite(low).any():
            panel.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
    panel.set(xlabel=axis, ylabel="P of the last transition (shaded: coexistence)", xscale="log", yscale="log")
    if len(lines) <= 12:
        panel.legend(fontsize=7)
    log_ticks(panel.xaxis)
    log_ticks(panel.yaxis)
    return figure
