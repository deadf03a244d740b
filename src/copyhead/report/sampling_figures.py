"""Figures of sampling: the free energy around P*, and precursors with the theory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from copyhead.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, RED, panels
from copyhead.study.finite_chi import Approached, Compared

LADDER_COLOURS = (BLUE, GREEN, BLACK, ORANGE, RED)


def free_energies(ladder: xr.Dataset) -> Figure:
    """F(aG) on expected moments at P around P* with error bands, and at the sampled P for every data set.

    ladder: dimensions seed (-1: expected moments), around (parts of the sampled P) and bin; coordinate P.
    """
    figure, axes = panels(1, 2, 9.5, 3.8, sharey=True)
    expected, sampled = ladder.sel(seed=-1), float(ladder.P)
    for part, colour in zip(ladder.around.values, LADDER_COLOURS, strict=False):
        aG = expected.bin_aG.values
        values, error = (expected[name].sel(around=part).values for name in ("free_energy", "free_energy_error"))
        axes[0, 0].plot(aG, values, color=colour, lw=1.3, label=f"P = {sampled * part:.0f}")
        axes[0, 0].fill_between(aG, values - error, values + error, color=colour, alpha=0.25, lw=0)
    for data in ladder.seed.values:
        one = ladder.sel(seed=data)
        name, style = ("expected moments", {"color": BLACK, "lw": 1.3}) if data < 0 else (None, {"color": GREY, "lw": 0.9})
        axes[0, 1].plot(one.bin_aG.values, one.free_energy.sel(around=1.0).values, label=name, **style)
    axes[0, 0].set(xlabel=r"$a_G$", ylabel=r"$F(a_G) = -\log p$, nats", title="expected moments")
    axes[0, 1].set(xlabel=r"$a_G$", title=f"P = {sampled:.0f}; grey: data sets")
    for panel in axes[0]:
        panel.legend(fontsize=7)
    return figure


def approaches(found: Sequence[Approached]) -> Figure:
    """Sampled susceptibility and relaxation rate on the way to each place. Lines: theory; dots: chains that mixed."""
    places = list(dict.fromkeys((one.approach.place, one.approach.order_parameter) for one in found))
    figure, axes = panels(len(places), 2, 9.5, 3.6 * len(places))
    for row, (place, name) in enumerate(places):
        own = [one for one in found if one.approach.place == place]
        way = own[0].approach
        exponents = way.susceptibility_exponent, way.relaxation_exponent
        axes[row, 0].loglog(way.distance, way.susceptibility, color=BLACK, lw=1, label=_power(exponents[0].value))
        for one, colour in zip(own, (BLUE, GREEN, ORANGE, RED), strict=False):
            label, style = f"χ = {one.chi:g}", {"fmt": "o", "ms": 4, "color": colour, "lw": 1}
            mixed = np.array([status == "mixed" for status in one.status])
            seen = (np.where(mixed, values, np.nan) for values in (one.susceptibility, one.susceptibility_error))
            axes[row, 0].errorbar(one.distance, *seen, label=label, **style)
            stayed = np.array([status != "left the branch" for status in one.status])
            rates = (np.where(stayed, values, np.nan) for values in (one.rate, one.rate_error))
            axes[row, 1].errorbar(one.distance, *rates, label=label, **style)
            axes[row, 1].plot(one.distance, one.theory_rate, color=colour, lw=0.9)
        quantity = f"${name[0]}_{name[1]}$"
        axes[row, 0].set(ylabel=rf"$\chi$ Var({quantity})", title=f"{quantity} to {place}")
        axes[row, 1].set(
            ylabel="relaxation rate per SGLD step", title="lines: theory at the same χ", yscale="log", xscale="log"
        )
        for panel in axes[row]:
            panel.set(xlabel="distance $|P - P_0| / P_0$")
            panel.invert_xaxis()
            panel.legend(fontsize=7)
    return figure


def _power(exponent: float) -> str:
    return rf"theory, $\chi \to \infty$ (exponent {exponent:.2f})"


def comparison(rows: Sequence[Compared]) -> Figure:
    """Sampled mean and standard deviation of cG over those of the theory, against chi, by branch."""
    figure, axes = panels(1, 2, 9.5, 3.8)
    sampled = [one for one in rows if one.quantity == "cG" and one.verdict != "not converged"]
    shown = [one for one in sampled if np.isfinite(one.theory) and abs(one.theory) > 1e-3]
    keys = list(dict.fromkeys((one.attention, one.P, one.theory > 1) for one in shown))
    colours = (BLUE, GREEN, ORANGE, RED, BLACK, GREY)
    for number, key in enumerate(keys):
        own = [one for one in shown if (one.attention, one.P, one.theory > 1) == key]
        chi = np.array([one.chi for one in own]) * 1.04**number
        label = f"{key[0]}, P = {key[1]:.0f}" + (", copying" if key[2] else "")
        style = {
            "fmt": "o-" if key[0] == "softmax" else "s--",
            "ms": 4,
            "lw": 0.8,
            "color": colours[number % len(colours)],
            "label": label,
        }
        ratios = [one.mean / one.theory for one in own], [one.deviation / one.theory_deviation for one in own]
        errors = [one.error / abs(one.theory) for one in own], [one.deviation_error / one.theory_deviation for one in own]
        for panel, values, error in zip(axes[0], ratios, errors, strict=True):
            panel.errorbar(chi, values, error, **style)
    for panel, name in zip(axes[0], ("mean", "standard deviation"), strict=True):
        panel.axhline(1, color=GREY, lw=0.8)
        panel.set(xscale="log", xlabel=r"$\chi$", title=f"{name} of $c_G$: sampled / theory")
    axes[0, 1].legend(fontsize=7)
    return figure
