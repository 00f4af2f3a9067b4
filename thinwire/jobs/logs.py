"""What a run leaves behind: config.toml, log.jsonl, tensorboard/, checkpoints/, result.json."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thinwire.lab.workers import Refused

CONFIG, LOG, RESULT = "config.toml", "log.jsonl", "result.json"
BOARD, CHECKPOINTS = "tensorboard", "checkpoints"
OWN = (CONFIG, LOG, RESULT, BOARD, CHECKPOINTS)


def prepared(out: Path) -> None:
    """Whether things can be written there; nothing is left behind."""
    missing: list[Path] = []
    try:
        missing += [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        try:
            probe.write_bytes(b"thinwire")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise Refused(f"cannot write in {out}: {error.strerror}; give another --out") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Nobody else writes there meanwhile; a folder that stays empty does not stay."""
    missing = [path for path in (out, *out.parents) if not path.exists()]
    folder = _writing(out, lambda: _locked(out))
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        os.close(folder)


def _locked(out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise Refused(f"another training writes in {out}; wait, or give another --out") from None
    except OSError:
        pass  # a file system without locks
    return folder


def written(path: Path, content: str | bytes) -> None:
    """All of it or nothing."""
    together(path.parent, {path.name: content})


def together(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """All of these files or none."""
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


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a run that was killed may have left a torn one at the end."""
    found = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from None
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
        self._scored = {r["step"] for r in kept if "seconds" not in r and "step" in r}
        written(self._path, "".join(json.dumps(plain(r)) + "\n" for r in kept))
        self._file = self._path.open("ab", buffering=0)
        self._board = _writing(self._path, lambda: Board.of(out / BOARD, after))

    def add(self, record: dict[str, Any]) -> None:
        if "seconds" not in record and record["step"] in self._scored:
            return  # a resumed run scores once more where it begins
        line = (json.dumps(plain(record)) + "\n").encode()
        try:
            put(self._file, line)
        except OSError as error:
            raise Refused(f"cannot write {self._path}: {error.strerror}") from None
        if self._board is not None:
            board = self._board
            _writing(self._path, lambda: board.add(record))

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def put(file: Any, content: bytes) -> None:
    """At the end of a file without a buffer: all of it or nothing."""
    size = file.tell()
    try:
        if file.write(content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
        raise


class Board:
    """Curves for TensorBoard, each written when it is told.

    The writer that comes with TensorBoard has a thread, of whose full disk nobody would hear.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        if not after:  # what a run that began here and was killed has drawn
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._file = (folder / name).open("wb", buffering=0)
        self._records = RecordWriter(SimpleNamespace(write=partial(put, self._file)))
        self._write(file_version="brain.Event:2")
        if after:  # what an interrupted run has drawn beyond is forgotten
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=after + 1, session_log=began)

    @staticmethod
    def of(folder: Path, after: int) -> Board | None:
        """Where TensorBoard is installed, and whole."""
        try:
            return Board(folder, after)
        except ImportError:
            return None

    def add(self, record: dict[str, Any]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in record.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._write(step=record["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())


def _writing(path: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise Refused(f"cannot write beside {path}: {error.strerror}") from None
