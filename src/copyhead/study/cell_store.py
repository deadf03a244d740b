"""Store of a study: a folder of batches, each one a Zarr group that is there whole or not at all.

    FOLDER/study.toml      the file as it was last run
    FOLDER/cells/*.zarr    batches of cells; plain xarray reads them:

    xarray.open_mfdataset("FOLDER/cells/*.zarr", engine="zarr", combine="nested", concat_dim="cell", consolidated=False,
                          data_vars="all", coords="all", compat="no_conflicts", join="outer")

A batch is written beside its place and renamed, which file systems do at once; nothing that is there is changed or removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xarray as xr

from copyhead.record import ProblemError

STUDY, CELLS, LOCK = "study.toml", "cells", ".lock"
# Beginning of the name of a batch that is being written.
PARTIAL = ".partial-"


class StoreError(ProblemError):
    """The folder cannot be used; the message says why and what to do."""


class CellStore:
    """The batches of one folder.

    Raises:
        StoreError: if the folder is none of a study. `create` makes it, also if it is new or empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / CELLS).is_dir():
            raise StoreError(f"folder = {str(folder)!r}: holds no study; `copyhead run STUDY.toml` makes one")

    @classmethod
    def create(cls, folder: Path) -> CellStore:
        """The store in a folder that is new, empty, or that of a study.

        Raises:
            StoreError: if there is something else in it, or it cannot be made.
        """
        folder = Path(folder)
        try:
            if folder.exists() and not (folder / CELLS).is_dir() and (not folder.is_dir() or any(folder.iterdir())):
                raise StoreError(f"out = {str(folder)!r}: exists and is no study; choose a new or empty folder")
            (folder / CELLS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"out = {str(folder)!r}: cannot be written to ({error.strerror})") from None
        return cls(folder)

    @property
    def text(self) -> str:
        """The study file as it was last run.

        Raises:
            StoreError: if there is none.
        """
        try:
            return (self.folder / STUDY).read_text(encoding="utf-8")
        except OSError as error:
            raise StoreError(f"folder = {str(self.folder)!r}: {STUDY} cannot be read ({error.strerror})") from None

    def batches(self) -> list[Path]:
        """Finished batches, by name."""
        return sorted(path for path in (self.folder / CELLS).glob("*.zarr") if not path.name.startswith("."))

    def known(self) -> dict[str, str]:
        """Status by identity of every cell that is there."""
        found: dict[str, str] = {}
        for path in self.batches():
            import zarr

            group = zarr.open_group(path, mode="r")
            found.update(zip(map(str, group["identity"][:]), map(str, group["status"][:]), strict=True))
        return found

    def pieces(self, identities: set[str] | None = None) -> Iterator[xr.Dataset]:
        """All cells, or those of given identity, batch by batch; a cell that is there twice is read once."""
        seen: set[str] = set()
        for path in self.batches():
            with xr.open_zarr(path, consolidated=False, chunks=None) as batch:
                names = [str(name) for name in batch.identity.values]
                keep = [k for k, name in enumerate(names) if name not in seen and (identities is None or name in identities)]
                seen.update(names[k] for k in keep)
                if keep:
                    yield batch.isel(cell=keep).load()

    def read(self, identities: set[str] | None = None) -> xr.Dataset:
        """All cells, or those of given identity, as one data set.

        Raises:
            StoreError: if there are none.
        """
        pieces = list(self.pieces(identities))
        if not pieces:
            beside = bool(self.batches())
            others = "; those that it holds are of other settings or of another version" if beside else ""
            raise StoreError(f"folder = {str(self.folder)!r}: holds no finished cells of this study yet{others}")
        return joined(pieces)

    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @contextmanager
    def writing(self, text: str) -> Iterator[None]:
        """Holds the store for one writer, with `text` as its study file, and clears what a killed one left half-written.

        Raises:
            StoreError: if another process writes to it.
        """
        try:
            handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(f"out = {str(self.folder)!r}: cannot be written to ({error.strerror})") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.pread(handle, 200, 0).decode(errors="replace") or "unknown"
                raise StoreError(f"out = {str(self.folder)!r}: is being written to by another run ({owner})") from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            for left in (self.folder / CELLS).glob(f"{PARTIAL}*"):
                shutil.rmtree(left, ignore_errors=True)
            write_text(self.folder / STUDY, text)
            yield
        finally:
            os.close(handle)

    @property
    def writer(self) -> str | None:
        """Who writes to the store now; None if nobody does."""
        try:
            handle = os.open(self.folder / LOCK, os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except OSError:
            return os.pread(handle, 200, 0).decode(errors="replace")
        finally:
            os.close(handle)


def write_text(path: Path, text: str) -> Path:
    """Writes a file at once: a reader sees the old content or the new.

    Raises:
        StoreError: if it cannot be written, with the reason.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(f"out = {str(path)!r}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_batch(folder: Path, name: str, batch: xr.Dataset) -> None:
    """Writes a batch under its final name only when it is whole.

    Raises:
        StoreError: if it cannot be written, with the reason (full disk, permissions).
    """
    place = Path(folder) / CELLS
    partial, final = place / f"{PARTIAL}{name}.{os.getpid()}.{socket.gethostname()}", place / f"{name}.zarr"
    try:
        batch.to_zarr(partial, mode="w", zarr_format=3, consolidated=False)
        if not final.exists():  # else a worker that was thought lost has written the same
            os.rename(partial, final)
    except OSError as error:
        raise StoreError(f"out = {str(final)!r}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def joined(pieces: list[xr.Dataset]) -> xr.Dataset:
    """Batches along `cell`; what a method does not give is nan."""
    found = xr.concat(
        pieces, "cell", data_vars="all", coords="all", compat="no_conflicts", join="outer", combine_attrs="override"
    )
    return found.drop_encoding()


def export(found: xr.Dataset, path: Path, kind: str) -> None:
    """Writes a joined data set as one netCDF file, Zarr group or CSV table (arrays as one column for each entry).

    Raises:
        StoreError: if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if kind == "netcdf":
            found.to_netcdf(partial, engine="h5netcdf")
        elif kind == "zarr":
            found.to_zarr(partial, mode="w", zarr_format=3, consolidated=False)
        else:
            table(found).to_csv(partial, index=False)
        os.replace(partial, path)
    except OSError as error:
        raise StoreError(f"out = {str(path)!r}: cannot be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)


def table(found: xr.Dataset) -> Any:
    """One row for each cell as a pandas table: labels first, then results, then how they were made; no draws or curves."""
    from copyhead.study.batch import LABELS, MADE
    from copyhead.study.methods import MEANINGS, STATE

    flat = flattened(found)
    rows = flat.drop_dims([dim for dim in flat.dims if dim != "cell"]).to_dataframe().reset_index(drop=True)
    order = [*LABELS, *MEANINGS]
    last = [*STATE, *MADE]

    def rank(name: str) -> tuple[int, int]:
        if name in last:
            return 2, last.index(name)
        base = next((known for known in order if name.partition("[")[0] == known), None)
        return (0, order.index(base)) if base else (1, 0)

    return rows[sorted(rows.columns, key=lambda name: rank(str(name)))]


def flattened(data: xr.Dataset) -> xr.Dataset:
    """Arrays over rows, heads and lags as one variable for each entry, name[coordinate]."""
    own = {name: next(iter(set(values.dims) & {"row", "head", "lag"}), None) for name, values in data.items()}
    parts = {
        f"{name}[{place}]": data[name].sel({dim: place}, drop=True)
        for name, dim in own.items()
        if dim is not None
        for place in data[dim].values
    }
    return (
        data.drop_vars([name for name, dim in own.items() if dim is not None])
        .drop_dims([dim for dim in ("row", "head", "lag") if dim in data.dims])
        .assign(parts)
    )
