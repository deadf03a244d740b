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
from copyhead.study.methods import bracket_of, run_cells
from copyhead.study.study_file import Adam, Jump, Langevin

# Most cells of a batch by method: a worker that is lost, or an interrupt, costs that many at most.
MOST = {"theory": 4000, "exact": 64, "adam": 256, "sgld": 64, "jump": 32, "ladder": 1}
# Draws of a chain are kept of about that many observables.
OBSERVABLES = 16
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


NOTHING = Needs(0.0, 0.0)


class Shape(NamedTuple):
    """What the memory of training depends on; `same` must be equal for one shape to need at most what another needs."""

    same: tuple[Any, ...]
    length: int
    vocab: int
    sequences: float

    def within(self, other: Shape) -> bool:
        return self.same == other.same and all(mine <= its for mine, its in zip(self[1:], other[1:], strict=True))


def shape_of(group: Group, cells: list[Cell]) -> Shape | None:
    """Shape of a group by its largest P; None for methods that solve or sample their cells one after the other."""
    problem, method = group
    if not isinstance(method, Adam | Jump | Langevin):
        return None
    largest = bracket_of(problem, method)[1] if isinstance(method, Jump) else max(cell.sequences or 0 for cell in cells)
    same = problem.attention, problem.heads, tuple(problem.beyond), problem.content, method.network, method.batch
    return Shape(same, problem.length, problem.vocab, largest)


def needs(waiting: list[tuple[Group, list[Cell]]]) -> list[Needs]:
    """What a batch of each group needs: measured on the largest shapes only, which the smaller ones need at most."""
    shapes = [shape_of(group, cells) for group, cells in waiting]
    distinct = [shape for shape in dict.fromkeys(shapes) if shape is not None]
    largest: list[Shape] = []
    for shape in sorted(distinct, key=lambda one: one[1:], reverse=True):
        if not any(shape.within(other) for other in largest):
            largest.append(shape)
    known = {top: measured(*waiting[shapes.index(top)], top.sequences) for top in largest}
    above = {shape: next(known[top] for top in largest if shape.within(top)) for shape in distinct}
    found = []
    for (group, _), shape in zip(waiting, shapes, strict=True):
        method = group.method
        runs = max(2, method.sections) if isinstance(method, Jump) else 1
        draws = 4 * method.draws * OBSERVABLES if isinstance(method, Langevin) else 0
        found.append(NOTHING if shape is None else Needs(above[shape].fixed, runs * above[shape].cell + draws))
    return found


def measured(group: Group, cells: list[Cell], sequences: float) -> Needs:
    """Memory of training at P = sequences: arrays of one run, the peak of drawing its data, buffers of the step loop."""
    import jax

    from copyhead.experiment.adam import AdamSettings, descend
    from copyhead.experiment.cells import assemble
    from copyhead.experiment.path import path

    problem, method = group
    assert isinstance(method, Adam | Jump | Langevin)
    way = path(problem, method.network, method.batch)
    run: Any = (round(sequences), cells[0].seed, cells[0].start, problem.chi)
    tracemalloc.start()
    one = assemble(way, [run])
    drawing = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    start, data = way.prepare(one.start, one.data, one.batch_key)
    each = sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves((one, start, data)))
    many = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf), way.cells, axis=0), (start, data))
    # the number of steps does not matter
    analysis = descend.lower(*many, way, AdamSettings(100, 0.01)).compile().memory_analysis()
    # not every backend tells
    loop = (
        0 if analysis is None else analysis.temp_size_in_bytes + analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    )
    return Needs(float(drawing + loop), float(each))


def batches(
    waiting: list[tuple[Group, list[Cell]]], budget: float, workers: int, needed: list[Needs] | None = None
) -> Iterator[Batch]:
    """Missing cells as batches that fit a memory budget (bytes of one worker) and keep all workers busy.

    Groups are joined up to MOST cells of their method; large groups are split.

    Raises:
        ProblemError: if not even one cell fits.
    """
    total: dict[str, int] = {}
    for group, cells in waiting:
        total[group.method.kind] = total.get(group.method.kind, 0) + len(cells)
    pending: list[tuple[Group, tuple[Cell, ...]]] = []
    filled = 0
    for (group, cells), own in zip(waiting, needed or [NOTHING] * len(waiting), strict=True):
        kind = group.method.kind
        most = min(MOST[kind], max(1, -(-total[kind] // (2 * workers))))
        if own.fixed + own.cell > budget:
            raise ProblemError(
                f"memory = {budget / 1e9:.3g} GB for each worker: must be at least "
                f"{(own.fixed + own.cell) / 1e9:.3g} GB for one cell of {kind} at length = {group.problem.length}, "
                f"vocab = {group.problem.vocab}"
            )
        if own.cell:
            most = min(most, max(1, int((budget - own.fixed) / own.cell)))
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
