"""Cell: one (problem, method, start, seed), and the name of all that determines its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from copyhead.problem import Problem
from copyhead.study.study_file import EXPECTED, Block, Method

# Start of what has none.
BOTH = "both"
# Rooms, files of study/ and records whose code, and libraries whose version, a result may depend on.
ROOMS = ("model", "theory", "experiment")
FILES = ("methods", "exact", "branch", "jump")
RECORDS = ("problem", "induction")
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "optax", "optimistix")


class Group(NamedTuple):
    """What cells that can be run together share. problem: without sequences."""

    problem: Problem
    method: Method


class Cell(NamedTuple):
    """identity: 16 hexadecimal digits. sequences: P; None for a theory of places and a search for a jump. start: BOTH, and
    seed: EXPECTED, where there is none."""

    identity: str
    sequences: float | None
    start: str
    seed: int


@lru_cache(maxsize=1)
def code_digest() -> str:
    """A hash of the sources that results depend on, and of the versions of the numerical libraries."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    own = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    for path in [*own, *(package / f"{name}.py" for name in RECORDS), *(package / "study" / f"{name}.py" for name in FILES)]:
        digest.update(path.read_bytes())
    for library in LIBRARIES:
        digest.update(version(library).encode())
    return digest.hexdigest()[:16]


def groups(blocks: Iterable[Block]) -> Iterator[tuple[Group, list[Cell]]]:
    """Every group of a study with its cells, in the order of the file; made as they are asked for.

    The identity of a cell is a hash of problem, files that it names, method, start, seed and `code_digest`: of all that
    determines its result, and of nothing else, so that a cell is found again in a grown grid.
    """
    for block in blocks:
        method = block.method
        seeds = block.seeds if method.seeded else (EXPECTED,)
        starts = block.starts if method.started else (BOTH,)
        settings = method.model_dump_json()
        for problem in block.problems():
            shared = "|".join((code_digest(), problem.to_json(), json.dumps(problem.digests), settings))
            known = hashlib.sha256(shared.encode())
            cells = []
            for sequences in block.sequences:
                place = None if sequences is None else float(sequences)
                for seed in seeds:
                    for start in starts:
                        own = known.copy()
                        own.update(f"|{place!r}|{seed}|{start}".encode())
                        cells.append(Cell(own.hexdigest()[:16], place, start, seed))
            yield Group(problem, method), cells
