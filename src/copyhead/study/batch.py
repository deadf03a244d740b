"""Batches: cells that one worker runs and stores together. Results do not depend on how cells are batched."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import tracemalloc
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from copyhead.problem import Problem, ProblemError
from copyhead.study.cell import Cell, Group, code_digest
from copyhead.study.cell_store import write_batch
from copyhead.study.methods import run_cells
from copyhead.study.study_file import Adam, Langevin

# Most cells of a batch by method: a worker that is lost, or an interrupt, costs that many at most.
MOST = {"theory": 4000, "exact": 64, "adam": 256, "sgld": 64}
# Packages whose versions are kept with the results.
PACKAGES = ("copyhead", "jax", "numpy", "scipy", "optax", "optimistix", "xarray", "zarr")
# Fields of a problem that a cell is labelled with; P has its own name in the tables.
FIELDS = tuple(name for name in Problem.model_fields if name != "sequences")
# Coordinates of a cell: what tells it from others, and how it was made.
LABELS = ("method", "P", "start", "seed", *FIELDS, "settings")
MADE = ("identity", "code", "versions", "commit", "device")


class Batch(NamedTuple):
    """Groups of one method with some of their cells each."""

    groups: tuple[tuple[Group, tuple[Cell, ...]], ...]

    @property
    def method(self) -> str:
        return self.groups[0][0].method.kind

    @property
    def size(self) -> int:
        return sum(len(cells) for _, cells in self.groups)

    @property
    def name(self) -> str:
        """A name of the cells in it."""
        digest = hashlib.sha256()
        for _, cells in self.groups:
            digest.update("".join(cell.identity for cell in cells).encode())
        return f"{self.method}-{digest.hexdigest()[:16]}"


class Needs(NamedTuple):
    """Measured memory in bytes. fixed: of a batch of any size. cell: of each cell in it."""

    fixed: float
    cell: float


def measured(group: Group, cells: list[Cell]) -> Needs:
    """What a batch of a group needs, measured on the cell of largest P: its arrays, drawing its data, and the compiled loop.

    Nothing is measured for theory and exact minima, whose cells are solved one after the other.
    """
    problem, method = group
    if not isinstance(method, Adam | Langevin):
        return Needs(0.0, 0.0)
    import jax

    from copyhead.experiment.adam import AdamSettings, descend
    from copyhead.experiment.cells import assemble
    from copyhead.experiment.path import path

    way = path(problem, method.network, method.batch)
    largest = max(cells, key=lambda cell: cell.sequences or 0)
    run: Any = (round(largest.sequences or 0), largest.seed, largest.start, problem.chi)
    tracemalloc.start()
    one = assemble(way, [run])
    drawing = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start, data = way.prepare(one.start, one.data, one.batch_key)
    each = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves((one, start, data)))
    if isinstance(method, Langevin):  # the draws of every observable
        each += 4 * method.draws * 16
    many = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), way.cells, axis=0), (start, data))
    steps = method.steps if isinstance(method, Adam) else 100
    rate = method.rate if isinstance(method, Adam) else 0.01
    analysis = descend.lower(*many, way, AdamSettings(steps, rate)).compile().memory_analysis()
    # not every backend tells
    loop = (
        0 if analysis is None else analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    )
    return Needs(float(drawing + loop), float(each))


def batches(
    waiting: list[tuple[Group, list[Cell]]], budget: float, workers: int, needs: dict[Any, Needs] | None = None
) -> Iterator[Batch]:
    """Missing cells as batches that fit a memory budget (bytes of one worker) and keep all workers busy.

    Groups are joined up to MOST cells of their method; large groups are split.

    Raises:
        ProblemError: if not even one cell fits.
    """
    total: dict[str, int] = {}
    for group, cells in waiting:
        total[group.method.kind] = total.get(group.method.kind, 0) + len(cells)
    known = {} if needs is None else needs
    pending: list[tuple[Group, tuple[Cell, ...]]] = []
    filled = 0
    for group, cells in waiting:
        kind = group.method.kind
        most = min(MOST[kind], max(1, -(-total[kind] // (2 * workers))))
        needed = known.get(shape_of(group), Needs(0.0, 0.0))
        if needed.fixed + needed.cell > budget:
            raise ProblemError(
                f"memory = {budget / 1e9:.3g} GB for each worker: must be at least "
                f"{(needed.fixed + needed.cell) / 1e9:.3g} GB for one cell of {kind} at length = {group.problem.length}, "
                f"vocab = {group.problem.vocab}"
            )
        if needed.cell:
            most = min(most, max(1, int((budget - needed.fixed) / needed.cell)))
        if pending and (pending[0][0].method != group.method or filled >= most):
            yield Batch(tuple(pending))
            pending, filled = [], 0
        first = 0
        while first < len(cells):
            taken = cells[first : first + most - filled]
            pending.append((group, tuple(taken)))
            first, filled = first + len(taken), filled + len(taken)
            if filled >= most:
                yield Batch(tuple(pending))
                pending, filled = [], 0
    if pending:
        yield Batch(tuple(pending))


def shape_of(group: Group) -> Any:
    """Groups of equal shapes need equal memory."""
    problem = group.problem
    return group.method, problem.length, problem.vocab, problem.heads, problem.causal, problem.content


def execute(batch: Batch, folder: str, commit: str) -> tuple[str, int, float]:
    """Runs a batch in this process and stores it: its name, number of cells, and seconds.

    Raises:
        StoreError: if it cannot be stored.
    """
    pieces = [labelled(group, list(cells), commit) for group, cells in batch.groups]
    from copyhead.study.cell_store import joined

    found = joined(pieces)
    write_batch(Path(folder), batch.name, found)
    return batch.name, batch.size, float(found.seconds.sum())


def labelled(group: Group, cells: list[Cell], commit: str) -> xr.Dataset:
    """Results with everything that tells a cell from others as coordinates."""
    problem, method = group
    n = len(cells)

    def same(value: Any) -> np.ndarray:
        missing = np.nan if value is None else value
        return np.array([missing] * n, dtype=object if isinstance(missing, str) else None)

    labels: dict[str, Any] = {
        "identity": (np.array([cell.identity for cell in cells], object), "hash of all that determines the result"),
        "method": (same(method.kind), "kind of method"),
        "settings": (same(method.model_dump_json()), "its settings, as JSON"),
        "P": (np.array([np.nan if c.sequences is None else c.sequences for c in cells]), "number of training sequences"),
        "start": (np.array([cell.start for cell in cells], object), "start of a run, or branch of the theory"),
        "seed": (np.array([cell.seed for cell in cells]), "data set; -1: expected moments"),
    }
    labels |= {name: (same(getattr(problem, name)), str(Problem.model_fields[name].description)) for name in FIELDS}
    labels |= {
        "code": (same(code_digest()), "hash of the code and libraries"),
        "versions": (same(versions()), "versions of packages, as JSON"),
        "commit": (same(commit), "git commit of copyhead, with + if files were changed; empty if not known"),
        "device": (same(device()), "where it ran"),
    }
    found = run_cells(group, cells)
    return found.assign_coords({k: ("cell", value, {"long_name": told}) for k, (value, told) in labels.items()})


@lru_cache(maxsize=1)
def versions() -> str:
    """Versions of the packages that results depend on, as JSON."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return json.dumps(found)


@lru_cache(maxsize=1)
def device() -> str:
    """Device of JAX and the kind of machine."""
    import jax

    return f"{jax.devices()[0].device_kind}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


@lru_cache(maxsize=1)
def git_commit() -> str:
    """Commit of the sources in use, with + if files were changed; empty where they are in no repository."""
    folder = Path(__file__).parents[3]
    if not (folder / ".git").exists():
        return ""
    try:
        named, changed = (
            subprocess.run(
                ["git", "-C", str(folder), *rest], capture_output=True, text=True, check=True, timeout=10, env=os.environ
            ).stdout.strip()
            for rest in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return named + ("+" if changed else "")
