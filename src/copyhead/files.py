"""Files that a problem names: matrices, counts and texts, read once, with errors that name the file."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from copyhead.record import ProblemError

# A file is read again when it has changed: its name, size and time of change are the key.
_Key = tuple[str, int, int]


def _key(field: str, path: str) -> _Key:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise ProblemError(f"{field} file = {path!r}: cannot be read ({error.strerror})") from None
    return path, found.st_size, found.st_mtime_ns


def content(field: str, path: str) -> bytes:
    """The bytes of a file.

    Raises:
        ProblemError: if it cannot be read or is empty; `field` is the field of the problem that names it.
    """
    return _content(field, _key(field, path))


@lru_cache(maxsize=8)
def _content(field: str, key: _Key) -> bytes:
    path = key[0]
    try:
        found = Path(path).read_bytes()
    except OSError as error:
        raise ProblemError(f"{field} file = {path!r}: cannot be read ({error.strerror})") from None
    if not found.strip():
        raise ProblemError(f"{field} file = {path!r}: is empty")
    return found


def digest(field: str, path: str) -> str:
    """A name of the content of a file, equal only for equal contents."""
    return _digest(field, _key(field, path))


@lru_cache(maxsize=64)
def _digest(field: str, key: _Key) -> str:
    return hashlib.sha256(_content(field, key)).hexdigest()


def text(field: str, path: str) -> str:
    """A file as text in UTF-8.

    Raises:
        ProblemError: if it cannot be read, is empty, or is no text.
    """
    found = content(field, path)
    if b"\0" in found:
        raise ProblemError(f"{field} file = {path!r}: is binary; must be text in UTF-8")
    try:
        return found.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ProblemError(f"{field} file = {path!r}: must be text in UTF-8 (byte {error.start} is not)") from None


def matrix(field: str, path: str) -> Float[np.ndarray, "r c"]:
    """A table of numbers, one row a line, separated by commas, semicolons or blanks; lines that begin with # are left out.

    Raises:
        ProblemError: if it cannot be read, or is no such table of finite numbers.
    """
    return _matrix(field, _key(field, path)).copy()


@lru_cache(maxsize=8)
def _matrix(field: str, key: _Key) -> Float[np.ndarray, "r c"]:
    path = key[0]
    rows = []
    for number, line in enumerate(text(field, path).splitlines(), 1):
        parts = line.replace(",", " ").replace(";", " ").split()
        if not parts or parts[0].startswith("#"):
            continue
        try:
            rows.append([float(part) for part in parts])
        except ValueError:
            raise ProblemError(f"{field} file = {path!r}, line {number}: must be numbers, is {line.strip()[:60]!r}") from None
        if len(rows[-1]) != len(rows[0]):
            raise ProblemError(f"{field} file = {path!r}, line {number}: must have {len(rows[0])} numbers, has {len(rows[-1])}")
    if not rows or not np.isfinite(rows).all():
        raise ProblemError(f"{field} file = {path!r}: must be a table of finite numbers")
    return np.array(rows)
