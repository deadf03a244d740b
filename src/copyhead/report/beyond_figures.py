"""Figures beyond the paper's task: rows and front under a causal mask, heads, lags. Lines are theory, circles Adam."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from copyhead.experiment.locate import crossing
from copyhead.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, SIZES, START_COLOURS, panels
from copyhead.study.curves import Measured
from copyhead.study.spec import Reproduction
from copyhead.theory.front import Front
from copyhead.theory.transition import numbers

COLOURS = (BLACK, BLUE, ORANGE, GREEN, RED, GREY)
# P at which the rows are shown.
SHOWN = 5


def rows(results: Measured, spec: Reproduction) -> Figure:
    """cG by row at several P, and the front: P where each row passes cG = 1."""
    figure, axes = panels(1, 2, 10, 3.8)
    sequences = results.adam.sequences
    chosen = [sequences[index] for index in np.unique(np.linspace(0, len(sequences) - 1, SHOWN).astype(int))]
    length = spec.problem.length
    positions = [int(name[5:-1]) for name in map(str, results.adam.data) if name.startswith("rows[")]
    for place, colour in zip(chosen, COLOURS, strict=False):
        state = results.theory.minima(place)[0]
        n = [a + 1 for a in range(length) if state.rows[a] is not None]
        axes[0, 0].plot(n, [value for value in state.rows if value is not None], color=colour, lw=1, label=f"P = {place}")
        found = [results.adam.estimate(f"rows[{a}]", place, "small") for a in positions]
        mean, error = [one.mean for one in found], [one.error for one in found]
        axes[0, 0].errorbar(np.array(positions) + 1, mean, error, fmt="o", ms=3, mfc="none", color=colour, lw=0.8)
    axes[0, 0].set(xlabel="positions $n$ that a row may attend to", ylabel="$c_G$ of the row", xscale="log")
    doubled = 2 ** np.arange(1, int(math.log2(length)) + 1)
    axes[0, 0].set_xticks(doubled, [str(n) for n in doubled])
    axes[0, 0].minorticks_off()
    axes[0, 0].legend()
    if isinstance(results.theory, Front):
        passing = results.theory.passing
        axes[0, 1].plot([one.n for one in passing], [one.P for one in passing], color=BLACK, lw=1, label="theory")
    for start, colour in START_COLOURS.items():
        places = [[crossing(sequences, results.adam.data[f"rows[{a}]"].sel(start=start, seed=seed).values, 1.0)
                   for seed in results.adam.data.seed.values] for a in positions]  # fmt: skip
        mean = [np.mean(one) for one in places]
        error = [np.std(one, ddof=1) / math.sqrt(len(one)) for one in places]
        axes[0, 1].errorbar(np.array(positions) + 1, mean, error, fmt="o", ms=SIZES[start] / 2, mfc="none", color=colour,
                            lw=0.8, label=f"Adam, {start} start")  # fmt: skip
    axes[0, 1].set(xlabel="positions $n$ that a row may attend to", ylabel="$P$ where the row passes $c_G = 1$")
    axes[0, 1].legend()
    return figure


def heads(results: Measured, spec: Reproduction) -> Figure:
    """cG by head against P."""
    return _against_p(results, spec, [f"heads[{index}]" for index in range(spec.problem.heads)], "$c_G$ of a head", "head")


def lags(results: Measured, spec: Reproduction) -> Figure:
    """Attention by lag against P."""
    names = [f"lags[{lag}]" for lag in spec.problem.lags or {}]
    return _against_p(results, spec, names, "attention on the lag", "lag")


def _against_p(results: Measured, spec: Reproduction, names: list[str], label: str, what: str) -> Figure:
    figure, axes = panels(1, 2, 10, 3.8, sharey=True)
    problem = spec.problem
    sequences = results.adam.sequences
    grid = np.geomspace(sequences[0], sequences[-1], 80)
    states = [numbers(results.theory.minima(place)[0], problem) for place in grid]
    for panel, start in zip(axes.flat, START_COLOURS, strict=True):
        for name, colour in zip(names, (*COLOURS, *COLOURS), strict=False):
            panel.plot(grid, [state[name] for state in states], color=colour, lw=1)
            _circles(panel, results, name, start, colour, f"{what} {name[name.index('[') + 1 : -1]}")
        panel.set(xlabel="training sequences $P$", title=f"Adam from the {start} start")
    axes[0, 0].set(ylabel=label)
    axes[0, 0].legend()
    return figure


def _circles(panel: Axes, results: Measured, name: str, start: str, colour: str, label: str) -> None:
    found = [results.adam.estimate(name, place, start) for place in results.adam.sequences]
    mean, error = [one.mean for one in found], [one.error for one in found]
    panel.errorbar(results.adam.sequences, mean, error, fmt="o", ms=4, mfc="none", color=colour, lw=0.8, label=label)
