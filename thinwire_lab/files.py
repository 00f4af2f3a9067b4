"""Writing files whole or not at all, and JSON with numbers that JSON does not have."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire_lab.errors import Refused


@contextlib.contextmanager
def explain_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Errors of the file system inside become a refusal: cannot `what`, and why."""
    try:
        yield
    except OSError as error:
        raise Refused(f"cannot {what}: {error.strerror}{remedy}") from None


def write(path: Path, content: str | bytes) -> None:
    """Replace a file by this content, or leave it as it is."""
    write_all(path.parent, {path.name: content})


def write_all(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Replace all of these files, or none that cannot be written."""
    parts = {folder / name: folder / f".{name}.part" for name in files}
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(parts, files.values(), strict=True):
            parts[path].write_bytes(content.encode() if isinstance(content, str) else content)
        for path, part in parts.items():
            os.replace(part, path)
    except OSError as error:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()
        raise Refused(f"cannot write {path}: {error.strerror}") from None


def append(file: Any, content: bytes) -> None:
    """Add all of it to a file that has no buffer, or nothing."""
    size = file.tell()
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


def nan_to_null(thing: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    if isinstance(thing, dict):
        return {key: nan_to_null(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [nan_to_null(value) for value in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def null_to_nan(thing: Any) -> Any:
    """Replace None, in records that hold numbers, by NaN."""
    if isinstance(thing, dict):
        return {key: null_to_nan(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [null_to_nan(value) for value in thing]
    return math.nan if thing is None else thing
