"""Runs what a study lacks, and says how far it is."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from copyhead.problem import ProblemError
from copyhead.study.batch import batches, git_commit, needs
from copyhead.study.cell import Cell, Group, groups
from copyhead.study.cell_store import CellStore
from copyhead.study.engine import Engine, run_all
from copyhead.study.methods import check
from copyhead.study.study_file import Study, parse

Progress = Callable[[str, float], AbstractContextManager[Callable[[float], None]]]
# Share of the memory of the machine that all workers may use together, and what a worker needs before it has a cell.
SHARE, WORKER_BYTES = 0.5, 6e8


@dataclass(frozen=True)
class Status:
    """How far a study is. planned: number of its cells by method; found: of those that are there, by method and status.

    beside: cells in the folder that the study does not ask for, of other settings or of another version.
    """

    folder: Path
    title: str
    planned: dict[str, int]
    found: dict[str, dict[str, int]]
    beside: int
    batches: int
    bytes: int
    writer: str | None

    @property
    def missing(self) -> int:
        return sum(self.planned.values()) - sum(sum(kinds.values()) for kinds in self.found.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "title": self.title,
            "planned": self.planned,
            "found": self.found,
            "missing": self.missing,
            "beside": self.beside,
            "batches": self.batches,
            "bytes": self.bytes,
            "writer": self.writer,
        }

    def __str__(self) -> str:
        lines = [f"{self.title or self.folder}: {sum(self.planned.values())} cells, {self.missing} missing"]
        for method, planned in self.planned.items():
            told = ", ".join(f"{number} {status}" for status, number in sorted(self.found.get(method, {}).items()))
            lines.append(f"  {method}: {planned} cells: {told or 'none yet'}")
        if self.beside:
            lines.append(f"  beside them {self.beside} cells of other settings or of another version")
        lines.append(f"  {self.batches} batches, {self.bytes / 1e6:.1f} MB in {self.folder}")
        if self.writer:
            lines.append(f"  being written to ({self.writer})")
        return "\n".join(lines)


def run(
    study: Study,
    text: str,
    out: Path,
    *,
    memory: float | None = None,
    engine: Engine | None = None,
    progress: Progress = lambda title, total: nullcontext(lambda done: None),
) -> Status:
    """Runs every cell of a study that the folder does not hold yet.

    Args:
        text: the study file, kept in the folder.
        memory: bytes for all workers together; default: half of the machine's.

    Raises:
        ProblemError: if a method cannot run a problem of the grid, or the memory is too small for one cell.
        StoreError: if the folder cannot be used, or results cannot be stored.
    """
    engine = engine or Engine()
    planned = list(groups(study.blocks))
    _check(planned)
    store = CellStore.create(out)
    with store.writing(text):
        known = store.known()
        waiting = [(group, [cell for cell in cells if cell.identity not in known]) for group, cells in planned]
        waiting = [(group, cells) for group, cells in waiting if cells]
        if waiting:
            budget = (SHARE * _machine_bytes() if memory is None else memory) / engine.workers - WORKER_BYTES
            if budget <= 0:
                raise ProblemError(f"memory: must be above {WORKER_BYTES / 1e9:g} GB for each of {engine.workers} workers")
            work = list(batches(waiting, budget, engine.workers, needs(waiting)))
            with progress("cells", sum(batch.size for batch in work)) as advance:
                run_all(work, store.folder, git_commit(), engine, advance)
    return status(out)


def _check(planned: list[tuple[Group, list[Cell]]]) -> None:
    for group, cells in planned:
        places = [cell.sequences for cell in cells if cell.sequences is not None]
        if group.method.seeded and any(place != round(place) or place < 1 for place in places):
            wrong = next(place for place in places if place != round(place) or place < 1)
            raise ProblemError(f"grid.sequences: {wrong!r}: must be a whole number >= 1 with method = {group.method.kind!r}")
        check(group, max(places, default=0))


def _machine_bytes() -> float:
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def status(folder: Path) -> Status:
    """How far the study in a folder is; nothing in it is touched.

    Raises:
        StoreError: if there is none. ProblemError: if its file has been damaged.
    """
    store = CellStore(folder)
    study = parse(store.text, str(store.folder / "study.toml"))
    known = store.known()
    planned: Counter[str] = Counter()
    found: dict[str, Counter[str]] = {}
    wanted = 0
    for group, cells in groups(study.blocks):
        planned[group.method.kind] += len(cells)
        there = Counter(known[cell.identity] for cell in cells if cell.identity in known)
        wanted += there.total()
        found.setdefault(group.method.kind, Counter()).update(there)
    plain = {method: dict(kinds) for method, kinds in found.items()}
    beside = len(known) - wanted
    return Status(store.folder, study.title, dict(planned), plain, beside, len(store.batches()), store.size(), store.writer)


def results(folder: Path, everything: bool = False) -> xr.Dataset:
    """The finished cells of the study in a folder as one data set, in the order of its grid.

    Args:
        everything: also cells of other settings or versions that the folder holds.

    Raises:
        StoreError: if there are none.
    """
    store = CellStore(folder)
    if everything:
        return store.read()
    study = parse(store.text, str(store.folder / "study.toml"))
    order = {cell.identity: index for index, cell in enumerate(cell for _, cells in groups(study.blocks) for cell in cells)}
    found = store.read(set(order))
    ranks = [order[str(name)] for name in found.identity.values]
    placed = found.isel(cell=sorted(range(len(ranks)), key=ranks.__getitem__))
    return placed.assign_attrs(
        title=study.title, study=store.text, made_by="copyhead", written=time.strftime("%Y-%m-%dT%H:%M:%S")
    )
