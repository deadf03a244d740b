"""A folder of finished parts: each one a netCDF file that is either absent or whole, and a manifest that names the run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xarray as xr

from copyhead.record import ProblemError

MANIFEST = "manifest.json"


class StoreError(ProblemError):
    """The folder cannot be used; the message says why and what to do."""


class Store:
    """Results of one run in one folder.

    An existing folder is used only if it holds the same run (then finished parts are kept), or is empty. Nothing that is in
    it is ever removed.

    Raises:
        StoreError: if the folder holds something else, or cannot be written to.
    """

    def __init__(self, folder: Path, identity: str, record: dict[str, Any]) -> None:
        self.folder = folder
        manifest = folder / MANIFEST
        try:
            if manifest.exists():
                self._check(manifest, identity)
            elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise StoreError(f"out = {str(folder)!r}: exists and is not a reproduction; choose a new or empty folder")
            else:
                folder.mkdir(parents=True, exist_ok=True)
            if not manifest.exists():
                self.write_text(MANIFEST, json.dumps({"identity": identity, **record}, indent=2))
            elif not os.access(folder, os.W_OK):
                raise PermissionError(13, "Permission denied")
            (folder / "parts").mkdir(exist_ok=True)
        except OSError as error:
            raise StoreError(f"out = {str(folder)!r}: cannot be written to ({error.strerror})") from None

    @staticmethod
    def _check(manifest: Path, identity: str) -> None:
        try:
            found = json.loads(manifest.read_text(encoding="utf-8"))["identity"]
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"out = {str(manifest.parent)!r}: {MANIFEST} is not readable; choose a new folder") from None
        if found != identity:
            raise StoreError(
                f"out = {str(manifest.parent)!r}: holds a run with other settings or of another version; choose a new folder"
            )

    def path(self, name: str) -> Path:
        return self.folder / "parts" / f"{name}.nc"

    def has(self, name: str) -> bool:
        """Whether a part is there and readable; one that was damaged later counts as absent and is made again."""
        try:
            self.read(name)
        except OSError:
            return False
        return True

    def read(self, name: str) -> xr.Dataset:
        with xr.open_dataset(self.path(name), engine="h5netcdf") as dataset:
            return dataset.load()

    def write_text(self, name: str, text: str) -> Path:
        """Writes a file of the folder, see `write_text`."""
        return write_text(self.folder / name, text)


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


def write_dataset(path: Path, dataset: xr.Dataset) -> None:
    """Writes a data set under its final name only when it is whole.

    Raises:
        StoreError: if it cannot be written, with the reason (full disk, permissions).
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        dataset.to_netcdf(partial, engine="h5netcdf")
        os.replace(partial, path)
    except OSError as error:
        reason = " ".join(str(error.strerror or error).split())  # HDF5 writes several lines
        raise StoreError(f"out = {str(path)!r}: cannot be written ({reason})") from None
    finally:
        partial.unlink(missing_ok=True)
