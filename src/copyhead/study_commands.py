"""Commands of studies: run, status, report, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from copyhead.options import AsJson, Memory, Progress, Scheduler, Slurm, Workers, bytes_of, engine_of, new_file

Folder = Annotated[Path, typer.Argument(help="folder of a study", metavar="DIR")]


def run(
    study: Annotated[Path, typer.Argument(help="study file", metavar="STUDY.toml")],
    out: Annotated[Path | None, typer.Option(help="folder for results (default: the name of the file without .toml)")] = None,
    memory: Memory = None,
    workers: Workers = None,
    scheduler: Scheduler = None,
    slurm: Slurm = None,
    as_json: AsJson = False,
) -> None:
    """Runs the cells of a study that its folder does not hold yet: all of them at first, later what is missing or new.

    Ctrl-C, a kill or a full disk cost the running batches only; the same command goes on. A grid that has grown finds its old
    cells again; a changed setting makes new cells beside the old. Examples:

    - `copyhead run study.toml`

    - `copyhead run study.toml --out results --workers 8 --memory 16GB`

    - `copyhead run study.toml --slurm cluster.toml --workers 20`
    """
    from copyhead.study.study_file import read
    from copyhead.study.sweep import run as run_study

    found = read(study)
    engine = engine_of(workers, scheduler, slurm)
    done = run_study(
        found,
        study.read_text(encoding="utf-8"),
        study.with_suffix("") if out is None else out,
        memory=bytes_of(memory),
        engine=engine,
        progress=Progress,
    )
    typer.echo(json.dumps(done.to_dict()) if as_json else str(done))


def status(folder: Folder, as_json: AsJson = False) -> None:
    """How far a study is: cells by method and status, what is missing, whether it is being written to. Example:

    - `copyhead status study`
    """
    from copyhead.study.sweep import status as look

    found = look(folder)
    typer.echo(json.dumps(found.to_dict()) if as_json else str(found))


def report(folder: Folder, as_json: AsJson = False) -> None:
    """Tables, figures and report.html of the cells of a study that are finished. Example:

    - `copyhead report study`
    """
    from copyhead.study_report import report as write

    page = write(folder)
    typer.echo(json.dumps({"report": str(page)}) if as_json else f"report: {page}")


def export(
    folder: Folder,
    kind: Annotated[
        Literal["netcdf", "zarr", "csv"], typer.Option("--format", help="one netCDF file, one Zarr group, or a table")
    ] = "netcdf",
    out: Annotated[Path | None, typer.Option(help="file to write (default: DIR.nc, DIR.zarr or DIR.csv)")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="also cells that the study no longer asks for")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it exists")] = False,
) -> None:
    """Writes the finished cells of a study as one labelled data set. Examples:

    - `copyhead export study`

    - `copyhead export study --format csv --out table.csv`
    """
    from copyhead.study.cell_store import export as write
    from copyhead.study.sweep import results

    suffix = {"netcdf": ".nc", "zarr": ".zarr", "csv": ".csv"}[kind]
    place = folder.with_name(folder.name + suffix) if out is None else out
    new_file(place, force, (suffix,))
    write(results(folder, everything), place, kind)
    typer.echo(f"wrote {place}")
