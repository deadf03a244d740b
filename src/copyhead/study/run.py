"""Executes the parts of a study in worker processes, one thread of JAX each, and stores every part as it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from copyhead.problem import Problem
from copyhead.study.spec import Part, Reproduction, moment_bytes
from copyhead.study.store import Store, StoreError, write_dataset

FRESH_SEQUENCES = 4096
# Langevin step of the logits: an eighth of what the stiffest logit mode of a copy head allows, some 1.5 / g_W in linear
# attention and 6 / g_W in softmax at the preset.
LOGIT_STEPS = {"softmax": 0.03, "linear": 0.1}
# Memory for the moments of the cells that are assembled at a time.
GROUP_BYTES = 1.5e9

# (P, data seed, start, chi)
Run = tuple[int, int, str, float]


def _yardstick(problem: Problem) -> Any:
    import jax
    import jax.numpy as jnp

    from copyhead.experiment.cells import objective
    from copyhead.experiment.observables import Yardstick
    from copyhead.model import moments, tokens

    shared = objective(problem)
    law = tokens.uniform(problem.vocab)
    fresh = tokens.sample(tokens.stream(0, "fresh"), FRESH_SEQUENCES, problem.length, law)
    population = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), moments.population(law))
    return Yardstick(shared.target, shared.layout, population, moments.empirical(fresh, problem.vocab))


def _grid(observed: Any, dims: tuple[str, ...], shape: tuple[int, ...], coords: dict[str, Any]) -> xr.Dataset:
    values = {name: (dims, np.asarray(getattr(observed, name)).reshape(shape)) for name in observed._fields}
    return xr.Dataset(values, coords=coords)


def _train(problem: Problem, runs: list[Run], steps: int, rate: float) -> tuple[Any, np.ndarray]:
    from copyhead.experiment.adam import AdamSettings, train
    from copyhead.experiment.cells import assemble, objective
    from copyhead.experiment.observables import measure_all

    yardstick, settings = _yardstick(problem), AdamSettings(steps, rate)
    observed, gradients = [], []
    for group in _groups(problem, runs):
        trained = train(assemble(problem, group), objective(problem), settings)
        observed.append(measure_all(trained.weights, yardstick, problem.attention))
        gradients.append(trained.gradient)
    return _joined(observed), np.concatenate(gradients)


def _groups(problem: Problem, runs: list[Run]) -> Iterator[list[Run]]:
    """Runs whose moments, as they are and packed, fit GROUP_BYTES together."""
    size = max(1, int(GROUP_BYTES / (3 * moment_bytes(problem))))
    for first in range(0, len(runs), size):
        yield runs[first : first + size]


def _joined(observed: list[Any]) -> Any:
    return type(observed[0])(*(np.concatenate(parts) for parts in zip(*observed, strict=True)))


def adam_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Adam from both starts on every (P, data seed)."""
    from copyhead.experiment.cells import STARTS

    runs = [(count, seed, start, problem.chi) for count in sequences for seed in seeds for start in STARTS]
    observed, gradient = _train(problem, runs, spec.adam_steps, spec.adam_rate)
    shape = (len(sequences), len(seeds), len(STARTS))
    coords = {"P": sequences, "seed": seeds, "start": list(STARTS)}
    return _grid(observed, ("P", "seed", "start"), shape, coords).assign(
        gradient=(("P", "seed", "start"), gradient.reshape(shape))
    )


def plane_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Adam from the small start, for one column of a loss map."""
    runs = [(count, seed, "small", problem.chi) for count in sequences for seed in seeds]
    observed, gradient = _train(problem, runs, spec.plane_steps, spec.adam_rate)
    shape = (len(sequences), len(seeds))
    coords = {"P": sequences, "seed": seeds}
    return _grid(observed, ("P", "seed"), shape, coords).assign(gradient=(("P", "seed"), gradient.reshape(shape)))


def langevin_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int], chi: float) -> xr.Dataset:
    """SGLD from both starts on every (P, data seed), at one chi."""
    from copyhead.experiment.cells import STARTS, assemble, objective
    from copyhead.experiment.langevin import LangevinSettings, sample

    runs = [(count, seed, start, chi) for count in sequences for seed in seeds for start in STARTS]
    settings = LangevinSettings(LOGIT_STEPS[problem.attention], warmup=spec.warmup, draws=spec.draws, thin=spec.thin)
    yardstick, shared = _yardstick(problem), objective(problem)
    trace = _joined([sample(assemble(problem, group), shared, yardstick, settings) for group in _groups(problem, runs)])
    shape = (len(sequences), len(seeds), len(STARTS), spec.draws)
    coords = {"P": sequences, "seed": seeds, "start": list(STARTS), "draw": np.arange(spec.draws), "chi": chi}
    return _grid(trace, ("P", "seed", "start", "draw"), shape, coords)


def exact_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Theory without the equivalent-kernel approximation: the minimum of S(G) over all L^2 logits on each data set.

    Started from the population minimum of the branch that each start of a training run belongs to.
    """
    from copyhead.experiment.cells import STARTS, data_sets
    from copyhead.model import moments, tokens
    from copyhead.study.compare import branch_state
    from copyhead.theory.action import full_task
    from copyhead.theory.full_matrix import measure, minimise
    from copyhead.theory.order_parameters import lift
    from copyhead.theory.transition import phases

    found = phases(problem, reach=sequences)
    population = moments.population(tokens.uniform(problem.vocab))
    fields = ("c1", "cG", "a1", "aG", "loss", "gradient")
    values = np.full((len(sequences), len(seeds), len(STARTS), len(fields)), np.nan)
    for column, seed in enumerate(seeds):
        for row, data in enumerate(data_sets(problem, sequences, seed)):
            task = full_task(problem, data)
            known: dict[tuple[float, float], np.ndarray] = {}
            for layer, start in enumerate(STARTS):
                state = branch_state(found, sequences[row], start).order_parameters
                key = (float(state.c1), float(state.cG))
                if key not in known:
                    # G = 0 is stationary at any P in linear attention: start beside it, or a saddle would pass for a minimum
                    start_at = np.array(key) if np.hypot(*key) > 1e-3 else np.array([0.01, 0.01])
                    minimum = minimise(task, np.asarray(lift(start_at, task.target)), problem.attention)
                    observed = measure(minimum.logits, task, population, problem.attention)
                    known[key] = np.array([*observed, minimum.gradient]) if minimum.converged else np.full(len(fields), np.nan)
                values[row, column, layer] = known[key]
    dims = ("P", "seed", "start")
    coords = {"P": sequences, "seed": seeds, "start": list(STARTS)}
    return xr.Dataset({name: (dims, values[..., index]) for index, name in enumerate(fields)}, coords=coords)


def jump_cells(
    problem: Problem, spec: Reproduction, seeds: list[int], start: str, bracket: tuple[int, int], sections: int = 12
) -> xr.Dataset:
    """The P at which a training run from `start` changes branch, for each data seed, by repeated section on nested data.

    Each round trains at `sections` values of P inside every bracket. A run counts as copying if its aG is above the mean of
    those at the two ends of the first bracket.
    """
    low, high = np.full(len(seeds), bracket[0]), np.full(len(seeds), bracket[1])
    ends, _ = _train(problem, [(p, s, start, problem.chi) for s in seeds for p in bracket], spec.adam_steps, spec.adam_rate)
    levels = np.asarray(ends.aG).reshape(len(seeds), 2)
    threshold = levels.mean(axis=1)
    apart = levels[:, 0] < 0.5 * levels[:, 1]  # otherwise the bracket does not hold the jump, or training was too short
    while np.any(high - low > 1):
        tried = np.round(np.linspace(low, high, sections + 2)[1:-1].T).astype(int)
        runs = [(int(p), seed, start, problem.chi) for seed, row in zip(seeds, tried, strict=True) for p in row]
        observed, _ = _train(problem, runs, spec.adam_steps, spec.adam_rate)
        copies = np.asarray(observed.aG).reshape(tried.shape) > threshold[:, None]
        # the place is where the last run that does not copy is followed by one that does
        for index, (row, copied) in enumerate(zip(tried, copies, strict=True)):
            failed = row[~copied]
            low[index] = max(low[index], failed.max()) if failed.size else low[index]
            above = row[copied & (row > low[index])]
            high[index] = min(high[index], above.min()) if above.size else high[index]
    places = {name: ("seed", np.where(apart, end, np.nan)) for name, end in (("low", low), ("high", high))}
    return xr.Dataset(places, coords={"seed": seeds}, attrs={"start": start})


METHODS: dict[str, Callable[..., xr.Dataset]] = {
    "adam": adam_cells,
    "langevin": langevin_cells,
    "exact": exact_cells,
    "jump": jump_cells,
    "plane": plane_cells,
}


def execute(part: Part, spec: Reproduction, path: Path) -> float:
    """Runs one part in this process and stores it; the seconds that it took."""
    began = time.perf_counter()
    dataset = METHODS[part.method](part.problem, spec, **part.arguments)
    seconds = time.perf_counter() - began
    dataset.attrs |= {"part": part.name, "problem": part.problem.to_json(), "seconds": seconds}
    write_dataset(path, dataset)
    return seconds


def _end_with(parent: int) -> None:
    """Ends this worker when its parent is gone, however that ended: an orphan would wait for work for ever."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(parts: list[Part], spec: Reproduction, store: Store, workers: int, done: Callable[[Part], None]) -> None:
    """Executes every part that the store does not hold yet.

    Workers are spawned, with one JAX thread each: a process per core is the best use of cores. On an interrupt or an error
    the workers are stopped at once; finished parts stay.
    """
    waiting = []
    for part in parts:
        if store.has(part.name):
            done(part)
        else:
            waiting.append(part)
    if not waiting:
        return
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = "1"  # read when JAX is imported, so it must stand before the workers start
    pool = ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        running: dict[Future[float], Part] = {pool.submit(execute, part, spec, store.path(part.name)): part for part in waiting}
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
                done(running.pop(future))
    except BrokenProcessPool:
        raise StoreError(
            f"out = {str(store.folder)!r}: a worker process was ended from outside, perhaps for want of memory; finished parts "
            "are kept, and the same command goes on from there"
        ) from None
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        os.environ.pop("NPROC") if before is None else os.environ.update(NPROC=before)
