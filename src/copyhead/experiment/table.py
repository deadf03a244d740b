"""A table of anybody's runs: control parameter, order parameter and what else is known of each run, read from CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from copyhead.experiment.shapes import Curve
from copyhead.record import ProblemError

# Names by which a column is known if none is given, the first that the header has.
NAMES = {
    "control": ("P", "sequences"),
    "order": ("cG", "aG", "order", "order_parameter", "m"),
    "loss": ("loss",),
    "error": ("error",),
    "start": ("start",),
    "chi": ("chi", "beta"),
    "size": ("L", "size"),
}
REQUIRED = ("control", "order")
# Repeats need no column: rows of equal control parameter and start are repeats.
REPEATS = ("seed", "data")
# Below this number of P no shape can be told from another.
FEWEST = 6


@dataclass(frozen=True, eq=False)
class Table:
    """One row for each run. control: P > 0. order: order parameter. Columns that the file lacks are None.

    error: standard error of `order`, > 0. start: which of at most two starts. names: the column that each was read from.
    unused: columns of the file that were not.
    """

    control: Float[np.ndarray, "row"]
    order: Float[np.ndarray, "row"]
    loss: Float[np.ndarray, "row"] | None = None
    error: Float[np.ndarray, "row"] | None = None
    start: Shaped[np.ndarray, "row"] | None = None
    chi: Float[np.ndarray, "row"] | None = None
    size: Float[np.ndarray, "row"] | None = None
    names: Mapping[str, str] | None = None
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("control", "chi", "size"):
            values = getattr(self, name)
            if values is not None and not np.all((values > 0) & np.isfinite(values)):
                raise ProblemError(
                    f"{name} = {values[~((values > 0) & np.isfinite(values))][0]:g}: must be a finite number > 0"
                )
        if len(places := np.unique(self.control)) < FEWEST:
            raise ProblemError(f"control: {len(places)} different values; must be at least {FEWEST}")
        for name in ("order", "loss"):
            values = getattr(self, name)
            if values is not None and np.ptp(values) == 0:
                raise ProblemError(f"{name} = {values[0]:g} in every row: must not be constant")
        if self.start is not None and len(starts := np.unique(self.start)) > 2:
            raise ProblemError(f"start: {len(starts)} different values; must be at most 2")

    def rows(self, mask: np.ndarray) -> Table:
        """The rows where the mask is true."""
        columns = {name: None if getattr(self, name) is None else getattr(self, name)[mask] for name in NAMES}
        return Table(**columns, names=self.names, unused=self.unused)


def read(path: str | Path, **columns: str | None) -> Table:
    """Reads a CSV file with a header; rows in any order.

    Args:
        columns: the name of the column for `control`, `order`, `loss`, `error`, `start`, `chi` or `size`; None or not
            given: by its usual names (`NAMES`).

    Raises:
        ProblemError: for a file that is no such table, a column that it lacks, or a value that is missing or out of range.
    """
    header, rows = _cells(Path(path))
    names = {}
    for role, usual in NAMES.items():
        name = columns.get(role) or next((name for name in usual if name in header), None)
        if name is not None and name not in header:
            raise ProblemError(f"{role} = {name!r}: must be a column of the table, one of {', '.join(header)}")
        if name is None and role in REQUIRED:
            raise ProblemError(f"{role}: no column {', '.join(usual)}; must be named, one of {', '.join(header)}")
        if name is not None:
            if name in names.values():
                raise ProblemError(f"{role} = {name!r}: must be another column than that of another role")
            names[role] = name
    found = {}
    for role, name in names.items():
        column = [(line, row[header.index(name)].strip()) for line, row in rows]
        found[role] = np.array([_label(name, *cell) if role == "start" else _number(role, name, *cell) for cell in column])
    unused = tuple(name for name in header if name not in names.values() and name not in REPEATS)
    return Table(**found, names=names, unused=unused)


def _cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and each row that is not empty with its line number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = [(number, row) for number, row in enumerate(csv.reader(text.splitlines()), 1) if any(map(str.strip, row))]
    except OSError as error:
        raise ProblemError(f"table = {str(path)!r}: cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error):
        raise ProblemError(f"table = {str(path)!r}: must be a CSV file, text in UTF-8") from None
    if "\0" in text:
        raise ProblemError(f"table = {str(path)!r}: must be a CSV file, text in UTF-8")
    if len(rows) < 2:
        raise ProblemError(f"table = {str(path)!r}: must have a header and at least one row")
    header = [name.strip() for name in rows[0][1]]
    if double := [name for name in header if header.count(name) > 1]:
        raise ProblemError(f"table = {str(path)!r}: two columns are called {double[0]!r}; names must differ")
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise ProblemError(f"table, line {line}: {len(row)} values; must be {len(header)}, as in the header")
    return header, rows[1:]


def _label(name: str, line: int, text: str) -> str:
    if not text:
        raise ProblemError(f"{name} = '' in line {line}: must not be empty")
    return text


def _number(role: str, name: str, line: int, text: str) -> float:
    wanted: tuple[Callable[[float], bool], str] = (
        (lambda value: True, "a finite number")
        if role in ("order", "loss")
        else (lambda value: value > 0, "a finite number > 0")
    )
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and wanted[0](value)):
        raise ProblemError(f"{name} = {text!r} in line {line}: must be {wanted[1]}")
    return value


class Runs(NamedTuple):
    """Runs of one table, turned so that the order parameter y grows. point: grid point of each. curve: means over runs."""

    x: Float[np.ndarray, "run"]
    y: Float[np.ndarray, "run"]
    point: Int[np.ndarray, "run"]
    curve: Curve
    table: Table

    @property
    def grid(self) -> np.ndarray:
        return np.exp(self.curve.x)


def runs_of(table: Table) -> Runs:
    """The runs against x = ln P, weighted by their errors where these are known."""
    x = np.log(table.control)
    places, index = np.unique(x, return_inverse=True)
    errors = np.ones_like(x) if table.error is None else table.error
    weights = np.bincount(index, errors**-2.0)
    mean = np.bincount(index, table.order * errors**-2.0) / weights
    y, mean = (table.order, mean) if np.polyfit(places, mean, 1)[0] >= 0 else (-table.order, -mean)
    return Runs(x, y, index, Curve(places, mean, weights), table)
