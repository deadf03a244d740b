"""Engine: batches as tasks of Dask on this machine's cores, on a scheduler that runs somewhere, or on SLURM."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from copyhead.problem import ProblemError
from copyhead.study.batch import Batch, execute
from copyhead.study.cell_store import StoreError

# One JAX thread each: a process per core is the best use of cores. Read when JAX is imported. Dask's own threshold returns the
# buffers of every step to the system, which makes a run of Adam three times as long.
PINNED = {
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
}
# Batches that a worker has at hand, beside the one that it runs, and how often a batch is tried if workers are lost with it.
AHEAD, TRIES = 2, 4
# Seconds to wait for the first worker of a scheduler or of SLURM.
PATIENCE = 600


class Engine(NamedTuple):
    """Where batches run.

    scheduler: address of one that runs. slurm: profile of jobs, `workers` of them. Neither: processes on this machine.
    """

    workers: int = len(os.sched_getaffinity(0))
    scheduler: str | None = None
    slurm: Path | None = None


def run_all(batches: list[Batch], folder: Path, commit: str, engine: Engine, done: Callable[[int], None]) -> None:
    """Runs batches until all are stored; `done` is told the number of cells of each that is.

    A worker that is lost costs the batch that it ran, which another one runs again.

    Raises:
        StoreError: if a result cannot be stored, or workers are lost again and again.
        ProblemError: if no scheduler or worker can be reached.
    """
    with _client(engine, folder) as client:
        from distributed import as_completed
        from distributed.client import FutureCancelledError
        from distributed.scheduler import KilledWorker

        waiting = iter(batches)
        running = as_completed()
        threads = max(engine.workers, sum(client.nthreads().values()))
        try:
            for batch in _first(waiting, threads * AHEAD):
                running.add(_submit(client, batch, folder, commit))
            for future in running:
                _, cells, _ = future.result()
                done(cells)
                for batch in _first(waiting, 1):
                    running.add(_submit(client, batch, folder, commit))
        except KilledWorker:
            raise StoreError(
                f"out = {str(folder)!r}: a batch has lost {TRIES} workers, perhaps for want of memory; finished batches are "
                "kept, and the same command goes on from there (a smaller --memory makes smaller batches)"
            ) from None
        except FutureCancelledError:
            raise StoreError(
                f"out = {str(folder)!r}: the scheduler is gone; finished batches are kept, and the same command goes on"
            ) from None


def _first(waiting: Iterator[Batch], number: int) -> Iterator[Batch]:
    for _ in range(number):
        batch = next(waiting, None)
        if batch is None:
            return
        yield batch


def _submit(client: Any, batch: Batch, folder: Path, commit: str) -> Any:
    return client.submit(execute, batch, str(folder.resolve()), commit, key=batch.name, pure=False)


@contextmanager
def _client(engine: Engine, folder: Path) -> Iterator[Any]:
    """A client with at least one worker; on any error the workers of this run are ended at once."""
    from dask import config
    from distributed import Client

    quiet = {
        "distributed.scheduler.allowed-failures": TRIES - 1,
        "distributed.comm.timeouts.connect": "30s",
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        "distributed.admin.system-monitor.gil.enabled": False,
        "logging.distributed": "critical",
    }
    with config.set(quiet), TemporaryDirectory(prefix="copyhead-") as scratch:
        if engine.scheduler is not None:
            try:
                client = Client(engine.scheduler, timeout=30)
            except (OSError, ValueError) as error:
                raise ProblemError(f"scheduler = {engine.scheduler!r}: cannot be reached ({error})") from None
            with client:
                _wait(client, "scheduler", engine.scheduler)
                yield client
            return
        cluster = _slurm(engine, folder) if engine.slurm is not None else _local(engine, scratch)
        client = Client(cluster)
        ended = False
        try:
            if engine.slurm is not None:
                _wait(client, "slurm", str(engine.slurm))
            yield client
            ended = True
        finally:
            if not ended:
                _kill(cluster)
            with suppress(Exception):  # what is left is ended with this process
                client.close(timeout=2)
                cluster.close(timeout=5)


def _wait(client: Any, field: str, value: str) -> None:
    try:
        client.wait_for_workers(1, timeout=PATIENCE)
    except TimeoutError:
        raise ProblemError(f"{field} = {value!r}: no worker came within {PATIENCE} s") from None


def _local(engine: Engine, scratch: str) -> Any:
    """Worker processes on this machine, which share the kernels that one of them has compiled."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", f"{scratch}/kernels"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    from dask import config
    from distributed import LocalCluster

    with config.set({"distributed.nanny.pre-spawn-environ": {**PINNED, **cache}}):
        try:
            return LocalCluster(
                n_workers=engine.workers,
                threads_per_worker=1,
                processes=True,
                memory_limit=0,
                dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": False},
                local_directory=scratch,
                silence_logs=50,
            )
        except RuntimeError as error:
            raise ProblemError(f"workers = {engine.workers}: could not be started ({error})") from None


def _slurm(engine: Engine, folder: Path) -> Any:
    """Jobs of SLURM after a profile: the fields of dask_jobqueue.SLURMCluster. A job that ends is submitted again."""
    try:
        from dask_jobqueue.slurm import SLURMCluster
    except ImportError:
        raise ProblemError("slurm: needs dask-jobqueue; python -m pip install 'copyhead[slurm]'") from None
    assert engine.slurm is not None
    try:
        profile = tomllib.loads(engine.slurm.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProblemError(f"slurm = {str(engine.slurm)!r}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProblemError(f"slurm = {str(engine.slurm)!r}: {error}") from None
    prologue = [f"export {name}={value}" for name, value in PINNED.items()]
    prologue.append(f"export DASK_DISTRIBUTED__NANNY__PRE_SPAWN_ENVIRON='{json.dumps(PINNED)}'")
    profile["job_script_prologue"] = [*profile.get("job_script_prologue", []), *prologue]
    profile.setdefault("scheduler_options", {}).setdefault("dashboard", False)
    profile.setdefault("log_directory", str(folder.resolve() / "logs"))
    try:
        cluster = SLURMCluster(**profile)
        cluster.adapt(minimum_jobs=engine.workers, maximum_jobs=engine.workers)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise ProblemError(f"slurm = {str(engine.slurm)!r}: {error}") from None
    return cluster


def _kill(cluster: Any) -> None:
    """Ends the workers of this machine at once: a step loop does not look at signals."""
    for nanny in getattr(cluster, "workers", {}).values():
        process = getattr(getattr(nanny, "process", None), "process", None)
        with suppress(Exception):
            nanny.auto_restart = False
        pid = getattr(process, "pid", None)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
