"""Runs of two-layer networks as one study: blocks of cells, kept in the store of all studies, continued after an interrupt.

A cell is (block, P, seed); its identity is a hash of all that determines its result. A batch is the cells of a block at one P.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr

from copyhead.experiment.induction_branches import classify
from copyhead.experiment.induction_scores import Scores, attention_maps, fresh
from copyhead.experiment.induction_training import Run, Settings, Trained, starts, train
from copyhead.experiment.two_layer_paths import TwoLayerPath
from copyhead.induction import Induction
from copyhead.model.two_layer import Start, TwoLayer
from copyhead.study.batch import device, git_commit, versions
from copyhead.study.cell import code_digest
from copyhead.study.cell_store import CellStore, write_batch

Part = Literal["threshold", "start", "condition", "network", "emergence"]
# Fresh sequences on which scores are measured.
TEST = 2000
LONG_NAMES = {
    "previous": "attention of layer 1 to the previous position",
    "induction": "attention of layer 2 to tokens after earlier occurrences of the query's token",
    "chance": "the same for uniform attention",
    "in_context": "in-context loss difference",
    "loss": "loss per scored position on fresh sequences",
    "beta": "coefficient of I - 11^T/V in the query-key circuit of layer 2",
    "w": "coefficient of I - 11^T/V in the value-output circuit of layer 2",
    "u": "coefficient of 11^T/V in the value-output circuit of layer 2",
    "matching": "eigenvalue score of the query-key circuit",
    "copying": "eigenvalue score of the value-output circuit",
}


class Block(NamedTuple):
    """Runs that differ in P and seed only. part: their use. name: unique in a study. maps: whether to keep attention."""

    part: Part
    name: str
    problem: Induction
    sequences: tuple[int, ...]
    seeds: int
    settings: Settings = Settings()
    network: TwoLayer = TwoLayer()
    start: Start = "small"
    scale: float = 0.01
    batch: int | None = None
    maps: bool = False

    @property
    def path(self) -> TwoLayerPath:
        return TwoLayerPath(self.problem, self.network, self.batch)

    @property
    def fluctuates(self) -> bool:
        """Whether runs have no stationary point to end at: SGLD and mini-batches."""
        return self.settings.method == "langevin" or self.batch is not None

    def identity(self, sequences: int, seed: int) -> str:
        """16 hexadecimal digits."""
        known = (
            code_digest(), self.problem.model_dump_json(), self.network.model_dump_json(), json.dumps(self.settings),
            self.start, str(self.scale), str(self.batch), str(self.maps), str(TEST), str(sequences), str(seed),
        )  # fmt: skip
        return hashlib.sha256("|".join(known).encode()).hexdigest()[:16]

    def cells(self, sequences: int) -> dict[str, int]:
        """Seed by identity at one P."""
        return {self.identity(sequences, seed): seed for seed in range(self.seeds)}

    def cost(self, sequences: int, seeds: int) -> float:
        """Of some cells, in units of a progress bar: entries of attention over all steps."""
        entries = sequences * self.problem.length * self.problem.scored if self.batch is None else self.batch
        return float(seeds * self.settings.steps * (entries + self.problem.length * self.problem.vocab))


def run(
    blocks: list[Block],
    folder: Path,
    text: str,
    progress: Callable[[str, float], AbstractContextManager[Callable[[float], None]]],
) -> None:
    """Runs the cells that the folder does not hold, one batch after the other.

    Args:
        text: the settings, kept in the folder.

    Raises:
        StoreError: if the folder cannot be used.
    """
    store = CellStore.create(folder)
    with store.writing(text):
        known = store.known()
        waiting = list(_waiting(blocks, known))
        with progress("training", sum(block.cost(place, len(cells)) for block, place, cells in waiting) or 1.0) as advance:
            for block, place, cells in waiting:
                cost = block.cost(place, len(cells))
                seen = [0]

                def told(done: int, of: int, cost: float = cost, seen: list[int] = seen) -> None:
                    advance(cost * (done - seen[0]) / of)
                    seen[0] = done

                digest = hashlib.sha256("".join(cells).encode()).hexdigest()[:16]
                write_batch(folder, f"induction-{digest}", batch(block, place, cells, told))


def _waiting(blocks: list[Block], known: dict[str, str]) -> Iterator[tuple[Block, int, dict[str, int]]]:
    """Blocks, P, and seeds by identity that are missing; cells that two blocks share are run once."""
    planned = set(known)
    for block in blocks:
        for place in block.sequences:
            missing = {name: seed for name, seed in block.cells(place).items() if name not in planned}
            planned |= missing.keys()
            if missing:
                yield block, place, missing


def batch(
    block: Block, sequences: int, cells: dict[str, int], told: Callable[[int, int], None] = lambda done, of: None
) -> xr.Dataset:
    """Trains some cells of a block at one P; variables have dimensions (cell,) or (cell, record)."""
    began = time.perf_counter()
    problem, test = block.problem, fresh(block.problem, TEST)
    runs = [Run(sequences, seed, block.start, block.scale) for seed in cells.values()]
    found = train(runs, block.path, block.settings, test, told)
    names = classify(found.last, problem.length, problem.vocab, block.network.loss)
    count = len(runs)
    data: dict[str, Any] = {
        name: (("cell", "record"), np.broadcast_to(values, (count, len(found.step))), _attributes(name))
        for name, values in found.scores._asdict().items()
    }
    data["step"] = ("cell", "record"), np.broadcast_to(found.step, (count, len(found.step)))
    data["residual"] = "cell", found.residual, {"long_name": "distance to a stationary point of E"}
    data["change"] = "cell", found.change, {"long_name": "largest change of a score since the record before the last"}
    data["branch"] = "cell", np.array(names, str)
    if block.maps:
        before = starts(runs, block.path)
        for when, weights in (("before", before), ("after", found.weights)):
            maps = attention_maps(weights, test, block.path)
            data[f"{when}_first"] = ("cell", "query", "key"), maps.first
            data[f"{when}_second"] = ("cell", "match", "key"), maps.second
    seconds = (time.perf_counter() - began) / count
    labels = {
        "identity": list(cells), "status": _status(block, found), "part": block.part, "block": block.name, "P": sequences,
        "seed": list(cells.values()), "start": block.start, "scale": block.scale, "method": block.settings.method,
        "problem": problem.model_dump_json(), "network": block.network.model_dump_json(),
        "settings": json.dumps({**block.settings._asdict(), "batch": block.batch}), "seconds": seconds, "code": code_digest(),
        "versions": versions(), "commit": git_commit(), "device": device(),
    }  # fmt: skip
    return xr.Dataset(data, coords={name: ("cell", np.broadcast_to(np.array(value), count)) for name, value in labels.items()})


def _attributes(name: str) -> dict[str, str]:
    base = name.removesuffix("_error")
    return {"long_name": LONG_NAMES[base] if base == name else f"standard error over fresh sequences of: {LONG_NAMES[base]}"}


def _status(block: Block, found: Trained) -> list[str]:
    """fluctuating: of a method without a stationary point."""
    end = np.where(found.converged, "converged", "fluctuating" if block.fluctuates else "not converged")
    return [str(one) if finite else "diverged" for one, finite in zip(end, found.finite, strict=True)]


def read(folder: Path, blocks: list[Block]) -> dict[str, xr.Dataset]:
    """The cells of each block in the order of P and seed."""
    wanted = {block.name: [name for place in block.sequences for name in block.cells(place)] for block in blocks}
    pieces: dict[str, list[xr.Dataset]] = {name: [] for name in wanted}
    owners: dict[str, list[str]] = {}
    for block, names in wanted.items():
        for name in names:
            owners.setdefault(name, []).append(block)
    for piece in CellStore(folder).pieces(set(owners)):
        for block in {owner for name in piece.identity.values for owner in owners[str(name)]}:
            keep = [k for k, name in enumerate(piece.identity.values) if block in owners[str(name)]]
            pieces[block].append(piece.isel(cell=keep))
    found = {}
    for block, parts in pieces.items():
        whole = xr.concat(parts, "cell", data_vars="all", coords="all", compat="no_conflicts", join="outer")
        found[block] = whole.isel(cell=np.lexsort((whole.seed.values, whole.P.values)))
    return found


def last(cells: xr.Dataset) -> Scores:
    """Scores of every cell at the end."""
    return Scores(*(cells[name].values[:, -1] for name in Scores._fields))
