"""Two workers beside one: cells per second of a study of Adam runs, once both have compiled, and their ratio.

python bench/workers.py [--steps 4000] [--batches 12]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from copyhead.study import batch
from copyhead.study.engine import Engine
from copyhead.study.study_file import parse
from copyhead.study.sweep import run

# Cells of a batch: some seconds of work.
CELLS = 256


class Clock:
    """Takes the place of the progress bar: when each batch was stored."""

    def __init__(self, title: str, total: float) -> None:
        self.stored: list[tuple[float, float]] = []
        Clock.last = self

    last: Clock

    def __enter__(self):
        return lambda cells: self.stored.append((time.perf_counter(), cells))

    def __exit__(self, *_: object) -> None: ...

    def rate(self, workers: int) -> float:
        """Cells per second from the first batch of every worker, which compiles, to the last that all of them run."""
        begun = self.stored[workers - 1][0]
        rest = self.stored[workers:]
        return sum(cells for _, cells in rest) / (rest[-1][0] - begun)


def measured(workers: int, steps: int, batches: int, seed: int) -> float:
    seeds = list(range(seed, seed + CELLS * batches // 8))
    text = f"seeds = {seeds}\n[grid]\nsequences = [200, 300, 400, 500]\n[[method]]\nkind = 'adam'\nsteps = {steps}\n"
    with tempfile.TemporaryDirectory() as folder:
        run(parse(text), text, Path(folder) / "study", engine=Engine(workers), progress=Clock)
    return Clock.last.rate(workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    batch.MOST["adam"] = CELLS
    print(f"{len(os.sched_getaffinity(0))} cores; batches of {CELLS} runs of {given.steps} steps")
    for number in range(given.rounds):
        one, two = (measured(workers, given.steps, given.batches, 1000 * number) for workers in (1, 2))
        print(f"one worker {one:.2f} cells/s, two workers {two:.2f} cells/s, ratio {two / one:.2f}")


if __name__ == "__main__":
    main()
