"""What a run leaves behind: config.toml, log.jsonl, tensorboard/, checkpoints/, result.json."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from thinwire_lab.errors import Refused
from thinwire_lab.files import append, explain_errors, nan_to_null, null_to_nan, write

CONFIG, LOG, RESULT = "config.toml", "log.jsonl", "result.json"
BOARD, CHECKPOINTS = "tensorboard", "checkpoints"
OWN = (CONFIG, LOG, RESULT, BOARD, CHECKPOINTS)


def check_writable(out: Path) -> None:
    """Refuse a folder in which nothing can be written; nothing is left behind."""
    with explain_errors(f"write in {out}", "; give another --out"), _no_empty_folders(out):
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        try:
            probe.write_bytes(b"thinwire")
        finally:
            probe.unlink(missing_ok=True)


@contextlib.contextmanager
def claim(out: Path) -> Iterator[None]:
    """Keep others from writing there; a folder that stays empty does not stay."""
    with contextlib.ExitStack() as closing, _no_empty_folders(out):
        with explain_errors(f"write beside {out}"):
            out.mkdir(parents=True, exist_ok=True)
            folder = os.open(out, os.O_RDONLY)
        closing.callback(os.close, folder)  # last of all: the lock goes with it
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(
                f"another training writes in {out}; wait, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


@contextlib.contextmanager
def _no_empty_folders(out: Path) -> Iterator[None]:
    missing = [path for path in (out, *out.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log; a run that was killed may have left a torn one at the end."""
    found = []
    with explain_errors(f"read {path}"):
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        try:
            found.append(null_to_nan(json.loads(line)))
        except ValueError:
            break
    return found


class Log:
    """Rank 0's log: a line for each record, and TensorBoard curves where that is installed."""

    def __init__(self, out: Path, after: int) -> None:
        """Keeps what was written up to step `after`, where a resumed run goes on."""
        self._path = out / LOG
        kept = [r for r in read_records(self._path) if r.get("step", 0) <= after] if after else []
        self._scored = {r["step"] for r in kept if "seconds" not in r and "step" in r}
        write(self._path, "".join(json.dumps(nan_to_null(r)) + "\n" for r in kept))
        self._file = self._path.open("ab", buffering=0)
        with explain_errors(f"write beside {self._path}"):
            try:
                self._board: Board | None = Board(out / BOARD, after)
            except ImportError:
                self._board = None

    def add(self, record: dict[str, Any]) -> None:
        if "seconds" not in record and record["step"] in self._scored:
            return  # a resumed run scores once more where it begins
        with explain_errors(f"write {self._path}"):
            append(self._file, (json.dumps(nan_to_null(record)) + "\n").encode())
        if self._board is not None:
            with explain_errors(f"write beside {self._path}"):
                self._board.add(record)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


class Board:
    """TensorBoard curves, each point on disk when `add` returns.

    TensorBoard's own writer has a thread, and nobody would learn that its disk is full.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        if not after:  # curves of a run that began here and was killed
            for stale in folder.glob("events.out.tfevents.*"):
                stale.unlink()
        name = f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._file = (folder / name).open("wb", buffering=0)
        self._records = RecordWriter(SimpleNamespace(write=partial(append, self._file)))
        self._write(file_version="brain.Event:2")
        if after:  # TensorBoard forgets what an interrupted run has drawn beyond
            began = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=after + 1, session_log=began)

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
