"""Studies that run: equal numbers however they are batched, killed, continued, grown, and spread over workers."""

import errno
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from conftest import quickly
from copyhead.study.batch import execute
from copyhead.study.cell_store import CellStore, StoreError, export, table, write_batch
from copyhead.study.engine import Engine
from copyhead.study.study_file import parse
from copyhead.study.sweep import results, status
from copyhead.study.sweep import run as run_study
from copyhead.study_report import report
from test_cli import run

pytestmark = pytest.mark.slow

# Before and after the crossover of softmax attention at L = 12, where few steps do.
TEXT = """title = "small"
seeds = 3

[problem]
length = 12

[grid]
sequences = [30, 50, 120, 160]

[[method]]
kind = "theory"

[[method]]
kind = "adam"
steps = 1500

[[method]]
kind = "exact"
"""
# Columns that say how a cell was made.
MADE = ["seconds", "commit", "device", "versions"]


@pytest.fixture(scope="module", autouse=True)
def quick_here() -> Iterator[None]:
    """Most of the time is compilation, in workers that begin anew."""
    with quickly():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A study that nobody has disturbed, on one worker."""
    folder = tmp_path_factory.mktemp("whole") / "study"
    found = run_study(parse(TEXT), TEXT, folder, engine=Engine(1))
    assert found.missing == 0
    return folder


def rows(folder: Path, everything: bool = False) -> pd.DataFrame:
    found = table(results(folder, everything)).drop(columns=MADE)
    return found.sort_values("identity").reset_index(drop=True)


def assert_equal(one: Path, other: Path) -> None:
    """Equal tables, numbers to float32 rounding: XLA may order sums otherwise where a chunk has another number of cells."""
    left, right = rows(one), rows(other)
    assert list(left.identity) == list(right.identity)
    for name in left.columns:
        if left[name].dtype.kind == "f":
            np.testing.assert_allclose(left[name], right[name], rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert list(left[name]) == list(right[name]), name


def command(*arguments: object) -> list[str]:
    # a shell that runs the tests in the background lets them ignore the interrupt, and Python would inherit that
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from copyhead.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def children(pid: int) -> list[int]:
    """Of all threads: the cluster starts its workers from one of its own."""
    return [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]


def workers(pid: int) -> list[int]:
    """Children that are workers of Dask, not the tracker of shared resources."""
    return [child for child in children(pid) if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_until(true, process: subprocess.Popen, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_methods_agree_where_they_must(whole):
    found = rows(whole)
    assert set(found.status) == {"ok"}
    cells = found.set_index(["method", "P", "start", "seed"])
    for name, width in (("cG", 2e-3), ("loss", 1e-3)):
        # Adam stops within 1e-3 of the minimum on its own data, see experiment.adam.GRADIENT_TOLERANCE
        np.testing.assert_allclose(cells.loc["adam"][name], cells.loc["exact"].loc[cells.loc["adam"].index][name], atol=width)
    # and the theory on expected moments is near, within the scatter of three data sets
    mean = cells.loc["exact"].groupby(["P", "start"]).cG.mean()
    np.testing.assert_allclose(mean, cells.loc["theory"].cG.droplevel("seed").loc[mean.index], rtol=0.1)


def test_the_store_is_read_by_xarray_alone(whole):
    code = (
        "import sys, xarray; found = xarray.open_mfdataset(sys.argv[1], engine='zarr', combine='nested', concat_dim='cell', "
        "consolidated=False, data_vars='all', coords='all', compat='no_conflicts', join='outer').load(); "
        "print(found.sizes['cell'], found.cG.attrs['long_name'], found.cG.attrs['units'], found.seconds.attrs['units'], "
        "'copyhead' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, f"{whole}/cells/*.zarr"], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "56 copy logit: on the target, above c1 1 s False"


def test_every_cell_says_how_it_was_made(whole):
    found = results(whole)
    for name in ("settings", "code", "versions", "device", "seed", "seconds"):
        assert name in found
    assert '"jax"' in str(found.versions.values[0])
    assert (found.seconds > 0).all()
    assert found.attrs["study"] == TEXT


def test_exports_hold_the_same_numbers(whole, tmp_path):
    found = results(whole)
    for kind, suffix in (("netcdf", ".nc"), ("zarr", ".zarr"), ("csv", ".csv")):
        export(found, tmp_path / f"out{suffix}", kind)
    netcdf, zarr = (
        xr.load_dataset(tmp_path / "out.nc"),
        xr.load_dataset(tmp_path / "out.zarr", engine="zarr", consolidated=False),
    )
    csv = pd.read_csv(tmp_path / "out.csv")
    for other in (netcdf.cG.values, zarr.cG.values, csv.cG.to_numpy()):
        np.testing.assert_array_equal(found.cG.values, other)
    assert list(csv.method) == [str(name) for name in netcdf.method.values]


def test_report_has_tables_and_figures(whole):
    page = report(whole).read_text(encoding="utf-8")
    assert "<h1>small</h1>" in page
    assert "data:image/png;base64" in page
    assert not re.search(r"(src|href)\s*=\s*.?http", page)
    summarised = pd.read_csv(whole / "summary.csv")
    assert len(summarised) == 3 * 4 * 2
    trained = summarised[summarised.method == "adam"]
    assert (trained.n == 3).all()
    assert (trained.ok == 3).all()


def test_report_of_a_study_of_jumps(tmp_path):
    text = """seeds = 2
[problem]
length = 32
[[method]]
kind = "jump"
steps = 3000
sections = 8
"""
    run_study(parse(text), text, tmp_path, engine=Engine(1))
    assert report(tmp_path).name == "report.html"
    cells, summarised = rows(tmp_path), pd.read_csv(tmp_path / "summary.csv").set_index("start")
    assert set(cells.status) == {"ok"}
    for start, own in cells.groupby("start"):
        assert summarised.loc[start].jump == pytest.approx((own.low + 0.5).mean())
        assert summarised.loc[start].jump_error == pytest.approx(own.low.std() / 2**0.5)
    assert summarised.loc["copy"].jump < summarised.loc["small"].jump


def test_results_do_not_depend_on_batches_and_workers(whole, tmp_path, monkeypatch):
    from copyhead.study import batch

    monkeypatch.setattr(batch, "MOST", {"theory": 3, "exact": 5, "adam": 7, "sgld": 7})
    run_study(parse(TEXT), TEXT, tmp_path / "study", engine=Engine(2))
    assert len(CellStore(tmp_path / "study").batches()) > len(CellStore(whole).batches())
    assert_equal(whole, tmp_path / "study")


def test_a_grown_grid_runs_only_what_is_new_and_a_changed_setting_stands_beside(whole, tmp_path):
    folder = tmp_path / "study"
    shutil.copytree(whole, folder)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("cells/*/*/c/*")}
    grown = TEXT.replace("[30, 50, 120, 160]", "[30, 50, 120, 140, 160]").replace('[[method]]\nkind = "exact"\n', "")
    counted: list[float] = []

    class Counter:
        def __init__(self, title: str, total: float) -> None:
            counted.append(total)

        def __enter__(self):
            return lambda done: None

        def __exit__(self, *_: object) -> None: ...

    found = run_study(parse(grown), grown, folder, engine=Engine(1), progress=Counter)
    assert counted == [2 + 6]  # theory and Adam at the new P
    assert found.missing == 0
    assert found.beside == 24  # those of exact
    changed = grown.replace("steps = 1500", "steps = 1000")
    found = run_study(parse(changed), changed, folder, engine=Engine(1), progress=Counter)
    assert counted == [8, 30]
    assert found.beside == 24 + 30
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(rows(folder)) == 40
    assert len(rows(folder, everything=True)) == 40 + 54


def test_killed_at_random_moments_the_table_is_that_of_a_run_left_alone(whole, tmp_path):
    """kill -9 of the whole process group, twenty times, from its start to shortly before its end."""
    file, folder = tmp_path / "study.toml", tmp_path / "study"
    file.write_text(TEXT)
    moments = random.Random(0)
    finished = 0
    for _ in range(20):
        process = subprocess.Popen(command("run", file, "--workers", 2), start_new_session=True, stderr=subprocess.PIPE)
        try:
            process.wait(moments.uniform(0.5, 12))
            finished += 1
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for path in (folder / "cells").glob("*.zarr"):
            xr.load_dataset(path, engine="zarr", consolidated=False)  # whole
    found = run_study(parse(TEXT), TEXT, folder, engine=Engine(2))
    assert found.missing == 0
    assert not list((folder / "cells").glob(".*"))
    assert_equal(whole, folder)


def test_a_lost_worker_costs_its_batch_only(whole, tmp_path):
    file, folder = tmp_path / "study.toml", tmp_path / "study"
    file.write_text(TEXT)
    process = subprocess.Popen(command("run", file, "--workers", 2), stderr=subprocess.PIPE, text=True)
    for stored in (1, 3):
        wait_until(
            lambda stored=stored: len(list((folder / "cells").glob("*.zarr"))) >= stored and workers(process.pid), process
        )
        os.kill(workers(process.pid)[0], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_equal(whole, folder)


def test_interrupt_ends_the_workers_and_says_how_to_go_on(tmp_path):
    file, folder = tmp_path / "study.toml", tmp_path / "study"
    file.write_text(TEXT.replace("steps = 1500", "steps = 1000000"))
    process = subprocess.Popen(command("run", file), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: list((folder / "cells").glob("theory*.zarr")), process)
    running = workers(process.pid)
    assert running
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "copyhead: interrupted; finished batches are kept, the same command goes on from there"
    assert "Traceback" not in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in running)
    assert status(folder).writer is None


def test_two_writers_at_once_are_refused(whole, tmp_path, capsys):
    file, folder = tmp_path / "study.toml", tmp_path / "study"
    file.write_text(TEXT)
    shutil.copytree(whole, folder)
    store = CellStore(folder)
    with store.writing(TEXT):
        assert f"process {os.getpid()} on {socket.gethostname()}" == status(folder).writer
        code, _, err = run(capsys, "run", str(file))
        assert code == 2
        assert f"is being written to by another run (process {os.getpid()}" in err
    assert status(folder).writer is None
    assert run(capsys, "run", str(file))[0] == 0


def test_what_cannot_be_written_is_one_line_and_loses_nothing(whole, tmp_path, monkeypatch):
    folder = tmp_path / "study"
    shutil.copytree(whole, folder)
    before = sorted(folder.rglob("*"))
    batch = CellStore(folder).read().isel(cell=slice(0, 4))

    def full(self, *_: object, **__: object) -> None:
        Path(_[0]).mkdir()
        (Path(_[0]) / "zarr.json").write_text("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_zarr", full)
    with pytest.raises(StoreError, match=r"cannot be written \(No space left on device\)"):
        write_batch(folder, "some", batch)
    assert sorted(folder.rglob("*")) == before


def test_wrong_folders_and_options_are_refused(tmp_path, capsys):
    file = tmp_path / "study.toml"
    file.write_text(TEXT)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    for arguments, expected in (
        (("run", file, "--out", tmp_path / "other"), "exists and is no study"),
        (("run", file, "--memory", "much"), "memory = 'much': must be a size such as 800MB or 4GB"),
        (("run", file, "--memory", "10MB"), "memory: must be above 0.6 GB for each of"),
        (("run", file, "--scheduler", "tcp://127.0.0.1:9"), "scheduler = 'tcp://127.0.0.1:9': cannot be reached"),
        (("status", tmp_path / "other"), "holds no study"),
        (("export", tmp_path / "other"), "holds no study"),
        (("report", tmp_path / "nothing"), "holds no study"),
    ):
        code, _, err = run(capsys, *map(str, arguments))
        assert code == 2
        assert expected in err
        assert len(err.strip().splitlines()) <= 2  # a line of progress before it


def test_a_refused_problem_is_a_result_and_not_an_error(tmp_path):
    text = (
        'starts = ["small"]\n[problem]\nlength = 6\n'
        '[grid]\ntarget = ["lag:1", "lag:9"]\nsequences = [50]\n[[method]]\nkind = "theory"\n'
    )
    found = run_study(parse(text), text, tmp_path / "study", engine=Engine(1))
    assert found.found == {"theory": {"ok": 1, "refused": 1}}
    cell = rows(tmp_path / "study").set_index("target").loc["lag:9"]
    assert "lags must be" in cell.message
    assert np.isnan(cell.cG)


def test_a_scheduler_with_workers_over_tcp(whole, tmp_path):
    """A scheduler and two workers of their own, as an operator would start them."""
    folder = tmp_path / "study"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address, "--no-dashboard"],
            stderr=subprocess.DEVNULL,
        )
    ]
    try:
        for _ in range(2):
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "distributed.cli.dask_worker", address, "--nthreads", "1", "--no-dashboard"],
                    stderr=subprocess.DEVNULL,
                    cwd=tmp_path,
                    env={**os.environ, "NPROC": "1"},
                )
            )
        found = run_study(parse(TEXT), TEXT, folder, engine=Engine(2, scheduler=address))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(30)
    assert found.missing == 0
    assert_equal(whole, folder)


SLURM = shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0


@pytest.mark.skipif(not SLURM, reason="no SLURM on this machine; tests/slurm.sh starts one")
def test_jobs_of_slurm_one_of_which_is_cancelled(whole, tmp_path):
    file, folder, profile = (tmp_path / name for name in ("study.toml", "study", "slurm.toml"))
    file.write_text(TEXT)
    profile.write_text('cores = 1\nprocesses = 1\nmemory = "900MB"\nwalltime = "00:20:00"\ninterface = "lo"\n')
    process = subprocess.Popen(
        command("run", file, "--slurm", profile, "--workers", 2), stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    wait_until(lambda: list((folder / "cells").glob("*.zarr")), process)
    jobs = subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True, check=True).stdout.split()
    subprocess.run(["scancel", jobs[0]], check=True)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert_equal(whole, folder)


def test_a_batch_is_stored_once(whole, tmp_path):
    """A worker that was thought lost may end after another one has run its batch again."""
    from copyhead.study.batch import Batch
    from copyhead.study.cell import groups

    store = CellStore.create(tmp_path / "study")
    group, cells = next(groups(parse(TEXT).blocks))
    batch = Batch(((group, tuple(cells)),))
    first = execute(batch, str(store.folder), "")
    assert execute(batch, str(store.folder), "")[:2] == first[:2]
    assert len(store.batches()) == 1
    assert len(store.known()) == len(cells)
