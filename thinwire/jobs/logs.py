"""What a run leaves behind: config.toml, log.jsonl, tensorboard/, checkpoints/, result.json."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thinwire.lab.workers import Refused

CONFIG, LOG, RESULT = "config.toml", "log.jsonl", "result.json"


def prepared(out: Path) -> None:
    """The folder, if things can be written in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        try:
            probe.write_bytes(b"thinwire")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"cannot write in {out}: {error.strerror}; give another --out") from None


def written(path: Path, text: str) -> None:
    """All of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise Refused(f"cannot write {path}: {error.strerror}") from None


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a run that was killed may have left a torn one at the end."""
    found = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            found.append(numbers(json.loads(line)))
        except ValueError:
            break
    return found


def plain(thing: Any) -> Any:
    """As JSON can have it, which has neither NaN nor infinity: such numbers are null."""
    if isinstance(thing, dict):
        return {key: plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return [plain(value) for value in thing]
    return None if isinstance(thing, float) and not math.isfinite(thing) else thing


def numbers(thing: Any) -> Any:
    """And back: null was a number once."""
    if isinstance(thing, dict):
        return {key: numbers(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [numbers(value) for value in thing]
    return math.nan if thing is None else thing


class Log:
    """Rank 0's: a line and a few curves for everything it is told."""

    def __init__(self, out: Path, after: int) -> None:
        """Keeps what was written up to step `after`, where a resumed run goes on."""
        self._path = out / LOG
        kept = [r for r in records(self._path) if r.get("step", 0) <= after] if after else []
        written(self._path, "".join(json.dumps(plain(r)) + "\n" for r in kept))
        self._file = self._path.open("ab", buffering=0)
        self._board = _writing(self._path, lambda: _board(out / "tensorboard", after))

    def add(self, record: dict[str, Any]) -> None:
        line = (json.dumps(plain(record)) + "\n").encode()
        size = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(28, "No space left on device")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)  # no torn line
            raise Refused(f"cannot write {self._path}: {error.strerror}") from None
        if self._board is not None:
            _writing(self._path, lambda: self._draw(record))

    def _draw(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            _writing(self._path, self._board.close)


def _writing(path: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise Refused(f"cannot write beside {path}: {error.strerror}") from None


def _board(folder: Path, after: int) -> Any:
    """A TensorBoard writer, where TensorBoard is installed."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=after + 1 if after else None)
