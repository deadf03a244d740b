"""Figures of the two-layer tasks: branches against P, and what both layers attend to on each of them."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from copyhead.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, log_ticks, panels
from copyhead.theory.recall_phases import RecallPhases

COLOURS = {"empty": BLACK, "pooling": GREEN, "anti-pooling": GREY, "induction": BLUE, "anti-induction": ORANGE}
SHOWN = {
    "beta": r"$\beta$, match",
    "w": "$w$, output",
    "previous": "previous-token score",
    "loss": "loss per sequence",
}


def branches(found: RecallPhases) -> Figure:
    """S / P, beta, w, previous-token score and loss of every branch against P; equal action dashed, window shaded."""
    figure, axes = panels(1, 1 + len(SHOWN), 3.0 * (1 + len(SHOWN)), 3.2)
    for piece in found.segments:
        places = np.exp([point.log_p for point in piece.points])
        colour = COLOURS[found.name(piece.points[len(piece.points) // 2])]
        label = found.name(piece.points[len(piece.points) // 2])
        states = [found.observe(point) for point in piece.points]
        axes.flat[0].plot(places, [point.action for point in piece.points] / places, color=colour, lw=1.4, label=label)
        for panel, name in zip(axes.flat[1:], SHOWN, strict=True):
            panel.plot(places, [getattr(state, name) for state in states], color=colour, lw=1.4)
    for panel, name in zip(axes.flat, ("$S / P$", *SHOWN.values()), strict=True):
        panel.set(xscale="log", xlabel="training sequences $P$", ylabel=name)
        log_ticks(panel.xaxis)
        panel.tick_params(axis="x", labelrotation=45)
        for t in found.transitions:
            panel.axvline(t.P, color=RED, ls="--", lw=0.8)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def attention_maps(found: RecallPhases, sequences: float) -> Figure:
    """Attention of both layers on every minimum at P: layer 1 by position; layer 2 of the last one by place j of the match.

    The target of row j is position j + 1.
    """
    points = [(found.name(point), point) for _, point in found.points(math.log(sequences))]
    figure, axes = panels(2, len(points), 3.2 * len(points), 6.0)
    mesh = None
    for column, (name, point) in enumerate(points):
        attended = found.seen(point).attended
        for row, matrix in enumerate((attended.first, attended.second)):
            panel = axes[row, column]
            mesh = panel.imshow(matrix, cmap="viridis", vmin=0, vmax=1, aspect="auto")
            panel.set(xlabel="position attended to", ylabel="position" if row == 0 else "place $j$ of the match")
        axes[0, column].set_title(f"{name}{'' if column else ' (lowest action)'}", fontsize=9)
    if mesh is not None:
        figure.colorbar(mesh, ax=axes, label="attention", shrink=0.6)
    figure.suptitle(f"$P$ = {sequences:g}: layer 1 above, layer 2 of the last position below")
    return figure
