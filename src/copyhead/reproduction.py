"""The whole reproduction, as `copyhead reproduce` runs it: a study, tables, figures, report."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from copyhead.experiment.path import path
from copyhead.model.network import Network
from copyhead.problem import Problem, ProblemError
from copyhead.report import beyond_figures, figures, html, sampling_figures, theory_figures
from copyhead.report.claims import beyond_remarks, claims, departure_remarks, network_remarks, remarks
from copyhead.report.style import save
from copyhead.study import compare
from copyhead.study.cell_store import CellStore, write_text
from copyhead.study.curves import Measured, gather, lost_runs
from copyhead.study.diagram import Axis, Diagram, diagram
from copyhead.study.engine import Engine
from copyhead.study.places import TRANSITIONS, transition_table
from copyhead.study.results import Results
from copyhead.study.scaling import Scaling, scaling
from copyhead.study.spec import Reproduction, plane_axes, settings_for, study
from copyhead.study.sweep import run
from copyhead.study.width import Departure, departures

Progress = Callable[[str, float], AbstractContextManager[Callable[[float], None]]]
# Name, caption and figure.
Drawn = tuple[str, str, Any]
PACKAGES = ("copyhead", "jax", "numpy", "scipy", "optax", "arviz-stats", "xarray", "matplotlib")


@dataclass(frozen=True)
class Summary:
    """Where the results are, the transitions and the agreement. lost: one line for each run that diverged."""

    folder: Path
    transitions: list[dict[str, Any]]
    agreements: list[compare.Agreement]
    lost: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "transitions": self.transitions,
            "agreement": [{**a._asdict(), "fraction": a.fraction if a.points else None} for a in self.agreements],
            "diverged": self.lost,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        lines = []
        for row in self.transitions:
            leading = (
                ""
                if row["leading_order"] is None
                else f"; leading order {row['leading_order']:.1f}, ratio {row['exact_over_leading']:.3f}"
            )
            lines.append(f"{row['attention']:8s} {row['place']}: exact {row['exact']:.2f}{leading}")
            for name, value in row["measured"].items():
                found = (
                    f"{value['P']:.1f} +- {value['error']:.1f}, ratio to exact {value['over_exact']:.3f}"
                    if value["P"]
                    else "not resolved"
                )
                lines.append(f"           {name}: {found}")
        lines += [
            f"{a.method} {a.attention}: {a.agree} of {a.points} grid points within {compare.AGREEMENT:g} errors of theory "
            f"({a.theory}); {a.gated} more not converged or not mixed"
            for a in self.agreements
        ]
        return "\n".join([*lines, *self.lost, f"report: {self.folder / 'report.html'}   ({self.seconds:.0f} s)"])


def reproduce(
    problem: Problem,
    out: str | Path = "reproduction",
    *,
    quick: bool = False,
    engine: Engine | None = None,
    memory: float | None = None,
    progress: Progress = lambda title, total: nullcontext(lambda done: None),
    **settings: Any,
) -> Summary:
    """Runs theory, Adam and SGLD for both kinds of attention and writes tables, figures and report.html to `out`.

    Args:
        problem: sizes and prior; its attention and sequences are not used. For a network that reads tokens token_scale = 0
            stands for 1, and the theory is that of content-dependent attention.
        out: a new or empty folder, or one of studies: of a run that was stopped only what is missing is run.
        engine, memory: where the cells run, and the bytes of all workers together, see `study.sweep.run`.
        settings: fields of study.spec.Reproduction.

    Raises:
        ProblemError: for a setting outside its range. StoreError: if `out` cannot be used.
    """
    began = time.perf_counter()
    network = settings.get("network", Network())
    base = problem.replace(attention="softmax", sequences=None)
    if network.kind != "positional":
        base.require_paper(f"network = {network.kind!r} is known")
    if network.kind == "positional" and base.content:
        raise ProblemError("content = True: the positional network reads no tokens; use network = kernel or embedded")
    if network.kind != "positional":
        base = base.replace(token_scale=base.token_scale or 1.0, content=True)
    spec = Reproduction(**{**settings_for(network, quick), **settings, "problem": base})
    path(spec.problem, spec.network, spec.batch)  # refuses what does not go together, as do the scales of the two chi
    asked, blocks = study(spec)  # refuses impossible sizes before anything is written
    run(asked, asked.to_toml(), Path(out), memory=memory, engine=engine, progress=progress)
    results = Results(CellStore(Path(out)), blocks)
    folder = Path(out)
    with progress("tables, figures and report", 1.0) as advance:
        measured = gather(spec, results)
        rows, transitions = compare.grid_table(spec, measured), transition_table(spec, measured)
        agreements = compare.agreement(rows)
        lost = lost_runs(results)
        write_text(folder / "grid.csv", compare.to_csv(rows))
        write_text(folder / TRANSITIONS, json.dumps(transitions, indent=2))
        beyond = bool(spec.problem.beyond)  # then the claims of the paper are not in question
        growth = None if beyond else scaling(spec.problem)
        advance(0.3)
        departed = {} if beyond else departures(spec, results)
        drawn = (
            _beyond_figures(spec, measured) if growth is None else _figures(spec, results, folder, measured, growth, departed)
        )
        shown = _saved(drawn, folder)
        advance(0.6)
        seconds = time.perf_counter() - began
        page = html.render(
            shown,
            title=f"Phase transitions of a copy head: {', '.join(spec.problem.beyond)}"
            if beyond
            else "Reproduction of the phase transitions of a copy head",
            problem=spec.problem,
            network=spec.network,
            batch=spec.batch,
            sampled=spec.sampled,
            quick=quick,
            transitions=transitions,
            agreements=agreements,
            remarks=[
                *([] if beyond else [*network_remarks(spec), *remarks(rows, measured), *departure_remarks(departed)]),
                *beyond_remarks(spec, measured),
                *lost,
            ],
            claims=[] if growth is None else claims(spec.problem, measured, transitions, agreements, growth),
            columns=list(dict.fromkeys(key for row in rows for key in row)),
            grid=rows,
            settings=_settings(spec, results, seconds),
        )
        write_text(folder / "report.html", page)
        advance(0.1)
    return Summary(Path(out), transitions, agreements, lost, time.perf_counter() - began)


def _figures(
    spec: Reproduction,
    results: Results,
    folder: Path,
    measured: dict[str, Measured],
    growth: Scaling,
    departed: dict[str, Departure],
) -> list[Drawn]:
    drawn: list[Drawn] = []
    if {"softmax", "linear"} <= measured.keys():
        caption = "The action below, at and above the transition. Orange: its minima."
        drawn.append(("landscape", caption, theory_figures.landscapes(measured["softmax"].theory, measured["linear"].theory)))
    for attention, own in measured.items():
        caption = (
            f"Order parameters and loss against P, {attention} attention. Line: theory (population moments), dashed where "
            "metastable; grey: coexistence window; dotted: transitions. Dots: Adam and SGLD from both starts, standard errors."
        )
        drawn.append((f"order-parameters-{attention}", caption, figures.order_parameters(own, spec)))
        if own.jump:
            caption = (
                "Hysteresis: a run from small weights leaves at the upper fold, a run from a copying network at the lower one."
            )
            drawn.append((f"hysteresis-{attention}", caption, figures.hysteresis(own)))
        if own.ladder is not None:
            caption = (
                f"Free energy of the copy attention at χ = {spec.problem.chi:g} around P*, from a ladder of biased chains. "
                "Left: expected moments, standard errors over repeats. Right: each data set. At P* both wells weigh the same."
            )
            drawn.append((f"free-energy-{attention}", caption, sampling_figures.free_energies(own.ladder)))
    maps, lines = _maps(spec, results)
    if departed:
        caption = (
            "Departure of the embedded network from the kernel limit against 1/d_model, before the transition and as a copy "
            "head. Dots: Adam minus the exact minimum of the kernel limit on the same data set, standard errors; lines: theory "
            "of embeddings that adapt (population moments). g_E: prior variance of an embedding row around its start."
        )
        drawn.append(("departure", caption, figures.departures(departed)))
        write_text(folder / "departure.csv", compare.to_csv(
            [{"attention": attention, **row} for attention, found in departed.items() for row in found.rows()]
        ))  # fmt: skip
    caption = (
        "Loss per token of Adam from small weights over (P, L) and (P, V), with the places of the theory and the leading order."
    )
    drawn.append(("loss-maps", caption, figures.loss_maps(maps, lines)))
    caption = (
        "Places of the transitions against L: exact, leading order, local exponent. The upper fold, where training from small "
        "weights jumps, grows faster than P*."
    )
    drawn.append(("scaling", caption, theory_figures.scaling_curves(growth)))
    caption = (
        "SGLD minus the exact theory of the same data sets, times chi, outside the coexistence window: equal heights mean a "
        "shift of order 1/chi."
    )
    drawn.append(("chi-shift", caption, figures.chi_shift(measured, spec)))
    return drawn


def _beyond_figures(spec: Reproduction, measured: dict[str, Measured]) -> list[Drawn]:
    """Order parameters of each attention, and what the problem has beside them: rows and front, heads, lags."""
    drawn: list[Drawn] = []
    for attention, results in measured.items():
        caption = (
            f"Order parameters and loss against P, {attention} attention. Line: theory (expected moments), dashed where "
            "metastable; grey: coexistence; dotted: transitions. Circles: Adam from both starts, standard errors."
        )
        drawn.append((f"order-parameters-{attention}", caption, figures.order_parameters(results, spec)))
        if spec.problem.causal:
            caption = (
                f"Rows under the causal mask, {attention} attention. Left: copy logit of a row against the number n of "
                "positions that it may attend to, at several P. Right: the front, P where a row passes cG = 1. Lines: theory; "
                "circles: Adam."
            )
            drawn.append((f"rows-{attention}", caption, beyond_figures.rows(results, spec)))
        if spec.problem.heads > 1:
            caption = (
                f"Copy logit of every head, in falling order of its copy attention, {attention} attention. Lines: theory, the "
                "state of lowest action; circles: Adam from both starts."
            )
            drawn.append((f"heads-{attention}", caption, beyond_figures.heads(results, spec)))
        if len(spec.problem.lags or {}) > 1:
            caption = (
                f"Mean attention of the leading head on each lag of the target, {attention} attention. Lines: theory, the "
                "state of lowest action; circles: Adam from both starts."
            )
            drawn.append((f"lags-{attention}", caption, beyond_figures.lags(results, spec)))
    return drawn


def _saved(drawn: list[Drawn], out: Path) -> list[html.Shown]:
    folder = out / "figures"
    folder.mkdir(exist_ok=True)
    shown = []
    for name, caption, figure in drawn:
        save(figure, folder / f"{name}.png", folder / f"{name}.svg")
        shown.append(html.Shown(name, caption, folder / f"{name}.png"))
    return shown


def _maps(spec: Reproduction, results: Results) -> tuple[dict[tuple[str, str], xr.Dataset], dict[tuple[str, str], Diagram]]:
    maps, lines = {}, {}
    for attention in spec.attentions:
        for axis in ("length", "vocab"):
            sizes = plane_axes(spec, axis)
            columns = [results[f"plane-{attention}-{axis}-{size}"][["loss", "diverged"]].isel(start=0) for size in sizes]
            maps[attention, axis] = xr.concat(columns, dim=xr.Variable(axis, sizes), data_vars="all", combine_attrs="drop")
            p_values = maps[attention, axis].P.values
            fine = np.unique(np.round(np.geomspace(sizes[0], sizes[-1], 25)))
            lines[attention, axis] = diagram(
                spec.problem.replace(attention=attention),
                Axis("sequences", (float(p_values[0]), float(p_values[-1]))),
                Axis(axis, tuple(int(size) for size in fine)),
            )
    return maps, lines


def _settings(spec: Reproduction, results: Results, seconds: float) -> list[tuple[str, str]]:
    busy = sum(float(results[name].seconds.sum()) for name in results.blocks)
    found = [(name, str(value)) for name, value in spec.model_dump().items() if name != "problem"]
    found += [(name, str(value)) for name, value in spec.problem.model_dump().items() if value is not None]
    found += [
        ("data seeds", f"0 .. {spec.seeds - 1}; data set of a smaller P is the prefix of that of a larger one"),
        ("starts", "small: normal weights of standard deviation 0.01; copy: a network that copies"),
        ("wall time", f"{seconds:.0f} s for this call; {busy:.0f} s of work in all cells"),
        ("versions", ", ".join(f"{name} {version(name)}" for name in PACKAGES)),
        (
            "machine",
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        ),
    ]
    return found
