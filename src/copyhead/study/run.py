"""Executes the parts of a study in worker processes, one thread of JAX each, and stores every part as it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from copyhead.model.network import Network, Start
from copyhead.problem import Problem
from copyhead.study.exact import FRESH_CONTENT, exact_minima
from copyhead.study.memory import run_bytes
from copyhead.study.spec import Part, Reproduction
from copyhead.study.store import Store, StoreError, write_dataset

if TYPE_CHECKING:
    from copyhead.experiment.cells import Run

# Fresh sequences that losses are measured on through moments, where any number costs the same.
FRESH_SEQUENCES = 4096
# Memory for the data and weights of the cells that are assembled at a time.
GROUP_BYTES = 1.5e9


def _grid(observed: Any, problem: Problem, dims: tuple[str, ...], shape: tuple[int, ...], coords: dict[str, Any]) -> xr.Dataset:
    """Observables on a grid of runs; those that are arrays have a last axis of their own."""
    from copyhead.experiment.observables import axes

    own = axes(problem)
    values = {}
    for name in observed._fields:
        axis = [own[name]] if name in own else []
        values[name] = (
            (*dims, *(label for label, _ in axis)),
            np.asarray(getattr(observed, name)).reshape(*shape, *(len(places) for _, places in axis)),
        )
    return xr.Dataset(values, coords={**coords, **dict(own.values())})


def _train(problem: Problem, spec: Reproduction, runs: list[Run], steps: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Observables, largest gradient entry, and step of divergence of each run."""
    from copyhead.experiment.adam import AdamSettings, train
    from copyhead.experiment.cells import assemble
    from copyhead.experiment.observables import measure_all, yardstick
    from copyhead.experiment.path import path

    settings, way = AdamSettings(steps, spec.adam_rate), path(problem, spec.network, spec.batch)
    against = yardstick(problem, spec.network, FRESH_CONTENT if problem.content else FRESH_SEQUENCES)
    found = []
    for group in _groups(problem, spec.network, runs):
        trained = train(assemble(way, group), way, settings)
        found.append((measure_all(trained.weights, against, problem), trained.gradient, trained.diverged))
    observed, gradients, diverged = zip(*found, strict=True)
    return _joined(list(observed)), np.concatenate(gradients), np.concatenate(diverged)


def _groups(problem: Problem, network: Network, runs: list[Run]) -> Iterator[list[Run]]:
    """Runs whose data, as they are and arranged for the step loop, fit GROUP_BYTES together."""
    size = max(1, int(GROUP_BYTES / run_bytes(problem, network)))
    for first in range(0, len(runs), size):
        yield runs[first : first + size]


def _joined(observed: list[Any]) -> Any:
    return type(observed[0])(*(np.concatenate(parts) for parts in zip(*observed, strict=True)))


def adam_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Adam from both starts on every (P, data seed)."""
    from copyhead.experiment.cells import STARTS

    runs = [(count, seed, start, problem.chi) for count in sequences for seed in seeds for start in STARTS]
    observed, gradient, diverged = _train(problem, spec, runs, spec.adam_steps)
    dims, shape = ("P", "seed", "start"), (len(sequences), len(seeds), len(STARTS))
    coords = {"P": sequences, "seed": seeds, "start": list(STARTS)}
    return _grid(observed, problem, dims, shape, coords).assign(
        gradient=(dims, gradient.reshape(shape)), diverged=(dims, diverged.reshape(shape))
    )


def plane_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Adam from the small start, for one column of a loss map."""
    return _one_start(problem, spec, sequences, seeds, "small", spec.plane_steps)


def _one_start(
    problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int], start: Start, steps: int
) -> xr.Dataset:
    """Adam from one start on every (P, data seed)."""
    runs = [(count, seed, start, problem.chi) for count in sequences for seed in seeds]
    observed, gradient, diverged = _train(problem, spec, runs, steps)
    dims, shape = ("P", "seed"), (len(sequences), len(seeds))
    return _grid(observed, problem, dims, shape, {"P": sequences, "seed": seeds}).assign(
        gradient=(dims, gradient.reshape(shape)), diverged=(dims, diverged.reshape(shape))
    )


def langevin_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int], chi: float) -> xr.Dataset:
    """SGLD from both starts on every (P, data seed), at one chi."""
    from copyhead.experiment.cells import STARTS, assemble
    from copyhead.experiment.langevin import LOGIT_STEPS, LangevinSettings, sample
    from copyhead.experiment.observables import yardstick
    from copyhead.experiment.path import path

    runs = [(count, seed, start, chi) for count in sequences for seed in seeds for start in STARTS]
    settings = LangevinSettings(LOGIT_STEPS[problem.attention], warmup=spec.warmup, draws=spec.draws, thin=spec.thin)
    heads = problem.head_dimension  # its ratio to chi is what the theory depends on
    sampled = problem.replace(chi=chi, head_dimension=None if heads is None else max(1, round(heads * chi / problem.chi)))
    way = path(sampled, spec.network, spec.batch)
    against = yardstick(problem, spec.network, FRESH_CONTENT if problem.content else FRESH_SEQUENCES)
    found = [sample(assemble(way, group), way, against, settings) for group in _groups(problem, spec.network, runs)]
    shape = (len(sequences), len(seeds), len(STARTS), spec.draws)
    coords = {"P": sequences, "seed": seeds, "start": list(STARTS), "draw": np.arange(spec.draws), "chi": chi}
    dims = ("P", "seed", "start", "draw")
    trace, diverged = _joined([part.observables for part in found]), np.concatenate([part.diverged for part in found])
    return _grid(trace, problem, dims, shape, coords).assign(diverged=(dims[:-1], diverged.reshape(shape[:-1])))


def exact_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int]) -> xr.Dataset:
    """Theory without the equivalent-kernel approximation, for both starts; no setting of training enters."""
    from copyhead.experiment.cells import STARTS

    return exact_minima(problem, sequences, seeds, STARTS)


def jump_cells(problem: Problem, spec: Reproduction, seeds: list[int], start: Start, bracket: tuple[int, int]) -> xr.Dataset:
    """The P at which a training run from `start` changes branch, for each data seed, by repeated section on nested data.

    Each round trains at spec.sections values of P inside every bracket. A run counts as copying if its aG is above the mean of
    those at the two ends of the first bracket.
    """
    low, high = np.full(len(seeds), bracket[0]), np.full(len(seeds), bracket[1])
    ends, _, lost = _train(problem, spec, [(p, s, start, problem.chi) for s in seeds for p in bracket], spec.adam_steps)
    diverged = lost.reshape(len(seeds), 2).max(axis=1)
    levels = np.asarray(ends.aG).reshape(len(seeds), 2)
    threshold = levels.mean(axis=1)
    apart = levels[:, 0] < 0.5 * levels[:, 1]  # otherwise the bracket does not hold the jump, or training was too short
    while np.any(high - low > 1):
        tried = np.round(np.linspace(low, high, spec.sections + 2)[1:-1].T).astype(int)
        runs = [(int(p), seed, start, problem.chi) for seed, row in zip(seeds, tried, strict=True) for p in row]
        observed, _, lost = _train(problem, spec, runs, spec.adam_steps)
        diverged = np.maximum(diverged, lost.reshape(tried.shape).max(axis=1))
        copies = np.asarray(observed.aG).reshape(tried.shape) > threshold[:, None]
        # the place is where the last run that does not copy is followed by one that does
        for index, (row, copied) in enumerate(zip(tried, copies, strict=True)):
            failed = row[~copied]
            low[index] = max(low[index], failed.max()) if failed.size else low[index]
            above = row[copied & (row > low[index])]
            high[index] = min(high[index], above.min()) if above.size else high[index]
    known = apart & (diverged < 0)  # a run that diverged counts neither as copying nor as not
    places = {name: ("seed", np.where(known, end, np.nan)) for name, end in (("low", low), ("high", high))}
    return xr.Dataset({**places, "diverged": ("seed", diverged)}, coords={"seed": seeds}, attrs={"start": start})


# F(aG) is shown at these parts of the P that was sampled.
AROUND = (0.97, 0.985, 1.0, 1.015, 1.03)


def ladder_cells(problem: Problem, spec: Reproduction, sequences: int, seeds: list[int]) -> xr.Dataset:
    """F(aG), branch weights and P* at the chi of the problem, on expected moments (data = -1) and on data sets."""
    from copyhead.experiment import umbrella
    from copyhead.experiment.cells import data_sets
    from copyhead.experiment.hamiltonian import HamiltonianSettings
    from copyhead.model import moments, tokens
    from copyhead.model.moments import Empirical

    pieces = [moments.expected(tokens.uniform(problem.vocab), sequences, problem.length)]
    pieces += [moments.empirical(data_sets(problem, [sequences], seed)[0], problem.vocab) for seed in seeds]
    stacked = Empirical(np.stack([one.sequences for one in pieces]), np.stack([one.tensor for one in pieces]))
    settings = HamiltonianSettings(warmup=150, draws=spec.ladder_draws, losses=False)
    trace, rung = umbrella.climb(problem, stacked, spec.repeats, settings, 0)
    joined = [umbrella.repeats(trace, rung, index) for index in range(len(pieces))]
    found = [umbrella.free_energy(trace, rung, problem, sequences, index, parts) for index, parts in enumerate(joined)]
    shown = [umbrella.around(parts, rung, problem, AROUND) for parts in joined]
    numbers = {
        "P_star": [one.P_star.mean for one in found],
        "P_star_error": [one.P_star.error for one in found],
        "log_ratio": [one.log_ratio.mean for one in found],
        "log_ratio_error": [one.log_ratio.error for one in found],
        "height_below": [one.heights[0].mean for one in found],
        "height_below_error": [one.heights[0].error for one in found],
        "height_above": [one.heights[1].mean for one in found],
        "height_above_error": [one.heights[1].error for one in found],
        "exchange": [one.exchange for one in found],
        "status": [one.status for one in found],
    }
    return xr.Dataset(
        {
            **{name: ("data", values) for name, values in numbers.items()},
            "free_energy": (("data", "P", "bin"), np.array([[part.mean for part in one] for one in shown])),
            "free_energy_error": (("data", "P", "bin"), np.array([[part.error for part in one] for one in shown])),
            "aG": ("bin", shown[0][0].center),
        },
        coords={"data": [-1, *seeds], "P": [sequences * factor for factor in AROUND]},
        attrs={"chi": problem.chi},
    )


def width_cells(problem: Problem, spec: Reproduction, sequences: list[int], seeds: list[int], width: int) -> xr.Dataset:
    """Adam from the copying start at one d_model, for every g_E: how far a network of finite width is from its limit.

    From the small start linear attention may end in its metastable branch of negative c1.
    """
    parts = []
    for variance in spec.width_variances:
        varied = spec.replace(network=spec.network.replace(width=width, embedding_variance=variance))
        parts.append(_one_start(problem, varied, sequences, seeds, "copy", spec.adam_steps))
    return xr.concat(parts, dim=xr.Variable("embedding_variance", list(spec.width_variances))).assign_coords(width=width)


METHODS: dict[str, Callable[..., xr.Dataset]] = {
    "adam": adam_cells,
    "langevin": langevin_cells,
    "exact": exact_cells,
    "jump": jump_cells,
    "ladder": ladder_cells,
    "plane": plane_cells,
    "width": width_cells,
}


def execute(part: Part, spec: Reproduction, path: Path) -> float:
    """Runs one part in this process and stores it; the seconds that it took."""
    from copyhead.experiment.langevin import LOGIT_STEPS

    began = time.perf_counter()
    dataset = METHODS[part.method](part.problem, spec, **part.arguments)
    seconds = time.perf_counter() - began
    size = (
        f"step_logits = {LOGIT_STEPS[part.problem.attention]:g}"
        if part.method == "langevin"
        else f"learning rate {spec.adam_rate:g}"
    )
    dataset.attrs |= {"part": part.name, "step_size": size, "problem": part.problem.to_json(), "seconds": seconds}
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
    with TemporaryDirectory(prefix="copyhead-") as cache, _environment(_worker_settings(cache)):
        _execute_all(waiting, spec, store, workers, done)


def _worker_settings(cache: str) -> dict[str, str]:
    """Environment of the workers: one JAX thread each, and kernels that one has compiled are there for the other.

    A cache that the user has is used.
    """
    return {
        "NPROC": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets variables that are read when JAX is imported, so that they stand before the workers start."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _execute_all(waiting: list[Part], spec: Reproduction, store: Store, workers: int, done: Callable[[Part], None]) -> None:
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
        # also one that was only just started, which the pool does not know yet and the end of this process would wait for
        for process in [*(pool._processes or {}).values(), *multiprocessing.active_children()]:
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
