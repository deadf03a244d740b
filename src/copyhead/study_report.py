"""The report of a study: summary.csv, figures and report.html (of a reproduction cells.html) in its folder."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from copyhead.report import html, study_figures
from copyhead.report.style import save
from copyhead.study.cell_store import write_text
from copyhead.study.compare import to_csv
from copyhead.study.places import TRANSITIONS
from copyhead.study.study_file import Study, parse
from copyhead.study.summary import places, summary
from copyhead.study.sweep import results, status

# Rows of the table that the page shows; summary.csv has all.
MOST_ROWS = 2000


def report(folder: Path) -> Path:
    """Writes the report of the finished cells of a study; the path of its page.

    Raises:
        StoreError: if the folder holds no finished cells, or cannot be written to.
    """
    found, state = results(folder), status(folder)
    study = parse(found.attrs["study"])
    rows, where = summary(found, study), places(found, study)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    write_text(folder / "summary.csv", to_csv(rows))
    drawn, more = _figures(rows, where, study)
    shown = []
    (folder / "figures").mkdir(exist_ok=True)
    for name, caption, figure in drawn:
        path = folder / "figures" / f"{name}.png"
        save(figure, path, path.with_suffix(".svg"))
        shown.append(html.Shown(name, caption, path))
    refused = Counter(str(text) for text in found.message.values if text)
    page = html.render(
        shown,
        page="study.html.j2",
        title=study.title or folder.name,
        missing=state.missing,
        planned=state.planned,
        found=state.found,
        statuses=sorted({name for kinds in state.found.values() for name in kinds}),
        refusals=dict(refused.most_common(10)),
        places=where[:MOST_ROWS],
        more=more,
        columns=columns,
        rows=rows[:MOST_ROWS],
        text=found.attrs["study"],
        made=[(name, ", ".join(dict.fromkeys(map(str, found[name].values)))) for name in ("versions", "commit", "device")],
    )
    # a reproduction has a report.html of its own
    return write_text(folder / ("cells.html" if (folder / TRANSITIONS).exists() else "report.html"), page)


def _figures(rows: list[dict[str, Any]], where: list[dict[str, Any]], study: Study) -> tuple[list[tuple[str, str, Any]], int]:
    drawn, axes = [], list(study.axes)
    numeric = [name for name in axes if all(isinstance(v, int | float) and v > 0 for v in study.axes[name])]
    if numeric and where and any(np.isfinite(row["last_place"]) for row in where):
        axis = max(numeric, key=lambda name: len(study.axes[name]))
        others = [name for name in axes if name != axis]
        caption = f"Place of the last transition against {axis}."
        drawn.append((f"places-{axis}", caption, study_figures.places_over(where, axis, others)))
    problems = list(dict.fromkeys(tuple(row[name] for name in axes) for row in rows))
    for number, key in enumerate(problems[: study_figures.MOST_FIGURES]):
        own = [row for row in rows if tuple(row[name] for name in axes) == key]
        place = next((row for row in where if tuple(row[name] for name in axes) == key), None)
        figure = study_figures.curves(own, place)
        if figure is not None:
            told = ", ".join(f"{name} = {value}" for name, value in zip(axes, key, strict=True))
            drawn.append((f"curves-{number}", f"Copy logit and loss against P{': ' if told else ''}{told}.", figure))
    return drawn, max(0, len(problems) - study_figures.MOST_FIGURES)
